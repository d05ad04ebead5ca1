"""Decoded blocks in memory, read ahead by threads.

Beside the batch's way, under `data/stream`, which says what it will want and copies rows out of what is held here.
"""

import atexit
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from queue import Empty, SimpleQueue
from weakref import WeakKeyDictionary

import numpy as np

from lm.data.shards import Shards
from lm.errors import RunError

DECODERS = 2  # threads; one reads several hundred million tokens a second
LAST_BLOCK = 5.0  # seconds that threads have at the end of the process for the blocks that they are at
TIMEOUT = 300.0  # seconds


class Decoders:
    """Threads that call a function for its result.

    They are daemons, since a read from a file system that does not answer never returns: the process can end all the
    same. Those that do return are waited for at its end, so that none is inside Arrow when the interpreter goes.
    """

    def __init__(self, threads: int) -> None:
        self._calls: SimpleQueue = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._calls,), name=f"lm-decode-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        _running.update({thread: self._calls for thread in self._threads})
        atexit.unregister(_end)
        atexit.register(_end)

    def submit(self, function: Callable, *arguments: object) -> Future:
        """The result of `function(*arguments)`, when there is one."""
        future: Future = Future()
        self._calls.put((future, function, arguments))
        return future

    def close(self) -> None:
        """Drop what is not begun; the threads end with what they are at."""
        _close(self._calls, len(self._threads))


_running: WeakKeyDictionary[threading.Thread, SimpleQueue] = WeakKeyDictionary()


def _close(calls: SimpleQueue, threads: int) -> None:
    with suppress(Empty):
        while True:
            calls.get_nowait()
    for _ in range(threads):
        calls.put(None)


def _end() -> None:
    """Before the interpreter goes."""
    running = dict(_running)
    for calls in running.values():
        _close(calls, len(running))
    until = time.monotonic() + LAST_BLOCK
    for thread in running:
        thread.join(max(0.0, until - time.monotonic()))


def _work(calls: SimpleQueue) -> None:
    while (call := calls.get()) is not None:
        future, function, arguments = call
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        del call, future, arguments  # or the last block would stay until the next one comes


class BlockBuffer:
    """Decoded blocks, never more than `capacity` tokens, decoded by threads before they are needed.

    Samples are `want`ed some way ahead of being taken, in the same order; their numbers are the clock. The block
    whose latest wanted sample is the oldest goes first, and none goes while a wanted sample is still to be taken.

    Args:
        shards: what is read.
        capacity: tokens.
        timeout: seconds that are waited for a block.
    """

    def __init__(self, shards: Shards, capacity: int, timeout: float = TIMEOUT):
        self.shards, self.capacity, self.held, self.timeout = shards, capacity, 0, timeout
        self.decoders = Decoders(DECODERS)
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
                del self.blocks[oldest], self.wanted[oldest]
                self.decoded.pop(oldest, None)
                self.held -= self.shards.blocks[oldest].tokens
            self.held += tokens
            self.blocks[block] = self.decoders.submit(self.shards.read, block)
        self.wanted[block] = sample
        return True

    def get(self, block: int) -> np.ndarray:
        """The tokens of a wanted block, as soon as they are decoded.

        Raises:
            RunError: they cannot be read, or the wait was too long; names the file.
        """
        tokens = self.decoded.get(block)
        if tokens is None:
            try:
                tokens = self.decoded[block] = self.blocks[block].result(self.timeout)
            except NotInTime as error:
                if self.blocks[block].done():  # the read's own, and no wait of ours
                    raise
                raise RunError(
                    f"{self.shards.blocks[block]}: not read after {self.timeout:g} seconds (data.timeout); does its "
                    "file system answer? Once it does, `--ckpt_path auto` goes on"
                ) from error
        return tokens

    def close(self) -> None:
        """Let go of the threads."""
        self.decoders.close()
