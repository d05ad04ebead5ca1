"""Lightning's own callbacks in a training: each works, or is refused in one line before anything is written."""

import math
from pathlib import Path

import pytest
from lightning.pytorch import callbacks
from trainings import fit, lm, make_workplace, write_config

from lm.cli.config import config_parser
from lm.errors import RequestError
from lm.runs.checkpoint import find_damage
from lm.training.checks import INSTEAD, of_callbacks, refuse

PLACE = "lightning.pytorch.callbacks."
# With validations the first two, and nothing but texts or subclasses the others.
WORKING = {"ModelCheckpoint", "EarlyStopping", "ModelSummary", "RichModelSummary", "LambdaCallback", "BaseFinetuning",
           "BasePredictionWriter", "Callback", "Checkpoint"}  # fmt: skip
ARGUMENTS = {
    "GradientAccumulationScheduler": {"scheduling": {0: 2}}, "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "ModelPruning": {"pruning_fn": "l1_unstructured"}, "ThroughputMonitor": {"batch_size_fn": len},
    "OnExceptionCheckpoint": {"dirpath": "."},
}  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("callbacks"))


def given(*callbacks):
    """Lightning's callbacks, each a class's name and its arguments."""
    return {"trainer.callbacks": [{"class_path": PLACE + name, "init_args": each} for name, each in callbacks]}


@pytest.mark.parametrize("name", callbacks.__all__)
def test_each_of_them_works_or_is_refused(name):
    """One that a new version of Lightning brings has to be looked at."""
    kind = getattr(callbacks, name)
    if name in WORKING:
        return
    assert issubclass(kind, tuple(INSTEAD))
    with pytest.raises(RequestError, match=f"^trainer.callbacks: {name} of Lightning does not work here: "):
        refuse(of_callbacks([kind(**ARGUMENTS.get(name, {}))]))


DOES_NOT_WORK, CANNOT_MONITOR = "of Lightning does not work here: ", "has no train/loss to monitor: give val/loss or "


@pytest.mark.parametrize("name, arguments, words", [
    ("Timer", {"duration": "00:01:00:00"}, DOES_NOT_WORK),  # with an enum, which goes into the run's config
    ("GradientAccumulationScheduler", {"scheduling": {4: 2}}, DOES_NOT_WORK),
    ("TQDMProgressBar", {}, DOES_NOT_WORK),
    ("EarlyStopping", {"monitor": "val/loss", "mode": "lowest"}, "`mode` can be min, max, got lowest\n"),
    ("ModelCheckpoint", {"dirpath": "texts/000.txt/mine"}, "cannot write to "),
    ("ModelCheckpoint", {"monitor": "train/loss"}, CANNOT_MONITOR),
    ("EarlyStopping", {"monitor": "train/loss"}, CANNOT_MONITOR),
])
def test_a_refusal_is_one_line_and_leaves_no_run(workplace, name, arguments, words):
    refused, run = fit(workplace, "refused", expect=2, **given((name, arguments)))
    *before, line = refused.stderr.splitlines(keepends=True)
    assert line.startswith("lm fit: trainer.callbacks: " + name) and words in line
    assert not run.path.exists() and not any(line.startswith("lm fit") for line in before)
    assert not before or words != DOES_NOT_WORK  # before data is made


@pytest.mark.parametrize("given, message", [
    ([{"class_path": PLACE + "EarlyStopping"}], f"give monitor under init_args, got {PLACE}EarlyStopping"),
    ([{"class_path": "EarlyStopping"}], "Give the full class path"),
    ({"class_path": PLACE + "EarlyStopping"}, "expected a list: [a, b], or lines that begin with a dash"),
    ([{"class_path": PLACE + "EarlyStoping"}], "has no attribute 'EarlyStoping'"),
])  # fmt: skip
def test_a_wrong_entry_says_what_to_write(tmp_path, given, message):
    config = write_config(tmp_path, **{"trainer.callbacks": given})
    with pytest.raises(RequestError) as refused:
        config_parser("lm plan").read(["--config", str(config)])
    assert str(refused.value).startswith("trainer.callbacks: ") and message in str(refused.value)


class Typed(callbacks.Callback):
    """Its argument is of no type that YAML knows."""

    def __init__(self, place: Path | float = math.inf, kind: str = callbacks.timer.Interval.epoch) -> None:
        assert kind == "epoch"


def test_arguments_of_any_type_are_in_the_config_of_the_run(workplace):
    typed = [{"class_path": "test_lightning_callbacks.Typed"}]
    _, run = fit(workplace, "typed", **{"trainer.max_steps": 3, "trainer.callbacks": typed})
    (callback,) = run.settings()["trainer"]["callbacks"]
    assert callback["init_args"] == {"place": math.inf, "kind": "epoch"}
    lm(workplace, "validate", "--run", "typed")


def test_lightnings_checkpoints_beside_ours(workplace):
    """In the run's folder unless another is named; whole, its best two kept, and resumed with the callback's state."""
    best = ("ModelCheckpoint", {"monitor": "val/loss", "save_top_k": 2, "save_last": True})
    often = ("ModelCheckpoint", {"dirpath": "mine/often", "every_n_train_steps": 3, "save_top_k": -1})
    _, run = fit(workplace, "beside", **given(best, often))
    names = {"epoch=0-step=8.ckpt", "epoch=0-step=12.ckpt", "last.ckpt"}
    assert {path.name for path in (run.path / "checkpoints").iterdir()} == names
    assert len(list((workplace / "mine/often").iterdir())) == 4
    kept = [*(run.path / "checkpoints").iterdir(), *(workplace / "mine/often").iterdir(), run.checkpoint("last")]
    assert not any(map(find_damage, kept)) and list(run.steps()) == [12]
    model = str(workplace / "mine/often/epoch=0-step=6.ckpt")
    assert lm(workplace, "generate", "--ckpt_path", model, "--prompt", "The", "--max_new_tokens", "3").stdout
    fit(workplace, "beside", "--ckpt_path", "auto", **given(best, often), **{"trainer.max_steps": 16})
    assert run.status() == "finished" and len(list((workplace / "mine/often").iterdir())) == 5
    assert len(list((run.path / "checkpoints").glob("epoch*"))) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_profiler_leaves_its_report_in_the_run(workplace, ranks):
    """Also of a validation, and that of every rank."""
    done, run = fit(workplace, f"profiled-{ranks}", **{
        "trainer.profiler": "simple", "trainer.max_steps": 3, "trainer.devices": ranks, "data.micro_batch_size": 2,
    })  # fmt: skip
    names = ["fit-profile.txt"] if ranks == 1 else ["fit-profile-0.txt", "fit-profile-1.txt"]
    assert f"profile: {Path('checkpoints', run.name, names[0])}\n" in done.stderr
    for name in names:
        assert "run_training_batch" in (run.path / name).read_text()
    if ranks == 1:
        lm(workplace, "validate", "--run", run.name, "--trainer.profiler", "advanced")
        assert "VALIDATE Profiler Report" in (run.path / "validate-profile.txt").read_text()
