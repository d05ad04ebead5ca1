"""`lm runs ls`, `rm`, `check` and `rebuild`: all runs of a user, and their registry.

Nothing here imports torch. `cli/runs_show` and `cli/runs_compare` have the other commands.
"""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lm.cli.charts import plain_table
from lm.cli.runs_show import STYLES
from lm.errors import LmError, RequestError
from lm.runs import registry
from lm.runs.expectations import acceptance, expectations
from lm.runs.facts import run_row
from lm.runs.find import find_run, find_runs
from lm.runs.run import ROOT, Run
from lm.system.files import folder_bytes, remove_folder
from lm.system.parsing import to_json
from lm.system.process import harmless
from lm.system.units import format_bytes, format_count, format_duration, plural

SHOWN = 20  # runs of other folders that `ls` shows without --all
EXPLAINED = ("stopped", "interrupted", "failed")  # statuses that have a reason worth a line


def ls(all: bool = False, tag: str | None = None, root: str = str(ROOT), json: bool = False) -> None:
    """List every run under a folder, then the runs of other folders that are in the registry; the newest last.

    Args:
        all: Include older runs of other folders.
        tag: Only runs with this tag.
        root: Folder whose runs are listed first.
        json: Print one JSON list instead.
    """
    rows = [run for run in collect_runs(root) if tag in (None, *(run.get("tags") or ()))]
    if json:
        print(to_json(rows))
        return
    root_folder = Path(root).resolve()
    under_root = [run for run in rows if Path(run["path"]).parent == root_folder]
    others = [run for run in rows if run not in under_root]
    shown = others if all else others[-SHOWN:]
    console = Console(highlight=False)
    if not rows and tag is not None:
        console.print(f"no run has the tag {tag}")
    elif not under_root and tag is None:
        where = f"under {root}" if others else f"under {root} or in the registry"
        console.print(f"no runs {where}: start one with `lm fit --config tiny.yaml`")
    _print_table([*shown, *under_root], console)
    if len(others) > len(shown):
        console.print(f"{plural(len(others) - len(shown), 'older run')} of other folders: --all shows them")


def rebuild(roots: list[str]) -> None:
    """Rebuild the registry from the run folders.

    Args:
        roots: Folders of runs to look in, besides `checkpoints` and the folders in the registry.
    """
    for root in roots:
        if not Path(root).is_dir():
            raise RequestError(f"{root} is not a folder of runs")
    known = [str(Path(row["path"]).parent) for row in registry.known_runs()]
    folders = sorted({Path(root).resolve() for root in (*roots, *known, ROOT)})
    runs = [run for folder in folders for run in Run.all(folder)]
    registry.rebuild(runs)
    print(f"{registry.place()} has {plural(len(runs), 'run')}")


def rm(runs: list[str], yes: bool = False, root: str = str(ROOT)) -> None:
    """Remove runs with all of their checkpoints; asks first.

    Args:
        runs: Names under the root, such as 'lr-*' in quotes, or paths.
        yes: Remove them without asking.
        root: Folder of the runs.
    """
    if not runs:
        raise RequestError("name the runs to remove, as `lm runs rm NAME`; `lm runs ls` lists them")
    folders = find_runs(runs, root)
    typed = {Path(name).resolve() for name in runs}
    for run in folders:
        if run.path.parent.resolve() != Path(root).resolve() and run.path.resolve() not in typed:
            raise RequestError(f"run {run.name} is not under {root}: to remove it, give its path, {run.path}")
        if run.status() == "running":
            raise RequestError(f"run {run.name} is still being trained")
        step, size = run_row(run)["step"] or 0, format_bytes(folder_bytes(run.path))
        print(f"{run.path}: {plural(step, 'step')}, {plural(len(run.steps()), 'checkpoint')}, {size}")
    if not yes:
        if not sys.stdin.isatty():
            raise RequestError("give --yes to remove them without being asked")
        if input("remove? [y/N] ").strip().lower() not in ("y", "yes"):
            return
    for run in folders:
        remove_folder(run.path)
    print("removed")
    with suppress(LmError):  # `lm runs ls` leaves them out all the same
        registry.forget(str(run.path.resolve()) for run in folders)


def check(run: str, root: str = str(ROOT), json: bool = False) -> None:
    """Check whether a run ended as its config expects: exit code 0 if it did, 1 if not.

    Args:
        run: Name under the root or in the registry, or a path.
        root: Folder of the runs.
        json: Print one JSON object instead of lines.
    """
    folder = find_run(run, root)
    checks, status = expectations(folder), folder.status()
    if not checks:
        raise RequestError(
            f"run {folder.name} has nothing to check: a config's `expect` has bounds, such as "
            "`expect: {val/loss: [3.2, 3.5]}`"
        )
    if status == "running":
        raise RequestError(f"run {folder.name} is still being trained")
    judged = acceptance(checks)
    passed = judged["passed"] and status == "finished"
    if json:
        print(to_json({**judged, "passed": passed, "status": status}))
    else:
        print(status, *checks, sep="\n")
    if not passed:
        missed = [str(each) for each in checks if not each.met] or [f"it is {status}, not finished"]
        raise LmError(f"run {folder.name} did not pass: {'; '.join(missed)}")


def collect_runs(root: str) -> list[dict[str, Any]]:
    """The facts of every run, read from its folder, by when it was last started or resumed.

    A run whose folder is missing is removed from the registry. Where the folder above is missing too, such as on a disk
    that is not mounted, the run has the status `gone` and the facts of the registry.
    """
    rows, removed = {}, []
    for row in registry.known_runs():
        path = Path(row["path"])
        if (path / "run.json").is_file():
            rows[row["path"]] = run_row(Run(path))
        elif path.parent.is_dir():
            removed.append(row["path"])
        else:
            rows[row["path"]] = {**row, "status": "gone"}
    for run in Run.all(root):
        path = str(run.path.resolve())
        rows[path] = rows.get(path) or run_row(run)
    if removed:
        with suppress(LmError):  # where it cannot be written to, they are left out all the same
            registry.forget(removed)
    return sorted(rows.values(), key=lambda run: (run.get("entered") or 0.0, run["name"]))


def _print_table(all_runs: list[dict[str, Any]], console: Console) -> None:
    """The runs of each folder, the last run's folder first."""
    folders: dict[Path, list[dict[str, Any]]] = {}
    for run in reversed(all_runs):
        folders.setdefault(Path(run["path"]).parent, []).insert(0, run)
    for folder, runs in folders.items():
        where = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        console.print(Text(str(where), style="bold"), soft_wrap=True)
        heads = ("run", "status", "step", "val loss", "loss", "tokens/s", "age")
        console.print(plain_table(heads, "ttnnnnn", map(_cells, runs)))


def _cells(run: dict[str, Any]) -> tuple[str | Text, ...]:
    status, reason = Text(run["status"], style=STYLES.get(run["status"], "")), run.get("reason")
    if run["status"] in EXPLAINED and reason:
        status.append(f": {' '.join(harmless(reason).split())}", style="dim")
        status.truncate(50, overflow="ellipsis")  # `lm runs show` has all of it
    steps = "/".join(_steps(run[name]) for name in ("step", "max_steps") if run.get(name) is not None)
    rate = run.get("tokens_per_second")
    since = "" if not run.get("entered") else format_duration(time.time() - run["entered"], parts=1)
    losses = ["" if run.get(key) is None else f"{run[key]:.4g}" for key in ("best_loss", "loss")]
    return run["name"], status, steps, *losses, "" if rate is None else format_count(float(rate)), since


def _steps(number: int) -> str:
    return str(number) if number < 100_000 else format_count(number)
