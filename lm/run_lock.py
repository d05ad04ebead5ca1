"""One process trains a run at a time: it holds `run.lock` in the run's folder.

It is a POSIX record lock (fcntl(2)): the system lets go of it however the process ends, so the lock of a dead one is
free at once, whoever has its number by then; children that were forked to read data do not inherit it and keep
nothing; and on a shared file system it holds between machines. A process loses such a lock as soon as it closes *any*
descriptor of the file, so nobody here opens a file that this process holds.

Where a file system has no locks, nothing is held, and whoever asks gets `LocksMissing`.
"""

import errno
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from lm.documents import number, parse_json

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

FILE = "run.lock"
TAKEN = (errno.EAGAIN, errno.EACCES)
# struct flock: how it is laid out, and where the kind of the lock stands in it.
LAYOUT, KIND = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi", 0)

_held: dict[str, int] = {}  # resolved folder -> descriptor of its lock, which stays open while this process has it


class LocksMissing(Exception):
    """The lock does not tell: the file system has none, or nobody ever took it here."""


class Holder(NamedTuple):
    """Who trains a run, as far as it is known."""

    pid: int | None
    host: str | None
    since: float | None  # seconds since 1970

    @classmethod
    def of(cls, found: Any) -> "Holder":
        """Out of a file that may hold anything."""
        found = found if isinstance(found, dict) else {}
        pid, host, since = found.get("pid"), found.get("host"), number(found.get("since"))
        return cls(pid if isinstance(pid, int) else None, host if isinstance(host, str) else None, since)

    def __str__(self) -> str:
        process = f"process {self.pid}" if self.pid else "another process"
        host = f" on {self.host}" if self.host else ""
        known = self.since is not None and self.since < 1e11
        since = time.strftime(" since %Y-%m-%d %H:%M:%SZ", time.gmtime(self.since)) if known else ""
        return process + host + since


def hold(folder: Path) -> Holder | None:
    """Take the lock of a run, until this process ends or lets go of it.

    Returns:
        None where this process has it now; else who has.

    Raises:
        LocksMissing: there are no locks here.
        OSError: the file cannot be made: the folder is gone, or is read-only.
    """
    key = str(folder.resolve())
    if key in _held:
        return None
    if fcntl is None:
        raise LocksMissing("this system has no locks")
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _read(descriptor)
        os.close(descriptor)
        if error.errno in TAKEN:
            return holder
        raise LocksMissing(error.strerror) from error
    _held[key] = descriptor
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(Holder(os.getpid(), socket.gethostname(), time.time())._asdict()).encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds, and only who has it is not known
    return None


def release(folder: Path) -> None:
    """Let go of the lock, if this process has it."""
    descriptor = _held.pop(str(folder.resolve()), None)
    if descriptor is not None:
        os.close(descriptor)


def look(folder: Path) -> tuple[Holder, bool]:
    """Who had the lock of a run last, and whether it is still taken. Nothing is taken here, not for a moment.

    Raises:
        LocksMissing: it cannot be told.
    """
    key = str(folder.resolve())
    if key in _held:
        return _read(_held[key]), True
    if fcntl is None:
        raise LocksMissing("this system has no locks")
    try:
        descriptor = os.open(folder / FILE, os.O_RDONLY)
    except OSError as error:
        raise LocksMissing(error.strerror) from error
    try:
        fields = [0] * 5
        fields[KIND] = fcntl.F_WRLCK
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(LAYOUT, *fields))
        return _read(descriptor), struct.unpack(LAYOUT, answer)[KIND] != fcntl.F_UNLCK
    except OSError as error:
        raise LocksMissing(error.strerror) from error
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Holder:
    try:
        return Holder.of(parse_json(os.pread(descriptor, 4096, 0)))
    except (OSError, ValueError):
        return Holder.of(None)


def exists(pid: int | None) -> bool:
    """Whether a process of this machine is there; where it cannot be told, yes."""
    try:
        os.kill(pid, 0)
        return True
    except (OSError, TypeError, OverflowError) as error:  # somebody else's, or none is known
        return not isinstance(error, ProcessLookupError)
