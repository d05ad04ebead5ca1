"""How the files of a run are written: replaced whole or appended to whole, also where a disk is full or a kill comes.

`Attempts` is for what a training can do without: it says once that it is missing, and the training goes on.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lm.documents import parse_json

log = logging.getLogger(__name__)


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Replace a file so that a reader sees the old or the new text and never a part.

    Args:
        path: the file; where it cannot be replaced nothing is left beside it.
        text: what it is to hold.
        durable: wait until it would survive a power cut, too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append(descriptor: int, data: bytes) -> None:
    """Add bytes to the end of a file that was opened for appending: all of them, or none.

    Raises:
        OSError: they cannot be written; the file is as long as before.
    """
    end, done = os.fstat(descriptor).st_size, 0
    try:
        while done < len(data):
            done += os.write(descriptor, data[done:])
    except OSError:
        os.ftruncate(descriptor, end)
        raise


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Add a line of JSON to a file, after ending the last one if a kill has cut it short.

    Raises:
        OSError: it cannot be written; the file is as long as before.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        end = os.fstat(descriptor).st_size
        cut = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        append(descriptor, b"\n" * cut + (json.dumps(line, ensure_ascii=False) + "\n").encode())
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, without what a kill has cut short."""
    try:
        text = path.read_bytes()
    except OSError:
        return
    for line in text.split(b"\n"):
        try:
            entry = parse_json(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


class Attempts:
    """Writes that may fail without harm: a full disk costs a training its curve and not its life.

    The first failure is said, and that all is written again; what lies in between is missing for good.
    """

    def __init__(self) -> None:
        self._missing: set[str] = set()  # what could not be written when it was tried last

    def __call__(self, what: Path | str, write: Callable[[], Any]) -> bool:
        """Call `write`; whether it went well.

        Args:
            what: is written; for people.
            write: may raise an OSError.
        """
        try:
            write()
        except OSError as error:
            first = not self._missing
            self._missing.add(str(what))
            if first:
                reason = error.strerror or error
                log.warning("%s cannot be written: %s; until it can, what the run logs is missing", what, reason)
            return False
        if str(what) in self._missing:
            self._missing.remove(str(what))
            if not self._missing:
                log.warning("what the run logs is written again; the part in between is missing")
        return True
