"""A training below its floor says why: by pure functions from facts, and by real trainings that are made slow."""

import json

import pytest
from test_guards import found_in
from trainings import fit

from lm.errors import RequestError
from lm.runs.postmortem import steps_of
from lm.training.callbacks.throughput_floor import ThroughputFloor
from lm.training.config import ThroughputConfig


def diagnosis(lines=3, **metrics):
    """What is said of a rate below the floor in the third log line that is judged."""
    floor = ThroughputFloor(ThroughputConfig(floor=100_000, patience=lines))
    floor.begin("attention cudnn, kernels CUDA")
    slow = {"perf/tokens_per_second": 61_234.0, **metrics}
    [(step, finding)] = found_in([(step, slow) for step in range(lines + 1)], floor)
    assert step == lines
    return finding.message


@pytest.mark.parametrize(("metrics", "graphs", "causes"), [
    ({"perf/data_wait": 0.62}, 0, "waiting for data 62% of the time; is the storage of the shards slow?"),
    ({}, 7, "torch.compile made 7 new graphs in 3 log lines, the last time because x size mismatch"),
    ({"perf/data_wait": 0.09}, 0, "no cause found (data wait 9.0%, no new graphs)"),
    ({}, 0, "no cause found (data wait not measured, no new graphs)"),
])  # fmt: skip
def test_causes_are_named_with_their_evidence(monkeypatch, metrics, graphs, causes):
    made = iter([(0, ""), (0, ""), (graphs, ""), (graphs, "x size mismatch")])
    monkeypatch.setattr("lm.training.callbacks.throughput_floor.compiled_graphs", lambda: next(made))
    said = f"61.2K tokens/s, below 100K for 3 log lines: {causes}; attention cudnn, kernels CUDA"
    assert diagnosis(**metrics) == said


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
    name = slow.split("class ")[1].split("(")[0]
    (folder / f"{name}.py").write_text(slow)
    floor = {"floor": "1G", "action": "checkpoint"}
    slowed = {"guards.throughput": floor, "trainer.callbacks": [{"class_path": f"{name}.{name}"}]}
    _, run = fit(folder, name, **slowed, **changes)
    assert steps_of(run) == []  # samples and weights do not explain a slow step
    alerts = [alert for alert in run.alerts() if alert["guard"] == "throughput"]
    return alerts, run.metrics(), (run.path / "log.txt").read_text()


def test_a_slow_loader_is_diagnosed(workplace):
    """Said once, at the third line that is judged, for the first is not; and the share is logged at every line."""
    changes = {"trainer.peak_tflops": 1, "trainer.max_steps": 5}
    alerts, metrics, log = slow_training(workplace, SLOW_DATA, **changes)
    assert [(alert["step"], alert["action"]) for alert in alerts] == [(4, "checkpoint")]
    assert "waiting for data" in alerts[0]["message"] and "graphs" not in alerts[0]["message"]
    shares = [line["perf/data_wait"] for line in metrics if "perf/data_wait" in line]
    assert len(shares) == 5 and all(0.5 < share <= 1 for share in shares)
    assert all(0 < line["perf/mfu"] < line["perf/mfu_full_attention"] for line in metrics if "perf/mfu" in line)
    assert "MFU (causal) 0." in log and "MFU (full) 0." in log


def test_recompiling_is_diagnosed(workplace):
    """And nothing else is: the data of the small model is there when it is asked for."""
    changes = {"data.micro_batch_size": 8, "model.compile": "triton_free", "model.decoder.num_hidden_layers": 1,
               "trainer.max_steps": 2, "model.schedule.warmup_steps": 1}  # fmt: skip
    changes["guards.throughput.patience"] = 1
    alerts, _, _ = slow_training(workplace, NEW_SHAPES, **changes)
    assert len(alerts) == 1 and "new graphs in 1 log line, the last time because" in alerts[0]["message"]
    assert "waiting for data" not in alerts[0]["message"], json.dumps(alerts)
