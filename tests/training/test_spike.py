"""The drill: five steps of rare tokens come when they were asked for, as a pure function, once, and are survived."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shard_files import write_folder, write_tokens
from trainings import equipment, fit, rows_by_step

from lm.data.loader import Batch
from lm.data.rare import rare_rows, rare_tokens
from lm.data.shards import Shards
from lm.runs.postmortem import steps_of, still_open
from lm.training.callbacks.alerts import Spike
from lm.training.callbacks.spike_injection import SpikeInjection
from lm.training.config import GuardsConfig

STEPS = [30, 31, 32, 33, 34]
LENGTH = {"trainer.max_steps": 44, "trainer.val_interval": 44}
DRILL = {"guards.inject_step": 30, **LENGTH}


# ---- which tokens ----------------------------------------------------------------------------------------------------
def test_rare_tokens_are_the_most_that_make_up_one_percent(tmp_path):
    """None that was left out is rarer than one that was taken, and one more would be too many."""
    random = np.random.default_rng(0)
    tokens = (random.zipf(1.3, 200_000) % 500).astype(np.uint16)
    write_tokens(tmp_path / "00000.parquet", tokens)
    rare = rare_tokens(Shards.open(str(tmp_path)), 1000)
    counts = np.bincount(tokens, minlength=1000)
    assert counts[rare].min() > 0 and counts[rare].sum() <= 0.01 * len(tokens)
    others = np.setdiff1d(np.flatnonzero(counts), rare)
    assert counts[others].min() >= counts[rare].max()
    assert counts[rare].sum() + counts[others].min() > 0.01 * len(tokens)


def test_where_every_token_is_common_the_rarest_one_is_taken(tmp_path):
    """Of equals it is the one with the smallest id."""
    write_tokens(tmp_path / "00000.parquet", np.array([7, 7, 7, 3, 3, 9, 9] * 10, dtype=np.uint16))
    assert rare_tokens(Shards.open(str(tmp_path)), 1000).tolist() == [3]


def test_only_the_beginning_of_the_text_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("lm.data.rare.COUNTED", 700)
    tokens = write_folder(tmp_path, [500, 500], vocab_size=20)
    counts = np.bincount(tokens[:700], minlength=1000)
    assert rare_tokens(Shards.open(str(tmp_path)), 1000)[0] == np.where(counts > 0, counts, 10_000).argmin()


def test_samples_are_a_function_of_seed_and_step_for_good():
    """The numbers are written down here: another version of numpy has to give them, too."""
    rare = np.array([11, 22, 33, 44, 55], dtype=np.uint16)
    rows = rare_rows(rare, seed=7, step=150, samples=2, length=6)
    assert rows.dtype == np.uint16 and rows.tolist() == PINNED
    assert not np.array_equal(rows, rare_rows(rare, 7, 151, 2, 6))
    assert not np.array_equal(rows, rare_rows(rare, 8, 150, 2, 6))
    assert set(rare_rows(rare, -1, 1, 64, 33).flatten().tolist()) == set(rare.tolist())


PINNED = [[33, 33, 44, 55, 22, 55], [55, 22, 22, 33, 44, 11]]


def test_documents_are_counted_again():
    """The end of a document may be rare, too, and flash attention has room for the documents that were counted."""
    data = SimpleNamespace(seed=7, seq_len=6, tokenizer=SimpleNamespace(eos_id=0))
    trainer = SimpleNamespace(
        global_step=0, global_rank=0, world_size=1, is_global_zero=False, datamodule=data,
        steps=SimpleNamespace(global_batch=2),
    )  # fmt: skip
    module = SimpleNamespace(on_before_batch_transfer=lambda batch, index: batch.count_documents(data.tokenizer.eos_id))
    batch = Batch(torch.ones(2, 7, dtype=torch.uint16))
    batch.count_documents(0)
    drill = SpikeInjection(1)
    drill._rare = np.zeros(1, np.uint16)
    drill.on_train_batch_start(trainer, module, batch, 0)
    assert not batch.tokens.any() and batch.row_documents == (7, 7)


# ---- in a training ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def drill(workplace):
    """One run: the process, the run and the tokens of each step."""
    return *fit(workplace, "drill", **DRILL), rows_by_step(workplace / "trace.jsonl")


@pytest.mark.fault(9)
def test_five_steps_are_replaced_and_no_other(workplace, drill):
    """The steps around are those of a run without the drill."""
    _, _, tokens = drill
    fit(workplace, "plain", **LENGTH)
    plain = rows_by_step(workplace / "trace.jsonl")
    assert [step for step in tokens if tokens[step] != plain[step]] == STEPS
    train = Shards.open(str(workplace / "data/small/train"))
    rare = set(rare_tokens(train, 100).tolist())
    assert all(rare.issuperset(row) for step in STEPS for row in tokens[step])
    assert len({tuple(row) for step in STEPS for row in tokens[step]}) == 5 * 8


@pytest.mark.fault(9)
def test_it_is_logged_survived_and_written_up_with_its_recovery(drill):
    ended, run, _ = drill
    assert "step 30: the samples of steps 30 to 34 are replaced by rare tokens" in ended.stderr
    assert [line["step"] for line in run.metrics() if line.get("data/injected") == 1] == STEPS
    assert run.read("run.json")["injected"] == {"steps": STEPS} and run.status() == "finished"
    folder = run.path / "postmortem-00000030"
    page = (folder / "postmortem.md").read_text()
    assert "**This was a drill**" in page and ", injected\n" in (folder / "samples.txt").read_text()
    assert re.search(r"## Recovery\n\nThe loss was as low as before: .* in the log line of step (3[5-9]|4\d)", page)


EARLY = equipment("lightning.pytorch.callbacks.EarlyStopping", monitor="val/loss", divergence_threshold=0.1)
UNLEARNED = {"trainer.log_interval": 1, "model.optimizer.lr": 1e-9, "model.decoder.dropout": 0.0}
OFTEN = {"grad_norm > 0": "warn", **{f"step == {step}": "checkpoint" for step in range(2, 26, 4)}}


@pytest.mark.parametrize(
    ("pages", "recovery", "changes"),
    [
        ([20], "The loss was as low as before: ", {"guards.inject_step": 20, "trainer.max_steps": 60}),
        ([12], "The training ended at step 12", {"guards.inject_step": 12}),
        ([8], "The training ended at step 8", {
            "guards.inject_step": 6, "guards.spike": None, "trainer.callbacks": [EARLY]}),
        # One that was open when the drill began is closed for it.
        ([5, 6], "The loss", {"guards.inject_step": 6, "guards.spike": "step == 5", **UNLEARNED}),
        # A run has five at most, but for the drill; that an alert warns is none.
        ([2, 6, 10, 14, 18, 26], "The ", {
            "guards.inject_step": 26, "guards.alerts": OFTEN, **UNLEARNED, "trainer.max_steps": 30}),
    ],
)  # fmt: skip
def test_it_is_written_up_though_no_spike_is_noticed(workplace, pages, recovery, changes):
    """Before there are ten log lines, in the last step, in a run that is stopped early, without `guards.spike`."""
    changes = {"trainer.log_interval": 10, "trainer.val_interval": 8, **changes}
    shutil.rmtree(workplace / "checkpoints" / "quiet", ignore_errors=True)
    _, run = fit(workplace, "quiet", **changes)
    assert steps_of(run) == pages and still_open(run) is None
    text = (run.path / f"postmortem-{pages[-1]:08d}" / "postmortem.md").read_text()
    assert "**This was a drill**" in text and f"## Recovery\n\n{recovery}" in text
    assert [alert["guard"] for alert in run.alerts()].count("drill") == 1


def test_a_spike_is_noticed_from_the_tenth_log_line_on():
    evaluator = Spike(GuardsConfig().spike)
    for _ in range(8):
        evaluator.evaluate({"train/loss": 3.0, "train/max_loss": 3.0})
    assert list(evaluator.evaluate({"train/loss": 3.0, "train/max_loss": 9.0}).values()) == [None]
    assert list(evaluator.evaluate({"train/loss": 3.0, "train/max_loss": 9.0}).values()) == [True]


def test_another_division_sees_the_same(workplace, drill):
    fit(workplace, "divided", **DRILL, **{"data.micro_batch_size": 2})
    assert rows_by_step(workplace / "trace.jsonl") == drill[2]
