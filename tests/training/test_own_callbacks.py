"""The callbacks of lm/training/README.md, as they stand there, and metrics that are given to Lightning's `log`."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainings import HERE, fit, lm, make_workplace

from lm.errors import RunError
from lm.training.callbacks.logging import metrics_of_callback

README = (HERE.parent / "lm" / "training" / "README.md").read_text()
CALLBACKS = re.search(r"```python\n(# my_callbacks.py\n.*?)```", README, re.DOTALL)[1]
LOGGING = '''
from lightning.pytorch.callbacks import Callback

class Logged(Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        pl_module.log("mine/step", float(trainer.global_step))

    def on_validation_batch_end(self, trainer, pl_module, *args):
        pl_module.log("mine/rows", 3.0, on_epoch=True, batch_size=1)

class Taken(Callback):
    def __init__(self, metric):
        self.metric = metric

    def logged_metrics(self, trainer, pl_module):
        return {self.metric: -1.0}

class Exits(Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == 5:
            raise SystemExit(0)

class OwnStep(Callback):  # by Lightning's `log`, which has no such names either
    def on_train_batch_end(self, trainer, pl_module, *args):
        pl_module.log_dict({"step": -1.0, "time": -1.0, "train/loss": -1.0})
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = make_workplace(tmp_path_factory.mktemp("place"))
    (place / "my_callbacks.py").write_text(CALLBACKS + LOGGING)
    return place


def own(name, **settings):
    return {"trainer.callbacks": [{"class_path": f"my_callbacks.{name}", "init_args": settings}]}


def test_an_embedding_is_frozen_and_the_rest_learns(place):
    """With two ranks too, which exchange the gradients of the rest."""
    changes = {"trainer.keep_checkpoints": 9, "trainer.devices": 2, "model.decoder.tie_word_embeddings": False}
    _, run = fit(place, "frozen", **own("FreezeEmbedding"), **changes)
    first, last = (load_file(run.steps()[step] / "model.safetensors") for step in (3, 12))
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == {"model.embed_tokens.weight"}


def test_an_own_metric_is_in_every_log_line(place):
    _, run = fit(place, "normed", **own("EmbeddingNorm"))
    assert all(line["optim/embedding_norm"] > 0 for line in run.metrics("train/loss"))


def test_a_run_stops_at_a_loss(place):
    """After the step whose loss is lower, with a checkpoint of it; what is in the record is that it finished."""
    _, run = fit(place, "stopped", **own("StopAtLoss", loss=3.0))
    *before, last = run.metrics("train/loss")
    assert last["train/loss"] < 3.0 <= min(line["train/loss"] for line in before)
    assert last["step"] < 12 and last["step"] in run.steps()


@pytest.mark.parametrize("returned, said", [
    (["a"], "a list: it returns a dictionary of numbers by name"), (None, "a NoneType: it"),
    ({"mine": "text"}, "'text' for 'mine': a metric is a number"), ({"mine": torch.ones(2)}, r"tensor.* for 'mine'"),
])
def test_what_is_no_metric_is_named_with_its_callback(returned, said):
    class Own: pass
    with pytest.raises(RunError, match=rf"^Own\.logged_metrics returned {said}"):
        metrics_of_callback(Own(), returned)
    numbers = {"a": torch.tensor(3), "b": np.float32(0.5), "c": 2}
    assert json.dumps(metrics_of_callback(Own(), numbers)) == '{"a": 3, "b": 0.5, "c": 2}'


def test_what_lightning_s_log_is_given_is_logged_like_the_rest(place):
    _, run = fit(place, "logged", **own("Logged"))
    assert all(line["mine/step"] == line["step"] for line in run.metrics("train/loss"))
    assert all((line.get("mine/rows") == 3.0) == ("val/loss" in line) for line in run.metrics())
    newest = run.read("state.json")["metrics"]
    assert newest.keys() >= {"train/loss", "val/loss", "mine/step", "mine/rows"}
    shown = lm(place, "monitor", "logged", "--once").stdout
    assert "mine/step" in shown and "mine/rows" in shown


@pytest.mark.parametrize("name", ["step", "time", "train/loss"])
def test_no_metric_replaces_one_that_is_there(place, name):
    ended, _ = fit(place, "taken", expect=1, **own("Taken", metric=name))
    assert f"Taken.logged_metrics returned '{name}', and the log line has a metric of that name: call it" in ended.stderr


def test_lightning_s_log_replaces_none_either(place):
    _, run = fit(place, "stepped", **own("OwnStep"))
    assert [line["step"] for line in run.metrics("train/loss")] == list(range(1, 13))
    assert all(line["time"] > 0 and line["train/loss"] > 0 for line in run.metrics("train/loss"))


def test_an_exit_in_a_callback_is_a_failure(place):
    ended, run = fit(place, "left", expect=1, **own("Exits"))
    assert "ended by sys.exit() in the training, after step 5; `" in ended.stderr and run.status() == "failed"
