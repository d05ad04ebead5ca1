"""The heartbeat of a run: that its process lives, and the load of its machine, every few seconds from a thread."""

import logging
import statistics
import threading
from contextlib import suppress
from typing import Any

import torch

from lm.runs.run import Run
from lm.system.telemetry import Telemetry
from lm.training.callback import Callback
from lm.training.module import LanguageModule
from lm.training.run_state import RunState
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)


class Heartbeat(Callback):
    """Writes `heartbeat.json` with the machine's load every `interval` seconds, from a thread of rank zero."""

    def __init__(self, interval: float = 5.0) -> None:
        self.interval = interval
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.is_global_zero:
            self._end.clear()
            self._thread = threading.Thread(
                target=self._beat, args=(trainer.run_state, Telemetry(_gpus(trainer))), name="heartbeat", daemon=True
            )
            self._thread.start()

    def _beat(self, state: RunState, telemetry: Telemetry | None) -> None:
        """Write heartbeats until the end, despite failures: without them, the run would be taken for dead."""
        _write_heartbeat(state.run, {})  # before the first reading, which may have to wake a driver
        while True:
            try:
                state.machine = telemetry.read() if telemetry else {}
            except Exception as error:
                log.warning("load, temperature and power are missing from now on: %s: %s", type(error).__name__, error)
                telemetry, state.machine = None, {}
            _write_heartbeat(state.run, state.machine)
            if self._end.wait(self.interval):
                return

    def logged_metrics(self, trainer: Trainer, pl_module: LanguageModule) -> dict[str, float]:
        metrics = machine_metrics(trainer.run_state.machine)
        if pl_module.device.type == "cuda":
            metrics["mem/cuda_peak_gib"] = torch.cuda.max_memory_allocated(pl_module.device) / 2**30
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        return metrics

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # not for long: a hanging driver must not block the exit
            self._thread = None

    on_exception = teardown


def machine_metrics(machine: dict[str, Any]) -> dict[str, float]:
    """The metrics of a reading: mean load of the GPUs, highest temperature, total power, fullest memory."""
    gpus, cpu, process = machine.get("gpus") or [], [machine.get("cpu", {})], [machine.get("process", {})]
    metrics = {}
    for metric, one_of, parts, name, unit in (
        ("perf/gpu_load", statistics.fmean, gpus, "load_percent", 1),
        ("perf/gpu_temperature", max, gpus, "temperature_celsius", 1),
        ("perf/gpu_power", sum, gpus, "power_watts", 1),
        ("perf/cpu_load", sum, cpu, "load_percent", 1),
        ("mem/process_gib", sum, process, "memory_bytes", 2**30),
        ("mem/gpu_gib", max, gpus, "memory_used_bytes", 2**30),
    ):
        if values := [part[name] for part in parts if part.get(name) is not None]:
            metrics[metric] = float(one_of(values)) / unit
    return metrics


def _gpus(trainer: Trainer) -> list[str]:
    """UUIDs of this node's GPUs used for training, since torch and NVML may number them differently."""
    if trainer.strategy.root_device.type != "cuda":
        return []
    visible = range(torch.cuda.device_count())
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in trainer.device_ids if index in visible]


def _write_heartbeat(run: Run, machine: dict[str, Any]) -> None:
    with suppress(OSError):  # a full disk, or a folder that is gone: the next checkpoint is an error then
        run.write_heartbeat(machine)
