"""What is shown of a run and of its data is what the run logged and saw: numbers against independent ones."""

import json
import math

import numpy as np
import pytest
from shard_files import write_folder
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from trainings import fit, trace

from lm.data.rare import count_tokens
from lm.data.shards import Shards
from lm.errors import RequestError
from lm.inspection import run_views as view
from lm.inspection.data import jensen_shannon, open_data, read_step, seen_table, split_documents
from lm.runs.config_diff import differences
from lm.runs.history import curve, labels, read_samples, time_spent
from lm.runs.run import Run


@pytest.fixture(scope="module")
def run(workplace):
    """A run that was really trained, and resumed from its middle."""
    changes = {"samples.prompts": ["Chapter 1", "The"], "trainer.keep_checkpoints": 5}
    fit(workplace, "small", "--trainer.max_steps", "6", **changes)
    return fit(workplace, "small", "--ckpt_path", "checkpoints/small/step-00000003", **changes)[1]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another working directory than the one that the run was started from, as a notebook has it."""
    monkeypatch.chdir(tmp_path)


def test_tensorboard_and_the_log_lines_agree_also_after_a_resume(run):
    events = EventAccumulator(str(run.path), size_guidance={SCALARS: 0})  # 0: all of them
    events.Reload()
    lines = run.metrics()
    metrics = {name for line in lines for name in line if "/" in name}
    assert {
        "train/loss", "train/perplexity", "val/loss", "val/perplexity", "val/bpb", "optim/lr", "optim/grad_norm",
        "optim/param_norm", "perf/tokens_per_second",
    } <= metrics  # fmt: skip
    assert [int(one.value) for one in events.Scalars("data/tokens")][:2] == [256, 512]
    for name in metrics:
        logged, shown = curve(name, lines, name), events.Scalars(name)
        assert [one.step for one in shown] == logged.x
        assert [one.value for one in shown] == pytest.approx(logged.y, rel=1e-6)


def test_time_is_that_of_training_of_waiting_and_of_pauses():
    """100 tokens a step at 50 tokens a second, and a validation of three seconds."""
    lines = [{"step": step, "tokens": 100 * step, "time": now, "perf/tokens_per_second": 50.0, "perf/data_wait": 0.25}
             for step, now in ((5, 1010.0), (10, 1020.0), (15, 1033.0))]  # fmt: skip
    assert time_spent(lines) == {"computing": 22.5, "waiting for data": 7.5, "pauses": 3.0}
    assert time_spent([]) == {"computing": 0.0, "waiting for data": 0.0, "pauses": 0.0}


def test_runs_differ_by_name_folder_and_settings(run, workplace, elsewhere):
    assert run.started_in() == workplace
    other = Run.create("small", run.path.parent)
    other.describe(id=other.name, name="small", entered=1.0)
    other.config.write_text(run.config.read_text().replace("lr: 0.01", "lr: 0.02"))
    assert differences([run.settings(), other.settings()]) == {"model.optimizer.lr": [0.01, 0.02]}
    assert labels([run, other]) == ["small", "small-2"]
    assert labels([run, Run("/somewhere/checkpoints/small")])[1] == "/somewhere/checkpoints/small"
    twins = ["/a/jobs/checkpoints/small", "/b/jobs/checkpoints/small"]
    assert labels([Run(path) for path in twins]) == twins


def test_the_later_sample_of_a_step_counts_as_it_was_written(run, tmp_path):
    samples = read_samples(run)
    assert [(one["step"], one["prompt"]) for one in samples] == [
        (step, prompt) for step in (4, 6, 8, 12) for prompt in ("Chapter 1", "The")
    ]  # the first session ended with step 6
    text = "a\u2028b\x85c"  # which end a line for Python, and not in a file of JSON lines
    lines = [{"step": 4, "prompt": "a", "text": "old"}, {"step": 8, "prompt": "a", "text": text},
             {"step": 4, "prompt": "a", "text": "new"}]  # fmt: skip
    whole = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "samples.jsonl").write_text(whole + '{"step": 9, "pro', encoding="utf-8")
    assert [(one["step"], one["text"]) for one in read_samples(Run(tmp_path))] == [(4, "new"), (8, text)]


def test_what_a_step_saw_is_read_again_from_any_folder(run, workplace, elsewhere):
    data = open_data(run)
    seen = [tokens for entry in trace(workplace) if entry["step"] == 5 for tokens in entry["tokens"]]
    half = len(seen) // 2  # the step was taken twice, before and after the resume
    samples = read_step(run, data, 5)
    assert [token for one in samples for token in one.token_ids] == seen[:half] == seen[half:]
    assert read_step(run, data, 5, limit=3) == samples[:3] and len(samples) == 8
    joined = "".join(split_documents(samples[0].token_ids, data))
    assert joined == data.tokenizer.decode(samples[0].token_ids)
    assert read_step(run, data) == read_step(run, data, 12)
    with pytest.raises(RequestError, match="has taken steps 1 to 12"):
        read_step(run, data, 13)


def test_tokens_are_counted_up_to_any_place(tmp_path):
    tokens = write_folder(tmp_path, [100, 3, 200], vocab_size=50, row_groups=20)
    shards = Shards.open(str(tmp_path), block_tokens=16)
    for stop in (0, 1, 18, 110, 1000):
        assert count_tokens(shards, 50, stop).tolist() == np.bincount(tokens[:stop], minlength=50).tolist()


def test_the_divergence_is_that_of_its_definition():
    assert jensen_shannon([1, 2, 3], [2, 4, 6]) == 0  # counts of the same distribution
    assert jensen_shannon([1, 0], [0, 5]) == pytest.approx(1)
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.25, 0.5])
    middle = [0.375, 0.375, 0.25]
    by_hand = 0.5 * (2 * 0.5 * math.log2(0.5 / 0.375)) + 0.5 * (2 * 0.25 * math.log2(0.25 / 0.375) + 0.5)
    assert middle == ((p + q) / 2).tolist() and jensen_shannon(p, q) == pytest.approx(by_hand)
    many = np.random.default_rng(0).random((4, 7))
    square = jensen_shannon(many[:, None], many[None])
    assert square.shape == (4, 4) and np.allclose(square, square.T) and np.allclose(np.diag(square), 0)
    assert math.isnan(jensen_shannon([0, 0], [1, 1]))


def test_pictures_and_tables_are_made_of_any_run(run, tmp_path):
    fresh = Run.create("fresh", tmp_path)
    fresh.describe(id="fresh", name="fresh", entered=1.0, status="running")
    run.append("alerts.jsonl", {"step": 9, "time": 0.0, "guard": "<spike>", "action": "warn", "message": "loss > 3"})
    for each in (run, fresh):
        assert view.draw_training(each)._repr_png_().startswith(b"\x89PNG")
        tables = view.summary_table(each), view.alerts_table(each), view.samples_table(each)
        assert all(one._repr_html_().startswith("<table>") for one in tables)
    assert "&lt;spike&gt;" in view.alerts_table(run).source


def test_the_samples_of_a_step_are_a_table(run, elsewhere):
    data = open_data(run)
    samples = read_step(run, data, 5, 2)
    seen = seen_table(samples, [split_documents(one.token_ids, data) for one in samples])
    assert seen._repr_html_().startswith("<table>")
    assert "village" in seen.source and "train/00000.parquet, window" in seen.source
