"""Muon for the matrices of the blocks and AdamW for the rest, as one optimizer.

Muon steps along the momentum of a matrix with its singular values made equal, so that rare directions move as much as
common ones (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/). `training/optim` assigns the
parameters. A step is `nesterov`, `orthogonal` and `descend`; several ranks compute with the same three functions, and
`training/muon_ranks` exchanges the updates between them.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lm.kernels.torch_private import foreach_lerp_, foreach_mul_, foreach_sub_
from lm.training.muon_ranks import ReplicaExchange, ShardExchange, find_owners, find_ranks
from lm.training.optim import AdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steepest at 0, and bounded after any number of rounds
ROUNDS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices `(n, rows, columns)` to about 1; their singular vectors stay the same.

    Newton-Schulz: rounds of `a X + (b G + c G^2) X` with `G = X X^T` apply an odd polynomial to the singular values,
    and nothing but multiplications is needed. Coefficients and rounds are Jordan's; values end between 0.67 and 1.21,
    and lower only where they were under 0.0015 of the Frobenius norm. A matrix of zeros stays zero.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # (n, short, long), so that G is (short, short)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value is above 1
    for _ in range(ROUNDS):
        gram = x @ x.mT  # (n, short, short)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


def nesterov(momenta: list[Tensor], gradients: list[Tensor], decay: float, skip: Tensor) -> list[Tensor]:
    """Update the momenta in place and return the Nesterov updates; if `skip` is true, the momenta do not change."""
    updates = [torch.where(skip, *pair) for pair in zip(momenta, gradients, strict=True)]  # momenta move towards these
    if updates:
        foreach_lerp_(momenta, updates, 1 - decay)  # momentum = decay * momentum + (1 - decay) * gradient
        foreach_lerp_(updates, momenta, decay)  # update = decay * momentum + (1 - decay) * gradient
    return [update.to(update_dtype(skip.device)) for update in updates]


def update_dtype(device: torch.device) -> torch.dtype:
    """The dtype of updates, which need not be exact: bf16 on GPUs since Ampere (half the bytes, over 2x the speed)."""
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def orthogonal(updates: Tensor, rows: int) -> Tensor:
    """Orthogonalise each matrix of updates `(n, height, columns)`, which are stacks of matrices with `rows` rows.

    The result has a root mean square of 0.2.
    """
    count, height, columns = updates.shape
    matrices = updates.view(count * height // rows, rows, columns)
    return orthogonalize(matrices).mul_(0.2 * math.sqrt(max(rows, columns))).reshape(updates.shape)


def descend(weights: list[Tensor], updates: Iterable[Tensor], lr: float, weight_decay: float, skip: Tensor) -> None:
    """Decay the weights and subtract the updates, in place; where `skip` is true the weights stay."""
    updates = [update.to(weight.dtype) for update, weight in zip(updates, weights, strict=True)]
    foreach_mul_(weights, torch.where(skip, 1.0, 1 - lr * weight_decay))
    foreach_mul_(updates, torch.where(skip, 0.0, lr))
    foreach_sub_(weights, updates)


class Muon(Optimizer):
    """Muon for parameter groups whose `kind` is `muon`, AdamW for the others.

    The parameters of a Muon group have the same shape. Each is a stack of matrices with `rows` rows: the heads of an
    attention, gate and up of an MLP, or the parameter itself. Each matrix is orthogonalised by itself, all in batched
    multiplications. As one matrix they would share a set of singular values, and the one with the largest gradient
    would get most of the update (heads: Kimi Team, 2026, arXiv:2607.24653, section 2.5).

    Updates are scaled to a root mean square of 0.2, like AdamW's: `0.2 * sqrt(max(rows, columns))` times the
    orthogonal matrix, so both take the same learning rate and the same decoupled decay (Liu et al., 2025,
    arXiv:2502.16982, section 2.2).

    The rank that orthogonalises a matrix needs all of it. With several ranks, sharded or replicated, all of them must
    call `step`; `assign_owners` divides the matrices among them.
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
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum=momentum, kind="adamw")
        super().__init__(groups, defaults)
        self.skip: Tensor | None = None  # a bool scalar on the device; the step is not taken where it is true
        others = self.groups("adamw")  # these dictionaries themselves, which get the defaults of AdamW in addition
        self._adamw = AdamW(others) if others else None
        matrices = self.groups("muon")
        self._ranks = find_ranks(matrices[0]["params"][0] if matrices else None)
        self._owners = find_owners(matrices, self._ranks.world)

    def groups(self, kind: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["kind"] == kind]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip = self.skip
        if skip is None:
            skip = torch.zeros((), dtype=torch.bool, device=self.param_groups[0]["params"][0].device)
        matrices = [group for group in self.groups("muon") if with_gradient(group)]
        if self._ranks.world == 1:
            for group in matrices:
                self._step_muon(group, skip)
            self._step_adamw()
        else:
            self._step_on_ranks(matrices, skip)
        return loss

    def _step_muon(self, group: dict[str, Any], skip: Tensor) -> None:
        parameters = with_gradient(group)
        momenta = [local(self._momentum(p)) for p in parameters]
        updates = nesterov(momenta, [local(p.grad) for p in parameters], group["momentum"], skip)
        updates = orthogonal(torch.stack(updates), group["rows"])  # (n, height, columns)
        descend([local(p) for p in parameters], updates, group["lr"], group["weight_decay"], skip)

    def _momentum(self, p: Tensor) -> Tensor:
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return self.state[p]["momentum_buffer"]

    def _step_adamw(self) -> None:
        if self._adamw is not None:
            # Loading a state replaces both.
            self._adamw.param_groups, self._adamw.state = self.groups("adamw"), self.state
            self._adamw.skip = self.skip
            self._adamw.step()

    # ---- several ranks ------------------------------------------------------------------------------------------

    def _step_on_ranks(self, groups: list[dict[str, Any]], skip: Tensor) -> None:
        """Step on several ranks: each matrix is orthogonalised by its owner, and every rank runs AdamW.

        Communication overlaps with computation: while a group's updates are sent, the next group's are computed.
        """
        kind = ShardExchange if self._ranks.sharded else ReplicaExchange
        dtype = update_dtype(skip.device)
        exchanges = [kind(with_gradient(group), self._owners, self._ranks, dtype) for group in groups]
        for group, exchange in zip(groups, exchanges, strict=True):
            momenta = [local(self._momentum(p)) for p in exchange.local_parameters]
            gradients = [local(p.grad) for p in exchange.local_parameters]
            exchange.send_to_owners(nesterov(momenta, gradients, group["momentum"], skip))
        for group, exchange in zip(groups, exchanges, strict=True):
            exchange.send_back(orthogonal(exchange.receive_owned(), group["rows"]))
        self._step_adamw()
        for group, exchange in zip(groups, exchanges, strict=True):
            weights = [local(p) for p in exchange.parameters]
            descend(weights, exchange.receive_all(), group["lr"], group["weight_decay"], skip)

    def gathered_state_dict(self, copy_to_host: Callable[[tuple[str, int], Tensor], Tensor]) -> dict[str, Any]:
        """`state_dict` with the momentum of all matrices on rank zero; call it on every rank.

        `copy_to_host(place, tensor)` copies each momentum of another rank, so the device holds one at a time.
        """
        state, ranks = self.state_dict(), self._ranks
        if ranks.sharded or ranks.world == 1:
            return state
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            owner = self._owners.get(p, 0)
            if owner == 0:
                continue
            momentum = self._momentum(p) if owner == ranks.rank else torch.empty_like(p)
            dist.broadcast(momentum, src=owner)
            if ranks.rank == 0:
                state["state"][index] = {"momentum_buffer": copy_to_host(("momentum", index), momentum)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `gathered_state_dict` gave on rank zero; momentum that another rank keeps is left out."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        rank = self._ranks.rank
        state = {
            index: slots
            for index, slots in state_dict["state"].items()
            if self._ranks.sharded or self._owners.get(parameters[index], rank) == rank
        }
        super().load_state_dict({**state_dict, "state": state})


def with_gradient(group: dict[str, Any]) -> list[Tensor]:
    return [p for p in group["params"] if p.grad is not None]


def local(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this rank holds; all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
