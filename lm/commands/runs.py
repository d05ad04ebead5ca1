"""`lm runs`: every run of a user at a glance, its removal, and the registry made anew. Reads files, imports no torch.

`run_page` has one run on a page, `run_compare` several in one chart, `run_export` a run for others.
"""

import json as jsonlib
import logging
import math
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lm import registry, registry_file, run_lock
from lm.errors import LmError, RequestError
from lm.quantities import format_bytes, format_count
from lm.runs import ROOT, Run

log = logging.getLogger(__name__)

SHOWN = 20  # runs that `ls` shows without --all
STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow", "interrupted": "yellow", "failed": "red",
          "dead": "red", "gone": "dim"}  # fmt: skip
EXPLAINED = ("stopped", "interrupted", "failed")  # statuses that have a reason worth a line


def ls(all: bool = False, root: str = str(ROOT), json: bool = False) -> None:
    """Every run that the registry knows and every run under a folder, the newest last.

    Args:
        all: Older runs too.
        root: Folder whose runs are listed even where the registry does not know them.
        json: Print one JSON list instead.
    """
    found = collect(root)
    shown = found if all or json else found[-SHOWN:]
    if json:
        print(to_json(shown))
        return
    console = Console(highlight=False, soft_wrap=True)
    if not found:
        console.print(f"no runs under {root} or in the registry: start one with `lm fit --config tiny.yaml`")
    _table(shown, console)
    if len(found) > len(shown):
        console.print(f"{len(found) - len(shown)} older runs: --all shows them")


def rm(run: str, yes: bool = False, root: str = str(ROOT)) -> None:
    """Remove a run with its checkpoints, after a question.

    Args:
        run: Name under the root or in the registry, or a path.
        yes: Do not ask.
        root: Folder of the runs.
    """
    gone = [row["path"] for row in registry.known() if row["name"] == run and not Path(row["path"]).exists()]
    try:
        folder = registry.find(run, root)
    except RequestError:
        if not gone:
            raise
        registry.forget(gone)
        print(f"forgot {', '.join(gone)}, which was gone")
        return
    path = folder.path.resolve()
    folder.refuse_if_trained()
    checkpoints = [step.name for step in folder.steps().values()]
    print(f"{path}: {folder.status()}, {format_bytes(size(path))}, checkpoints: {', '.join(checkpoints) or 'none'}")
    if not yes:
        if not sys.stdin.isatty():
            raise RequestError("nobody is there to be asked: give --yes to remove it")
        if input("remove it for good? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return
    with suppress(OSError):  # of a disk that cannot be written to, which the next line says
        folder.hold()
    dead = path.with_name(f".removed-{path.name}-{os.getpid()}")
    os.rename(path, dead)
    run_lock.release(path)  # a network's file system cannot remove a folder with a file that is open
    (dead / "run.json").unlink()  # what a kill leaves here is no run
    shutil.rmtree(dead)
    if folder.path.is_symlink():
        folder.path.unlink()
    try:
        registry.forget([str(path)])
    except LmError as error:
        log.warning("%s; `lm runs ls` leaves removed runs out all the same", error)
    print(f"removed {path}")


def rebuild(roots: list[str]) -> None:
    """Make the registry anew from the run folders.

    Args:
        roots: Folders of runs to look in, besides `checkpoints` and those that the registry knows.
    """
    for root in roots:
        if not Path(root).is_dir():
            raise RequestError(f"{root} is not a folder of runs")
    known = [str(Path(row["path"]).parent) for row in registry.known()]
    folders = sorted({Path(root).resolve() for root in (*roots, *known, ROOT)})
    runs = [run for folder in folders for run in Run.all(folder)]
    registry.note(runs, forget_others=True)
    print(f"{len(runs)} runs are in {registry_file.place()}")


# ---- looking ---------------------------------------------------------------------------------------------------------


def collect(root: str) -> list[dict[str, Any]]:
    """The facts of every run, read from its folder, by when it was started or gone on with last.

    A run whose folder was removed is taken out of the registry. One whose folder cannot be reached, because what it
    lies in is not there either, has the status `gone` and what the registry remembers.
    """
    found, removed = {}, []
    for row in registry.known():
        path = Path(row["path"])
        if (path / "run.json").is_file():
            found[row["path"]] = registry.facts(Run(path))
        elif path.parent.is_dir():
            removed.append(row["path"])
        else:
            found[row["path"]] = {**row, "status": "gone"}
    for run in Run.all(root):
        if str(run.path.resolve()) not in found:
            found[str(run.path.resolve())] = registry.facts(run)
    if removed:
        try:
            registry.forget(removed)
        except LmError as error:
            log.warning("%s", error)
    return sorted(found.values(), key=lambda run: (run.get("entered") or 0.0, run["name"]))


def size(path: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.lstat().st_size for file in path.rglob("*"))


def to_json(value: Any) -> str:
    """JSON that every program reads: numbers that are not finite are null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return jsonlib.dumps(finite(value), ensure_ascii=False, allow_nan=False)


def age(seconds: float) -> str:
    """How long ago, in one unit: 40s, 12m, 5h, 3d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


# ---- the table -------------------------------------------------------------------------------------------------------

HEADINGS = ("run", "status", "step", "best loss", "loss", "tokens/s", "age")


def _table(found: list[dict[str, Any]], console: Console) -> None:
    """One table in which the runs of a folder stand together, the folder with the newest run last."""
    folders: dict[Path, list[dict[str, Any]]] = {}
    for run in reversed(found):
        folders.setdefault(Path(run["path"]).parent, []).insert(0, run)
    rows = {run["path"]: _cells(run) for run in found}
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows.values(), strict=True)]
    widths[0] = min(widths[0], max(8, console.width - sum(widths[1:]) - 2 * len(widths)))
    for folder, runs in reversed(folders.items()):
        where = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        console.print(Text(str(where), style="bold"))
        console.print(_line(HEADINGS, widths, "dim"))
        for run in runs:
            console.print(_line(rows[run["path"]], widths, STYLES.get(run["status"], "")))
            if run["status"] in EXPLAINED and run["reason"]:
                reason = Text(f"    {' '.join(run['reason'].split())}", style="dim")
                reason.truncate(console.width, overflow="ellipsis")
                console.print(reason)


def _cells(run: dict[str, Any]) -> tuple[str, ...]:
    step, last = run.get("step"), run.get("max_steps")
    steps = "" if step is None else f"{_steps(step)}/{_steps(last)}" if last else _steps(step)
    rate = run.get("tokens_per_second")
    since = "" if not run.get("entered") else age(time.time() - run["entered"])
    losses = ["" if run.get(key) is None else f"{run[key]:.4g}" for key in ("best_loss", "loss")]
    return run["name"], run["status"], steps, *losses, "" if rate is None else format_count(float(rate)), since


def _steps(number: int) -> str:
    return str(number) if number < 100_000 else format_count(number)


def _line(cells: tuple[str, ...], widths: list[int], style: str) -> Text:
    name, status, *rest = cells
    if len(name) > widths[0]:
        name = name[: widths[0] - 1] + "…"
    line = Text(f"  {name:<{widths[0]}}  ", style="dim" if cells is HEADINGS else "")
    line.append(f"{status:<{widths[1]}}", style=style)
    for cell, width in zip(rest, widths[2:], strict=True):
        line.append(f"  {cell:>{width}}")
    return line
