"""Samples and evaluations of a real training: they show what its weights can do, and it trains on as without them."""

import json
import textwrap
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from decoders import continued, written_by
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainings import equipment, fit, lm, losses

from lm.data.tokenizer_training import train_bpe
from lm.errors import RequestError, RunError
from lm.evaluation import benchmark
from lm.evaluation.tasks import read_tasks
from lm.inference import completion
from lm.inference.generation import NewToken, generate
from lm.inference.pretrained import load_pretrained
from lm.inference.sampling import Sampling
from lm.runs.evaluations import evaluation_metrics
from lm.training.callbacks.logging import format_line
from lm.training.callbacks.samples import Samples
from lm.training.config import EvaluationConfig, SamplesConfig

PROMPTS = ["The letter of ", "", "Chapter 1"]
SAMPLES = {"prompts": PROMPTS, "max_new_tokens": 12, "temperature": 0.5, "top_k": 5, "seed": 3}
WORDS = ("letter", "answer", "garden", "weight", "captain", "village", "engine", "river", "senate")
TASKS = {"tasks": ["words.jsonl"], "max_items": 7, "batch_tokens": 100}
COUNTS = ("accuracy", "centered", "items", "acc", "acc_norm")
PAUSE = 1.0  # seconds
TEXT = "text_summary"  # with which TensorBoard's tags of texts end


class Obstacles(Callback):
    """Samples and evaluations take long, fail at step 8, and cannot be written to their files.

    Samples fail because the weights are broken, the evaluation on the second rank alone.
    """

    def on_train_start(self, trainer, pl_module):
        self.trainer, self.score = trainer, benchmark.score
        completion.generate, benchmark.score = self.generate, self.slowly
        if trainer.is_global_zero:
            for name in ("samples.jsonl", "evaluations.jsonl"):
                (trainer.run.path / name).mkdir()

    def generate(self, decoder, *arguments, **options):
        time.sleep(PAUSE)
        kept = decoder.norm.weight.detach().clone()
        try:
            with torch.no_grad():
                if self.trainer.global_step == 8:
                    decoder.norm.weight.fill_(torch.nan)
            yield from generate(decoder, *arguments, **options)
        finally:
            with torch.no_grad():
                decoder.norm.weight.copy_(kept)

    def slowly(self, *arguments, **options):
        time.sleep(PAUSE)
        if self.trainer.global_step == 8 and self.trainer.global_rank == 1:
            raise RunError("the second rank has no memory left")
        return self.score(*arguments, **options)


@pytest.fixture(scope="module")
def workplace(workplace):
    write_tasks(workplace)
    return workplace


def write_tasks(place):
    """Which of two words has its letters in the right order."""
    items = [{"query": "The", "choices": [word, word[::-1]], "gold": 0} for word in WORDS]
    (place / "words.jsonl").write_text("\n".join(map(json.dumps, items)))


def written(run):
    return [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]


def said_by(checkpoint):
    """What the weights of a checkpoint continue the prompts with."""
    model = load_pretrained(checkpoint, "cpu")
    prompts = [model.tokenizer.encode(text) or [model.tokenizer.eos_id] for text in PROMPTS]
    tokens = written_by(model.decoder, prompts, Sampling(0.5, 5, max_new_tokens=12, seed=3))
    return [continued(model.tokenizer, prompt, new) for prompt, (new, _) in zip(prompts, tokens, strict=True)]


def found_by(checkpoint, tasks):
    """What an evaluation says of a checkpoint."""
    model = load_pretrained(checkpoint, "cpu")
    (result,) = benchmark.evaluate(model.decoder, model.tokenizer, read_tasks([str(tasks)]), max_items=7)
    return {name: result.as_dict()[name] for name in COUNTS}


def counts(record):
    return {name: record["tasks"]["words"][name] for name in COUNTS}


@pytest.fixture(scope="module")
def resumed(workplace):
    """A run with samples and evaluations that was killed and resumed, and its event file; its losses are checked."""
    fit(workplace, "without", **{"trainer.max_steps": 11})
    expected = losses(workplace)
    (workplace / "trace.jsonl").unlink()
    kill = equipment("recorder.KillAt", signal_name="SIGKILL", micro_batch=16)
    for callbacks, code in (([kill], -9), ([], 0)):
        _, run = fit(workplace, "with", "--ckpt_path", "auto", callbacks=callbacks, expect=code, **{
            "samples": {**SAMPLES, "interval": 2}, "evaluation": {**TASKS, "interval": 2}, "trainer.max_steps": 11,
            "trainer.keep_checkpoints": 9, "guards.alerts": {"core > -9": "warn"},
        })  # fmt: skip
    assert losses(workplace) == expected, "also with dropout"
    return run, EventAccumulator(str(run.path), size_guidance={"tensors": 0, "scalars": 0}).Reload()


@pytest.mark.slow
def test_samples_are_those_of_the_weights_in_both_logs(resumed):
    run, events = resumed
    lines = written(run)
    assert all(line["tokens"] == line["step"] * 256 for line in lines)
    texts = {(line["step"], line["prompt"]): line["text"] for line in lines}
    assert all(texts[line["step"], line["prompt"]] == line["text"] for line in lines)  # those written twice, too
    assert texts.keys() == {(step, prompt) for step in (2, 4, 6, 8, 10) for prompt in PROMPTS} and len(lines) > 15
    for step in (6, 8):
        assert [texts[step, prompt] for prompt in PROMPTS] == said_by(run.steps()[step])
    assert len({text for (_, prompt), text in texts.items() if prompt == ""}) > 2  # they change as it learns
    for index, prompt in enumerate(PROMPTS):
        shown = events.Tensors(f"sample/{index}/{TEXT}")
        assert {event.step for event in shown} == {2, 4, 6, 8, 10}
        for event in shown:
            text = textwrap.indent(prompt + texts[event.step, prompt], "    ", lambda line: True)
            assert event.tensor_proto.string_val[0].decode() == text


@pytest.mark.slow
def test_scores_are_those_of_the_weights_in_all_three_logs(workplace, resumed):
    run, events = resumed
    evaluations = {entry["step"]: entry for entry in run.evaluations()}
    steps = {2, 4, 6, 8, 10, 11}  # the last one too
    assert evaluations.keys() == steps and len(run.evaluations()) > len(steps)
    assert all(counts(entry) == counts(evaluations[entry["step"]]) for entry in run.evaluations())  # those made twice
    logged = {entry["step"]: entry for entry in run.metrics() if "eval/core" in entry}
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
    """Whether they divide the items or share a model, whose blocks are compiled; and they write one set of samples."""
    _, run = fit(workplace, strategy, **{
        "trainer.devices": 2, "trainer.strategy": strategy, "data.micro_batch_size": 2, "trainer.callbacks": [],
        "trainer.max_steps": 8, "trainer.checkpoint_interval": 4, "trainer.keep_checkpoints": 2,
        "model.compile": "triton_free", "evaluation": TASKS, "samples": SAMPLES,
    })  # fmt: skip
    assert [entry["step"] for entry in run.evaluations()] == [4, 8]
    for record in run.evaluations():
        found = found_by(run.steps()[record["step"]], workplace / "words.jsonl")
        assert counts(record) == found and record["checkpoint"] is None
    lines = written(run)
    assert [(line["step"], line["prompt"]) for line in lines] == [(step, text) for step in (4, 8) for text in PROMPTS]
    assert [line["text"] for line in lines[3:]] == said_by(run.checkpoint("last"))


@pytest.mark.slow
def test_nothing_that_goes_wrong_stops_the_training_and_its_clock_is_stopped(workplace):
    """On two ranks with a whole model each, of which the first alone writes; one that fails does not leave the other
    waiting."""
    ended, run = fit(workplace, "obstacles", **{
        "trainer.callbacks": [equipment("test_between_steps.Obstacles")], "trainer.devices": 2,
        "data.micro_batch_size": 2, "evaluation": {**TASKS, "interval": 4},
        "samples": {**SAMPLES, "prompts": ["The"], "interval": 2},
    })  # fmt: skip
    assert ended.stderr.count("no samples at step ") == 6 and ended.stderr.count("Is a directory") == 6
    assert "no samples at step 8: the logits are not finite" in ended.stderr
    assert "no evaluation at step 8: the evaluation failed on rank 1" in ended.stderr
    assert ended.stderr.count("evaluations.jsonl cannot be written: Is a directory") == 1
    assert run.read("run.json")["status"] == "finished" and run.read("state.json")["phase"] == "training"
    texts = EventAccumulator(str(run.path), size_guidance={"tensors": 0}).Reload().Tensors(f"sample/0/{TEXT}")
    assert [event.step for event in texts] == [2, 4, 6, 10, 12]
    assert [entry["step"] for entry in run.metrics() if "eval/core" in entry] == [4, 12]
    rates = [line["perf/tokens_per_second"] for line in run.metrics("train/loss") if line["step"] in (3, 5, 7, 9)]
    assert len(rates) == 4 and all(256 / rate < PAUSE for rate in rates)


@pytest.mark.parametrize("record, words", [
    ({"tasks": ["nowhere.yaml"]}, "nowhere.yaml: no such file"),
    ({"tasks": ["words.jsonl"], "num_fewshot": 7, "max_items": 7}, "7 items are too few for 7"),
])  # fmt: skip
def test_tasks_that_cannot_be_asked_end_a_fit_before_it_begins_and_are_seen_by_plan(workplace, record, words):
    lm(workplace, "data", "prepare", "--input", "texts", "--output", "data/small", "--tokenizer", "char",
       "--val_fraction", "0.2")  # fmt: skip
    refused, run = fit(workplace, "refused", expect=2, evaluation=record)
    assert words in refused.stderr and not run.path.exists()
    assert words in lm(workplace, "plan", "--config", "refused.yaml", expect=2).stdout


@pytest.mark.parametrize(("config", "name", "wrong"), [
    (SamplesConfig, "samples.interval", 0), (SamplesConfig, "samples.max_new_tokens", 0),
    (SamplesConfig, "samples.temperature", -1.0), (SamplesConfig, "samples.top_k", 0),
    (EvaluationConfig, "evaluation.interval", 0), (EvaluationConfig, "evaluation.max_items", 0),
    (EvaluationConfig, "evaluation.num_fewshot", -1), (EvaluationConfig, "evaluation.batch_tokens", 0),
])  # fmt: skip
def test_wrong_numbers_are_refused(config, name, wrong):
    with pytest.raises(RequestError, match=f"{name} {wrong}"):
        config(**{name.partition(".")[2]: wrong})


def test_a_line_for_people_has_core_or_else_each_accuracy():
    assert format_line(4, 8, {"eval/a/accuracy": 0.25, "eval/core": 0.0512}) == "step 4/8  mean centred accuracy 0.0512"
    assert format_line(4, 8, {"eval/a/accuracy": 0.25, "eval/b/accuracy": 0.5}) == "step 4/8  a 25.0%  b 50.0%"


def test_a_sample_ends_with_its_document_and_reads_on_from_the_prompt(monkeypatch):
    tokenizer = train_bpe(["a short text, and another: é"], 300)
    tokens = [*tokenizer.encode("ort"), tokenizer.eos_id, *tokenizer.encode("text")]

    def generate(decoder, prompts, sampling, *, ended, **options):
        for index, token in enumerate(tokens, start=1):
            ended(0, token)
            yield NewToken(0, token, "length" if index == len(tokens) else None, 0.0)

    monkeypatch.setattr(completion, "generate", generate)
    parts = {"datamodule": SimpleNamespace(tokenizer=tokenizer),
             "precision_plugin": SimpleNamespace(forward_context=nullcontext)}  # fmt: skip
    samples = Samples(SamplesConfig(prompts=["a sh"]))
    assert samples.written(SimpleNamespace(**parts), SimpleNamespace(decoder=None)) == ["ort"]
