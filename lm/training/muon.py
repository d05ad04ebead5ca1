"""Muon for the matrices of the blocks and AdamW for the rest, as one optimizer.

Muon steps along the momentum of a matrix with its singular values made equal, so that rare directions move as much as
common ones (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/). `training/optim` says which parameter
goes where.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

ADAMW_SLOTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps of each parameter
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steepest at 0, and bounded after any number of rounds
ROUNDS = 5
MUON_SLOTS = ("momentum_buffer",)  # what a step leaves for the next one, of each parameter


def orthogonalize(matrices: Tensor) -> Tensor:
    """Matrices with the same singular vectors and singular values of about 1.

    Newton-Schulz: rounds of `a X + (b G + c G^2) X` with `G = X X^T` apply an odd polynomial to the singular values,
    and nothing but multiplications is needed. Coefficients and rounds are Jordan's; values end between 0.67 and 1.21,
    and lower only where they were under 0.0015 of the Frobenius norm. A matrix of zeros stays one.

    Args:
        matrices: `(n, rows, columns)`, in the precision to compute in.

    Returns:
        `(n, rows, columns)`.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # (n, short, long), because G is square in the first
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value is above 1
    for _ in range(ROUNDS):
        gram = x @ x.mT  # (n, short, short)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


class Muon(Optimizer):
    """One step of Muon for the groups that name `rows`, and of AdamW for the others.

    A group with `rows` holds matrices of one shape, so that one batch of multiplications serves them all. `rows` are
    those of the matrices that stand one above the other in each of them. They are orthogonalised one by one, as if
    they had never been joined: joined, they would share one set of singular values, and the part with the larger
    gradient would take most of the step from the others.

    An update's root mean square is brought to 0.2, which is AdamW's: `0.2 * sqrt(max(rows, columns))` times the
    orthogonal matrix, so both take the same learning rate and the same decoupled decay (Liu et al., 2025,
    arXiv:2502.16982, section 2.2).

    A matrix is needed whole. Where it is sharded, momentum stays so, every rank gathers the updates of a group and
    orthogonalises them, and keeps its share; replicas of a model compute the same from equal gradients.

    Args:
        groups: dictionaries with `params`, and if they differ from the rest `lr`, `weight_decay`, `rows`.
        lr: learning rate.
        weight_decay: decoupled decay.
        betas: AdamW's decay rates of the running means of the gradient and of its square.
        eps: AdamW's, added to the denominator.
        momentum: decay rate of Muon's running mean of the gradient, which is used with Nesterov's look ahead.

    Attributes:
        skip: a bool scalar on the device; the step is not taken where it is true.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
    ) -> None:
        super().__init__(
            groups, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, momentum=momentum, rows=None)
        )
        self.skip: Tensor | None = None
        for group in self.param_groups:
            group["fused"] = group["rows"] is None and all(p.device.type in ("cuda", "cpu") for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.skip is not None and self.skip.item():
            return loss
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                (self._adamw if group["rows"] is None else self._muon)(parameters, group)
        return loss

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradients = [_local(p.grad) for p in parameters]
        momenta = [_local(self.state[p]["momentum_buffer"]) for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
        # Half the bytes and twice the speed and more on a GPU; the values need not be exact, only alike.
        dtype = torch.bfloat16 if parameters[0].device.type == "cuda" else torch.float32
        whole = [_whole(update.to(dtype), p) for update, p in zip(updates, parameters, strict=True)]
        stack = torch.stack(whole)  # (n, rows, columns)
        del updates, whole
        for part in stack.split(group["rows"], dim=1):
            part.copy_(orthogonalize(part)).mul_(0.2 * math.sqrt(max(part.shape[1:])))
        weights = [_local(p) for p in parameters]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        updates = [_local_shard(update, p).to(p.dtype) for update, p in zip(stack, parameters, strict=True)]
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p].update(
                    step=torch.zeros((), device=p.device if group["fused"] else "cpu"),
                    exp_avg=torch.zeros_like(p),
                    exp_avg_sq=torch.zeros_like(p),
                )
        averages, squares, steps = ([self.state[p][slot] for p in parameters] for slot in ADAMW_SLOTS)
        beta1, beta2 = group["betas"]
        adamw(
            parameters, [p.grad for p in parameters], averages, squares, [], steps, fused=group["fused"] or None,
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip


def _local(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this rank holds; all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(own: Tensor, like: Tensor) -> Tensor:
    """The full tensor, gathered from every rank's shard `own`, which is sharded as `like` is."""
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def _local_shard(whole: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_whole`: this rank's shard. Every rank has the full tensor, so nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()
