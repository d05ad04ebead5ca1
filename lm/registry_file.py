"""The file of the registry: one SQLite table, opened so that it survives what a user's home may be.

It is written in one transaction at a time, with a write-ahead log where that works, so that readers never wait. A
damaged file is set aside. `registry.py` says what is in the table.
"""

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from lm.errors import LmError

log = logging.getLogger(__name__)

LOCK_TIMEOUT = 0.25  # seconds to wait for another process
# The shared memory that WAL needs is not shared between machines, and SQLite does not notice: it would be damaged.
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "fuse.", "orangefs")
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def place() -> Path:
    """Where the file is: `$LM_REGISTRY`, else `lm/runs.db` in the user's folder for data.

    Raises:
        LmError: the user has no home.
    """
    named = os.environ.get("LM_REGISTRY")
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    try:
        return Path(named or f"{data}/lm/runs.db").expanduser()
    except RuntimeError as error:
        raise LmError(f"there is no place for a registry ({error}); name one with LM_REGISTRY") from error


def read() -> list[dict[str, Any]]:
    """All rows, by column, in the order of their paths; [] where there is no file.

    Raises:
        LmError: it cannot be read.
    """
    path = place()
    if not path.exists():
        return []
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, timeout=LOCK_TIMEOUT, uri=True)) as database:
            database.row_factory = sqlite3.Row
            if not _columns(database):
                return []
            return [dict(row) for row in database.execute("SELECT * FROM runs ORDER BY path")]
    except sqlite3.Error as error:
        raise LmError(f"the registry {path} cannot be read: {error}; `lm runs rebuild` makes it anew") from error


def write(columns: dict[str, str], work: Callable[[sqlite3.Connection], Any]) -> None:
    """Call `work` within one transaction, after seeing that the table `runs` is there.

    Args:
        columns: of the table, with their SQL types; those that an older version of lm did not have are added.
        work: what to do with the open database.

    Raises:
        LmError: the file cannot be opened or written, or another process keeps it locked.
    """
    path = place()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        inode = path.stat().st_ino if path.exists() else None
        try:
            _transact(path, columns, work)
        except sqlite3.DatabaseError as error:
            if _code(error) not in DAMAGED:
                raise
            _set_aside(path, inode)
            _transact(path, columns, work)
    except (sqlite3.Error, OSError) as error:
        raise LmError(f"the registry {path} cannot be written: {error}") from error


def _transact(path: Path, columns: dict[str, str], work: Callable[[sqlite3.Connection], Any]) -> None:
    """With a write-ahead log, or with SQLite's usual journal where that is not wanted or refused."""
    if not on_network(path.parent):
        try:
            _transact_with(("journal_mode = WAL",), path, columns, work)
            return
        except sqlite3.OperationalError as error:
            if _code(error) in LOCKED:
                raise
    # The file may say WAL by now. Only who has it alone can read that without shared memory, and change it.
    pragmas = ("locking_mode = EXCLUSIVE", "journal_mode = DELETE", "locking_mode = NORMAL")
    _transact_with(pragmas, path, columns, work)


def _transact_with(
    pragmas: tuple[str, ...], path: Path, columns: dict[str, str], work: Callable[[sqlite3.Connection], Any]
) -> None:
    with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT, isolation_level=None)) as database:
        for pragma in pragmas:
            database.execute(f"PRAGMA {pragma}")
        database.execute("BEGIN IMMEDIATE")
        with database:
            known = _columns(database)
            if not known:
                database.execute(f"CREATE TABLE runs ({', '.join(f'{name} {kind}' for name, kind in columns.items())})")
            for name in columns.keys() - known if known else ():
                database.execute(f"ALTER TABLE runs ADD COLUMN {name} {columns[name]}")
            work(database)


def _columns(database: sqlite3.Connection) -> set[str]:
    return {name for _, name, *_ in database.execute("PRAGMA table_info(runs)")}


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary code of an error; 0 where it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _set_aside(path: Path, inode: int | None) -> None:
    """Rename a damaged file, unless another process has done so already."""
    suffix = f".damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        damaged = open(path, "rb")
    except FileNotFoundError:
        return
    with damaged:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(damaged, fcntl.LOCK_EX)  # who waited for it finds another file under the name, or none
        if path.exists() and path.stat().st_ino == inode:
            _rename(path, suffix)


def _rename(path: Path, suffix: str) -> None:
    for part in ("-wal", "-shm", ""):  # the file itself last: from then on others make a new one, with parts of its own
        file = path.with_name(path.name + part)
        if file.exists():
            os.replace(file, path.with_name(path.name + part + suffix))
    new = path.name + suffix
    log.warning("the registry %s was damaged and is now %s; `lm runs rebuild` fills a new one", path, new)


def on_network(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether a folder is on a file system that other machines see too; where it cannot be told, no."""
    try:
        lines = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
        folder = folder.resolve()
    except OSError:
        return False
    holding = [(len(line[1]), line[2]) for line in lines if folder.is_relative_to(line[1])]
    return bool(holding) and max(holding)[1].startswith(NETWORK)
