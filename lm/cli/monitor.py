"""`lm monitor`: show runs that are training, live in a terminal or once as JSON. It only reads their files."""

import signal
import sys
import time
from contextlib import suppress

from rich.console import Console
from rich.layout import Layout
from rich.live import Live
from rich.text import Text

from lm.cli.monitor_page import page, stacked
from lm.runs.facts import LiveRun
from lm.runs.find import find_run, known_folders, no_run
from lm.runs.run import ROOT, Run
from lm.system.parsing import to_json


def monitor(runs: list[str], json: bool = False, root: str = str(ROOT), interval: float = 1.0) -> None:
    """Watch runs in the terminal: curves, figures, the machine, checkpoints, alerts, and the remaining time.

    Args:
        runs: Names or paths; the active runs if not given.
        json: Print the state as one JSON object and exit; a list if there are several runs.
        root: Folder of the runs.
        interval: Seconds between updates.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for encodings without braille characters
    console = Console()
    watches = [LiveRun(run) for run in [find_run(name, root) for name in runs] or default_runs(root)]
    if sys.stdout.isatty() and not console.is_dumb_terminal and not json:
        follow_runs(watches, console, interval, None if runs else root)
        return
    for watch in watches:
        watch.refresh()
    if json:
        states = [watch.state for watch in watches]
        print(to_json(states if len(states) > 1 else states[0]))
        return
    width, height = console.size if sys.stdout.isatty() else (100, 30)
    height = (height - 1) * len(watches)  # the prompt comes below
    with console.capture() as shown:
        console.print(page(watches, width, height), width=width, height=height)
    print(shown.get().rstrip())


def default_runs(root: str) -> list[Run]:
    """The runs to watch where none is named: those that are running under the root, else in other folders of the
    registry, else the newest."""
    under_root = Run.all(root)[::-1]
    elsewhere = [Run(path) for path in known_folders() if path not in [run.path.resolve() for run in under_root]]
    elsewhere.sort(key=lambda run: run.entered()[1], reverse=True)
    if not (under_root or elsewhere):
        raise no_run(f"{root} or in the registry")
    for runs in (under_root, elsewhere):
        if active := [run for run in runs if run.status() == "running"]:
            if runs is elsewhere:
                folders = ", ".join(str(run.path) for run in active)
                print(f"nothing is running under {root}, but {folders} is", file=sys.stderr)
            return active
    print("nothing is running; this is the newest run", file=sys.stderr)
    return [*under_root, *elsewhere][:1]


def follow_runs(watches: list[LiveRun], console: Console, interval: float, root: str | None) -> None:
    """Show a page until Ctrl-C, updated at every interval and when the terminal's size changes.

    Runs that begin under `root` meanwhile are added.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, which gives the screen back
    screen = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with suppress(KeyboardInterrupt), screen:
        while True:
            looked, shown = time.monotonic(), [watch.run.path.resolve() for watch in watches]
            new = [run for run in (Run.all(root) if root else ()) if run.path.resolve() not in shown]
            watches += [LiveRun(run) for run in new if run.status() == "running"]
            for watch in watches:
                watch.refresh()
            size = None
            while True:
                if size != console.size:
                    size = console.size
                    hint = Layout(Text("Ctrl-C leaves; the runs continue", "dim"), size=1)
                    screen.update(stacked(page(watches, size.width, max(1, size.height - 1)), hint), refresh=True)
                if time.monotonic() - looked >= interval:
                    break
                time.sleep(min(0.1, interval))
