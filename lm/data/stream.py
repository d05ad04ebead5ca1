"""Micro-batches for one rank: the samples of each optimizer step, divided, read ahead and laid in rows.

Between `data/order`, which says what each sample is, and `data/datamodule`, which hands the batches to Lightning.

`Stream` and `Windows` say which samples make which micro-batch; `assemble` copies their rows out of blocks, which
`data/buffer` decodes ahead. Decoding runs in threads of the training process: Arrow and numpy let go of the
interpreter lock while they work, and copying batches between processes (`data/workers`) costs more than reading them.
Copying the rows takes some 50 microseconds a batch, less than handing it over from yet another thread would.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lm.data.batch import Batch, Cursor
from lm.data.buffer import TIMEOUT, BlockBuffer
from lm.data.order import BLOCKS_AHEAD, Order
from lm.data.shards import BLOCK_TOKENS, BadBlock, Shards
from lm.errors import RequestError

OnBadShard = Literal["raise", "skip"]
LOCATED = 1024  # samples that are located in one call of numpy
MOST_AHEAD = 4096  # samples that blocks are decoded ahead for; less where BLOCKS_AHEAD blocks have fewer windows


class Request(NamedTuple):
    """One micro-batch to be made: its samples in order, and how many rows at the end only fill it up."""

    samples: np.ndarray
    cursor: Cursor | None = None
    padding: int = 0


class Reading(NamedTuple):
    """What to do when a block cannot be read.

    Args:
        timeout: seconds that are waited for one.
        on_bad_shard: `raise`; or `skip`, which leaves the targets of a damaged block out of the loss. Every sample
            keeps its place in the order, so nothing else changes.
    """

    timeout: float = TIMEOUT
    on_bad_shard: OnBadShard = "raise"


class Stream(IterableDataset):
    """The endless training stream of one rank.

    Optimizer step after optimizer step takes the next `global_batch` samples; ranks, workers and micro-batches only
    divide them, so another division sees the same samples in every step.

    Args:
        shards: where tokens are read.
        order: which window each sample is.
        seq_len: T, the targets of a row.
        start: the first sample that was not trained on yet.
        global_batch: samples of an optimizer step over all ranks.
        micro_batch: B, the rows of a batch.
        rank: this process; it takes every `world`-th sample of a step.
        world: number of processes.
        shuffle_buffer: tokens of decoded blocks that are held at most; None takes what the order's lanes need.
        reading: what to do when a block cannot be read, or not soon.

    Raises:
        ValueError: `global_batch` is not a multiple of `world * micro_batch`.
        RequestError: a row group alone is larger than the shuffle buffer.
    """

    def __init__(
        self, shards: Shards, order: Order, *, seq_len: int, start: int, global_batch: int, micro_batch: int,
        rank: int = 0, world: int = 1, shuffle_buffer: int | None = None, reading: Reading = Reading(),
    ):
        if global_batch % (world * micro_batch):
            raise ValueError(f"global_batch {global_batch} is not a multiple of {world} ranks x {micro_batch} samples")
        largest = shards.largest
        needed = (order.lanes + BLOCKS_AHEAD) * largest.tokens
        if shuffle_buffer is not None and largest.tokens > shuffle_buffer:
            raise RequestError(
                f"{largest}: {largest.tokens} tokens in one piece, more than data.shuffle_buffer ({shuffle_buffer}); "
                "raise data.shuffle_buffer, or write the shard again with smaller row groups (`lm data prepare`)"
            )
        self.shards, self.order, self.seq_len, self.start = shards, order, seq_len, start
        self.global_batch, self.micro_batch, self.rank, self.world = global_batch, micro_batch, rank, world
        self.buffer = needed if shuffle_buffer is None else shuffle_buffer
        self.reading = reading

    def requests(self) -> Iterator[Request]:
        """What this rank's micro-batches are made of; endless."""
        start = self.start
        while True:
            end = start + self.global_batch
            samples = np.arange(start + self.rank, end, self.world)
            for micro, first in enumerate(range(0, len(samples), self.micro_batch)):
                yield Request(samples[first : first + self.micro_batch], Cursor(start, end, micro))
            start = end

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, worker: int = 0, workers: int = 1) -> Iterator[Batch]:
        """Every `workers`-th batch from the `worker`-th on: those of all workers, taken in turn, are in order again."""
        requests = islice(self.requests(), worker, None, workers)
        return assemble(self.shards, self.order, self.seq_len, requests, self.buffer, self.reading)


class Windows(IterableDataset):
    """The first windows in the order in which they lie, once, for evaluation.

    Each window is counted by exactly one rank. All ranks yield the same number of batches, since sharded models run
    in lockstep: what a rank lacks is filled with rows whose mask is False.

    Args:
        shards: where tokens are read.
        seq_len: T, the targets of a row.
        micro_batch: B, the rows of a batch.
        limit: how many windows; None takes all.
        rank: this process; each takes one run of consecutive windows.
        world: number of processes.
        reading: what to do when a block cannot be read, or not soon.
    """

    def __init__(
        self, shards: Shards, *, seq_len: int, micro_batch: int, limit: int | None = None,
        rank: int = 0, world: int = 1, reading: Reading = Reading(),
    ):
        self.shards, self.seq_len, self.micro_batch, self.reading = shards, seq_len, micro_batch, reading
        self.order = Order(shards.windows(seq_len), seed=0, shuffle=False)
        self.total = self.order.total if limit is None else min(limit, self.order.total)
        share = -(-self.total // world)
        self.first, self.last = min(rank * share, self.total), min((rank + 1) * share, self.total)
        self.batches = -(-share // micro_batch)
        self.buffer = (1 + BLOCKS_AHEAD) * shards.largest.tokens

    def requests(self) -> Iterator[Request]:
        """What this rank's batches are made of."""
        for first in range(self.first, self.first + self.batches * self.micro_batch, self.micro_batch):
            samples = np.arange(first, min(first + self.micro_batch, self.last))
            yield Request(samples, padding=self.micro_batch - len(samples))

    def __iter__(self) -> Iterator[Batch]:
        return assemble(self.shards, self.order, self.seq_len, self.requests(), self.buffer, self.reading)


# ---- rows out of blocks ---------------------------------------------------------------------------------------------


def assemble(
    shards: Shards, order: Order, seq_len: int, requests: Iterator[Request], capacity: int, reading: Reading = Reading()
) -> Iterator[Batch]:
    """Turn requests into batches.

    Args:
        shards: where tokens are read.
        order: which window each sample is.
        seq_len: T.
        requests: what to make.
        capacity: tokens of decoded blocks to hold at most; at least the largest block.
        reading: what to do when a block cannot be read, or not soon.

    Yields:
        A batch of (B, T + 1) tokens for each request.

    Raises:
        RunError: a block cannot be read; names the file.
    """
    dtype = shards.column.dtype if shards.column.dtype == np.uint16 else np.dtype(np.int32)
    ahead = min(MOST_AHEAD, max(1, BLOCKS_AHEAD * BLOCK_TOKENS // seq_len))  # on this stretch as many blocks begin
    buffer = BlockBuffer(shards, capacity, reading.timeout)
    plan = _located(order, requests)
    waiting, unwanted = deque(), deque()  # located requests, and those of their blocks that are not wanted yet
    wanted = taken = 0

    def look_ahead() -> None:
        nonlocal wanted
        while wanted - taken < ahead:
            if not unwanted:
                located = next(plan, None)
                if located is None:
                    return
                waiting.append(located)
                unwanted.extend(located[1])
            elif buffer.want(unwanted[0], wanted, taken):
                unwanted.popleft()
                wanted += 1
            else:
                return

    try:
        look_ahead()
        while waiting:
            request, blocks, windows = waiting.popleft()
            rows = np.zeros((len(blocks) + request.padding, seq_len + 1), dtype=dtype)  # (B, T + 1)
            bad = {}
            for place, (block, window) in enumerate(zip(blocks, windows)):
                if wanted == taken:
                    look_ahead()  # the buffer was full; nothing that was taken needs its block any more
                first = window * seq_len
                try:
                    rows[place] = buffer.get(block)[first : first + seq_len + 1]
                except BadBlock as damage:
                    if reading.on_bad_shard == "raise":
                        raise
                    bad[place] = str(damage.with_traceback(None))  # the same one for all its rows: they would add up
                taken += 1
            look_ahead()  # so that decoding goes on while the batch is trained on
            yield _batch(rows, request, bad)
    finally:
        buffer.close()


def _located(order: Order, requests: Iterator[Request]) -> Iterator[tuple[Request, list[int], list[int]]]:
    """Requests with the block and window of each sample, located many at a time; the first ones few, to start soon."""
    size = 1
    while group := list(islice(requests, size)):
        blocks, windows = order.locate(np.concatenate([request.samples for request in group]))
        ends = np.cumsum([len(request.samples) for request in group])
        for request, end in zip(group, ends.tolist()):
            here = slice(end - len(request.samples), end)
            yield request, blocks[here].tolist(), windows[here].tolist()
        size = max(1, LOCATED // max(1, ends[-1] // len(group)))


def _batch(rows: np.ndarray, request: Request, bad: dict[int, str]) -> Batch:
    """`bad` says of rows that could not be read what is wrong with their block."""
    tokens, mask = torch.from_numpy(rows), None
    if request.padding or bad:
        mask = torch.ones(len(rows), rows.shape[1] - 1, dtype=torch.bool)  # (B, T)
        mask[len(rows) - request.padding :] = False
        for place in bad:
            mask[place] = False
    return Batch(tokens, request.cursor, mask, tuple(bad.values()))
