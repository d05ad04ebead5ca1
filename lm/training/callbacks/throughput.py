"""Tokens a second, model FLOPs utilisation, and time spent waiting for data."""

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lm.training.callback import Callback
from lm.training.lightning_patches import around_fetches
from lm.training.trainer import Trainer


class Throughput(Callback):
    """Measures from one log line to the next; pauses such as validations do not count as training.

    Every fetch of a batch is timed. On a CUDA device a fetch costs nothing while the device still computes: two events
    around the fetch give the time in which the device had no work, and they are read at the log line.
    """

    def __init__(self) -> None:
        self._since = self._paused = 0.0
        self._step = 0
        self._on_gpu = False
        self._fetch_began: Any = None  # seconds, or a CUDA event
        self._fetches: list[tuple[Any, Any]] = []  # when each began and ended

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak = trainer.device_peak and trainer.device_peak * trainer.world_size
        around_fetches(trainer, self._begin_fetch, self._end_fetch)
        self._on_gpu = pl_module.device.type == "cuda"
        self._since, self._paused, self._step = time.monotonic(), 0.0, trainer.global_step

    def _begin_fetch(self) -> None:
        self._fetch_began = self._now()

    def _end_fetch(self) -> None:
        self._fetches.append((self._fetch_began, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_pause(self, trainer: Trainer, seconds: float, kind: str) -> None:
        self._paused += seconds

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Of the steps since the last call. The loss was read before this, so the device has caught up."""
        now = time.monotonic()
        seconds = now - self._since - self._paused
        tokens = (trainer.global_step - self._step) * trainer.steps.tokens_per_step
        waited = sum(a.elapsed_time(b) / 1000 if self._on_gpu else b - a for a, b in self._fetches)
        self._since, self._paused, self._step = now, 0.0, trainer.global_step
        self._fetches.clear()
        rate = tokens / seconds
        metrics = {"perf/tokens_per_second": rate, "perf/data_wait": min(waited / seconds, 1.0)}
        if self._peak:
            metrics["perf/mfu"] = rate * pl_module.flops_per_token() / self._peak
            metrics["perf/mfu_full_attention"] = rate * pl_module.flops_per_token(full_attention=True) / self._peak
        return metrics
