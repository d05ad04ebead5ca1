"""Which rank orthogonalises which matrix of Muon, and how ranks exchange the updates.

The ranks divide the matrices of a group among them: each is orthogonalised by one rank, its owner. `ReplicaExchange`
is for ranks that hold whole models (DDP), `ShardExchange` for ranks that hold shards (FSDP2). Both have three phases:
updates go to their owners, the owners orthogonalise them (`training/muon`), and the results go back to all ranks.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name since torch 2.13


class Ranks(NamedTuple):
    """The ranks that divide the matrices among them; together they hold one sharded model, or each a replica."""

    rank: int = 0  # of this process
    world: int = 1
    group: dist.ProcessGroup | None = None
    sharded: bool = False  # every rank holds rows of every matrix, not whole ones


def find_ranks(parameter: Tensor | None) -> Ranks:
    """The ranks that hold the shards or replicas of a parameter and of others like it."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return Ranks(mesh.get_local_rank(), mesh.size(), mesh.get_group(), sharded=True)
    if parameter is not None and dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    return Ranks()


def find_owners(groups: list[dict[str, Any]], world: int) -> dict[Tensor, int]:
    """The rank that orthogonalises each parameter of Muon's groups."""
    costs = []  # multiplications of `orthogonalize`, but for a common factor
    for group in groups:
        rows, columns = group["params"][0].shape
        costs.append(rows * columns * min(group["rows"], columns))
    owners = assign_owners(costs, [len(group["params"]) for group in groups], world)
    return {p: rank for group, ranks in zip(groups, owners) for p, rank in zip(group["params"], ranks, strict=True)}


def assign_owners(costs: Sequence[int], counts: Sequence[int], world: int) -> list[list[int]]:
    """Assign matrices to ranks: each group evenly, and its remainder to the ranks with the least work.

    Within a group, ranks differ by at most one matrix, so the all-gather pads by at most one. Groups with expensive
    matrices are assigned first (longest processing time first; Graham, 1969, doi:10.1137/0117039). `costs` has the
    cost of one matrix of each group. Returns the rank of each matrix of each group, in ascending order.
    """
    load = [0] * world
    owners: list[list[int]] = [[] for _ in costs]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        least_loaded = sorted(range(world), key=load.__getitem__)
        owners[index] = sorted(least_loaded[i % world] for i in range(counts[index]))
        for rank in owners[index]:
            load[rank] += costs[index]
    return owners


class ReplicaExchange:
    """Communicates a group's updates between ranks that hold whole models (DDP).

    An owner keeps the momentum of its matrices, so it only has to send the updates it computed to all ranks.
    """

    def __init__(
        self, parameters: list[Tensor], owners: dict[Tensor, int], ranks: Ranks, update_dtype: torch.dtype
    ) -> None:
        self.parameters = parameters  # sorted by owner
        self.ranks, self.update_dtype = ranks, update_dtype
        self.local_parameters = [p for p in parameters if owners[p] == ranks.rank]  # whose momentum this rank keeps
        self.counts = [sum(owners[p] == rank for p in parameters) for rank in range(ranks.world)]  # matrices of each

    def send_to_owners(self, updates: list[Tensor]) -> None:
        """Start sending the updates of `local_parameters` to the owners; here the owner has them already."""
        p = self.parameters[0]
        self.buffer = torch.stack(updates) if updates else p.new_empty(0, *p.shape, dtype=self.update_dtype)

    def receive_owned(self) -> Tensor:
        """The updates of the matrices that this rank owns: `(owned, height, columns)`."""
        return self.buffer

    def send_back(self, results: Tensor) -> None:
        """Send what this rank computed for the matrices that it owns, `(owned, height, columns)`."""
        if missing := max(self.counts) - len(results):
            results = torch.cat((results, results.new_zeros(missing, *results.shape[1:])))  # all ranks send as much
        self.buffer = results.new_empty(self.ranks.world * len(results), *results.shape[1:])
        self.work = ALL_GATHER(self.buffer, results.contiguous(), group=self.ranks.group, async_op=True)

    def receive_all(self) -> list[Tensor]:
        """What all ranks computed: an update, or its shard, for each of `parameters`."""
        by_rank = self._wait().unflatten(0, (self.ranks.world, -1))
        return [update for updates, count in zip(by_rank, self.counts) for update in updates[:count]]

    def _wait(self) -> Tensor:
        """Wait for the data sent to this rank and drop the buffer: those of all groups are in flight at once."""
        assert self.work is not None
        self.work.wait()
        received = self.buffer
        del self.buffer
        return received


class ShardExchange(ReplicaExchange):
    """The same between ranks that hold shards, some rows of every weight and momentum (FSDP2).

    An owner receives the shards of its updates from all ranks, and sends each rank its shard of the result.
    """

    def __init__(
        self, parameters: list[Tensor], owners: dict[Tensor, int], ranks: Ranks, update_dtype: torch.dtype
    ) -> None:
        super().__init__(parameters, owners, ranks, update_dtype)
        self.local_parameters = parameters
        height, self.columns = parameters[0].shape
        max_rows = -(-height // ranks.world)  # as FSDP2 divides rows: the last ranks may have fewer, or none
        self.rows = [min(max_rows, max(0, height - rank * max_rows)) for rank in range(ranks.world)]
        # Elements that this rank exchanges with each other rank: its shards of the other's matrices, and the other's
        # shards of the matrices that this rank owns.
        self.shard_sizes = [count * self.rows[ranks.rank] * self.columns for count in self.counts]
        self.owned_sizes = [self.counts[ranks.rank] * rows * self.columns for rows in self.rows]

    def _exchange(self, parts: Iterable[Tensor], sent: list[int], received: list[int]) -> None:
        """Start an all-to-all; `sent` and `received` are the numbers of elements to and from each rank."""
        outgoing = torch.cat([part.flatten() for part in parts])
        self.buffer = outgoing.new_empty(sum(received))
        self.work = dist.all_to_all_single(self.buffer, outgoing, received, sent, self.ranks.group, async_op=True)

    def send_to_owners(self, updates: list[Tensor]) -> None:
        self._exchange(updates, self.shard_sizes, self.owned_sizes)

    def receive_owned(self) -> Tensor:
        owned, shards = self.counts[self.ranks.rank], self._wait().split(self.owned_sizes)
        shards = [shard.view(owned, rows, self.columns) for shard, rows in zip(shards, self.rows, strict=True)]
        return torch.cat(shards, dim=1)

    def send_back(self, results: Tensor) -> None:
        self._exchange(results.split(self.rows, dim=1), self.owned_sizes, self.shard_sizes)

    def receive_all(self) -> Tensor:
        return self._wait().view(len(self.parameters), self.rows[self.ranks.rank], self.columns)
