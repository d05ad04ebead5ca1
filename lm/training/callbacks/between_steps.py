"""What callbacks do with the model between two training steps."""

import logging
from abc import ABC, abstractmethod
from typing import Any

import torch

from lm.errors import LmError, first_line
from lm.training.callback import Callback, not_training
from lm.training.callbacks.logging import log_metrics
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)


class BetweenSteps(Callback, ABC):
    """Does something with the model every `interval` optimizer steps, or after every validation.

    A failure is logged and does not end the training. It comes after `RunLog` in the list of callbacks. A resumed run
    repeats later steps; the later line of a file counts.
    """

    name: str  # name of the action, for messages
    interval: int | None  # None: after every validation

    def on_train_batch_end(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
        if self.is_due(trainer.global_step, trainer.max_steps):
            self._run(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.fitting and self.interval is None:
            self._run(trainer, pl_module)

    def is_due(self, step: int, max_steps: int) -> bool:
        return self.interval is not None and step % self.interval == 0

    @abstractmethod
    def run(self, trainer: Trainer, pl_module: LanguageModule) -> dict[str, float]:
        """Run it, on every rank, and return metrics. The ranks of a sharded model must compute together."""

    def _run(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()  # queued work belongs to the training
        try:
            with not_training(trainer):
                metrics = self.run(trainer, pl_module)
        except Exception as error:  # such as of a custom model that computes no logits without labels
            foreseen = isinstance(error, LmError | OSError)
            if trainer.sharded and not foreseen:
                raise  # the other ranks may be waiting for this one's part of the weights
            what = str(error) if foreseen else f"{type(error).__name__}: {first_line(error)}"
            log.warning("no %s at step %d: %s", self.name, trainer.global_step, what)
            return
        if metrics:
            log_metrics(trainer, pl_module, metrics)
