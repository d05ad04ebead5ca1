"""The hooks that callbacks of this project have beyond Lightning's."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback as LightningCallback


class Callback(LightningCallback):
    """Lightning's Callback with further hooks, which do nothing here.

    A callback that is not of this class may define any of them, too: `call_hook` goes by the name.
    """

    def on_model_built(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when the decoder has its initial weights, before it is compiled, is sharded, or has an optimizer."""

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> Mapping[str, float]:
        """Metrics for the log line of this optimizer step. Called on every rank, every `trainer.log_interval` steps."""
        return {}

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: Mapping[str, float]) -> None:
        """Metrics have been logged: those of a log line, of a validation, or of an evaluation. Called on every rank."""

    def on_guard(self, trainer: Trainer, pl_module: LightningModule, guard: str, action: str, message: str) -> None:
        """A guard has found something; called before its action changes anything. See `callbacks/guards.act`."""

    def on_pause(self, trainer: Trainer, seconds: float, kind: str) -> None:
        """Training was paused for `seconds`; `kind`: for a `validation`, or for something `other`, such as samples."""

    def on_cut_off(self, trainer: Trainer, error: Exception) -> None:
        """The process ends in a moment, in the middle of a step. Called from another thread."""

    def rows_of_step(self, trainer: Trainer, step: int) -> np.ndarray | None:
        """The global batch `(N, T + 1)` that replaced the data's own in this step; None if this callback did not."""
        return None


def call_hook(trainer: Trainer, name: str, *args: Any) -> list[Any]:
    """Call a hook of every callback that has it, in their order, with the trainer and `args`; returns their answers."""
    return [getattr(callback, name)(trainer, *args) for callback in trainer.callbacks if hasattr(callback, name)]


def has_hook(trainer: Trainer, name: str) -> bool:
    nothing = (None, getattr(Callback, name))
    return any(getattr(type(callback), name, None) not in nothing for callback in trainer.callbacks)


@contextmanager
def not_training(trainer: Trainer) -> Iterator[None]:
    """Measure the time of the block, and pass it to `on_pause` of every callback."""
    began = time.monotonic()
    try:
        yield
    finally:
        call_hook(trainer, "on_pause", time.monotonic() - began, "other")
