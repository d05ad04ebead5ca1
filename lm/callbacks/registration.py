"""Notes in the user's registry of runs that a run has started, and how it ended."""

from lightning.pytorch import Callback, LightningModule

from lm.registry import record
from lm.trainer import Trainer


class Registration(Callback):
    """Stands after `RunFolder`, which says what is noted. What is wrong with the registry is said once."""

    def __init__(self) -> None:
        self._failed = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._record(trainer)

    def _record(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and trainer.fitting and trainer.run is not None:
            self._failed = not record(trainer.run, again=self._failed)
