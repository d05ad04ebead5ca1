"""How much of the time a training waits for its data."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from lm.trainer import Trainer


class DataWait(Callback):
    """Times every fetch of a micro-batch, from one log line to the next; validations and other pauses are not counted.

    On a CUDA device it is the device that counts: a fetch that takes place while it still computes costs nothing. Two
    events around a fetch tell how long it had nothing to do, and they are read at the log line, so nothing waits.
    """

    def __init__(self) -> None:
        self._since = self._paused = self._validation_began = 0.0
        self._on_gpu = False
        self._began: Any = None  # the fetch that is under way: seconds, or a CUDA event
        self._fetches: list[tuple[Any, Any]] = []  # when each began and ended

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's loop calls these two just before and just after it asks the loader, for its profilers.
        loop = trainer.fit_loop.epoch_loop
        before, after = loop._on_before_fetch, loop._on_after_fetch

        def begin() -> None:
            before()
            self._began = self._mark()

        def end() -> None:
            self._fetches.append((self._began, self._mark()))
            after()

        loop._on_before_fetch, loop._on_after_fetch = begin, end
        self._on_gpu = pl_module.device.type == "cuda"
        self._since, self._paused = time.monotonic(), 0.0

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_pause(self, trainer: Trainer, seconds: float) -> None:
        """So many seconds were not training."""
        self._paused += seconds

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_began = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused += time.monotonic() - self._validation_began

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """The share of the time since it was last asked. The loss was read before, so the device has caught up."""
        now = time.monotonic()
        seconds = now - self._since - self._paused
        waited = sum(a.elapsed_time(b) / 1000 if self._on_gpu else b - a for a, b in self._fetches)
        self._since, self._paused = now, 0.0
        self._fetches.clear()
        return {"perf/data_wait": min(waited / seconds, 1.0)}
