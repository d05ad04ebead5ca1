"""Lightning's loops, which may begin with the validation that a stopped run still owes."""

import sys
from typing import Any

from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop


class FitLoop(_FitLoop):
    """A run with a validation to come is not done, though all steps are taken."""

    @property
    def done(self) -> bool:
        return super().done and not self.trainer.owes_validation


class EpochLoop(_TrainingEpochLoop):
    """Makes up for a validation before it takes a step, and says when it waits for data."""

    @property
    def done(self) -> bool:
        return super().done and not self.trainer.owes_validation

    def advance(self, data_fetcher: Any) -> None:
        if self.trainer.owes_validation:
            self.val_loop.restarting = False  # from its first batch: what was added up of it is gone
        else:
            super().advance(data_fetcher)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return self.trainer.owes_validation or super()._should_check_val_fx(data_fetcher)

    def _on_before_fetch(self) -> None:
        super()._on_before_fetch()
        self.trainer.repeatable = True

    def _on_after_fetch(self) -> None:
        self.trainer.repeatable = sys.exception() is not None  # a fetch that failed has changed nothing
        super()._on_after_fetch()
