"""A training below its floor says why: by pure functions from facts, and by real trainings that are made slow."""

import json

import pytest
from trainings import lm, make_workplace, write_config

from lm.errors import RequestError
from lm.runs.run import Run
from lm.training.callbacks.throughput import Facts, diagnose
from lm.training.config import ThroughputConfig

SLOW = dict(rate=61_234.0, floor=100_000, lines=3)
WELL = dict(data_wait=0.004, on_gpu=True, attention="cudnn, then flash", kernels="CUDA")


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"data_wait": 0.62}, "waiting for data 62% of the time"),
        ({"compilations": 7, "reason": "x size mismatch"}, "7 new graphs in 3 log lines, the last time because x"),
        ({"attention": "masked", "masked": True}, "attention is by a mask"),
        ({"attention": "efficient, then math", "full_precision": True}, "attention is not by flash"),
        ({"masked": True, "full_precision": True}, "attention is by a mask"),
        ({"plain": True, "kernels": "plain PyTorch (NVRTC is not installed)"}, "kernels are plain PyTorch (NVRTC"),
        ({"limits": ["GPU 0: thermal"]}, "clocks are limited: GPU 0: thermal"),
    ],
)
def test_one_cause_is_named_with_its_evidence(facts, cause):
    line = diagnose(Facts(**SLOW, **{**WELL, **facts}))
    assert line.startswith("61.2K tokens/s, below 100K for 3 log lines: ")
    assert cause in line and ";" not in line.partition(cause)[0] and "no cause" not in line and line.isprintable()


@pytest.mark.parametrize(
    "facts",
    [
        {}, {"data_wait": 0.09}, {"data_wait": None}, {"on_gpu": False, "masked": True, "plain": True},
        {"attention": "flash over sequences"},
    ],
)  # fmt: skip
def test_what_is_no_cause_is_not_blamed(facts):
    """A CPU has no other kernels, and the figures are in the line."""
    line = diagnose(Facts(**SLOW, **{**WELL, **facts}))
    assert "no cause found" in line and "data wait" in line and line.isprintable()


def test_several_causes_are_all_named():
    line = diagnose(Facts(**SLOW, **{**WELL, "data_wait": 0.5, "limits": ["power"], "kernels": "plain PyTorch", "plain": True}))
    assert "waiting for data" in line and "power" in line and "kernels are" in line


@pytest.mark.parametrize(("wrong", "word"), [({"floor": 0}, "floor"), ({"patience": 0}, "patience")])
def test_a_wrong_request_is_refused(wrong, word):
    with pytest.raises(RequestError, match=word):
        ThroughputConfig(**wrong)


# ---- trainings that are made slow ------------------------------------------------------------------------------------

SLOW_DATA = """
import time
from lightning.pytorch import Callback
from lm.data.loader import Stream

class SlowData(Callback):
    def setup(self, trainer, pl_module, stage):
        rows = Stream.__iter__
        def slowly(stream):
            for batch in rows(stream):
                time.sleep(0.3)
                yield batch
        Stream.__iter__ = slowly
"""

# Every micro-batch is a token shorter than the one before it, and nothing may be compiled for several lengths at once.
NEW_SHAPES = """
import torch
from lightning.pytorch import Callback

class NewShapes(Callback):
    def setup(self, trainer, pl_module, stage):
        torch._dynamo.config.assume_static_by_default = True
        torch._dynamo.config.automatic_dynamic_shapes = False

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch.tokens = batch.tokens[:, : 30 - batch_idx]
"""


def slow_training(folder, slow, **changes):
    """The alerts of a training with a floor that it cannot reach, its metrics, and its log."""
    make_workplace(folder)
    (folder / "slow.py").write_text(slow)
    name = slow.split("class ")[1].split("(")[0]
    callbacks = [{"class_path": f"slow.{name}"}]
    write_config(folder, **{"guards.throughput": {"floor": "1G"}, "trainer.callbacks": callbacks, **changes})
    lm(folder, "fit", "--config", "small.yaml")
    run = Run(folder / "checkpoints" / "small")
    return [alert for alert in run.alerts() if alert["guard"] == "throughput"], run.metrics(), (run.path / "log.txt").read_text()


def test_a_slow_loader_is_diagnosed(tmp_path):
    """Said once, at the third line that is judged, for the first is not; and the share is logged at every line."""
    alerts, metrics, log = slow_training(tmp_path, SLOW_DATA, **{"trainer.peak_tflops": 1})
    assert [(alert["step"], alert["action"]) for alert in alerts] == [(4, "warn")]
    assert "waiting for data" in alerts[0]["message"] and "graphs" not in alerts[0]["message"]
    shares = [line["perf/data_wait"] for line in metrics if "perf/data_wait" in line]
    assert len(shares) == 12 and all(0.5 < share <= 1 for share in shares)
    assert all(0 < line["perf/mfu"] < line["perf/mfu_full_attention"] for line in metrics if "perf/mfu" in line)
    assert "MFU (causal) 0." in log and "MFU (full) 0." in log


def test_recompiling_is_diagnosed(tmp_path):
    """And nothing else is: the data of the small model is there when it is asked for."""
    changes = {"data.micro_batch_size": 8, "model.compile": "triton_free", "trainer.max_steps": 2,
               "model.schedule.warmup_steps": 1}  # fmt: skip
    changes["guards.throughput.patience"] = 1
    alerts, _, _ = slow_training(tmp_path, NEW_SHAPES, **changes)
    assert len(alerts) == 1 and "new graphs in a log line, the last time because" in alerts[0]["message"]
    assert "waiting for data" not in alerts[0]["message"], json.dumps(alerts)
