"""Callbacks in a training: some of Lightning's own, and those of lm/training/README.md.

What is given to Lightning's `log` is logged like other metrics.
"""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import callbacks
from safetensors.torch import load_file
from trainings import HERE, equipment, fit, lm, write_config

from lm.cli import request
from lm.cli.classes_by_path import with_classes
from lm.errors import RequestError
from lm.runs.trainer_json import find_damage
from lm.training.callback import Callback, has_hook

PLACE = "lightning.pytorch.callbacks."
README = (HERE.parent / "lm" / "training" / "README.md").read_text()
CALLBACKS = re.search(r"```python\n(# my_callbacks.py\n.*?)```", README, re.DOTALL)[1]
LOGGING = """
import torch
from lightning.pytorch.callbacks import Callback


class Logged(Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        pl_module.log("mine/step", float(trainer.global_step))

    def on_validation_batch_end(self, trainer, pl_module, *args):
        pl_module.log("mine/rows", 3.0, on_epoch=True, batch_size=1)


class Taken(Callback):
    def __init__(self, metric, value):
        self.metric, self.value = metric, value

    def logged_metrics(self, trainer, pl_module):
        return {self.metric: self.value if isinstance(self.value, str) else torch.tensor(self.value)}


class Keeps(Callback):
    def state_dict(self):
        return {"seen": {1, 2}}


class Exits(Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == 5:
            raise SystemExit(0)


class OwnStep(Callback):  # by Lightning's `log`, which has no such names either
    def on_train_batch_end(self, trainer, pl_module, *args):
        pl_module.log_dict({"step": -1.0, "time": -1.0, "train/loss": -1.0})
"""


@pytest.fixture(scope="module")
def workplace(workplace):
    (workplace / "my_callbacks.py").write_text(CALLBACKS + LOGGING)
    return workplace


def test_a_wrong_argument_is_refused_in_one_line_and_leaves_no_run(workplace):
    wrong = [equipment(PLACE + "EarlyStopping", monitor="val/loss", mode="lowest")]
    refused, run = fit(workplace, "refused", expect=2, **{"trainer.callbacks": wrong})
    line = refused.stderr.splitlines()[-1]
    assert line.startswith("lm fit: trainer.callbacks: EarlyStopping") and "`mode` can be min, max, got lowest" in line
    assert not run.path.exists()


@pytest.mark.parametrize("given, message", [
    ([{"class_path": PLACE + "EarlyStopping"}],
     "monitor is missing; give --trainer.callbacks.init_args.monitor val/loss"),
    ([{"class_path": "Stopping"}], "Lightning has no Stopping; give its path"),
    ([{"class_path": PLACE + "EarlyStoping"}], "has no EarlyStoping"),
])  # fmt: skip
def test_a_wrong_entry_says_what_to_write(tmp_path, given, message):
    config = write_config(tmp_path, **{"trainer.callbacks": given})
    with pytest.raises(RequestError) as refused:
        with_classes(request.read("plan", ["--config", str(config)]))
    assert str(refused.value).startswith("trainer.callbacks: ") and message in str(refused.value)


class Typed(callbacks.Callback):
    """Its argument is of no type that YAML knows."""

    def __init__(self, place: Path | float = math.inf, kind: str = callbacks.timer.Interval.epoch) -> None:
        assert kind == "epoch"


def test_arguments_of_any_type_are_in_the_config_of_the_run(workplace):
    typed = [equipment("test_callbacks.Typed")]
    _, run = fit(workplace, "typed", **{"trainer.max_steps": 3, "trainer.callbacks": typed})
    (callback,) = run.settings()["trainer"]["callbacks"]
    assert callback["init_args"] == {"place": math.inf, "kind": "epoch"}
    lm(workplace, "validate", "--run", "typed")


def test_lightnings_checkpoints_beside_ours(workplace):
    """In the run's folder unless another is named; whole, its best two kept, and resumed with the callback's state."""
    both = {"callbacks": [
        equipment(PLACE + "ModelCheckpoint", monitor="val/loss", save_top_k=2, save_last=True),
        equipment(PLACE + "ModelCheckpoint", dirpath="mine/often", every_n_train_steps=3, save_top_k=-1),
    ]}  # fmt: skip
    _, run = fit(workplace, "beside", **both)
    names = {"epoch=0-step=8.ckpt", "epoch=0-step=12.ckpt", "last.ckpt"}
    assert {path.name for path in (run.path / "checkpoints").iterdir()} == names
    assert len(list((workplace / "mine/often").iterdir())) == 4
    kept = [*(run.path / "checkpoints").iterdir(), *(workplace / "mine/often").iterdir(), run.checkpoint("last")]
    assert not any(map(find_damage, kept)) and list(run.steps()) == [12]
    model = str(workplace / "mine/often/epoch=0-step=6.ckpt")
    assert lm(workplace, "generate", "--ckpt_path", model, "--prompt", "The", "--max_new_tokens", "3").stdout
    fit(workplace, "beside", "--ckpt_path", "auto", **both, **{"trainer.max_steps": 16})
    assert run.status() == "finished" and len(list((workplace / "mine/often").iterdir())) == 5
    assert len(list((run.path / "checkpoints").glob("epoch*"))) == 2


# ---- custom ones -----------------------------------------------------------------------------------------------------
def test_an_embedding_is_frozen_and_the_rest_learns(workplace):
    """With two ranks too, which exchange the gradients of the rest."""
    changes = {"trainer.keep_checkpoints": 9, "trainer.devices": 2, "model.decoder.tie_word_embeddings": False}
    _, run = fit(workplace, "frozen", callbacks=[equipment("my_callbacks.FreezeEmbedding")], **changes)
    first, last = (load_file(run.steps()[step] / "model.safetensors") for step in (3, 12))
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == {"model.embed_tokens.weight"}


def test_a_run_stops_at_a_loss(workplace):
    """After the step whose loss is lower, with a checkpoint of it; what is in the record is that it finished."""
    _, run = fit(workplace, "stopped", callbacks=[equipment("my_callbacks.StopAtLoss", loss=3.0)])
    *before, last = run.metrics("train/loss")
    assert last["train/loss"] < 3.0 <= min(line["train/loss"] for line in before)
    assert last["step"] < 12 and last["step"] in run.steps()


def test_custom_metrics_are_logged_like_the_rest_and_replace_none(workplace):
    """Those of `logged_metrics`, and those that Lightning's `log` is given, whatever their names."""
    given = [equipment(f"my_callbacks.{name}") for name in ("EmbeddingNorm", "Logged", "OwnStep")]
    _, run = fit(workplace, "logged", callbacks=given)
    lines = run.metrics("train/loss")
    assert [line["step"] for line in lines] == [line["mine/step"] for line in lines] == list(range(1, 13))
    assert all(line[name] > 0 for line in lines for name in ("optim/embedding_norm", "time", "train/loss"))
    assert all((line.get("mine/rows") == 3.0) == ("val/loss" in line) for line in run.metrics())
    newest = run.read("state.json")["metrics"]
    assert newest.keys() >= {"train/loss", "val/loss", "mine/step", "mine/rows"}
    shown = lm(workplace, "monitor", "logged").stdout
    assert "mine/step" in shown and "mine/rows" in shown


def test_a_metric_replaces_none_that_is_there(workplace):
    """What a callback returns may be a tensor; a value that is no number ends the run."""
    taken = [equipment("my_callbacks.Taken", metric=name, value=-1.0) for name in ("train/loss", "mine/value")]
    _, run = fit(workplace, "taken", callbacks=taken)
    assert all(line["train/loss"] > 0 and line["mine/value"] == -1.0 for line in run.metrics("train/loss"))
    wrong = [equipment("my_callbacks.Taken", metric="mine/text", value="a")]
    ended, _ = fit(workplace, "text", expect=1, callbacks=wrong)
    assert "could not convert string to float: 'a'" in ended.stderr.splitlines()[-1]


def test_a_state_that_no_checkpoint_holds_ends_the_run_at_the_first_one(workplace):
    ended, _ = fit(workplace, "keeps", expect=1, callbacks=[equipment("my_callbacks.Keeps")])
    assert "a checkpoint cannot hold callbacks['Keeps']['seen'] of the type set: let its" in ended.stderr


def test_an_exit_in_a_callback_is_a_failure(workplace):
    ended, run = fit(workplace, "left", expect=1, callbacks=[equipment("my_callbacks.Exits")])
    assert "ended by sys.exit() after step 5 of the training; `" in ended.stderr and run.status() == "failed"


def test_weights_are_made_at_once_where_a_callback_sees_them():
    """Else FSDP2 makes them when it has sharded the model, after `on_model_built`."""

    class Seeing(callbacks.Callback):
        def on_model_built(self, trainer, pl_module):
            pass

    found = [has_hook(SimpleNamespace(callbacks=[Callback(), one]), "on_model_built")
             for one in (Callback(), callbacks.Callback(), Seeing())]  # fmt: skip
    assert found == [False, False, True]
