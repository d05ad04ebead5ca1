"""One optimizer step in plain PyTorch: from a batch of tokens to changed weights.

Input: a batch of `data/loader`, this rank's rows of the global batch. Output: a `StepResult`, and changed weights. It
calls `model/decoder` for the losses and an optimizer of `training/optim` for the update. Nothing of Lightning is in it:
`LanguageModule.training_step` is a call of it, and `lm/training/README.md` begins with a plain loop around it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lm.data.loader import Batch
from lm.kernels.torch_private import foreach_mul_, foreach_norm
from lm.model.decoder import Losses
from lm.training.schedule import ScheduleConfig, Steps, lr_fraction


class StepResult(NamedTuple):
    """What one optimizer step has computed; tensors on the device, which nothing has waited for."""

    loss: Tensor  # () mean over the targets that count, of all ranks, in nats
    nats: Tensor  # () their sum
    targets: Tensor  # () int64, how many they are
    grad_norm: Tensor  # () norm of the gradient of that mean, before clipping
    finite: Tensor  # () bool: loss and gradient are; where they are not, no weight has changed, on any rank
    per_token: list[Tensor]  # (b, T) of each micro-batch of this rank: losses of its tokens, 0 where they do not count


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The norm of all tensors as one vector, over all shards: an fp32 scalar on the device."""
    norm = torch.linalg.vector_norm(torch.stack(foreach_norm(tensors, 2, dtype=torch.float32)))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def sum_over_ranks(*tensors: Tensor) -> list[Tensor]:
    """The sums of tensors over all ranks of torch.distributed, if there are several: one exchange, added up in fp64."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return list(tensors)
    together = torch.cat([tensor.double().flatten() for tensor in tensors])
    dist.all_reduce(together)
    sizes = [tensor.numel() for tensor in tensors]
    return [each.view_as(tensor).to(tensor.dtype) for each, tensor in zip(together.split(sizes), tensors)]


class OptimizerStep:
    """Micro-batches forward and backward, the mean over all targets, clipping, learning rate, update.

    A step whose loss or gradient is not finite changes no weight. The host never waits for the device.

    Args:
        losses: of a micro-batch: the sum over its targets, which is differentiable, and each token's part; such as
            `lambda batch: decoder(batch.input_ids, labels=batch.labels)`.
        optimizer: of `optim.build_optimizer`: its groups have a `peak_lr`, and it can skip a step.
        steps: counts of the run; of them `micro_batch_size`, `accumulate`, `tokens_per_step` and `max_steps` are used.
        schedule: the learning rate over the steps.
        clip: largest norm of the gradient; None: no clipping.
        backward: adds the gradient of a scalar to those that are there.
        update: changes the weights; `optimizer.step` if not given.
        hold_gradients: a context in which backward passes exchange no gradients between ranks, such as DDP's `no_sync`.
        sum_over_ranks: the sums of tensors over all ranks.
        loss_scale: what `backward` multiplies gradients with, as a GradScaler does; such an `update` skips a step by
            itself where a gradient is not finite. None: gradients are not scaled.
        before_micro_batch: may raise, to drop the step; `zero_grad` then forgets the gradients.
        record: given the forward and backward pass of a micro-batch, returns one that computes the same, such as a CUDA
            graph. Gradients then keep their place in memory.
    """

    def __init__(
        self,
        losses: Callable[[Batch], Losses],
        optimizer: torch.optim.Optimizer,
        steps: Steps,
        schedule: ScheduleConfig,
        clip: float | None = None,
        *,
        backward: Callable[[Tensor], Any] = Tensor.backward,
        update: Callable[[], Any] | None = None,
        hold_gradients: Callable[[], AbstractContextManager] = nullcontext,
        sum_over_ranks: Callable[..., list[Tensor]] = sum_over_ranks,
        loss_scale: Callable[[], Tensor] | None = None,
        before_micro_batch: Callable[[], Any] = lambda: None,
        record: Callable[[Callable[[Batch], Tensor]], Callable[[Batch], Tensor]] | None = None,
    ) -> None:
        self.losses, self.optimizer, self.steps, self.schedule, self.clip = losses, optimizer, steps, schedule, clip
        self.backward, self.update = backward, update or optimizer.step
        self.hold_gradients, self.sum_over_ranks, self.loss_scale = hold_gradients, sum_over_ranks, loss_scale
        self.before_micro_batch = before_micro_batch
        self.forward_backward = record(self._forward_backward) if record else self._forward_backward
        self.keeps_gradients = record is not None

    def __call__(self, batch: Batch, step: int) -> StepResult:
        """Take the optimizer step `step`, 0 for the first, on rows `(B, T + 1)`."""
        micro_batches = batch.split(self.steps.micro_batch_size)  # (b, T + 1) each
        per_token = []  # (b, T) each
        for micro_batch in micro_batches:
            self.before_micro_batch()
            # Ranks exchange gradients once, in the backward pass of the last micro-batch.
            with nullcontext() if micro_batch is micro_batches[-1] else self.hold_gradients():
                per_token.append(self.forward_backward(micro_batch))

        nats = sum(losses.sum() for losses in per_token)
        targets = torch.full((), batch.num_tokens, dtype=torch.int64, device=nats.device)
        nats, targets = self.sum_over_ranks(nats, targets)
        loss = nats / targets.clamp(min=1)

        # The backward passes averaged over all positions; the mean is over the targets that count.
        to_mean = self.steps.tokens_per_step / targets.clamp(min=1)  # exactly 1 where all of them count
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        grad_norm = total_norm(gradients) * to_mean / (self.loss_scale() if self.loss_scale else 1)
        finite = loss.isfinite() & grad_norm.isfinite()
        clip = (self.clip / (grad_norm + 1e-6)).clamp(max=1) if self.clip else 1
        self._scale_or_skip(gradients, to_mean * clip, finite)

        rate = lr_fraction(step, self.steps.max_steps, self.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * rate
        self.update()
        self.zero_grad()
        return StepResult(loss, nats, targets, grad_norm, finite, per_token)

    def _forward_backward(self, micro_batch: Batch) -> Tensor:
        """Add the gradient of a micro-batch's mean loss, divided by the micro-batches of a step, to those before it.

        Returns:
            The loss of every token in nats, `(b, T)`.
        """
        total, per_token = self.losses(micro_batch)  # (), (b, T)
        self.backward(total / per_token.numel() / self.steps.accumulate)
        return per_token

    def _scale_or_skip(self, gradients: list[Tensor], factor: Tensor, finite: Tensor) -> None:
        """Multiply the gradients; where `finite` is false, have the update change no weight."""
        if self.loss_scale:
            factor = torch.where(finite, factor, torch.nan)
        else:
            self.optimizer.skip = ~finite
        foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def zero_grad(self) -> None:
        """Forget the gradients, as after a step."""
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
