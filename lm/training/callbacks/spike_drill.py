"""A drill: five optimizer steps of rare tokens, to see that a loss spike is noticed, written up and survived.

`data/rare` draws the tokens; `callbacks/postmortem` writes up the spike.
"""

import logging

import numpy as np
import torch
from lightning.pytorch import LightningModule

from lm.data.loader import Batch
from lm.data.rare import RARE_FRACTION, rare_rows, rare_tokens
from lm.errors import RequestError
from lm.training.callback import Callback
from lm.training.callbacks.guards import from_rank_zero
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)
DRILL_STEPS = 5


class SpikeInjection(Callback):
    """Replaces the samples of optimizer steps `first` to `first + 4` by sequences of rare tokens.

    `run.json` lists the steps under `injected`. A resume from before them removes them from the list, and they are
    injected as in a run that was never stopped.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self._rare: np.ndarray | None = None  # ids, once needed
        self._step = 0  # of `_rows`
        self._rows: np.ndarray | None = None  # (G, T + 1)
        self._done: list[int] = []  # the injected steps
        self._logged = 0  # the step of the newest log line

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.first > trainer.max_steps:
            raise RequestError(f"guards.inject_step {self.first}: the run ends with step {trainer.max_steps}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        noted = trainer.run.read("run.json").get("injected", {}).get("steps", []) if trainer.is_global_zero else None
        noted = from_rank_zero(trainer, noted)
        self._done = [step for step in noted if step <= trainer.global_step]
        self._logged = trainer.global_step
        if self._done != noted:
            self._save_steps(trainer)
        if not self._done and self.first <= trainer.global_step:
            log.warning("guards.inject_step %d is past: the run is at step %d", self.first, trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        step = trainer.global_step + 1
        rows = self.rows_of_step(trainer, step)
        if rows is None:
            return
        batch.tokens.copy_(torch.from_numpy(rows[trainer.global_rank :: trainer.world_size]))  # (G / ranks, T + 1)
        if step not in self._done:
            self._done.append(step)
            self._save_steps(trainer)
            self._report(step)

    def rows_of_step(self, trainer: Trainer, step: int) -> np.ndarray | None:
        """The injected samples of a step, `(G, T + 1)`, from the seed and the step alone; None: it has none."""
        if not self.first <= step < self.first + DRILL_STEPS:
            return None
        if self._step != step:
            data = trainer.datamodule
            train = data.shards["train"]
            if self._rare is None:
                dtype = np.uint16 if train.column.dtype == np.uint16 else np.int32  # as batches have it
                self._rare = rare_tokens(train, data.tokenizer.vocab_size).astype(dtype)
            self._rows = rare_rows(self._rare, data.seed, step, trainer.steps.global_batch, data.seq_len + 1)
            self._step = step
        return self._rows

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        since, self._logged = self._logged, trainer.global_step
        return {"data/injected": 1.0} if any(since < step <= trainer.global_step for step in self._done) else {}

    def _save_steps(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            trainer.run.describe(injected={"steps": self._done})

    def _report(self, step: int) -> None:
        last = self.first + DRILL_STEPS - 1
        if step == self.first:
            log.warning(
                "step %d: the samples of steps %d to %d are replaced by rare tokens (guards.inject_step), drawn from "
                "%d tokens, the bottom %.0f %% of the text", step, step, last, len(self._rare), 100 * RARE_FRACTION,
            )  # fmt: skip
        elif step == last:
            log.warning("step %d: the last of the injected steps", step)
