"""Batches for one rank: the samples of each optimizer step, decoded ahead by threads and assembled into rows.

Input: blocks of tokens (`data/shards`) and the order of samples (`data/sampler`); output: a `Batch`, which
`data/datamodule` hands to `training/step`. `Stream` and `Windows` decide which samples form each batch; `Assembler`
copies their rows from blocks that `BlockBuffer` decodes ahead. Decoding runs in threads of the training process:
Arrow and numpy release the interpreter lock while they work, and copying batches between processes would cost more
than reading them.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lm.data.blocks import BLOCK_TOKENS
from lm.data.config import TIMEOUT
from lm.data.parquet import IGNORED, Tokens
from lm.data.sampler import BLOCKS_AHEAD, Order
from lm.data.shards import Shards
from lm.errors import DataError, RunError
from lm.system.process import reader_pool

if TYPE_CHECKING:
    from lm.data.mixture import Mixture

DECODERS = 2  # threads; one decodes some hundred million tokens a second
SAMPLES_LOCATED = 1024  # in one call of numpy
SAMPLES_AHEAD = 4096  # decoded ahead at most; fewer if BLOCKS_AHEAD blocks hold fewer windows

# ---- batch -----------------------------------------------------------------------------------------------------------


class Batch:
    """Rows of T + 1 consecutive tokens: the first T are inputs, the last T their targets.

    In training, a batch is one rank's part of an optimizer step, which `split` divides into micro-batches. Tokens
    keep the dtype they are stored in until they are on the device. It is not a dataclass, since Lightning takes
    dataclasses apart, field by field.
    """

    def __init__(
        self,
        tokens: Tensor,
        consumed: int = 0,
        mask: Tensor | None = None,
        counted: int | None = None,
        row_documents: tuple[int, ...] | None = None,
        sources: Tensor | None = None,
    ) -> None:
        self.tokens = tokens  # (B, T + 1) uint16 or int32, on any device
        # Samples that are trained on once this optimizer step is done, over all ranks, and so the first sample of the
        # next step, however far the loader has read ahead. 0 outside of training.
        self.consumed = consumed
        self.mask = mask  # (B, T) bool, False where a target does not count; None when all of them count
        self._counted = counted  # number of True values of the mask, if known
        self.row_documents = row_documents  # upper bounds on the documents in each row's inputs; None: not counted
        self.sources = sources  # (B,) int64, source of each row in a mixture, from 0; None: a single source

    @property
    def input_ids(self) -> Tensor:
        """(B, T) int64."""
        return _to_int64(self.tokens[:, :-1])

    @property
    def labels(self) -> Tensor:
        """(B, T) int64: the token after each input, -100 where the mask is False."""
        labels = _to_int64(self.tokens[:, 1:])
        return labels if self.mask is None else labels.masked_fill_(~self.mask, IGNORED)

    @property
    def num_targets(self) -> int:
        """Number of targets that count, counted on the host, so that no device synchronization is needed."""
        if self.mask is None:
            return self.tokens.shape[0] * (self.tokens.shape[1] - 1)
        if self._counted is None:
            self._counted = int(self.mask.sum())
        return self._counted

    def split(self, rows: int) -> "list[Batch]":
        """Micro-batches of `rows` rows each, in order. They are views, and carry no `consumed`."""
        of_rows = {"mask": self.mask, "row_documents": self.row_documents, "sources": self.sources}
        of_rows = {name: values for name, values in of_rows.items() if values is not None}
        parts = [slice(start, start + rows) for start in range(0, len(self.tokens), rows)]
        return [Batch(self.tokens[part], **{name: values[part] for name, values in of_rows.items()}) for part in parts]

    def count_documents(self, eos_id: int) -> None:
        """Count the documents of each row, while the tokens are on the host."""
        ends = (self.tokens[:, :-1].numpy() == eos_id).sum(1)  # (B,)
        self.row_documents = tuple((ends + 1).tolist())

    @property
    def max_documents(self) -> int | None:
        """Upper bound on the documents in all rows: a power of two, so that few distinct values occur."""
        return None if self.row_documents is None else 1 << (sum(self.row_documents) - 1).bit_length()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Copy the batch to page-locked memory, from which a GPU can copy asynchronously."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        mask, counted = (None, None) if self.mask is None else (function(self.mask), self.num_targets)
        sources = None if self.sources is None else function(self.sources)
        return Batch(function(self.tokens), self.consumed, mask, counted, self.row_documents, sources)


def _to_int64(tokens: Tensor) -> Tensor:
    """An int64 copy of uint16 or int32 tokens, on their device."""
    if tokens.dtype == torch.uint16:  # few CUDA kernels take uint16: view as int16, clear the extended sign bit
        return tokens.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    return tokens.to(torch.int64, copy=True)


# ---- which samples form each batch ----------------------------------------------------------------------------------


class Request(NamedTuple):
    """A batch to be made: its samples in order, and the number of padding rows at the end."""

    samples: np.ndarray
    consumed: int = 0  # as `Batch.consumed`
    padding: int = 0
    sources: np.ndarray | None = None  # source of each sample of a mixture


class Stream(IterableDataset):
    """The endless training stream of one rank.

    Each batch is this rank's part of an optimizer step, which takes the next `global_batch` samples. Ranks and
    micro-batches only divide them, so that any division sees the same samples in every step: rank `rank` of `world`
    takes every `world`-th. `start` is the first sample not trained on yet. At most `shuffle_buffer` tokens of
    decoded blocks are held; None takes what the order's lanes need.
    """

    def __init__(
        self,
        shards: Shards,
        order: "Order | Mixture",
        *,
        seq_len: int,
        start: int,
        global_batch: int,
        rank: int = 0,
        world: int = 1,
        shuffle_buffer: int | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.shards, self.order, self.seq_len, self.start = shards, order, seq_len, start
        self.global_batch, self.rank, self.world = global_batch, rank, world
        self.buffer = shuffle_buffer or (order.lanes + BLOCKS_AHEAD) * shards.index.largest.tokens
        self.timeout = timeout

    def requests(self) -> Iterator[Request]:
        """The samples of this rank in each optimizer step; endless."""
        for start in count(self.start, self.global_batch):
            end = start + self.global_batch
            samples = np.arange(start + self.rank, end, self.world)
            yield Request(samples, consumed=end, sources=self.order.source_of(samples))

    def __iter__(self) -> Iterator[Batch]:
        return Assembler(self.shards, self.order, self.seq_len, self.requests(), self.buffer, self.timeout).batches()


class Windows(IterableDataset):
    """One pass over the first `limit` windows, or all, in stored order, for evaluation.

    Each window is counted by exactly one rank. All ranks yield the same number of batches, since sharded models run
    in lockstep: missing rows are padding, whose mask is False. A rank takes one range of consecutive
    windows. `source` is the index of these rows' source in a mixture.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        seq_len: int,
        micro_batch: int,
        limit: int | None = None,
        rank: int = 0,
        world: int = 1,
        timeout: float = TIMEOUT,
        source: int | None = None,
    ) -> None:
        self.shards, self.seq_len, self.micro_batch, self.timeout = shards, seq_len, micro_batch, timeout
        self.order = Order(shards.index.windows(seq_len), seed=0, shuffle=False)
        self.total = self.order.total if limit is None else min(limit, self.order.total)
        per_rank = -(-self.total // world)
        self.first, self.last = min(rank * per_rank, self.total), min((rank + 1) * per_rank, self.total)
        self.batches = -(-per_rank // micro_batch)
        self.buffer = (1 + BLOCKS_AHEAD) * shards.index.largest.tokens
        self.sources = None if source is None else np.full(micro_batch, source)  # (B,)

    def requests(self) -> Iterator[Request]:
        for first in range(self.first, self.first + self.batches * self.micro_batch, self.micro_batch):
            samples = np.arange(first, min(first + self.micro_batch, self.last))
            yield Request(samples, padding=self.micro_batch - len(samples), sources=self.sources)

    def __iter__(self) -> Iterator[Batch]:
        return Assembler(self.shards, self.order, self.seq_len, self.requests(), self.buffer, self.timeout).batches()


# ---- rows from blocks ------------------------------------------------------------------------------------------------


class Assembler:
    """Makes batches from requests, holding at most `capacity` tokens of decoded blocks (but at least one block)."""

    def __init__(
        self,
        shards: Shards,
        order: "Order | Mixture",
        seq_len: int,
        requests: Iterator[Request],
        capacity: int,
        timeout: float = TIMEOUT,
    ) -> None:
        self.shards, self.seq_len = shards, seq_len
        self.stride = shards.index.stride(seq_len)
        self.buffer = BlockBuffer(shards, capacity, timeout)
        self.located = _locate_many(order, requests)
        self.waiting: deque = deque()  # located requests
        self.pending: deque[int] = deque()  # blocks of these that were not requested of the buffer yet
        # About BLOCKS_AHEAD blocks begin within this many samples.
        self.ahead = min(SAMPLES_AHEAD, max(1, BLOCKS_AHEAD * BLOCK_TOKENS // seq_len))

    def batches(self) -> Iterator[Batch]:
        """Yield a batch for each request; DataError names the file of a block that cannot be read."""
        try:
            self.look_ahead()
            while self.waiting:
                batch = self.fill(*self.waiting.popleft())
                self.look_ahead()  # so that decoding continues while the batch is trained on
                yield batch
        except RunError as error:
            raise DataError(str(error)) from error
        finally:
            self.buffer.close()

    def look_ahead(self) -> None:
        """Request the blocks of the next samples, as far as they fit into the buffer."""
        while self.buffer.requested - self.buffer.returned < self.ahead:
            if not self.pending:
                located = next(self.located, None)
                if located is None:
                    return
                self.waiting.append(located)
                self.pending.extend(located[1])
            elif self.buffer.request(self.pending[0]):
                self.pending.popleft()
            else:
                return

    def fill(self, request: Request, blocks: list[int], windows: list[int]) -> Batch:
        """Make the batch of a request; sample i is window `windows[i]` of block `blocks[i]`."""
        buffer, length = self.buffer, self.seq_len
        rows = np.empty((len(blocks) + request.padding, length + 1), self.shards.column.row_dtype)  # (B, T + 1)
        rows[len(blocks) :] = 0
        mask = np.ones((len(rows), length), bool)  # (B, T)
        mask[len(blocks) :] = False
        for place, (block, window) in enumerate(zip(blocks, windows)):
            if buffer.requested == buffer.returned:
                self.look_ahead()  # the buffer was full; the samples copied so far no longer need their blocks
            first = window * self.stride
            ids, targets = buffer.get(block)
            rows[place] = ids[first : first + length + 1]
            if targets is not None:
                mask[place] = targets[first + 1 : first + length + 1]
        marks = None if mask.all() else torch.from_numpy(mask)
        sources = None if request.sources is None else torch.from_numpy(request.sources)
        return Batch(torch.from_numpy(rows), request.consumed, marks, sources=sources)


def _locate_many(
    order: "Order | Mixture", requests: Iterator[Request]
) -> Iterator[tuple[Request, list[int], list[int]]]:
    """Requests with the block and window of each sample, located in groups; the first group is small, to start soon."""
    size = 1
    while group := list(islice(requests, size)):
        blocks, windows = order.locate(np.concatenate([request.samples for request in group]))
        ends = np.cumsum([len(request.samples) for request in group])
        for request, end in zip(group, ends.tolist()):
            part = slice(end - len(request.samples), end)
            yield request, blocks[part].tolist(), windows[part].tolist()
        size = max(1, SAMPLES_LOCATED // max(1, ends[-1] // len(group)))


class BlockBuffer:
    """Blocks decoded by threads before they are needed; holds at most `capacity` tokens.

    Each sample requests its block (`request`) before it gets it (`get`), in the same order. The block whose latest
    requesting sample is the oldest is dropped first, but never before that sample has got it.
    """

    def __init__(self, shards: Shards, capacity: int, timeout: float = TIMEOUT) -> None:
        self.shards, self.capacity, self.timeout = shards, capacity, timeout
        self.tokens = 0  # of the blocks in the buffer
        self.requested = self.returned = 0  # samples so far
        self.decoders = reader_pool(DECODERS)
        self.blocks: OrderedDict[int, Future] = OrderedDict()  # in the order in which they are dropped
        self.latest: dict[int, int] = {}  # block -> the latest sample that requested it

    def request(self, block: int) -> bool:
        """Start decoding `block` for the next sample; False if it does not fit yet."""
        if block in self.blocks:
            self.blocks.move_to_end(block)
        else:
            tokens = self.shards.block(block).tokens
            while self.blocks and self.tokens + tokens > self.capacity:
                oldest = next(iter(self.blocks))
                if self.latest[oldest] >= self.returned:
                    return False
                del self.blocks[oldest], self.latest[oldest]
                self.tokens -= self.shards.block(oldest).tokens
            self.tokens += tokens
            self.blocks[block] = self.decoders.submit(self.shards.read_tokens, block)
        self.latest[block] = self.requested
        self.requested += 1
        return True

    def get(self, block: int) -> Tokens:
        """Return the tokens of the next sample's block; waits until they are decoded."""
        self.returned += 1
        future = self.blocks[block]
        while True:
            try:
                return future.result(self.timeout)
            except TimeoutError as error:
                if future.done():  # the read itself raised it
                    raise
                from lm.system.remote import is_asked_to_wait

                if not is_asked_to_wait():
                    raise RunError(
                        f"{self.shards.block(block)}: not read after {self.timeout:g} seconds (data.timeout); does its "
                        "file system answer?"
                    ) from error

    def close(self) -> None:
        """Cancel reads that have not begun; the threads end after their current block."""
        self.decoders.shutdown(wait=False, cancel_futures=True)
