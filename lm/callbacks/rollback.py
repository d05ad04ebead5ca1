"""Rollback: back to the weights of the last good checkpoint, past the samples that were trained on since.

The steps go on counting. So the order of samples, the schedule and the curves are those of any other run, the samples
since that checkpoint are not seen again, and what they had done to weights and optimizer is gone. (Chowdhery et al.,
2022, arXiv:2204.02311, section 5.1, restart about 100 steps before a spike and skip 200 to 500 batches.)
"""

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule

from lm import snapshot
from lm.callbacks.actions import Action, agree
from lm.checkpoint import find_damage, step_of
from lm.errors import GuardStop
from lm.trainer import Trainer

log = logging.getLogger(__name__)


class Rollback(Callback):
    """Goes back when a guard asks for it.

    The last good checkpoint is the newest whole one that is not younger than the last log line at which no guard
    asked for a rollback.

    Args:
        most: how often, in the whole run; the next time ends it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.done = 0
        self._good = 0  # the last step of which nothing bad was found
        self._asked = False  # at this log line

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._good = trainer.global_step

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """After all guards have seen the line."""
        if not self._asked and "train/loss" in metrics:  # other lines say nothing of the steps before them
            self._good = trainer.global_step
        self._asked = False

    def on_guard(
        self, trainer: Trainer, pl_module: LightningModule, guard: str, action: Action, message: str
    ) -> None:
        if action != "rollback" or self._asked:
            return
        self._asked = True
        if self.done >= self.most:
            trainer.stop = GuardStop(f"{guard}: {message}; guards.max_rollbacks {self.most} are used up")
            return
        folder = agree(trainer, self._last_good(trainer) if trainer.is_global_zero else None)
        if folder is None:
            trainer.stop = GuardStop(
                f"{guard}: {message}; there is no checkpoint of step {self._good} or before to return to"
            )
            return
        self._return_to(trainer, pl_module, folder)

    def _last_good(self, trainer: Trainer) -> Path | None:
        trainer.checkpoint_io.drain()
        left_behind = trainer.checkpoint_callback.left_behind  # they are of another stretch of training
        folders = [
            path for step, path in trainer.run.steps().items() if step <= self._good and path.name not in left_behind
        ]
        return next((path for path in reversed(folders) if find_damage(path) is None), None)

    def _return_to(self, trainer: Trainer, pl_module: LightningModule, folder: Path) -> None:
        checkpoint = trainer.strategy.load_checkpoint(folder)
        snapshot.restore_weights(pl_module, checkpoint)
        trainer.strategy.load_model_state_dict(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        self.done += 1
        trainer.checkpoint_callback.request()  # or a kill would bring the bad stretch back
        if trainer.is_global_zero:
            returned = {"step": trainer.global_step, "to": step_of(folder)}
            trainer.run.describe(rollbacks=[*trainer.run.read("run.json").get("rollbacks", []), returned])
            log.warning(
                "rollback %d of %d: weights and optimizer are those of step %d again; training goes on with step %d, "
                "past the samples in between", self.done, self.most, returned["to"], trainer.global_step + 1,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]
