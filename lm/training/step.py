"""One optimizer step in plain PyTorch: rows of one rank in, changed weights out.

The batch comes from `data/loader`, the losses from `model/decoder`, and the optimizer from `training/optim`.
`lm/training/README.md` begins with a plain loop around this function; `LanguageModule.training_step` calls it through
`training/lightning_step`.
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
    """Results of one step: tensors on the device, for which the host has not waited."""

    loss: Tensor  # () mean over the unmasked targets of all ranks, in nats
    loss_sum: Tensor  # () sum of the losses of these targets
    num_targets: Tensor  # () int64, number of these targets
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
    """Accumulate, average and clip the gradients, and update the weights; the caller clears the gradients.

    Args:
        batch: rows `(B, T + 1)` of this rank, a whole number of micro-batches.
        forward_backward: runs one micro-batch: adds its gradient to `.grad` and returns its detached token losses,
            `(b, T)`. The gradient is of the sum of these losses (plus terms of the model, such as a z-loss), divided by
            the number of this rank's positions in the step, masked or not, and averaged over ranks, as in DDP.
        optimizer: any `torch.optim.Optimizer`. If it has an attribute `skip`, as those of `optim.build_optimizer` do,
            it skips non-finite steps itself, without a device synchronization.
        micro_batch_size: rows in each forward and backward pass.
        tokens_per_step: positions in the step, masked or not, summed over all ranks.
        lr_factor: multiplies each parameter group's initial learning rate, which the group keeps as `peak_lr`.
        max_norm: clip the global gradient norm to this value; None or 0: no clipping.
        update: called instead of `optimizer.step` to update the weights.
        no_sync: context manager in which backward passes do not average gradients over ranks, such as DDP's `no_sync`.
        loss_scale: returns the scale of a GradScaler, by which `forward_backward` multiplied the loss. `update` must
            then call the scaler's `step`, which unscales the gradients and skips the update if one is not finite.
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

    # All ranks have the same loss and norm, so they agree on whether to skip. A GradScaler or an
    # optimizer with `skip` skips the update itself; otherwise this function does.
    update = update or optimizer.step
    finite = loss.isfinite() & grad_norm.isfinite()
    if loss_scale:
        rescale = torch.where(finite, rescale, torch.nan)  # the scaler skips a step with NaN gradients
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
    """The L2 norm over all tensors, of a DTensor over all its shards: an fp32 scalar on the device."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norm = torch.linalg.vector_norm(torch.stack(foreach_norm(tensors, 2, dtype=dtype))).float()
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def sum_over_ranks(*tensors: Tensor) -> list[Tensor]:
    """Sum each tensor over all ranks, in one fp64 all-reduce; with a single rank, return the tensors as they are."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return list(tensors)
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(parts, tensors)]
