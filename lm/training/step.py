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
    """Results of one step: tensors on the device, made without a host-device synchronization."""

    loss: Tensor  # () mean over the unmasked targets of all ranks, in nats
    loss_sum: Tensor  # () sum of the losses of these targets
    num_targets: Tensor  # () int64, number of these targets
    grad_norm: Tensor  # () global L2 norm, before clipping
    finite: Tensor  # () bool; False: loss or gradient is NaN or infinite, and no rank has changed its weights
    token_losses: list[Tensor]  # (b, T) of each micro-batch of this rank, in nats; 0 where masked


def optimizer_step(
    batch: Batch,
    compute_losses: Callable[[Batch], tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    micro_batch_size: int,
    lr_factor: float,
    max_norm: float | None = None,
    backward: Callable[[Tensor], Any] | None = None,
    no_sync: Callable[[], AbstractContextManager] = nullcontext,
    update: Callable[[], Any] | None = None,
    loss_scale: Tensor | float = 1.0,
) -> StepResult:
    """Accumulate and clip the gradients of the mean loss, and update the weights; the caller clears the gradients.

    Args:
        batch: rows `(B, T + 1)` of this rank, a whole number of micro-batches.
        compute_losses: the model's losses of one micro-batch: `()`, the sum to minimize, and `(b, T)`, detached, the
            loss of each token. The sum may have further terms, such as a z-loss.
        optimizer: any `torch.optim.Optimizer`; see `step_unless` for those that skip a step on the device.
        micro_batch_size: rows in each forward and backward pass.
        lr_factor: multiplies each parameter group's initial learning rate, which the group keeps as `peak_lr`.
        max_norm: clip the global gradient norm to this value; None or 0: no clipping.
        backward: called with the loss, a scalar, in place of `loss.backward()`. Either must average the gradients over
            ranks, as those of DDP and FSDP do.
        no_sync: context manager in which backward passes do not average gradients over ranks, such as DDP's `no_sync`.
        update: called in place of `optimizer.step()`.
        loss_scale: the factor by which `backward` multiplies the loss; `update` divides the gradients by it again, as
            a GradScaler's `step` does.
    """
    # The loss is a mean over the unmasked targets of all micro-batches and ranks, wherever they are, so they are
    # counted first. Averaging the gradients over ranks divides by the number of ranks, and so this does too.
    num_targets = torch.full((), batch.num_targets, dtype=torch.int64, device=batch.tokens.device)
    num_targets = sum_over_ranks(num_targets)
    targets_per_rank = num_targets.clamp(min=1) / world_size()

    micro_batches = batch.split(micro_batch_size)  # (b, T + 1) each
    token_losses = []  # (b, T) each
    for index, micro_batch in enumerate(micro_batches, start=1):
        is_last = index == len(micro_batches)
        with nullcontext() if is_last else no_sync():  # the last backward pass averages over ranks
            total, losses = compute_losses(micro_batch)  # (), (b, T)
            loss = total / targets_per_rank
            backward(loss) if backward else loss.backward()
        token_losses.append(losses)
    loss_sum = sum_over_ranks(sum(losses.sum() for losses in token_losses))
    mean_loss = loss_sum / num_targets.clamp(min=1)

    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    grad_norm = total_norm(gradients) / loss_scale
    clip = (max_norm / (grad_norm + 1e-6)).clamp(max=1) if max_norm else torch.ones_like(grad_norm)

    # All ranks have the same loss and norm, so they agree on whether to skip. The gradients of a skipped step become
    # NaN, of which a GradScaler on any rank takes notice, also where its own shards were finite.
    finite = mean_loss.isfinite() & grad_norm.isfinite()
    clip = torch.where(finite, clip, torch.nan)
    foreach_mul_(gradients, clip.to(gradients[0].dtype))

    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("peak_lr", group["lr"]) * lr_factor
    step_unless(~finite, optimizer, update or optimizer.step)
    return StepResult(mean_loss, loss_sum, num_targets, grad_norm, finite, token_losses)


def step_unless(skip: Tensor, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
    """Call the `step` of an optimizer, which must change nothing if `skip`, a bool scalar on the device, is true.

    An optimizer with an attribute `skip`, as those of `optim.build_optimizer` have, sees to that itself, without a
    host-device synchronization.
    """
    if hasattr(optimizer, "skip"):
        optimizer.skip = skip
    elif skip:  # waits for the device
        return
    step()


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The L2 norm over all tensors, of a DTensor over all its shards: an fp32 scalar on the device."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norm = torch.linalg.vector_norm(torch.stack(foreach_norm(tensors, 2, dtype=dtype))).float()
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in fp64; with a single rank, return it as it is."""
    if world_size() == 1:
        return value
    total = value.double()
    dist.all_reduce(total)
    return total.to(value.dtype)
