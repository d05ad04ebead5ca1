"""Muon for the matrices of the blocks and AdamW for the rest, as one optimizer.

Muon steps along the momentum of a matrix with its singular values made equal, so that rare directions move as much as
common ones (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/). `training/optim` assigns the
parameters. `Muon.step_alone` is the step on one device, in three functions; several ranks compute with the same three
functions, and exchange updates between them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lm.kernels.torch_private import foreach_lerp_, foreach_mul_, foreach_sub_

ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name since torch 2.13
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

    The options are those of `OptimizerConfig`; `training/optim` makes the groups.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, weight_decay: float, betas: tuple[float, float], eps: float,
        momentum: float,
    ) -> None:  # fmt: skip
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum=momentum, kind="adamw")
        super().__init__(groups, defaults)
        self.skip: Tensor | None = None  # a bool scalar on the device; the step is not taken where it is true
        for group in self.groups("adamw"):
            group["fused"] = all(p.device.type in ("cuda", "cpu") for p in group["params"])
        hidden = self.groups("muon")
        self._ranks = ranks_of(hidden[0]["params"][0] if hidden else None)
        self._owners = owners_of(hidden, self._ranks.world)

    def groups(self, kind: str) -> list[dict[str, Any]]:
        """The groups that `muon` or `adamw` updates."""
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
        hidden = [group for group in self.groups("muon") if with_gradient(group)]
        if self._ranks.world == 1:
            for group in hidden:
                self.step_alone(group, skip)
            self._step_adamw(skip)
        else:
            self._step_together(hidden, skip)
        return loss

    def step_alone(self, group: dict[str, Any], skip: Tensor) -> None:
        """Muon on one device."""
        parameters = with_gradient(group)
        momenta = [local(self._momentum(p)) for p in parameters]
        updates = nesterov(momenta, [local(p.grad) for p in parameters], group["momentum"], skip)
        updates = orthogonal(torch.stack(updates), group["rows"])  # (n, height, columns)
        descend([local(p) for p in parameters], updates, group["lr"], group["weight_decay"], skip)

    def _momentum(self, p: Tensor) -> Tensor:
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return self.state[p]["momentum_buffer"]

    def _step_adamw(self, skip: Tensor) -> None:
        for group in self.groups("adamw"):
            parameters, fused = with_gradient(group), group["fused"]
            if not parameters or (not fused and skip.item()):  # only the fused one reads `skip` on the device
                continue
            for p in parameters:
                if not self.state[p]:
                    self.state[p].update(
                        step=torch.zeros((), device=p.device if fused else "cpu"),
                        exp_avg=torch.zeros_like(p),
                        exp_avg_sq=torch.zeros_like(p),
                    )
            step_adamw(parameters, [self.state[p] for p in parameters], group, skip)

    # ---- several ranks ------------------------------------------------------------------------------------------

    def _step_together(self, hidden: list[dict[str, Any]], skip: Tensor) -> None:
        """Step on several ranks: each matrix is orthogonalised by its owner, and every rank runs AdamW.

        Communication overlaps with computation: while a group's updates are sent, the next group's are computed.
        """
        exchanges = [
            (ShardExchange if self._ranks.sharded else ReplicaExchange)(with_gradient(group), self._owners, self._ranks)
            for group in hidden
        ]
        for group, exchange in zip(hidden, exchanges, strict=True):
            momenta = [local(self._momentum(p)) for p in exchange.held]
            gradients = [local(p.grad) for p in exchange.held]
            exchange.send_to_owners(nesterov(momenta, gradients, group["momentum"], skip))
        for group, exchange in zip(hidden, exchanges, strict=True):
            exchange.send_back(orthogonal(exchange.receive_own(), group["rows"]))
        self._step_adamw(skip)
        for group, exchange in zip(hidden, exchanges, strict=True):
            weights = [local(p) for p in exchange.parameters]
            descend(weights, exchange.receive_all(), group["lr"], group["weight_decay"], skip)

    def gathered_state_dict(self, keep: Callable[[tuple[str, int], Tensor], Tensor]) -> dict[str, Any]:
        """`state_dict` with the momentum of all matrices on rank zero; call it on every rank.

        `keep(place, tensor)` copies each momentum of another rank to the host, so the device holds one at a time.
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
                state["state"][index] = {"momentum_buffer": keep(("momentum", index), momentum)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `gathered_state_dict` gave on rank zero; momentum that another rank keeps is left out."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        kept = {
            index: state for index, state in state_dict["state"].items()
            if self._ranks.sharded or self._owners.get(parameters[index], self._ranks.rank) == self._ranks.rank
        }  # fmt: skip
        super().load_state_dict({**state_dict, "state": kept})


# ---- AdamW -----------------------------------------------------------------------------------------------------------


def step_adamw(parameters: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any], skip: Tensor) -> None:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), by torch's kernel for all parameters where the device has
    it, which reads `skip` there."""
    averages, squares, steps = ([local(state[slot]) for state in states] for slot in ("exp_avg", "exp_avg_sq", "step"))
    beta1, beta2 = group["betas"]
    adamw(
        [local(p) for p in parameters], [local(p.grad) for p in parameters], averages, squares, [], steps,
        fused=group["fused"], foreach=False, found_inf=skip.float() if group["fused"] else None, amsgrad=False,
        beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip


# ---- several ranks ---------------------------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """The ranks that divide the matrices among them; together they hold one sharded model, or each a replica."""

    rank: int = 0  # of this process
    world: int = 1
    group: dist.ProcessGroup | None = None
    sharded: bool = False  # every rank holds rows of every matrix, not whole ones


def ranks_of(parameter: Tensor | None) -> Ranks:
    """The ranks that hold the shards or replicas of a parameter and of others like it."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        dim = next(dim for dim, placement in enumerate(parameter.placements) if placement.is_shard(0))
        return Ranks(mesh.get_local_rank(dim), mesh.size(dim), mesh.get_group(dim), sharded=True)
    if parameter is not None and dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    return Ranks()


def owners_of(hidden: list[dict[str, Any]], world: int) -> dict[Tensor, int]:
    """The rank that orthogonalises each parameter of Muon's groups."""
    costs = []  # multiplications of `orthogonalize`, but for a common factor
    for group in hidden:
        rows, columns = group["params"][0].shape
        costs.append(rows * columns * min(group["rows"], columns))
    owners = assign_owners(costs, [len(group["params"]) for group in hidden], world)
    return {p: rank for group, ranks in zip(hidden, owners) for p, rank in zip(group["params"], ranks, strict=True)}


def assign_owners(costs: Sequence[int], counts: Sequence[int], world: int) -> list[list[int]]:
    """Assign matrices to ranks: each group evenly, and its remainder to the ranks with the least work.

    Within a group, ranks differ by at most one matrix, so the all-gather pads by at most one. Groups with expensive
    matrices are assigned first (longest processing time first; Graham, 1969, doi:10.1137/0117039). `costs` has the
    cost of one matrix of each group. Returns the rank of each matrix of each group, in ascending order.
    """
    load = [0] * world
    owners: list[list[int]] = [[] for _ in costs]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        idlest = sorted(range(world), key=load.__getitem__)
        owners[index] = sorted(idlest[i % world] for i in range(counts[index]))
        for rank in owners[index]:
            load[rank] += costs[index]
    return owners


class ReplicaExchange:
    """Communicates a group's updates between ranks that hold whole models (DDP).

    An owner keeps the momentum of its matrices, so it only has to send the updates it computed to all ranks.
    """

    def __init__(self, parameters: list[Tensor], owners: dict[Tensor, int], ranks: Ranks) -> None:
        self.parameters, self.ranks = parameters, ranks  # sorted by owner
        self.held = [p for p in parameters if owners[p] == ranks.rank]  # their momentum, or a shard of it, is kept here
        self.counts = [sum(owners[p] == rank for p in parameters) for rank in range(ranks.world)]  # matrices of each

    def send_to_owners(self, updates: list[Tensor]) -> None:
        """Start sending the updates of `held` to the owners; here the owner has them already."""
        p = self.parameters[0]
        nothing = p.new_empty(0, *p.shape, dtype=update_dtype(p.device))
        self.buffer = torch.stack(updates) if updates else nothing

    def receive_own(self) -> Tensor:
        """The updates of this rank's own matrices: `(own, height, columns)`."""
        return self.buffer

    def send_back(self, own: Tensor) -> None:
        """Send what this rank computed for its own matrices, `(own, height, columns)`."""
        if missing := max(self.counts) - len(own):
            own = torch.cat((own, own.new_zeros(missing, *own.shape[1:])))  # all ranks send as much
        self.buffer = own.new_empty(self.ranks.world * len(own), *own.shape[1:])
        self.work = ALL_GATHER(self.buffer, own.contiguous(), group=self.ranks.group, async_op=True)

    def receive_all(self) -> list[Tensor]:
        """What all ranks computed: an update, or its shard, for each of `parameters`."""
        of_ranks = self._arrived().unflatten(0, (self.ranks.world, -1))
        return [update for updates, count in zip(of_ranks, self.counts) for update in updates[:count]]

    def _arrived(self) -> Tensor:
        """Wait for the data sent to this rank and drop the buffer: those of all groups are in flight at once."""
        self.work.wait()
        arrived = self.buffer
        del self.buffer
        return arrived


class ShardExchange(ReplicaExchange):
    """The same between ranks that hold shards, some rows of every weight and momentum (FSDP2).

    An owner receives the shards of its updates from all ranks, and sends each rank its shard of the result.
    """

    def __init__(self, parameters: list[Tensor], owners: dict[Tensor, int], ranks: Ranks) -> None:
        super().__init__(parameters, owners, ranks)
        self.held = parameters
        height, self.columns = parameters[0].shape
        most = -(-height // ranks.world)  # as FSDP2 divides rows: the last ranks may have fewer, or none
        self.rows = [min(most, max(0, height - rank * most)) for rank in range(ranks.world)]
        self.of_shards = [count * self.rows[ranks.rank] * self.columns for count in self.counts]  # of each owner
        self.of_own = [self.counts[ranks.rank] * rows * self.columns for rows in self.rows]  # from each rank

    def _exchange(self, parts: Iterable[Tensor], sent: list[int], received: list[int]) -> None:
        """Start an all-to-all; `sent` and `received` are the numbers of elements to and from each rank."""
        outgoing = torch.cat([part.flatten() for part in parts])
        self.buffer = outgoing.new_empty(sum(received))
        self.work = dist.all_to_all_single(self.buffer, outgoing, received, sent, self.ranks.group, async_op=True)

    def send_to_owners(self, updates: list[Tensor]) -> None:
        self._exchange(updates, self.of_shards, self.of_own)

    def receive_own(self) -> Tensor:
        own, shards = self.counts[self.ranks.rank], zip(self._arrived().split(self.of_own), self.rows, strict=True)
        return torch.cat([shard.view(own, rows, self.columns) for shard, rows in shards], dim=1)

    def send_back(self, own: Tensor) -> None:
        self._exchange(own.split(self.rows, dim=1), self.of_own, self.of_shards)

    def receive_all(self) -> Tensor:
        return self._arrived().view(len(self.parameters), self.rows[self.ranks.rank], self.columns)


def with_gradient(group: dict[str, Any]) -> list[Tensor]:
    return [p for p in group["params"] if p.grad is not None]


def local(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this rank holds; all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
