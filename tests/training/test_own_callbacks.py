"""The callbacks of lm/training/README.md, as they stand there, and metrics that are given to Lightning's `log`."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainings import HERE, lm, make_workplace, write_config

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
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = make_workplace(tmp_path_factory.mktemp("place"))
    (place / "my_callbacks.py").write_text(CALLBACKS + LOGGING)
    return place


def fit(place, name, *callbacks, **changes):
    lm(place, "fit", "--config", str(write_config(place, name, **{"trainer.callbacks": list(callbacks), **changes})))
    lines = (place / "checkpoints" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def own(name, **settings):
    return {"class_path": f"my_callbacks.{name}", "init_args": settings}


def test_an_embedding_is_frozen_and_the_rest_learns(place):
    """With two ranks too, which exchange the gradients of the rest."""
    fit(place, "frozen", own("FreezeEmbedding"), **{"trainer.keep_checkpoints": 9, "trainer.devices": 2,
                                                    "model.decoder.tie_word_embeddings": False})  # fmt: skip
    first, last = (load_file(place / "checkpoints/frozen" / step / "model.safetensors")
                   for step in ("step-00000003", "step-00000012"))  # fmt: skip
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == {"model.embed_tokens.weight"}


def test_an_own_metric_is_in_every_log_line(place):
    lines = fit(place, "normed", own("EmbeddingNorm"))
    assert all(line["optim/embedding_norm"] > 0 for line in lines if "train/loss" in line)


def test_a_run_stops_at_a_loss(place):
    """After the step whose loss is lower, with a checkpoint of it; what is in the record is that it finished."""
    lines = [line for line in fit(place, "stopped", own("StopAtLoss", loss=3.0)) if "train/loss" in line]
    *before, last = [line["train/loss"] for line in lines]
    assert last < 3.0 <= min(before) and lines[-1]["step"] < 12
    assert (place / f"checkpoints/stopped/step-{lines[-1]['step']:08d}").is_dir()


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
    lines = fit(place, "logged", own("Logged"))
    assert all(line["mine/step"] == line["step"] for line in lines if "train/loss" in line)
    assert all((line.get("mine/rows") == 3.0) == ("val/loss" in line) for line in lines)
    newest = json.loads((place / "checkpoints/logged/state.json").read_text())["metrics"]
    assert newest.keys() >= {"train/loss", "val/loss", "mine/step", "mine/rows"}
    shown = lm(place, "monitor", "logged", "--once").stdout
    assert "mine/step" in shown and "mine/rows" in shown
