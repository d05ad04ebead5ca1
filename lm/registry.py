"""The registry: where a user's runs are, in one SQLite file, so that `lm runs` finds them from any folder.

It is an index and holds nothing that the run folders do not: a lost one is made again by `lm runs rebuild`. A training
writes to it through `record`, which never fails and never takes longer than `PATIENCE`.
"""

import hashlib
import logging
import sqlite3
import threading
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lm import registry_file
from lm.documents import number, parse_json
from lm.errors import LmError, RequestError
from lm.evaluation_log import joined
from lm.runs import ROOT, Run

log = logging.getLogger(__name__)

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
        "core": (joined(run.evaluations()) or {}).get("core"),
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
        step, loss = number(numbers.get("step")), numbers.get("val/loss")
        if (resumed_at := number(numbers.get("resumed_at"))) is not None:
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

    def write(database: sqlite3.Connection) -> None:
        if forget_others:
            database.execute("DELETE FROM runs")
        database.executemany(f"INSERT OR REPLACE INTO runs ({names}) VALUES ({marks})", rows)

    registry_file.write(COLUMNS, write)


def forget(paths: Iterable[str]) -> None:
    """Take rows out.

    Raises:
        LmError: the registry cannot be written.
    """
    gone = [(path,) for path in paths]
    registry_file.write(COLUMNS, lambda database: database.executemany("DELETE FROM runs WHERE path = ?", gone))


# ---- finding runs ----------------------------------------------------------------------------------------------------


def find(name: str, root: Path | str = ROOT) -> Run:
    """The run that a person means: a folder under `root`, else one that the registry knows, else a path.

    Raises:
        RequestError: there is none, or there are several; the message lists them or the nearest names.
    """
    here = Path(root) / name
    if (here / "run.json").is_file():
        return Run(here)
    paths = [path for row in known() if ((path := Path(row["path"])) / "run.json").is_file()]
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


def known() -> list[dict[str, Any]]:
    """Every run of the registry, as it was when it was noted last; [] where it cannot be read, which is logged:
    commands then know the runs under the folder that they look at."""
    try:
        return registry_file.read()
    except LmError as error:
        log.warning("%s", error)
        return []
