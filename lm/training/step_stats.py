"""Sums of loss and tokens between log lines, kept on the device so that no step waits for it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.data.loader import Batch
from lm.evaluation.metrics import perplexity
from lm.training.step import StepResult, sum_over_ranks


class StepRecord(NamedTuple):
    """One optimizer step, over all ranks."""

    step: int  # 1 is the first
    loss: float  # mean in nats a token
    grad_norm: float  # before clipping
    applied: bool  # False where loss or gradient was not finite, and so no weight was changed


class StepStats:
    """Sums of loss and tokens on the device, and the steps since the newest log line.

    Args:
        state: from a checkpoint: the steps that were not logged yet.
        sources: number of sources of a mixture; 0 without a mixture.
        scaled: a GradScaler multiplies the gradients, and overflows them now and then to find the largest factor.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        state: Mapping[str, Any] | None = None,
        sources: int = 0,
        scaled: bool = False,
    ) -> None:
        self.scaled = scaled
        state = state or {"nats": 0.0, "tokens": 0, "steps": []}
        # Sums over all ranks of the applied steps since the newest log line. A step that a GradScaler skips, because a
        # gradient overflowed, counts too if its loss is finite.
        self.nats = torch.tensor(state["nats"], device=device)
        self.tokens = torch.tensor(state["tokens"], dtype=torch.int64, device=device)
        # Nats and tokens of each source of a mixture, `(sources, 2)`; a source may be new since the checkpoint.
        before = state.get("by_source") or []
        self.by_source = torch.tensor((before + [[0.0, 0.0]] * sources)[:sources], device=device).view(sources, 2)
        self.recent: list[StepRecord] = []  # the steps between the last two calls of `metrics`
        # Since then. Number; loss, gradient norm and whether it was applied, as a tensor.
        self._unread = [
            (step, torch.tensor([math.nan if value is None else value for value in values], device=device))
            for step, *values in state["steps"]
        ]

    def add(self, step: int, batch: Batch, result: StepResult) -> None:
        """Count an optimizer step; `step` is its number, 1 for the first, and `batch` this rank's rows."""
        counts = result.loss.isfinite() if self.scaled else result.finite
        self.nats.add_(torch.where(counts, result.loss_sum, 0))
        self.tokens.add_(torch.where(counts, result.num_targets, 0))
        if batch.sources is not None:
            by_source = sum_over_ranks(self._sums_by_source(batch, torch.cat(result.token_losses)))
            self.by_source.add_(torch.where(counts, by_source, 0))
        values = torch.stack([result.loss, result.grad_norm.float(), result.finite.float()])
        self._unread.append((step, values))

    def _sums_by_source(self, batch: Batch, per_token: Tensor) -> Tensor:
        """Nats and targets of a batch by the sources of its rows: `(sources, 2)`, of losses `(B, T)`."""
        rows, length = per_token.shape
        targets = per_token.new_full((rows,), length) if batch.mask is None else batch.mask.sum(1)
        sums = torch.stack([per_token.sum(1).to(self.by_source), targets.to(self.by_source)], dim=1)  # (B, 2)
        return torch.zeros_like(self.by_source).index_add_(0, batch.sources, sums)

    def metrics(self, sources: Sequence[str] = ()) -> dict[str, float]:
        """Metrics of the steps since the last call, which are then in `recent`. Waits for the device."""
        loss, self.recent = (self.nats / self.tokens).item(), self._records()  # NaN where no step counts
        by_source = (self.by_source[:, 0] / self.by_source[:, 1]).tolist()
        for sums in (self.nats, self.tokens, self.by_source):
            sums.zero_()
        self._unread.clear()
        return {
            "train/loss": loss,
            "train/max_loss": max((step.loss for step in self.recent if math.isfinite(step.loss)), default=math.nan),
            "train/perplexity": perplexity(loss),
            "optim/grad_norm": self.recent[-1].grad_norm if self.recent else math.nan,
            **{f"train/loss/{name}": loss for name, loss in zip(sources, by_source) if loss == loss},
        }

    def state_dict(self) -> dict[str, Any]:
        """The steps that were not logged yet, the same on every rank, as values of JSON. Waits for the device."""
        steps = [[value if math.isfinite(value) else None for value in step] for step in self._records()]
        sums = {"nats": self.nats.item(), "tokens": self.tokens.item(), "by_source": self.by_source.tolist()}
        return {**sums, "steps": steps}

    def _records(self) -> list[StepRecord]:
        values = torch.stack([values for _, values in self._unread]).tolist() if self._unread else []
        return [
            StepRecord(step, loss, norm, bool(applied))
            for (step, _), (loss, norm, applied) in zip(self._unread, values, strict=True)
        ]
