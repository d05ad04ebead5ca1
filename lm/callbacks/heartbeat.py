"""A sign of life every few seconds, and how the machine is doing: `heartbeat.json`."""

import json
import logging
import os
import socket
import statistics
import threading
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from lm.runs import Run, write_atomically
from lm.telemetry import Telemetry
from lm.trainer import Trainer

log = logging.getLogger(__name__)


class Heartbeat(Callback):
    """Writes from a thread of rank zero, so that it costs training nothing and goes on through a long validation.

    Args:
        interval: seconds between two beats.
    """

    def __init__(self, interval: float = 5.0) -> None:
        self.interval = interval
        self.latest: dict[str, Any] = {}  # the newest reading
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._end.clear()
            self._thread = threading.Thread(
                target=self._beat, args=(trainer.run, Telemetry(_gpus(trainer))), name="heartbeat", daemon=True
            )
            self._thread.start()

    def _beat(self, run: Run, telemetry: Telemetry | None) -> None:
        """Nothing that fails here may end it: without a beat the run would be taken for dead."""
        _write(run, {})  # before the first reading, which may have to wake a driver
        while True:
            try:
                self.latest = telemetry.read() if telemetry else {}
            except Exception as error:
                log.warning("the machine's figures are missing from now on: %s: %s", type(error).__name__, error)
                telemetry, self.latest = None, {}
            _write(run, self.latest)
            if self._end.wait(self.interval):
                return

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """The newest reading, none older than the interval: mean load of the GPUs, temperature of the hottest, power of
        all, memory of the fullest. `mem/cuda_peak_gib` is the most that tensors took on this rank since the last time.
        """
        metrics = figures(self.latest)
        if pl_module.device.type == "cuda":
            metrics["mem/cuda_peak_gib"] = torch.cuda.max_memory_allocated(pl_module.device) / 2**30
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        return metrics

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # not for long: a driver that hangs must not keep the process
            self._thread = None


def figures(machine: dict[str, Any]) -> dict[str, float]:
    """A reading by the names of TensorBoard; what is not known is absent."""

    def of_gpus(name: str) -> list[float]:
        return [gpu[name] for gpu in machine.get("gpus") or [] if gpu[name] is not None]

    def of(part: str, name: str) -> list[float]:
        value = machine.get(part, {}).get(name)
        return [] if value is None else [value]

    known = {
        "perf/gpu_load": (statistics.fmean, of_gpus("load_percent"), 1),
        "perf/gpu_temperature": (max, of_gpus("temperature_celsius"), 1),
        "perf/gpu_power": (sum, of_gpus("power_watts"), 1),
        "perf/cpu_load": (sum, of("cpu", "load_percent"), 1),
        "mem/process_gib": (sum, of("process", "memory_bytes"), 2**30),
        "mem/gpu_gib": (max, of_gpus("memory_used_bytes"), 2**30),
    }
    return {name: float(one_of(values)) / unit for name, (one_of, values, unit) in known.items() if values}


def _gpus(trainer: Trainer) -> list[str] | None:
    """The UUIDs of this node's GPUs that are trained on, since torch and NVML may count them differently."""
    if trainer.strategy.root_device.type != "cuda":
        return None
    here = range(torch.cuda.device_count())
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in trainer.device_ids if index in here]


def _write(run: Run, machine: dict[str, Any]) -> None:
    beat = {"time": time.time(), "pid": os.getpid(), "host": socket.gethostname(), "machine": machine}
    try:
        write_atomically(run.path / "heartbeat.json", json.dumps(beat) + "\n", durable=False)
    except OSError:  # a full disk, or a folder that is gone: what is vital will say so
        pass
