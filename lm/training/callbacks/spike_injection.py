"""The drill of `guards.inject_step`: a loss spike on purpose, to see guards and the post-mortem act."""

import logging

import numpy as np
import torch

from lm.data.loader import Batch
from lm.data.rare import RARE_FRACTION, rare_rows, rare_tokens
from lm.training.callback import Callback
from lm.training.callbacks.guards import Finding, act
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)

DRILL_STEPS = 5


class SpikeInjection(Callback):
    """Replaces the samples of optimizer steps `first` to `first + 4` by sequences of rare tokens.

    `run.json` lists the steps under `injected`. After a resume those that are still to come are injected, as in a run
    that was never stopped.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self._rare: np.ndarray | None = None  # token ids, computed when needed
        self._steps: list[int] = []  # that were and will be injected

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        step = trainer.global_step
        noted = trainer.run.read("run.json").get("injected", {}).get("steps", []) if trainer.is_global_zero else []
        self._steps = [number for number in trainer.strategy.broadcast(noted) if number <= step]
        self._steps += range(max(self.first, step + 1), self.first + DRILL_STEPS)
        if not self._steps:
            log.warning("guards.inject_step %d is past: the run is at step %d", self.first, step)
        elif trainer.is_global_zero:
            trainer.run.describe(injected={"steps": self._steps})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LanguageModule, batch: Batch, batch_idx: int) -> None:
        step = trainer.global_step + 1
        rows = self.rows_of_step(trainer, step)
        if rows is None:
            return
        rank_batch = Batch(torch.from_numpy(rows[trainer.global_rank :: trainer.world_size]))  # (G / ranks, T + 1)
        pl_module.on_before_batch_transfer(rank_batch, 0)  # counts documents, of which there may be more than before
        batch.tokens.copy_(rank_batch.tokens)
        batch.row_documents = rank_batch.row_documents
        if step == self.first:
            log.warning(
                f"step {step}: the samples of steps {step} to {step + DRILL_STEPS - 1} are replaced by rare tokens "
                f"(guards.inject_step), drawn from {len(self._rare)} tokens, the bottom {100 * RARE_FRACTION:.0f} % of "
                "the text"
            )

    def on_metrics(self, trainer: Trainer, pl_module: LanguageModule, metrics: dict[str, float]) -> None:
        if "train/loss" in metrics:
            self._report(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        trainer.run_state.stats.metrics()  # steps since the last log line, if the run stops early
        self._report(trainer, pl_module)

    def _report(self, trainer: Trainer, module: LanguageModule) -> None:
        """Have a post-mortem written when the first step has just been logged, even if the loss hardly rises."""
        if any(step.step == self.first for step in trainer.run_state.stats.recent):
            act(trainer, module, Finding("drill", "warn", "samples of rare tokens (guards.inject_step)"))

    def rows_of_step(self, trainer: Trainer, step: int) -> np.ndarray | None:
        """The injected samples of a step, `(G, T + 1)`, determined by the seed and the step; None if it has none."""
        if not self.first <= step < self.first + DRILL_STEPS:
            return None
        data = trainer.datamodule
        if self._rare is None:
            train = data.shards["train"]
            self._rare = rare_tokens(train, data.tokenizer.vocab_size).astype(train.column.row_dtype)
        return rare_rows(self._rare, data.seed, step, trainer.steps.global_batch, data.seq_len + 1)

    def logged_metrics(self, trainer: Trainer, pl_module: LanguageModule) -> dict[str, float]:
        injected = any(step.step in self._steps for step in trainer.run_state.stats.recent)
        return {"data/injected": 1.0} if injected else {}
