"""Loader processes: each makes every n-th batch of a stream, and they are taken in turn.

Beside the batch's way, between `data/loader` and `data/datamodule`; most trainings do without (`data.num_workers: 0`).
The processes are begun anew and not forked, since neither Arrow's threads nor the client of an object store survive a
fork, and a forked process would hold what the training has open: its run's lock, the pipes of the other processes.
"""

import atexit
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

import torch

from lm.data.encode import end_with_parent
from lm.data.loader import Batch, Stream
from lm.errors import DataError, LmError

STARTING = 300.0  # seconds for a process to begin; torch alone takes seconds to import
GRACE = 5.0  # seconds that a process gets beyond those that it gives a block itself, to say which one it was
AHEAD = 2  # batches that each process sends before they are asked for
# The training process decides what a signal means; to the whole group of processes it may be sent all the same.
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class Workers:
    """The batches of a stream, made by processes.

    Args:
        stream: what they make.
        count: how many processes.

    Raises:
        LmError: while iterating, what a process raised.
        DataError: while iterating, a process died, or gave no batch for so long that it must hang; names it.
    """

    def __init__(self, stream: Stream, count: int) -> None:
        self.stream, self.count = stream, count

    def __iter__(self) -> Iterator[Batch]:
        workers: list[_Worker] = []

        def end() -> None:
            atexit.unregister(end)
            for process in [worker.process for worker in workers if worker.process.pid]:
                process.kill()  # it writes nothing that could be half done
                process.join(GRACE)

        atexit.register(end)  # where an error keeps this iterator alive: they do not hear multiprocessing's SIGTERM
        try:
            for index in range(self.count):
                workers.append(_Worker(self.stream, index, self.count))
                workers[-1].start()
            for worker in workers:
                worker.take(STARTING)
            while True:
                for worker in workers:
                    tokens, cursor, mask, bad = worker.take(self.stream.reading.timeout + GRACE)
                    yield Batch(torch.from_numpy(tokens), cursor, None if mask is None else torch.from_numpy(mask), bad)
        finally:
            end()


class _Worker:
    """One process, and the thread that takes what it sends: a stopped process may stop within a message."""

    def __init__(self, stream: Stream, index: int, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, self.other = context.Pipe()
        self.received: SimpleQueue = SimpleQueue()
        self.name = f"loader process {index + 1} of {count}"
        self.process = context.Process(
            target=_make, args=(stream, index, count, self.other), daemon=True, name=self.name
        )

    def start(self) -> None:
        """Begin; a signal may end the training just then, and it must know of the process."""
        resource_tracker.ensure_running()  # which unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # from its first moment
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.other.close()  # so that its end is noticed
        threading.Thread(target=_receive, args=(self.pipe, self.received), daemon=True, name="lm-receive").start()

    def take(self, seconds: float) -> Any:
        """What it sent next; it may make one more."""
        with suppress(OSError):  # where it is gone, what it sent tells
            self.pipe.send_bytes(b"1")
        try:
            message = self.received.get(timeout=seconds)
        except Empty:
            raise DataError(
                f"{self.name} (pid {self.process.pid}) gave nothing for {seconds:g} seconds (see data.timeout), so it "
                "hangs; `--ckpt_path auto` goes on from the newest checkpoint"
            ) from None
        if isinstance(message, LmError):
            raise message
        if isinstance(message, EOFError):
            self.process.join(GRACE)
            code = self.process.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
            memory = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
            raise DataError(
                f"{self.name} (pid {self.process.pid}) {how}{memory}; `--ckpt_path auto` goes on from the newest "
                "checkpoint"
            )
        return message


def _receive(pipe: Connection, received: SimpleQueue) -> None:
    """Put everything that comes into the queue, and an EOFError at its end."""
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            message = EOFError()
        received.put(message)
        if isinstance(message, EOFError):
            return


def _make(stream: Stream, index: int, count: int, pipe: Connection) -> None:
    """What a process does: say that it is there, then make batches for as long as they are taken."""
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        pipe.send("ready")
        pipe.recv_bytes()
        for number, batch in enumerate(stream.batches(index, count)):
            if number >= AHEAD:
                pipe.recv_bytes()
            mask = None if batch.mask is None else batch.mask.numpy()
            pipe.send((batch.tokens.numpy(), batch.cursor, mask, batch.bad))
    except LmError as error:
        with suppress(OSError):
            pipe.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # nobody takes them any more
        pass
