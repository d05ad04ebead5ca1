"""Writes TensorBoard's events, so that a disk that is full or gone costs a training its curves and nothing else.

TensorBoard's own writer has a thread that ends at the first failure, with a traceback, and every write after it raises.
Here an event is written at once, whole or not at all, and the next one is tried again. There are a few a log line.
"""

import os
import socket
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter

from lm.run_files import append

_files = count()  # of this process, for their names


class EventWriter:
    """One event file, with the methods of tensorboard's `EventFileWriter`.

    Args:
        folder: where it goes, under a name that TensorBoard knows.
        attempt: calls a function that may raise an OSError, see `lm.run_files.Attempts`.
    """

    def __init__(self, folder: Path, attempt: Callable[[str, Callable[[], Any]], bool]) -> None:
        self._folder = folder
        self._attempt = attempt
        self._descriptor: int | None = None
        self._records = RecordWriter(self)

    def get_logdir(self) -> str:
        """The folder, as torch asks for it."""
        return str(self._folder)

    def add_event(self, event: Event) -> None:
        """Write an event."""
        self._attempt("TensorBoard's event file", lambda: self._add(event))

    def _add(self, event: Event) -> None:
        if self._descriptor is None:
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
            self._descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if os.fstat(self._descriptor).st_size == 0:
            self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._records.write(event.SerializeToString())

    def write(self, record: bytes) -> None:
        """Put a whole record, as `RecordWriter` makes them, into the file."""
        append(self._descriptor, record)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """End the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _Files(FileWriter):
    def __init__(self, events: EventWriter) -> None:
        self.event_writer = events


class Summaries(SummaryWriter):
    """torch's SummaryWriter, which makes events of values, texts and histograms, on top of an `EventWriter`."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        super().__init__(log_dir=events.get_logdir())

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is None:
            self.file_writer = _Files(self._events)
            self.all_writers = {self.get_logdir(): self.file_writer}
        return self.file_writer
