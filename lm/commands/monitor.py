"""`lm monitor`: runs that are training, live in a terminal, or once as JSON for programs. It only reads their files.

`watch` reads them and `dashboard` makes a page of what they say.
"""

import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from select import select
from types import FrameType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lm.commands.dashboard import page
from lm.commands.dashboard_figures import duration
from lm.commands.runs import STYLES, to_json
from lm.commands.watch import Watch
from lm.errors import RequestError
from lm.registry import find
from lm.runs import ROOT, Run

PLAIN = 100, 30  # columns and rows of a page that is not for a terminal


def monitor(
    runs: list[str], json: bool = False, root: str = str(ROOT), interval: float = 1.0, once: bool = False
) -> None:
    """Watch runs in the terminal: curves, figures, the machine, checkpoints, alerts, and the time that is left.

    Args:
        runs: Names or paths; the active runs if not given.
        json: Print how they stand as one JSON object and end; as a list of them if there are several.
        root: Folder of the runs.
        interval: Seconds between two looks.
        once: Print one page and end, which is also what is done where there is no terminal.
    """
    if not 0.05 <= interval <= 3600:
        raise RequestError(f"--interval {interval:g} must lie between 0.05 and 3600 seconds")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # where there are no braille dots
    console = Console()
    live = sys.stdout.isatty() and not console.is_dumb_terminal and not json and not once
    chosen = [find(name, root) for name in runs] or choose(root, ask=live and sys.stdin.isatty())
    watches = [Watch(run) for run in chosen]
    if live:
        follow(watches, console, interval)
        return
    for watch in watches:
        while not watch.state or watch.behind:
            watch.look()
    if json:
        states = [watch.state for watch in watches]
        print(to_json(states if len(states) > 1 else states[0]))
        return
    width, height = console.size if sys.stdout.isatty() else PLAIN
    text = Text("\n").join(page(watches, width, (height - 1) * len(watches)))  # the prompt comes below
    text.rstrip()
    console.print(text, soft_wrap=True)


def choose(root: str, ask: bool) -> list[Run]:
    """The runs to watch where none is named: the active one; of several those that are asked for, or all; of none the
    newest.

    Raises:
        RequestError: there is no run at all.
    """
    every = [(run, run.status()) for run in reversed(Run.all(root))]
    if not every:
        raise RequestError(f"no run under {root} yet: start one with `lm fit --config tiny.yaml`")
    active = [run for run, status in every if status == "running"]
    if not active:
        print(f"nothing is running under {root}; this is the newest run", file=sys.stderr)
        return [every[0][0]]
    if len(active) == 1 or not ask:
        return active
    listed = [(run, status) for run, status in every if status in ("running", "dead")]
    console = Console(stderr=True, highlight=False)
    wide = max(len(run.name) for run, _ in listed)
    for number, (run, status) in enumerate(listed, 1):
        state, entered = run.read("state.json"), run.read("run.json").get("entered", time.time())
        line = Text(f"{number:3}  {run.name:<{wide}}  ").append(f"{status:<7}", STYLES.get(status, ""))
        steps = f"step {state['step']}/{state['max_steps']}" if "max_steps" in state else "no step yet"
        console.print(line.append(f"  {steps}, started {duration(time.time() - entered)} ago"))
    while True:
        answer = console.input("which? (numbers; Enter for all that are running) ").replace(",", " ").split()
        if not answer:
            return active
        if all(word.isdigit() and 1 <= int(word) <= len(listed) for word in answer):
            return [listed[int(word) - 1][0] for word in answer]


def follow(watches: list[Watch], console: Console, interval: float) -> None:
    """Show a page until q or Ctrl-C, anew at every look and when the terminal's size changes."""
    try:
        with _keys() as pressed, _leave_when_terminated(), Live(
            console=console, screen=True, auto_refresh=False, vertical_overflow="crop"
        ) as screen:
            while True:
                looked = time.monotonic()
                for watch in watches:
                    watch.look()
                wait = 0.0 if any(watch.behind for watch in watches) else interval
                size = None
                while True:
                    if size != console.size:
                        size = console.size
                        lines = page(watches, size.width, max(1, size.height - 1))
                        lines.append(_foot(size.width))
                        text = Text("\n", no_wrap=True, end="").join(lines[: size.height])
                        screen.update(text, refresh=True)
                    if time.monotonic() - looked >= wait:
                        break
                    if b"q" in pressed(min(0.1, interval)):
                        return
    except KeyboardInterrupt:
        return


def _foot(width: int) -> Text:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    line = Text("q leaves; the runs go on", "dim", no_wrap=True)
    line.truncate(width)
    return line.append(" " * max(0, width - line.cell_len - len(now)) + now if line.cell_len + len(now) < width else "")


@contextmanager
def _keys() -> Iterator:
    """A function that waits so many seconds for keys, which are not shown; where nobody can press any it only waits."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or b""
        return
    before = termios.tcgetattr(sys.stdin)

    def pressed(seconds: float) -> bytes:
        if not select([sys.stdin], [], [], seconds)[0]:
            return b""
        return os.read(sys.stdin.fileno(), 64) or b"q"  # nothing to read: the terminal is gone

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def _leave_when_terminated() -> Iterator[None]:
    """A SIGTERM too gives the screen back."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
