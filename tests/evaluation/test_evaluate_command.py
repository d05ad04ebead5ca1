"""`lm evaluate`: what it finds is what validation and the loaded model say, and it stays with the run."""

import json
import math
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_between_steps import WORDS, found_by, write_tasks
from trainings import fit, lm

from lm.cli.evaluate import evaluate, short_names
from lm.cli.model_options import EvaluateOptions
from lm.cli.runs_show import show
from lm.errors import RequestError, RunError
from lm.runs import registry
from lm.runs.evaluations import evaluation_metrics, evaluation_record, evaluation_rows, merge_evaluations
from lm.runs.run import Run
from lm.system.arguments import call

WORDS_TASK = ("--tasks", "words.jsonl", "--device", "cpu")


@pytest.fixture(scope="module")
def workplace(workplace):
    """A run of 8 steps, with checkpoints of 4 and 8."""
    write_tasks(workplace)
    fit(workplace, **{"trainer.max_steps": 8, "trainer.checkpoint_interval": 4, "trainer.keep_checkpoints": 2,
                  "trainer.callbacks": None, "data.val_tokens": None})  # fmt: skip
    return workplace


@pytest.fixture
def run(workplace, monkeypatch):
    """The run, without evaluations; where it is, commands are typed."""
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("LM_REGISTRY", str(workplace / "runs.db"))
    run = Run(workplace / "checkpoints" / "small")
    (run.path / "evaluations.jsonl").unlink(missing_ok=True)
    return run


def found_with(capsys, *options):
    """What `lm evaluate --json` prints."""
    evaluate(call(EvaluateOptions, [*options, "--json"], prog="lm evaluate"))
    return json.loads(capsys.readouterr().out)


def points(run, name):
    """Step -> value, as the newest event file has them."""
    newest = max(run.path.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns)
    return {event.step: event.value for event in EventAccumulator(str(newest)).Reload().Scalars(name)}


@pytest.mark.slow
def test_what_is_found_is_the_models_and_stays_with_the_run(workplace, run, capsys):
    done = lm(workplace, "evaluate", *WORDS_TASK, "--ckpt_path", "last", "--max_items", "7", "--json")
    assert "checkpoints/small/step-00000008" in done.stderr
    last = json.loads(done.stdout)
    first = found_with(capsys, *WORDS_TASK, "--ckpt_path", "checkpoints/small/step-00000004", "--max_items", "7")
    for found, step in ((last, 8), (first, 4)):
        expected = found_by(run.steps()[step], workplace / "words.jsonl")
        assert (found["run"], found["step"], found["checkpoint"]) == ("small", step, f"step-{step:08}")
        assert expected.items() <= found["tasks"]["words"].items()
        task = found["tasks"]["words"]
        assert found["core"] == task["centered"] == pytest.approx(2 * task["accuracy"] - 1)
        low, high = found["core_interval"]
        assert low <= found["core"] <= high and (low, high) == pytest.approx(task["centered_interval"])
    assert [entry.items() <= found.items() for entry, found in zip(run.evaluations(), (last, first), strict=True)]
    assert [row["core"] for row in registry.known_runs()] == [first["core"]]  # the newest
    for name, value in evaluation_metrics(first).items():
        assert points(run, name) == pytest.approx({4: value, 8: evaluation_metrics(last)[name]})
    call(show, ["small"], prog="lm runs show")
    shown = capsys.readouterr().out
    assert re.search(rf"evaluation\s+step 4, mean centred accuracy {first['core']:.4f}", shown) and "words: " in shown


@pytest.mark.slow
def test_bits_per_byte_of_the_texts_of_the_validation_are_those_of_the_validation(workplace, run, capsys):
    """Nearly, where windows do not cross documents."""
    found = found_with(capsys, "--texts", "texts/00*.txt", "texts", "--ckpt_path", "last")
    validated = lm(workplace, "validate", "--run", "small", "--ckpt_path", "last").stdout
    bpb = float(re.search(r"val/bpb (\S+)", validated)[1])
    texts = found["texts"]
    assert list(texts) == ["texts/00*.txt", "texts"] and found["tasks"] == {} and found["core"] is None
    assert texts["texts"]["bytes"] == sum(path.stat().st_size for path in (workplace / "texts").iterdir())
    assert texts["texts"]["bits_per_byte"] == pytest.approx(bpb, rel=0.15)
    assert points(run, "eval/texts/bpb") == {8: pytest.approx(texts["texts"]["bits_per_byte"])}


def test_texts_have_a_key_of_any_name(run, capsys):
    pq.write_table(pa.table({"body": ["Chapter 3. The letter"]}), "texts.parquet")
    Path("texts.jsonl").write_text(json.dumps({"body": "Chapter 3. The letter"}))
    Path("texts.txt").write_text("Chapter 3. The letter")
    with pytest.raises(
        RunError, match="no column 'text' among 'body'; name the one with text .* by --text_key, in a c"
    ):
        found_with(capsys, "--texts", "texts.parquet")
    sources = ("texts.txt", "texts.jsonl", "texts.parquet")
    found = found_with(capsys, "--texts", *sources, "--text_key", "body")["texts"]
    assert found["texts.txt"] == found["texts.jsonl"] == found["texts.parquet"] and len(found) == 3


@pytest.mark.slow
def test_a_model_without_a_run_leaves_nothing_behind(workplace, run, capsys):
    shutil.copytree(run.checkpoint("last"), workplace / "model", dirs_exist_ok=True)
    (workplace / "model" / "trainer.json").unlink()
    before = sorted(path for path in workplace.rglob("*"))
    evaluate(call(EvaluateOptions, ["--ckpt_path", "model", *WORDS_TASK, "--dtype", "bfloat16"], prog="lm evaluate"))
    assert sorted(path for path in workplace.rglob("*")) == before and run.evaluations() == []
    shown = capsys.readouterr().out
    assert re.search(rf"^words: .* right .*; {len(WORDS)} items, 0 shots$", shown, re.M)
    assert re.search(r"^model\nmean centred accuracy \S+ \(\S+ to ", shown, re.M)


@pytest.mark.parametrize("options, words", [
    ((), "give something to evaluate on"),
    (("--tasks", "hellaswg"), "hellaswg: no such file; give embedded:sotu, a benchmark .arc_challenge"),
    (("--tasks", "words.jsonl", "--max_items", "0"), "--max_items 0 must be at least 1"),
    (("--tasks", "words.jsonl", "--num_fewshot", "9"), "too few for 9"),
    (("--texts", "nowhere.txt"), "nowhere.txt"),
    (("--tasks", "words.jsonl", "--run", "nobody"), "no run 'nobody'"),
])  # fmt: skip
def test_a_wrong_request_is_one_line_and_leaves_nothing(run, options, words):
    with pytest.raises(RequestError, match=words) as refused:
        evaluate(call(EvaluateOptions, list(options), prog="lm evaluate"))
    assert "\n" not in str(refused.value) and run.evaluations() == []


def test_sources_have_short_names_that_differ():
    sources = ["a/b/news.jsonl.gz", "data/val/", "data/x/*.parquet", "embedded:sotu", "*.txt"]
    assert short_names(sources) == ["news", "val", "x", "sotu", "*.txt"]
    assert short_names(["a/val", "val/*.txt", "a/test"]) == ["a/val", "val/*.txt", "test"]


def test_what_is_kept_is_json_that_every_program_reads():
    found = {"bits_per_byte": math.nan, "loss": 1.5, "stderr": math.inf, "tokens": 3}
    kept = evaluation_record(4, "step-00000004", {}, None, {"a": found}, {"tasks": None})
    assert json.loads(json.dumps(kept, allow_nan=False)) == kept
    assert kept["texts"]["a"] == {"bits_per_byte": None, "loss": 1.5, "stderr": None, "tokens": 3}
    assert evaluation_metrics(kept) == {}
    text = {"bits_per_byte": 1.25, "loss": 1.5, "stderr": 0.01, "tokens": 3}
    [row] = evaluation_rows({"tasks": {}, "texts": {"a": text}}).items()
    assert row == ("a", "1.2500 ± 0.0196 bits per byte, loss 1.5000 over 3 tokens")


def test_what_is_known_of_a_step_is_put_together_and_a_part_does_not_replace_the_whole():
    """Of each task the result over most items counts; texts measured later do not drop the tasks."""

    def evaluation(step, tasks, texts=(), core=None):
        return {
            "step": step, "core": core, "core_interval": core and [core, core],
            "tasks": {name: {"items": items, "accuracy": accuracy} for name, items, accuracy in tasks},
            "texts": {name: {"tokens": tokens} for name, tokens in texts},
        }  # fmt: skip

    whole = evaluation(4, [("a", 160, 0.5), ("b", 100, 0.25)], core=0.3)
    part, words = evaluation(4, [("a", 3, 1.0)], core=1.0), evaluation(4, [], [("w", 9)])
    older = evaluation(2, [("a", 500, 0.0)])
    known = merge_evaluations([older, whole, part, words])
    assert known["tasks"] == whole["tasks"] and known["texts"] == words["texts"] and known["core"] == 0.3
    assert merge_evaluations([older, whole], 2)["tasks"] == older["tasks"]
    assert merge_evaluations([]) is None and merge_evaluations([whole], 3) is None
    newest = evaluation(4, [("b", 100, 0.75)])
    assert merge_evaluations([part, whole, newest])["tasks"]["b"]["accuracy"] == 0.75
