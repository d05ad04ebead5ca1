"""What a training adds up between log lines, on the device, so that nothing waits for it.

`module` adds a micro-batch at a time and closes every optimizer step; a log line reads it all at once. A step whose
loss or gradient is not finite is found here, before it is applied.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Step(NamedTuple):
    """One optimizer step, over all ranks."""

    step: int  # 1 is the first
    loss: float  # mean in nats a token
    grad_norm: float  # before clipping
    applied: bool  # False where one of them was not finite, and so no weight was changed


class Tally:
    """Sums of losses and tokens, and the steps since they were last read.

    Args:
        device: where the sums are.
        state: of a checkpoint, what it had not logged yet.
    """

    def __init__(self, device: torch.device | str = "cpu", state: Mapping[str, Any] | None = None) -> None:
        state = state or {"nats": 0.0, "tokens": 0, "steps": []}
        # Of the current step so far, on this rank:
        self._step_nats = torch.zeros((), device=device)
        self._step_tokens = torch.zeros((), dtype=torch.int64, device=device)
        # Of all applied steps since they were last read, on all ranks:
        self.nats = torch.tensor(state["nats"], device=device)
        self.tokens = torch.tensor(state["tokens"], dtype=torch.int64, device=device)
        # Number; loss, gradient norm and whether it was applied, as a tensor.
        self._steps = [
            (step, torch.tensor([math.nan if value is None else value for value in values], device=device))
            for step, *values in state["steps"]
        ]

    def add(self, nats: Tensor, tokens: int) -> None:
        """Count a micro-batch.

        Args:
            nats: sum of its losses, a scalar on the device.
            tokens: how many they were.
        """
        self._step_nats.add_(nats)
        self._step_tokens.add_(tokens)

    def step_sums(self, world_size: int) -> tuple[Tensor, Tensor]:
        """Nats and tokens of the current step over all ranks, as scalars on the device."""
        if world_size == 1:
            return self._step_nats.clone(), self._step_tokens.clone()
        sums = torch.stack([self._step_nats.double(), self._step_tokens.double()])
        dist.all_reduce(sums)
        return sums[0].float(), sums[1].long()

    def close_step(self, step: int, nats: Tensor, tokens: Tensor, grad_norm: Tensor, scaled: bool) -> Tensor:
        """End the current step and begin the next.

        Args:
            step: its number, 1 for the first.
            nats, tokens: from `step_sums`.
            grad_norm: over all ranks, a scalar on the device.
            scaled: a GradScaler tries out how far it can go, so an overflow of the gradients is its business.

        Returns:
            Whether loss and gradient are finite: a bool scalar on the device, the same on every rank.
        """
        loss = nats / tokens.clamp(min=1)
        applied = loss.isfinite() & grad_norm.isfinite()
        counts = loss.isfinite() if scaled else applied
        self.nats.add_(torch.where(counts, nats, 0))
        self.tokens.add_(torch.where(counts, tokens, 0))
        self._steps.append((step, torch.stack([loss, grad_norm.float(), applied.float()])))
        self._step_nats.zero_()
        self._step_tokens.zero_()
        return counts

    def read(self) -> tuple[float, list[Step]]:
        """The mean loss of the applied steps since the last call, NaN where there is none, and all steps since.

        Waits for the device.
        """
        loss, steps = (self.nats / self.tokens).item(), self._unread()
        self.nats.zero_()
        self.tokens.zero_()
        self._steps.clear()
        return loss, steps

    def state_dict(self) -> dict[str, Any]:
        """What was not read yet, the same on every rank, in what JSON has words for. Waits for the device."""
        steps = [[value if math.isfinite(value) else None for value in step] for step in self._unread()]
        return {"nats": self.nats.item(), "tokens": self.tokens.item(), "steps": steps}

    def _unread(self) -> list[Step]:
        values = torch.stack([values for _, values in self._steps]).tolist() if self._steps else []
        return [
            Step(step, loss, norm, bool(applied))
            for (step, _), (loss, norm, applied) in zip(self._steps, values, strict=True)
        ]
