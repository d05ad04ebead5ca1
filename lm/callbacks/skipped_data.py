"""Samples that were left out because their shard is damaged: told once a block, and counted."""

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule

from lm.callbacks.actions import act
from lm.data.batch import Batch
from lm.trainer import Trainer


class SkippedData(Callback):
    """Counts what `data.on_bad_shard: skip` leaves out, over all ranks and since the beginning of the run.

    Without it nothing is left out, and there is nothing to exchange.
    """

    def __init__(self) -> None:
        self._asked_for = False
        self._samples = 0  # that were not trained on, on all ranks
        self._told: list[str] = []  # what is wrong with which block
        self._new: list[str] = []  # of these, what was not told yet
        self._here: list[str] = []  # an entry a row, on this rank since the ranks spoke of it
        self._in_step: list[str] = []  # those of a step that is not taken yet
        self._validated: set[str] = set()  # blocks of validations, likewise

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._asked_for = trainer.datamodule.on_bad_shard == "skip"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self._in_step += batch.bad
        if trainer.step_taken(batch_idx) is not None:  # one that is given up is done again, and would count twice
            self._here += self._in_step
            self._in_step = []

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._validated |= set(batch.bad)

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """How many samples were left out; called on every rank."""
        if not self._asked_for:
            return {}
        self._exchange()
        return {"data/skipped_samples": self._samples}

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """Tell of blocks that were met for the first time; called on every rank."""
        new, self._new = self._new, []
        for text in new:
            act(trainer, pl_module, "data", "warn", f"its samples are skipped: {text}")

    def state_dict(self) -> dict[str, Any]:
        if self._asked_for:
            self._exchange()
        return {"samples": self._samples, "told": [text for text in self._told if text not in self._new]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples, self._told = state_dict["samples"], list(state_dict["told"])

    def _exchange(self) -> None:
        """Add up what all ranks met."""
        mine = (len(self._here), sorted({*self._here, *self._validated}))
        everyone = [mine]
        if dist.is_available() and dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        self._here, self._validated = [], set()
        for samples, texts in everyone:
            self._samples += samples
            fresh = [text for text in texts if text not in self._told]
            self._told += fresh
            self._new += fresh
