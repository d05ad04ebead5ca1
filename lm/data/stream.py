"""Micro-batches for one rank: the samples of each optimizer step, divided, read ahead and laid in rows.

Between `data/order`, which says what each sample is, and `data/datamodule`, which hands the batches to Lightning.

`Stream` and `Windows` say which samples make which micro-batch; `assemble` copies their rows out of blocks, which a
`BlockBuffer` decodes ahead. Decoding runs in threads of the training process: Arrow and numpy let go of the
interpreter lock while they work, and copying batches between processes costs more than reading them. Copying the rows
takes some 50 microseconds a batch, less than handing it over from yet another thread would.
"""

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lm.data.batch import Batch, Cursor
from lm.data.order import BLOCKS_AHEAD, Order
from lm.data.shards import BLOCK_TOKENS, Shards
from lm.errors import RequestError

DECODERS = 2  # threads; one reads several hundred million tokens a second
LOCATED = 1024  # samples that are located in one call of numpy
MOST_AHEAD = 4096  # samples that blocks are decoded ahead for; less where BLOCKS_AHEAD blocks have fewer windows


class Request(NamedTuple):
    """One micro-batch to be made: its samples in order, and how many rows at the end only fill it up."""

    samples: np.ndarray
    cursor: Cursor | None = None
    padding: int = 0


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

    Raises:
        ValueError: `global_batch` is not a multiple of `world * micro_batch`.
        RequestError: a row group alone is larger than the shuffle buffer.
    """

    def __init__(
        self, shards: Shards, order: Order, *, seq_len: int, start: int, global_batch: int, micro_batch: int,
        rank: int = 0, world: int = 1, shuffle_buffer: int | None = None,
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
        return assemble(self.shards, self.order, self.seq_len, _mine(self), self.buffer)


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
    """

    def __init__(
        self, shards: Shards, *, seq_len: int, micro_batch: int, limit: int | None = None,
        rank: int = 0, world: int = 1,
    ):
        self.shards, self.seq_len, self.micro_batch = shards, seq_len, micro_batch
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
        return assemble(self.shards, self.order, self.seq_len, _mine(self), self.buffer)


def _mine(dataset: Stream | Windows) -> Iterator[Request]:
    """In a DataLoader's worker w of W, requests w, w + W, ...: taken in turn they are in order again."""
    worker = get_worker_info()
    return islice(dataset.requests(), worker.id if worker else 0, None, worker.num_workers if worker else 1)


# ---- rows out of blocks ---------------------------------------------------------------------------------------------


class BlockBuffer:
    """Decoded blocks, never more than `capacity` tokens, decoded by threads before they are needed.

    Samples are `want`ed some way ahead of being taken, in the same order; their numbers are the clock. The block
    whose latest wanted sample is the oldest goes first, and none goes while a wanted sample is still to be taken.
    """

    def __init__(self, shards: Shards, capacity: int):
        self.shards, self.capacity, self.held = shards, capacity, 0
        self.pool = ThreadPoolExecutor(DECODERS, thread_name_prefix="lm-decode")
        self.blocks: OrderedDict[int, Future] = OrderedDict()  # the one that goes first stands first
        self.wanted: dict[int, int] = {}  # block -> the latest sample that wants it
        self.decoded: dict[int, np.ndarray] = {}  # what `get` has seen; asking a Future for each row takes its lock

    def want(self, block: int, sample: int, taken: int) -> bool:
        """See to it that `block` is decoded for `sample`; False if there is no room while `taken` is being taken."""
        if block in self.blocks:
            self.blocks.move_to_end(block)
        else:
            tokens = self.shards.blocks[block].tokens
            while self.blocks and self.held + tokens > self.capacity:
                oldest = next(iter(self.blocks))
                if self.wanted[oldest] >= taken:
                    return False
                del self.blocks[oldest], self.wanted[oldest], self.decoded[oldest]
                self.held -= self.shards.blocks[oldest].tokens
            self.held += tokens
            self.blocks[block] = self.pool.submit(self.shards.read, block)
        self.wanted[block] = sample
        return True

    def get(self, block: int) -> np.ndarray:
        """The tokens of a wanted block, as soon as they are decoded."""
        tokens = self.decoded.get(block)
        if tokens is None:
            tokens = self.decoded[block] = self.blocks[block].result()
        return tokens

    def close(self) -> None:
        """Drop what is not begun; the threads end with what they are at."""
        if not sys.is_finalizing():  # when the interpreter exits it has ended them already
            self.pool.shutdown(wait=False, cancel_futures=True)


def assemble(
    shards: Shards, order: Order, seq_len: int, requests: Iterator[Request], capacity: int
) -> Iterator[Batch]:
    """Turn requests into batches.

    Args:
        shards: where tokens are read.
        order: which window each sample is.
        seq_len: T.
        requests: what to make.
        capacity: tokens of decoded blocks to hold at most; at least the largest block.

    Yields:
        A batch of (B, T + 1) tokens for each request.
    """
    dtype = shards.column.dtype if shards.column.dtype == np.uint16 else np.dtype(np.int32)
    ahead = min(MOST_AHEAD, max(1, BLOCKS_AHEAD * BLOCK_TOKENS // seq_len))  # on this stretch as many blocks begin
    buffer = BlockBuffer(shards, capacity)
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
            for row, block, window in zip(rows, blocks, windows):
                if wanted == taken:
                    look_ahead()  # the buffer was full; nothing that was taken needs its block any more
                first = window * seq_len
                row[:] = buffer.get(block)[first : first + seq_len + 1]
                taken += 1
            look_ahead()  # so that decoding goes on while the batch is trained on
            yield _batch(rows, request)
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


def _batch(rows: np.ndarray, request: Request) -> Batch:
    tokens, mask = torch.from_numpy(rows), None
    if request.padding:
        mask = torch.ones(len(rows), rows.shape[1] - 1, dtype=torch.bool)  # (B, T)
        mask[len(rows) - request.padding :] = False
    return Batch(tokens, request.cursor, mask)
