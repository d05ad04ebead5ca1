"""The registry: where a user's runs are, in one SQLite file, so that `lm runs` finds them from any folder.

It is an index and holds nothing that the run folders do not: a lost one is made again by `lm runs rebuild`. A training
writes to it through `record`, which never fails and never takes longer than `PATIENCE`.
"""

import fcntl
import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lm.errors import LmError, RequestError
from lm.runs.run import ROOT, Run, merge_evaluations
from lm.system.files import nonnegative, parse_json

# ---- registry file ---------------------------------------------------------------------------------------------------
# The file of the registry: one SQLite table, opened so that it survives what a user's home may be.
#
# It is written in one transaction at a time, with a write-ahead log where that works, so that readers never wait. A
# damaged file is set aside. `registry.py` says what is in the table.

log = logging.getLogger(__name__)

LOCK_TIMEOUT = 0.25  # seconds to wait for another process
# The shared memory that WAL needs is not shared between machines, and SQLite does not notice: it would be damaged.
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "fuse.", "orangefs")
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def place() -> Path:
    """Where the file is: `$LM_REGISTRY`, else `lm/runs/run.db` in the user's folder for data.

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
            present = _columns(database)
            if not present:
                database.execute(f"CREATE TABLE runs ({', '.join(f'{name} {kind}' for name, kind in columns.items())})")
            for name in columns.keys() - present if present else ():
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


# ---- registry --------------------------------------------------------------------------------------------------------

PATIENCE = 1.0  # seconds that a training waits for the registry, whatever is wrong with it
COLUMNS = {
    "path": "TEXT PRIMARY KEY", "name": "TEXT", "status": "TEXT", "reason": "TEXT", "step": "INTEGER",
    "max_steps": "INTEGER", "tokens": "INTEGER", "best_loss": "REAL", "val_loss": "REAL", "loss": "REAL",
    "tokens_per_second": "REAL", "started": "TEXT", "entered": "REAL", "host": "TEXT", "config_sha256": "TEXT",
    "core": "REAL",
}  # fmt: skip


def facts(run: Run) -> dict[str, Any]:
    """What the registry has of a run, read from its folder; None for what is not known (yet).

    Returns:
        By the names of `COLUMNS`; `status` is `Run.status()`, `best_loss` the lowest validation loss.
    """
    described, state = run.read("run.json"), run.read("state.json")
    config = run.config.read_bytes() if run.config.exists() else None
    latest = state.get("metrics") or {}
    return {
        "path": str(run.path.resolve()),
        "name": run.name,
        "status": run.status(),
        "reason": described.get("reason"),
        "step": state.get("step", described.get("step")),
        "max_steps": state.get("max_steps"),
        "tokens": state.get("tokens"),
        "best_loss": min(_validation_losses(run), default=None),
        "val_loss": latest.get("val/loss"),
        "loss": latest.get("train/loss"),
        "tokens_per_second": latest.get("perf/tokens_per_second"),
        "started": described.get("started"),
        "entered": described.get("entered"),
        "host": described.get("host"),
        "config_sha256": hashlib.sha256(config).hexdigest() if config is not None else None,
        "core": (merge_evaluations(run.evaluations()) or {}).get("core"),
    }


def _validation_losses(run: Run) -> list[float]:
    """As `Run.metrics` has them, without parsing the other lines, of which there may be very many."""
    try:
        lines = (run.path / "metrics.jsonl").read_bytes().split(b"\n")
    except OSError:
        return []
    kept: list[tuple[int, float]] = []
    for line in lines:
        if b'"val/loss"' not in line and b'"resumed_at"' not in line:
            continue
        try:
            entry = parse_json(line)
        except ValueError:  # a line that a kill cut short
            continue
        numbers = entry if isinstance(entry, dict) else {}
        step, loss = nonnegative(numbers.get("step")), numbers.get("val/loss")
        if (resumed_at := nonnegative(numbers.get("resumed_at"))) is not None:
            kept = [(at, loss) for at, loss in kept if at <= resumed_at]
        elif step is not None and isinstance(loss, int | float):
            kept.append((step, float(loss)))
    return [loss for _, loss in kept if loss == loss]


# ---- what a training writes ------------------------------------------------------------------------------------------


def record(run: Run, again: bool = False) -> bool:
    """Note how a run stands; to be called when it starts and when it ends.

    It never raises and returns within `PATIENCE` seconds: what goes wrong is one line in the log.

    Args:
        run: the run.
        again: it went wrong before, so the line was said.

    Returns:
        Whether it went well.
    """
    failures: list[Exception] = []

    def work() -> None:
        try:
            note([run])
        except Exception as error:  # a training must not end because of an index
            failures.append(error)

    thread = threading.Thread(target=work, name="registry", daemon=True)  # a hanging disk must not hold up the exit
    try:
        thread.start()
        thread.join(PATIENCE)
    except RuntimeError as error:  # there can be no more threads
        failures.append(error)
    if thread.is_alive() or failures:
        reason = failures[0] if failures else "it does not answer"
        level = logging.DEBUG if again else logging.WARNING
        log.log(level, "the registry of runs was not updated: %s; `lm runs rebuild` makes up for it", reason)
        return False
    return True


def note(runs: Iterable[Run], forget_others: bool = False) -> None:
    """Write what the folders say of these runs, all of it or nothing.

    Args:
        forget_others: the registry holds these runs and no others afterwards.

    Raises:
        LmError: the registry cannot be written.
    """
    rows = [facts(run) for run in runs]
    names, marks = ", ".join(COLUMNS), ", ".join(f":{name}" for name in COLUMNS)

    def insert(database: sqlite3.Connection) -> None:
        if forget_others:
            database.execute("DELETE FROM runs")
        database.executemany(f"INSERT OR REPLACE INTO runs ({names}) VALUES ({marks})", rows)

    write(COLUMNS, insert)


def forget(paths: Iterable[str]) -> None:
    """Take rows out.

    Raises:
        LmError: the registry cannot be written.
    """
    gone = [(path,) for path in paths]
    write(COLUMNS, lambda database: database.executemany("DELETE FROM runs WHERE path = ?", gone))


# ---- finding runs ----------------------------------------------------------------------------------------------------


def find(name: str, root: Path | str = ROOT) -> Run:
    """The run that a person means: a folder under `root`, else one that the registry knows, else a path.

    Raises:
        RequestError: there is none, or there are several; the message lists them or the nearest names.
    """
    here = Path(root) / name
    if (here / "run.json").is_file():
        return Run(here)
    paths = [path for row in known_runs() if ((path := Path(row["path"])) / "run.json").is_file()]
    named = [path for path in paths if path.name == name]
    if len(named) > 1:
        raise RequestError(f"several runs are named {name}; give the path of one: {', '.join(map(str, named))}")
    if named:
        return Run(named[0])
    if (Path(name) / "run.json").is_file():
        return Run(Path(name).resolve())
    names = sorted({path.name for path in paths} | {run.name for run in Run.all(root)})
    close = get_close_matches(name, names, 3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else "; `lm runs ls` lists those there are"
    raise RequestError(f"no run {name!r} under {root} or in the registry{hint}")


def known_runs() -> list[dict[str, Any]]:
    """Every run of the registry, as it was when it was noted last; [] where it cannot be read, which is logged:
    commands then know the runs under the folder that they look at."""
    try:
        return read()
    except LmError as error:
        log.warning("%s", error)
        return []
