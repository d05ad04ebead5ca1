"""Muon for the matrices of the blocks and AdamW for the rest, as one optimizer.

Muon steps along the momentum of a matrix with its singular values made equal, so that rare directions move as much as
common ones (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/). `training/optim` says which parameter
goes where.

Over several devices each matrix has an owner, the rank that orthogonalises it:

| ranks hold         | momentum is kept  | before                           | after                              |
|--------------------|-------------------|----------------------------------|------------------------------------|
| whole models (DDP) | by the owner      | the owner has all it needs       | owners send updates to all ranks   |
| shards (FSDP2)     | in shards         | owners get shards of the updates | owners send each rank its shard    |
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lm.kernels.torch_private import foreach_lerp_, foreach_mul_, foreach_sub_

ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name since torch 2.13
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

    A group with `rows` holds parameters of one shape. Each is a stack of matrices with `rows` rows: the heads of an
    attention, gate and up of an MLP, or the parameter itself. They are orthogonalised one by one, all in one batch of
    multiplications. Joined they would share one set of singular values, and the matrix with the largest gradient would
    get most of the update (heads: Kimi Team, 2026, arXiv:2607.24653, section 2.5).

    An update's root mean square is brought to 0.2, which is AdamW's: `0.2 * sqrt(max(rows, columns))` times the
    orthogonal matrix, so both take the same learning rate and the same decoupled decay (Liu et al., 2025,
    arXiv:2502.16982, section 2.2).

    A matrix is needed whole, by one rank. Where the model is sharded over ranks or replicated on them, all of them must
    take the step; the work is divided by `assign_owners`.

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
        self._ranks = _ranks_of(next((group["params"][0] for group in self._hidden), None))
        costs = [_cost(*group["params"][0].shape, group["rows"]) for group in self._hidden]
        counts = [len(group["params"]) for group in self._hidden]
        owners = assign_owners(costs, counts, self._ranks.world)
        self._owners = {
            p: rank for group, ranks in zip(self._hidden, owners, strict=True)
            for p, rank in zip(group["params"], ranks, strict=True)
        }  # fmt: skip

    @property
    def _hidden(self) -> list[dict[str, Any]]:
        """The groups that Muon updates."""
        return [group for group in self.param_groups if group["rows"] is not None]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip = self.skip
        if skip is None:
            skip = torch.zeros((), dtype=torch.bool, device=self.param_groups[0]["params"][0].device)
        # Nothing is waited for before it is needed: while updates travel, those of the next group are computed.
        hidden = [group for group in self._hidden if _with_gradient(group)]
        collected = [self._collect(group, skip) for group in hidden]
        computed = []
        for group in hidden:
            computed.append(self._orthogonalize(group, collected.pop(0)))
        for group in self.param_groups:
            if group["rows"] is None:
                self._adamw(group, skip)
        for group in hidden:
            self._apply(group, skip, computed.pop(0))
        return loss

    def gathered_state_dict(self) -> dict[str, Any]:
        """`state_dict` with the momentum of all matrices on rank zero; to be called on every rank."""
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
                state["state"][index] = {"momentum_buffer": momentum.cpu()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `gathered_state_dict` gave on rank zero; momentum that another rank keeps is left out."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        kept = {
            index: state for index, state in state_dict["state"].items()
            if self._ranks.sharded or self._owners.get(parameters[index], self._ranks.rank) == self._ranks.rank
        }  # fmt: skip
        super().load_state_dict({**state_dict, "state": kept})

    # ---- matrices -----------------------------------------------------------------------------------------------

    def _collect(self, group: dict[str, Any], skip: Tensor) -> Callable[[], Tensor]:
        """Move the momentum on, and send updates to their owners.

        Returns:
            A function that waits for them: the updates of this rank's own matrices, `(own, rows, columns)`.
        """
        ranks, parameters = self._ranks, _with_gradient(group)
        own = [p for p in parameters if self._owners[p] == ranks.rank]
        held = parameters if ranks.sharded else own  # their momentum is here, or a shard of it
        momenta = [_local(self._momentum(p)) for p in held]
        # A gradient equal to the momentum leaves it as it is.
        updates = [torch.where(skip, momentum, _local(p.grad)) for momentum, p in zip(momenta, held, strict=True)]
        if held:
            foreach_lerp_(momenta, updates, 1 - group["momentum"])
            foreach_lerp_(updates, momenta, group["momentum"])
        # Half the bytes and twice the speed and more on a GPU since Ampere; the values need not be exact, only alike.
        fast = skip.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = torch.bfloat16 if fast else torch.float32
        updates = [update.to(dtype) for update in updates]
        if ranks.sharded:
            return _send_to_owners(updates, self._counts(parameters), parameters[0].shape, ranks)
        stack = torch.stack(updates) if own else skip.new_empty(0, *parameters[0].shape, dtype=dtype)
        return lambda: stack

    def _orthogonalize(self, group: dict[str, Any], collected: Callable[[], Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Orthogonalise this rank's own matrices, and send them to all ranks.

        Returns:
            A function that waits for the ranks' updates: of each parameter `(rows, columns)`, or its shard.
        """
        ranks, counts = self._ranks, self._counts(_with_gradient(group))
        stack = collected()  # (own, rows, columns)
        count, rows, columns = stack.shape
        matrices = stack.view(count * rows // group["rows"], group["rows"], columns)
        stack = orthogonalize(matrices).mul_(0.2 * math.sqrt(max(matrices.shape[1:]))).reshape(stack.shape)
        if ranks.world == 1:
            return lambda: stack
        return (_send_shards if ranks.sharded else _send_to_all)(stack, counts, ranks)

    def _apply(self, group: dict[str, Any], skip: Tensor, computed: Callable[[], Sequence[Tensor]]) -> None:
        """Decay the weights and subtract the updates."""
        parameters = _with_gradient(group)
        lr, decay = group["lr"], 1 - group["lr"] * group["weight_decay"]
        weights = [_local(p) for p in parameters]
        updates = [update.to(p.dtype) for update, p in zip(computed(), parameters, strict=True)]
        foreach_mul_(weights, torch.where(skip, 1.0, decay))
        foreach_mul_(updates, torch.where(skip, 0.0, lr))
        foreach_sub_(weights, updates)

    def _momentum(self, p: Tensor) -> Tensor:
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return self.state[p]["momentum_buffer"]

    def _counts(self, parameters: list[Tensor]) -> list[int]:
        """How many of these matrices each rank owns; those of a rank are consecutive."""
        owners = [self._owners[p] for p in parameters]
        return [owners.count(rank) for rank in range(self._ranks.world)]

    # ---- the rest -----------------------------------------------------------------------------------------------

    def _adamw(self, group: dict[str, Any], skip: Tensor) -> None:
        parameters, fused = _with_gradient(group), group["fused"]
        if not parameters or (not fused and skip.item()):  # only the fused one reads `skip` on the device
            return
        for p in parameters:
            if not self.state[p]:
                self.state[p].update(
                    step=torch.zeros((), device=p.device if fused else "cpu"),
                    exp_avg=torch.zeros_like(p),
                    exp_avg_sq=torch.zeros_like(p),
                )
        averages, squares, steps = ([_local(self.state[p][slot]) for p in parameters] for slot in ADAMW_SLOTS)
        beta1, beta2 = group["betas"]
        adamw(
            [_local(p) for p in parameters], [_local(p.grad) for p in parameters], averages, squares, [], steps,
            fused=fused or None, found_inf=skip.float() if fused else None, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip


# ---- several ranks ---------------------------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """Those that hold one model together, or a replica each, and divide the matrices among them."""

    rank: int = 0  # of this process
    world: int = 1
    group: dist.ProcessGroup | None = None
    sharded: bool = False  # every rank holds rows of every matrix, not whole ones


def _ranks_of(parameter: Tensor | None) -> Ranks:
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        dim = next(dim for dim, placement in enumerate(parameter.placements) if placement.is_shard(0))
        return Ranks(mesh.get_local_rank(dim), mesh.size(dim), mesh.get_group(dim), sharded=True)
    if parameter is not None and dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    return Ranks()


def _cost(rows: int, columns: int, part: int) -> int:
    """Multiplications of `orthogonalize`, but for a common factor, for a parameter in matrices of `part` rows."""
    return rows * columns * min(part, columns)


def assign_owners(costs: Sequence[int], counts: Sequence[int], world: int) -> list[list[int]]:
    """Divide matrices over ranks: of each group evenly, and what is left over goes to the ranks with the least to do.

    Within a group ranks differ by one matrix at most, so gathering pads by no more than that. Groups with expensive
    matrices are assigned first (longest processing time first; Graham, 1969, doi:10.1137/0117039).

    Args:
        costs: of one matrix of each group.
        counts: matrices of each group.
        world: ranks.

    Returns:
        For each group the rank of each matrix, in ascending order.
    """
    load = [0] * world
    owners: list[list[int]] = [[] for _ in costs]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        idlest = sorted(range(world), key=load.__getitem__)
        owners[index] = sorted(idlest[i % world] for i in range(counts[index]))
        for rank in owners[index]:
            load[rank] += costs[index]
    return owners


def _send_to_all(stack: Tensor, counts: list[int], ranks: Ranks) -> Callable[[], list[Tensor]]:
    """Gather whole matrices: from this rank `(own, rows, columns)`; a list of all ranks', once they arrived."""
    slots = max(counts)
    own = stack
    if len(stack) < slots:
        own = stack.new_zeros(slots, *stack.shape[1:])
        own[: len(stack)] = stack
    everyones = own.new_empty(ranks.world * slots, *stack.shape[1:])
    work = ALL_GATHER(everyones, own, group=ranks.group, async_op=True)

    def arrived() -> list[Tensor]:
        work.wait()
        return [everyones[rank * slots + i] for rank, count in enumerate(counts) for i in range(count)]

    return arrived


def _send_to_owners(shards: list[Tensor], counts: list[int], shape: torch.Size, ranks: Ranks) -> Callable[[], Tensor]:
    """Gather every matrix on its owner.

    Args:
        shards: this rank's, `(its rows, columns)`, in the order of the owners.
        counts: matrices of each owner.
        shape: of a whole matrix.
        ranks: that take part.

    Returns:
        A function that waits for this rank's own matrices, `(own, rows, columns)`.
    """
    own, rows = counts[ranks.rank], _rows_of_ranks(shape[0], ranks.world)
    sizes = [own * r * shape[1] for r in rows]
    arrived = _exchange(shards, [count * shards[0].numel() for count in counts], sizes, ranks)
    return lambda: torch.cat(
        [piece.view(own, r, shape[1]) for piece, r in zip(arrived().split(sizes), rows, strict=True)], dim=1
    )


def _send_shards(stack: Tensor, counts: list[int], ranks: Ranks) -> Callable[[], Sequence[Tensor]]:
    """The inverse of `_send_to_owners`: from this rank `(own, rows, columns)`; its shards of all, once they arrived."""
    columns, rows = stack.shape[2], _rows_of_ranks(stack.shape[1], ranks.world)
    mine = rows[ranks.rank]
    sizes = [len(stack) * r * columns for r in rows]
    arrived = _exchange(stack.split(rows, dim=1), sizes, [count * mine * columns for count in counts], ranks)
    return lambda: arrived().view(sum(counts), mine, columns)


def _exchange(parts: Sequence[Tensor], sent: list[int], received: list[int], ranks: Ranks) -> Callable[[], Tensor]:
    """All to all: elements that go to each rank, joined, for those from each, joined, once they arrived."""
    outgoing = torch.cat([part.flatten() for part in parts])
    incoming = outgoing.new_empty(sum(received))
    work = dist.all_to_all_single(incoming, outgoing, received, sent, group=ranks.group, async_op=True)

    def arrived() -> Tensor:
        work.wait()
        return incoming

    return arrived


def _rows_of_ranks(rows: int, world: int) -> list[int]:
    """Rows of each rank's shard, as FSDP2 divides them: equal but for the last ones, which may be smaller or empty."""
    most = -(-rows // world)
    return [min(most, max(0, rows - rank * most)) for rank in range(world)]


def _with_gradient(group: dict[str, Any]) -> list[Tensor]:
    return [p for p in group["params"] if p.grad is not None]


def _local(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this rank holds; all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
