"""The last optimizer step is always validated, whatever the interval."""

from typing import Any

from lightning.pytorch import Callback, LightningModule

from lm.trainer import Trainer


class LastStep(Callback):
    """Asks Lightning to stop at the last step, which makes it validate first."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.step_taken(batch_idx) == trainer.max_steps:
            trainer.should_stop = True
