"""The registry: the runs of a user in one SQLite file, so that `lm runs` finds them from any folder.

It is an index of the run folders and may be deleted: `lm runs rebuild` makes it again. A run writes to it
through `record_run`, which never fails.
"""

import logging
import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from lm.errors import LmError
from lm.runs.facts import run_row
from lm.runs.run import Run

log = logging.getLogger(__name__)

LOCK_TIMEOUT = 0.25  # seconds to wait for another process to finish writing
COLUMNS = {
    "path": "TEXT PRIMARY KEY", "name": "TEXT", "status": "TEXT", "reason": "TEXT", "step": "INTEGER",
    "max_steps": "INTEGER", "tokens": "INTEGER", "best_loss": "REAL", "val_loss": "REAL", "loss": "REAL",
    "tokens_per_second": "REAL", "started": "TEXT", "entered": "REAL", "host": "TEXT", "config_sha256": "TEXT",
    "core": "REAL",
}  # fmt: skip


def place() -> Path:
    """Path of the registry: `$LM_REGISTRY`, else `lm/runs.db` in the user's data folder."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(os.environ.get("LM_REGISTRY") or f"{data}/lm/runs.db").expanduser()


def known_runs() -> list[dict[str, Any]]:
    """The rows of all runs, as last written; [] if there is no registry.

    An unreadable registry is logged and gives [] too: commands then know only the runs in the folder they look at.
    """
    path = place()
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", timeout=LOCK_TIMEOUT, uri=True)) as database:
            database.row_factory = sqlite3.Row
            rows = database.execute("SELECT * FROM runs ORDER BY path")  # an older version of lm had fewer columns
            return [{**dict.fromkeys(COLUMNS), **dict(row)} for row in rows]
    except sqlite3.Error as error:
        log.warning("the registry %s cannot be read: %s; `lm runs rebuild` makes it anew", path, error)
    return []


def note(runs: Iterable[Run]) -> None:
    """Write the rows of these runs, all of them or none; LmError if the registry cannot be written."""
    rows = [run_row(run) for run in runs]
    names, marks = ", ".join(COLUMNS), ", ".join(f":{name}" for name in COLUMNS)
    _write(lambda database: database.executemany(f"INSERT OR REPLACE INTO runs ({names}) VALUES ({marks})", rows))


def forget(paths: Iterable[str]) -> None:
    """Remove the rows of these run folders; LmError if the registry cannot be written."""
    _write(lambda database: database.executemany("DELETE FROM runs WHERE path = ?", [(path,) for path in paths]))


def rebuild(runs: Iterable[Run]) -> None:
    """Replace the registry, whatever its state, by a new one of these runs; LmError if it cannot be written."""
    path = place()
    try:
        for part in ("", "-wal", "-shm"):
            path.with_name(path.name + part).unlink(missing_ok=True)
    except OSError as error:
        raise LmError(f"the registry {path} cannot be written: {error.strerror}") from error
    note(runs)


def _write(work: Callable[[sqlite3.Connection], Any]) -> None:
    """Call `work` in one transaction on the table `runs`."""
    path = place()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT, isolation_level="IMMEDIATE")) as database:
            database.execute("PRAGMA journal_mode = WAL")  # readers never wait
            with database:
                columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
                database.execute(f"CREATE TABLE IF NOT EXISTS runs ({columns})")
                work(database)
    except (sqlite3.Error, OSError) as error:
        raise LmError(f"the registry {path} cannot be written: {error}") from error


def record_run(run: Run) -> None:
    """Write a run's row when it starts or ends; a failure is logged: a run must not end because of an index."""
    try:
        note([run])
    except Exception as error:
        log.warning("the registry of runs was not updated: %s; `lm runs rebuild` makes it anew", error)
