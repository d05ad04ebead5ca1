"""The end of a run whose validation loss does not get better any more."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping

from lm.trainer import Trainer


class EarlyStopping(LightningEarlyStopping):
    """Lightning's, which also remembers that it has stopped a run, and goes by the config when it goes on.

    Args:
        patience: validations in a row without a new best.
        min_delta: how much lower `val/loss` must be to be one.
    """

    def __init__(self, patience: int, min_delta: float) -> None:
        super().__init__("val/loss", min_delta, patience, check_on_train_epoch_end=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A kill between its last checkpoint and the note that it has ended must not make a run longer."""
        if self.wait_count >= self.patience:
            trainer.should_stop = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
