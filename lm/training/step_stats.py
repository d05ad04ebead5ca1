"""Sums of loss and tokens between log lines, kept on the device so that no step waits for it.

A step whose loss or gradient is not finite is found here, before it is applied.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lm.kernels.torch_private import foreach_norm


class StepRecord(NamedTuple):
    """One optimizer step, over all ranks."""

    step: int  # 1 is the first
    loss: float  # mean in nats a token
    grad_norm: float  # before clipping
    applied: bool  # False where loss or gradient was not finite, and so no weight was changed


def sum_over_ranks(
    loss: Tensor, tokens: int, world_size: int, by_source: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The summed loss and the tokens of an optimizer step over all ranks, as scalars on the device of `loss`.

    `by_source` is summed with them, of any shape.
    """
    if world_size == 1:
        return loss, torch.full((), tokens, dtype=torch.int64, device=loss.device), by_source
    sums = torch.stack([loss.double(), torch.full_like(loss, tokens, dtype=torch.float64)])
    if by_source is not None:
        sums = torch.cat([sums, by_source.double().flatten()])
    dist.all_reduce(sums)
    return sums[0].float(), sums[1].long(), None if by_source is None else sums[2:].float().view_as(by_source)


def sum_by_source(per_token: Tensor, mask: Tensor | None, sources: Tensor, sums: Tensor) -> None:
    """Add the losses and targets of a micro-batch to those of the sources of its rows.

    Args:
        per_token: `(b, T)` nats, 0 where the mask is False.
        mask: `(b, T)` bool: which targets count; None: all.
        sources: `(b,)` int64.
        sums: `(sources, 2)` fp32, nats and targets of a step.
    """
    rows, length = per_token.shape
    targets = torch.full((rows,), float(length), device=sums.device) if mask is None else mask.sum(1).to(sums.dtype)
    sums.index_add_(0, sources, torch.stack([per_token.sum(1).to(sums.dtype), targets], dim=1))


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The norm of all tensors as one vector, over all shards: an fp32 scalar on the device."""
    norm = torch.linalg.vector_norm(torch.stack(foreach_norm(tensors, 2, dtype=torch.float32)))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class StepStats:
    """Sums of loss and tokens on the device, and the steps since they were last read.

    Args:
        device: where the sums are.
        state: from a checkpoint: the steps that were not logged yet.
        sources: of a mixture; 0 without one.
    """

    def __init__(
        self, device: torch.device | str = "cpu", state: Mapping[str, Any] | None = None, sources: int = 0
    ) -> None:
        state = state or {"nats": 0.0, "tokens": 0, "steps": []}
        # Of the steps since they were last read, on all ranks, but those that were not applied. Where a GradScaler
        # finds an overflow of the gradients, a step is not applied and its loss is counted.
        self.nats = torch.tensor(state["nats"], device=device)
        self.tokens = torch.tensor(state["tokens"], dtype=torch.int64, device=device)
        # Nats and tokens of each source of a mixture, `(sources, 2)`; a source may be new since the checkpoint.
        before = state.get("by_source") or []
        self.by_source = torch.tensor((before + [[0.0, 0.0]] * sources)[:sources], device=device).view(sources, 2)
        # Number; loss, gradient norm and whether it was applied, as a tensor.
        self._steps = [
            (step, torch.tensor([math.nan if value is None else value for value in values], device=device))
            for step, *values in state["steps"]
        ]

    def add(
        self, step: int, nats: Tensor, tokens: Tensor, grad_norm: Tensor, scaled: bool, by_source: Tensor | None = None
    ) -> Tensor:
        """Count an optimizer step, before it is applied.

        Args:
            step: its number, 1 for the first.
            nats, tokens: summed loss and tokens of the step, from `sum_over_ranks`.
            grad_norm: over all ranks, a scalar on the device.
            scaled: a GradScaler multiplies the gradients, and overflows them now and then to find the largest factor.
            by_source: nats and tokens of each source of a mixture, `(sources, 2)`.

        Returns:
            Whether loss and gradient are finite: a bool scalar on the device, the same on every rank.
        """
        loss = nats / tokens.clamp(min=1)
        applied = loss.isfinite() & grad_norm.isfinite()
        loss_counts = loss.isfinite() if scaled else applied
        self.nats.add_(torch.where(loss_counts, nats, 0))
        self.tokens.add_(torch.where(loss_counts, tokens, 0))
        if by_source is not None:
            self.by_source.add_(torch.where(loss_counts, by_source, 0))
        self._steps.append((step, torch.stack([loss, grad_norm.float(), applied.float()])))
        return applied

    def read(self) -> tuple[float, list[float], list[StepRecord]]:
        """The mean loss of the steps since the last call (NaN: none counts), that of each source of a mixture, and the
        steps. Waits for the device.
        """
        loss, steps = (self.nats / self.tokens).item(), self._unread()
        by_source = (self.by_source[:, 0] / self.by_source[:, 1]).tolist()
        for sums in (self.nats, self.tokens, self.by_source):
            sums.zero_()
        self._steps.clear()
        return loss, by_source, steps

    def state_dict(self) -> dict[str, Any]:
        """The steps that were not read yet, the same on every rank, as values of JSON. Waits for the device."""
        steps = [[value if math.isfinite(value) else None for value in step] for step in self._unread()]
        sums = {"nats": self.nats.item(), "tokens": self.tokens.item(), "by_source": self.by_source.tolist()}
        return {**sums, "steps": steps}

    def _unread(self) -> list[StepRecord]:
        values = torch.stack([values for _, values in self._steps]).tolist() if self._steps else []
        return [
            StepRecord(step, loss, norm, bool(applied))
            for (step, _), (loss, norm, applied) in zip(self._steps, values, strict=True)
        ]
