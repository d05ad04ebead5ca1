"""One optimizer step in plain PyTorch: rows of one rank in, changed weights out.

The rows are a batch of `data/loader`, the losses come from `model/decoder`, and the update is that of an optimizer of
`training/optim`. `lm/training/README.md` begins with a plain loop around it; `LanguageModule.training_step` calls it
through `training/lightning_step`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lm.data.loader import Batch
from lm.kernels.torch_private import foreach_mul_, foreach_norm


class StepResult(NamedTuple):
    """Results of one step, as tensors on the device, for which the host has not waited."""

    loss: Tensor  # () mean over the unmasked targets of all ranks, in nats
    loss_sum: Tensor  # () their sum
    num_targets: Tensor  # () int64, their number
    grad_norm: Tensor  # () global L2 norm, before clipping
    finite: Tensor  # () bool; False: loss or gradient is NaN or infinite, and no rank has changed its weights
    token_losses: list[Tensor]  # (b, T) of each micro-batch of this rank, in nats; 0 where masked


def optimizer_step(
    batch: Batch,
    forward_backward: Callable[[Batch], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    micro_batch_size: int,
    tokens_per_step: int,
    lr_factor: float,
    max_norm: float | None = None,
    update: Callable[[], Any] | None = None,
    no_sync: Callable[[], AbstractContextManager] = nullcontext,
    loss_scale: Callable[[], Tensor] | None = None,
) -> StepResult:
    """Accumulate, average, clip, update. The gradients are left for the caller to clear.

    Args:
        batch: rows `(B, T + 1)` of this rank, a whole number of micro-batches.
        forward_backward: adds the gradient of one micro-batch to `.grad`, and returns the detached losses of its
            tokens, `(b, T)`. The gradient is that of their sum (and of what a model adds to it, such as a z-loss),
            divided by all positions of this rank's step, masked or not, and averaged over ranks, as DDP does it.
        optimizer: any of torch. One with an attribute `skip`, as `optim.build_optimizer` makes it, skips a step that is
            not finite by itself, without a wait for the device.
        micro_batch_size: rows that are run at once.
        tokens_per_step: positions of the step over all ranks, masked ones too.
        lr_factor: factor on each group's initial learning rate, which is kept as its `peak_lr`.
        max_norm: clip the gradient to this norm; None or 0: no clipping.
        update: changes the weights in place of `optimizer.step`.
        no_sync: a context in which backward passes leave gradients on their rank, such as DDP's.
        loss_scale: the current scale of a GradScaler, by which `forward_backward` multiplied; `update` is then its
            `step`, which divides by it and skips where a gradient is not finite.
    """
    *first, last = batch.split(micro_batch_size)  # (b, T + 1) each
    token_losses = []  # (b, T) each
    for micro_batch in first:
        with no_sync():
            token_losses.append(forward_backward(micro_batch))
    token_losses.append(forward_backward(last))  # the last backward pass averages over ranks

    loss_sum = sum(losses.sum() for losses in token_losses)
    num_targets = torch.full((), batch.num_targets, dtype=torch.int64, device=loss_sum.device)
    loss_sum, num_targets = sum_over_ranks(loss_sum, num_targets)
    loss = loss_sum / num_targets.clamp(min=1)

    # The gradient is a mean over all positions; make it the mean over the unmasked targets, wherever they were.
    rescale = tokens_per_step / num_targets.clamp(min=1)  # exactly 1 where nothing is masked
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    grad_norm = total_norm(gradients) * rescale / (loss_scale() if loss_scale else 1)
    if max_norm:
        rescale = rescale * (max_norm / (grad_norm + 1e-6)).clamp(max=1)

    # All ranks have the same loss and norm, so they agree on whether to skip. Who skips: a GradScaler, an optimizer of
    # ours, or else this function.
    update = update or optimizer.step
    finite = loss.isfinite() & grad_norm.isfinite()
    if loss_scale:
        rescale = torch.where(finite, rescale, torch.nan)  # which the scaler looks for
    elif hasattr(optimizer, "skip"):
        optimizer.skip = ~finite
    elif not finite:  # waits for the device
        update = lambda: None  # noqa: E731
    foreach_mul_(gradients, rescale.to(gradients[0].dtype))

    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("peak_lr", group["lr"]) * lr_factor
    update()
    return StepResult(loss, loss_sum, num_targets, grad_norm, finite, token_losses)


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The global L2 norm of all tensors and all their shards: an fp32 scalar on the device."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norm = torch.linalg.vector_norm(torch.stack(foreach_norm(tensors, 2, dtype=dtype))).float()
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def sum_over_ranks(*tensors: Tensor) -> list[Tensor]:
    """The sums of tensors over all ranks, if there are several: one fp64 all-reduce."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return list(tensors)
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(parts, tensors)]
