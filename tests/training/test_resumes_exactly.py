"""Whatever a run trains with, an interruption changes nothing: losses, weights and optimizer state are the same bits.

A row is a feature and how its run is interrupted. `faults/` has more interruptions, of an ordinary run.
"""

import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file
from shard_files import write_rows
from test_custom_model_state import MODEL as BIGRAM
from test_mixtures import mixed, source, write_sources
from test_optimizer_class import EVERYTHING, OWN, SGD
from test_own_model import FILES
from trainings import equipment, fit, trace

EXIT = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 75}
SHARDED = {"trainer.devices": 2, "trainer.strategy": "fsdp2", "data.micro_batch_size": 2, "model.decoder.dropout": 0}
# Step 3, from which the first resume goes on, ends the second epoch of `brief`: 18 samples of its 9 windows.
REPEATED = [source("brief", weight=0.75), source("middle", weight=0.25), source("high", weight=0)]
HEAD_RATE = {"model.optimizer.groups": {"output": {"lr": 0.02}}}
BRIEF = {"data": {"train": "brief/train", "val": "brief/val", "tokenizer": "tok", "micro_batch_size": 4,
                  "global_batch_tokens": 256, "val_tokens": 256}}  # fmt: skip  # its epoch is a little more than a step
UNUSUAL = "transposed-slash-float64-generators-own-optimizer"  # weights, and generators of Python and NumPy


class Row(NamedTuple):
    changes: dict[str, Any]  # of `trainings.CONFIG`: 12 steps of two micro-batches, a checkpoint every three steps
    interruptions: list[tuple[str, int]]  # each a signal, and the micro-batch of the run, from 0, at which it comes
    callbacks: list[dict] = []
    program: list[str] = []
    marks: list[pytest.MarkDecorator] = []


ROWS = {
    "muon": Row({"model.optimizer": {"name": "muon", "lr": 1e-2}, "model.decoder.qk_norm": True,
                 "trainer.log_interval": 5}, [("SIGKILL", 15)]),  # from step 6, whose loss was not logged yet
    "bf16-mixed": Row({"trainer.precision": "bf16-mixed"}, [("SIGKILL", 19)],
                      marks=[pytest.mark.fault(1)]),
    "bf16-true and a later epoch": Row({"trainer.precision": "bf16-true", **BRIEF}, [("SIGKILL", 15)],
                                       marks=[pytest.mark.fault(1), pytest.mark.fault(15)]),
    "an optimizer of torch, with packed rows": Row({
        "model.optimizer": SGD, "data.path": "data/packed", "data.packing": "whole"}, [("SIGKILL", 9)]),
    "a custom optimizer": Row({"model.optimizer": OWN}, [("SIGKILL", 9)]),
    "every kind of optimizer state": Row({"model.optimizer": EVERYTHING}, [("SIGKILL", 9)]),
    "shards of a custom optimizer": Row({"model.optimizer": EVERYTHING, **SHARDED}, [("SIGTERM", 15)],
                                        marks=[pytest.mark.slow]),
    "a mixture with two phases": Row(mixed(REPEATED), [("SIGKILL", 9), ("SIGKILL", 15)]),  # in each phase
    "fp8": Row({}, [("SIGTERM", 11)], [equipment("test_precision.Emulated")]),
    "a custom model": Row(HEAD_RATE, [("SIGKILL", 9)], program=["my_gru.py"]),
    "unusual weights": Row({"model.variant": UNUSUAL}, [("SIGKILL", 9)], program=["bigram.py"]),
    "bigrams at the start": Row({"trainer.bigram_init": True, "model.decoder.tie_word_embeddings": False},
                                [("SIGKILL", 3), ("SIGKILL", 9)]),  # first without a checkpoint
    # Killed in the middle of its five steps, which are 5 to 9.
    "the drill of a spike": Row({"guards.inject_step": 5}, [("SIGKILL", 15)], marks=[pytest.mark.fault(9)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(workplace):
    write_sources(workplace)
    for split, row in {"train": [2, 3, 4, 3, 2] * 60, "val": [4, 3, 2] * 100}.items():
        write_rows(workplace / f"brief/{split}/0.parquet", [row])
    (workplace / "my_gru.py").write_text(FILES["my_gru.py"])
    (workplace / "bigram.py").write_text(BIGRAM)
    return workplace


def entries(place: Path) -> list[dict[str, Any]]:
    """What the recorders of all ranks wrote down, of micro-batches that did not count in the end too."""
    return [entry for path in place.glob("trace*.jsonl") for entry in trace(place, path.name)]


def losses(entries: list[dict[str, Any]]) -> dict[tuple[int, int, int], str]:
    """The loss of each micro-batch that counted in the end, exactly."""
    return {(entry["rank"], entry["step"], entry["micro"]): entry["loss"] for entry in entries}


@pytest.mark.parametrize("name", [pytest.param(name, marks=ROWS[name].marks) for name in ROWS])
def test_an_interrupted_run_is_the_run_without_a_stop(place, name):
    row, run = ROWS[name], name.replace(" ", "-").replace(",", "")

    def train(run, changes, *arguments, callbacks=(), expect=0):
        callbacks = [*row.callbacks, *callbacks]
        return fit(place, run, *arguments, callbacks=callbacks, program=row.program, expect=expect, **changes)[1]

    whole = train(f"{run}-whole", row.changes)
    expected, arguments = entries(place), []
    for signal_name, micro_batch in row.interruptions:
        stop = equipment("recorder.KillAt", signal_name=signal_name, micro_batch=micro_batch)
        train(run, row.changes, *arguments, callbacks=[stop], expect=EXIT[signal_name])
        arguments = ["--ckpt_path", "auto"]
    resumed = train(run, row.changes, *arguments)
    found = entries(place)
    assert losses(found) == losses(expected)
    logged = [[(line["step"], line["train/loss"], line["train/max_loss"]) for line in each.metrics("train/loss")]
              for each in (whole, resumed)]  # fmt: skip
    assert logged[0] == logged[1]
    injected = [each.read("run.json").get("injected") for each in (whole, resumed)]
    assert injected[0] == injected[1] and (injected[0] is None) == ("guards.inject_step" not in row.changes)
    if all(name == "SIGTERM" for name, _ in row.interruptions):  # no micro-batch is computed twice
        assert len(found) == len(expected)
    for file in ("model.safetensors", "optimizer.safetensors"):
        before, after = (load_file(each.checkpoint("last") / file) for each in (whole, resumed))
        assert before.keys() == after.keys()
        assert all(before[key].dtype == after[key].dtype and before[key].equal(after[key]) for key in before)
