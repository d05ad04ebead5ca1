"""Evaluations of a real training: they say what its weights can do, and it trains on as if nobody had asked."""

import json
import time

import pytest
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainings import lm, losses, make_workplace, write_config

from lm.errors import RequestError, RunError
from lm.evaluation import benchmark
from lm.evaluation.tasks import read_tasks
from lm.inference.pretrained import load_pretrained
from lm.runs.metrics import evaluation_metrics
from lm.runs.run import Run
from lm.training.callbacks.logging import format_line
from lm.training.config import EvaluationConfig

WORDS = ("letter", "answer", "garden", "weight", "captain", "village", "engine", "river", "senate")
OPTIONS = {"tasks": ["words.jsonl"], "max_items": 7, "batch_tokens": 100}
PAUSE = 1.0  # seconds
COUNTS = ("accuracy", "centered", "items", "acc", "acc_norm")


class Obstacles(Callback):
    """Evaluations take long, fail at step 8 on the second rank alone, and cannot be written to their file."""

    def on_train_start(self, trainer, pl_module):
        self.trainer, self.score = trainer, benchmark.score
        benchmark.score = self.slowly
        if trainer.is_global_zero:
            (trainer.run.path / "evaluations.jsonl").mkdir()

    def slowly(self, *arguments, **options):
        time.sleep(PAUSE)
        if self.trainer.global_step == 8 and self.trainer.global_rank == 1:
            raise RunError("the second rank has no memory left")
        return self.score(*arguments, **options)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    place = make_workplace(tmp_path_factory.mktemp("evaluations"))
    write_tasks(place)
    return place


def write_tasks(place):
    """Which of two words has its letters in the right order."""
    items = [{"query": "The", "choices": [word, word[::-1]], "gold": 0} for word in WORDS]
    (place / "words.jsonl").write_text("\n".join(map(json.dumps, items)))


def found_by(checkpoint, tasks):
    """What an evaluation says of a checkpoint."""
    model = load_pretrained(checkpoint, "cpu")
    result, = benchmark.evaluate(model.decoder, model.tokenizer, read_tasks([str(tasks)]), max_items=7)
    return {name: result.as_dict()[name] for name in COUNTS}


def counts(evaluation):
    return {name: evaluation["tasks"]["words"][name] for name in COUNTS}


# ---- in a training --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_losses_are_those_without_evaluations_and_scores_those_of_the_weights(workplace):
    """Also with dropout, over a kill and a resume, and in all three logs."""
    lm(workplace, "fit", "--config", str(write_config(workplace, "without", **{"trainer.max_steps": 11})))
    expected = losses(workplace)
    (workplace / "trace.jsonl").unlink()
    kill = {"class_path": "recorder.KillAt", "init_args": {"signal_name": "SIGKILL", "micro_batch": 16}}
    for callbacks, code in (([kill], -9), ([], 0)):
        callbacks = [{"class_path": "recorder.Recorder"}, *callbacks]
        changes = {"evaluation": {**OPTIONS, "interval": 2}, "guards.alerts": {"core > -9": "warn"},
                   "trainer.keep_checkpoints": 9, "trainer.max_steps": 11, "trainer.callbacks": callbacks}  # fmt: skip
        lm(workplace, "fit", "--config", str(write_config(workplace, "with", **changes)), "--ckpt_path", "auto",
           expect=code)  # fmt: skip
    assert losses(workplace) == expected
    run = Run(workplace / "checkpoints" / "with")
    evaluations = {entry["step"]: entry for entry in run.evaluations()}
    steps = {2, 4, 6, 8, 10, 11}  # the last one too
    assert evaluations.keys() == steps and len(run.evaluations()) > len(steps)
    assert all(counts(entry) == counts(evaluations[entry["step"]]) for entry in run.evaluations())  # those made twice
    logged = {entry["step"]: entry for entry in run.metrics() if "eval/core" in entry}
    events = EventAccumulator(str(run.path), size_guidance={"scalars": 0}).Reload()
    for step in steps & run.steps().keys():
        assert counts(evaluations[step]) == found_by(run.steps()[step], workplace / "words.jsonl")
        shown = evaluation_metrics(evaluations[step])
        assert shown.keys() == {"eval/words/accuracy", "eval/words/centered", "eval/core"}
        assert shown.items() <= logged[step].items() and logged[step]["tokens"] == step * 256
        for name, value in shown.items():
            points = {event.step: event.value for event in events.Scalars(name)}
            assert points.keys() == steps and points[step] == pytest.approx(value)
    assert {"core > -9"} == {alert["message"].split(":")[0] for alert in run.alerts()}
    state = run.read("state.json")["metrics"]
    assert state["eval/core"] == logged[11]["eval/core"] and "train/loss" in state and "val/loss" in state


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_find_what_one_does_after_every_validation(workplace, strategy):
    """Whether they divide the items or share a model, whose blocks are compiled."""
    changes = {"trainer.devices": 2, "trainer.strategy": strategy, "data.micro_batch_size": 2, "trainer.callbacks": [],
               "trainer.max_steps": 8, "trainer.checkpoint_interval": 4, "trainer.keep_checkpoints": 2,
               "model.compile": "triton_free", "evaluation": OPTIONS}  # fmt: skip
    lm(workplace, "fit", "--config", str(write_config(workplace, strategy, **changes)))
    run = Run(workplace / "checkpoints" / strategy)
    assert [entry["step"] for entry in run.evaluations()] == [4, 8]
    for evaluation in run.evaluations():
        found = found_by(run.steps()[evaluation["step"]], workplace / "words.jsonl")
        assert counts(evaluation) == found and evaluation["checkpoint"] is None


@pytest.mark.slow
def test_nothing_that_goes_wrong_stops_the_training_and_its_clock_is_stopped(workplace):
    """A rank that fails does not leave the other waiting."""
    changes = {"trainer.callbacks": [{"class_path": "test_evaluations_callback.Obstacles"}], "trainer.devices": 2,
               "data.micro_batch_size": 2, "evaluation": {**OPTIONS, "interval": 4}}  # fmt: skip
    fit = lm(workplace, "fit", "--config", str(write_config(workplace, "obstacles", **changes)))
    assert "no evaluation at step 8: the evaluation failed on rank 1" in fit.stderr
    assert fit.stderr.count("evaluations.jsonl cannot be written: Is a directory") == 1
    run = Run(workplace / "checkpoints" / "obstacles")
    assert run.read("run.json")["status"] == "finished" and run.read("state.json")["phase"] == "training"
    assert [entry["step"] for entry in run.metrics() if "eval/core" in entry] == [4, 12]
    lines = [entry for entry in run.metrics() if entry["step"] in (5, 9)]
    rates = [entry["perf/tokens_per_second"] for entry in lines if "train/loss" in entry]
    assert len(rates) == 2 and all(256 / rate < PAUSE for rate in rates)


# ---- the request ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation, words", [
    ({"tasks": ["nowhere.yaml"]}, "nowhere.yaml: no such file"),
    ({"tasks": ["words.jsonl"], "num_fewshot": 7, "max_items": 7}, "max_items 7 must be at least 8"),
])  # fmt: skip
def test_tasks_that_cannot_be_asked_end_a_fit_before_it_begins_and_are_seen_by_plan(workplace, evaluation, words):
    config = str(write_config(workplace, "refused", **{"evaluation": evaluation}))
    lm(workplace, "data", "prepare", "--input", "texts", "--output", "data/small", "--tokenizer", "char",
       "--val_fraction", "0.2")  # fmt: skip
    assert words in lm(workplace, "plan", "--config", config, expect=2).stdout
    assert words in lm(workplace, "fit", "--config", config, expect=2).stderr
    assert not (workplace / "checkpoints" / "refused").exists()


@pytest.mark.parametrize("name, least", [("interval", 1), ("max_items", 1), ("num_fewshot", 0), ("batch_tokens", 1)])
def test_wrong_numbers_are_refused(name, least):
    with pytest.raises(RequestError, match=f"evaluation.{name} {least - 1} must be at least {least}"):
        EvaluationConfig(**{name: least - 1})


def test_a_line_for_people_has_core_or_else_each_accuracy():
    assert format_line(4, 8, {"eval/a/accuracy": 0.25, "eval/core": 0.0512}) == "step 4/8  mean centred accuracy 0.0512"
    assert format_line(4, 8, {"eval/a/accuracy": 0.25, "eval/b/accuracy": 0.5}) == "step 4/8  a 25.0%  b 50.0%"
