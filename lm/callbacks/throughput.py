"""Tokens a second and model FLOPs utilisation, over the time that was spent training."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule

from lm.hardware import device_name, peak_flops
from lm.trainer import Trainer


class Throughput(Callback):
    """Measures from one log line to the next; validations and other pauses are not counted as training."""

    def __init__(self) -> None:
        self._since = 0.0
        self._paused = 0.0
        self._validation_began = 0.0
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since, self._paused, self._step = time.monotonic(), 0.0, trainer.global_step
        peak = peak_flops(device_name(pl_module.device), str(trainer.precision))
        self._peak = peak * trainer.world_size if peak else None

    def on_pause(self, trainer: Trainer, seconds: float) -> None:
        """So many seconds were not training."""
        self._paused += seconds

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_began = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused += time.monotonic() - self._validation_began

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Over the steps since it was last asked. The loss was read before, so the device has caught up."""
        now = time.monotonic()
        seconds = now - self._since - self._paused
        tokens = (trainer.global_step - self._step) * trainer.steps.tokens_per_step
        self._since, self._paused, self._step = now, 0.0, trainer.global_step
        rate = tokens / seconds
        metrics = {"perf/tokens_per_second": rate}
        if self._peak:
            metrics["perf/mfu"] = rate * pl_module.flops_per_token / self._peak
        return metrics
