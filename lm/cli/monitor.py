"""`lm monitor`: show runs that are training, live in a terminal or once as JSON. It only reads their files.

Functions that end in `_facts` give labels and values of the page, and `RunView` arranges them.
"""

import math
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lm.cli.charts import chart
from lm.cli.runs_show import STYLES
from lm.runs.facts import LiveRun
from lm.runs.find import find_run, known_folders, no_run
from lm.runs.history import Series
from lm.runs.metrics import BY_SOURCE, METRICS, Metric
from lm.runs.run import ROOT, Run
from lm.system.parsing import DAMAGE_ERRORS, to_json
from lm.system.units import format_bytes, format_count, format_duration

FIGURES = (
    *("train/loss", "val/loss", "val/bpb", "optim/lr", "optim/grad_norm"),
    *("perf/tokens_per_second", "perf/mfu", "perf/mfu_full_attention"),
)

Fact = tuple[str, str, str]  # label, value, style


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
    """The runs to watch where none is named: those running under the root, else in the registry, else the newest."""
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


# ---- figures ---------------------------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    """Untrusted text as one line without control characters."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def title(state: dict[str, Any], width: int) -> Text:
    """The name and status of the run; on the right, if it fits, its device and host."""
    status = state["status"]
    line = Text().append(one_line(state["run"]), "bold").append("  ").append(status, f"bold {STYLES.get(status, '')}")
    if status == "running" and state.get("phase") not in (None, "training"):
        line.append(f", {state['phase']}")
    if status == "dead" and state.get("heartbeat_age_seconds") is not None:
        line.append(f", last sign of life {format_duration(state['heartbeat_age_seconds'])} ago")
    if status == "gone":
        line.append(f": {state['path']} is not there any more")
    where = "  ".join(one_line(str(state[name])) for name in ("device", "host") if state.get(name))
    if (state.get("world_size") or 1) > 1:
        where = f"{state['world_size']} x {where}"
    room = width - line.cell_len - len(where)
    return line.append(" " * room + where, "dim") if room > 1 else line


def progress(state: dict[str, Any]) -> RenderableType:
    step, last = state.get("step"), state.get("max_steps")
    if not last:
        return Text("no step yet", "dim")
    text = f"{min(1.0, step / last):4.0%}  step {step:,}/{last:,}"
    if state.get("max_tokens"):
        text += f"  {format_count(float(state['tokens']))}/{format_count(float(state['max_tokens']))} tokens"
    if state.get("eta_seconds") is not None:
        text += f"  {format_duration(state['eta_seconds'])} left"
    elif state["status"] == "running":
        text += "  time left not known yet"
    row = Table.grid(expand=True, padding=(0, 1, 0, 0))
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_row(ProgressBar(last, step, complete_style="cyan", finished_style="cyan"), Text(text))
    return row


def training_facts(state: dict[str, Any]) -> list[Fact]:
    """The newest metrics, including those that a user's callbacks log, and the best validation; NaN and Inf are red."""
    facts, metrics = [], state.get("metrics", {})
    of_callbacks = [name for name in metrics if name not in METRICS and not name.startswith(("eval/", *BY_SOURCE))]
    for name in (*FIGURES, *of_callbacks):
        metric, value = METRICS.get(name, Metric(name)), metrics.get(name)
        if value is not None:
            label = metric.short or metric.label
            facts.append((label, metric.shown(float(value)), "" if math.isfinite(value) else "bold red"))
        if name == "val/loss" and state.get("best_val_loss") is not None:
            facts.append(("best", f"{state['best_val_loss']:.4f} at step {state['best_val_step']:,}", ""))
    return facts


def machine_facts(state: dict[str, Any], most: int) -> list[Fact]:
    """The newest reading of the hardware, empty for a run that is over; more GPUs than `most` are combined."""
    reading = state.get("machine")
    if not reading or state["status"] not in ("running", "dead"):
        return []
    try:
        gpus = reading["gpus"] or []
        facts = [("GPU" if gpu["index"] is None else f"GPU {gpu['index']}", _gpu(gpu), "") for gpu in gpus]
        if len(gpus) > most:
            facts = [(f"{len(gpus)} GPUs", _gpu(combine_gpus(gpus)), "")]
        cpu, memory, process = reading["cpu"], reading["memory"], reading["process"]
        if cpu["load_percent"] is not None:
            facts.append(("CPU", f"{cpu['load_percent']:.0f}% of {cpu['cores']} cores", ""))
        if memory["used_bytes"] is not None:
            facts.append(("RAM", _of(memory["used_bytes"], memory["total_bytes"]), ""))
        if process["memory_bytes"] is not None:
            facts.append(("process", format_bytes(process["memory_bytes"]), ""))
        return facts
    except DAMAGE_ERRORS:
        return [("machine", "not readable: heartbeat.json is damaged", "")]


def combine_gpus(gpus: list[dict[str, Any]]) -> dict[str, Any]:
    summaries = {
        "load_percent": statistics.fmean,
        **dict.fromkeys(("memory_used_bytes", "memory_total_bytes", "temperature_celsius"), max),
        **dict.fromkeys(("power_watts", "power_limit_watts"), sum),
    }
    known = {name: [gpu[name] for gpu in gpus if gpu[name] is not None] for name in summaries}
    return {name: summary(known[name]) if known[name] else None for name, summary in summaries.items()}


def _gpu(gpu: dict[str, Any]) -> str:
    """A GPU's figures in a line."""
    parts = []
    if gpu["load_percent"] is not None:
        parts.append(f"{gpu['load_percent']:.0f}%")
    if gpu["memory_used_bytes"] is not None:
        parts.append(_of(gpu["memory_used_bytes"], gpu["memory_total_bytes"]))
    if gpu["temperature_celsius"] is not None:
        parts.append(f"{gpu['temperature_celsius']:.0f}°C")
    if gpu["power_watts"] is not None:
        limit = "" if gpu["power_limit_watts"] is None else f"/{gpu['power_limit_watts']:.0f}"
        parts.append(f"{gpu['power_watts']:.0f}{limit} W")
    return " ".join(parts) or "not known"


def _of(used: int, total: int | None) -> str:
    if not total:
        return format_bytes(used)
    decimals = 0 if total >= 100 * 2**30 else 1
    return f"{used / 2**30:,.{decimals}f}/{total / 2**30:,.{decimals}f} GiB"


def checkpoint_facts(state: dict[str, Any]) -> list[Fact]:
    facts = []
    for label, name in (("last", "checkpoint"), ("best", "best_checkpoint")):
        if checkpoint := state.get(name):
            age = format_duration(checkpoint["age_seconds"])
            facts.append((label, f"{checkpoint['name']}, {age} ago", ""))
    return facts or [("checkpoint", "none yet", "")]


def alert_lines(state: dict[str, Any], most: int) -> list[Text]:
    """The newest alerts, newest first, cut off at the width."""
    lines = []
    for alert in state.get("alerts", [])[::-1][:most]:
        at = time.strftime("%H:%M", time.localtime(alert["time"]))
        guard, message, action = (one_line(alert[name]) for name in ("guard", "message", "action"))
        line = Text(no_wrap=True, overflow="ellipsis")
        lines.append(line.append(f"{at} {guard}", "bold yellow").append(f" {message} -> {action}"))
    return lines


def in_row(facts: list[Fact]) -> Columns:
    texts = [Text().append(label + " ", "dim").append(value, style) for label, value, style in facts]
    return Columns(texts, padding=(0, 3, 0, 0))


@dataclass
class LossChart:
    """The training loss and the validations, in the space which rich gives them."""

    watch: LiveRun

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        loss, validation = self.watch.curve("train/loss"), self.watch.curve("val/loss")
        shown = [curve for curve in (loss, Series("validation", validation.x, validation.y)) if curve.x]
        size, y_range = (options.max_width, options.height or options.max_height), range_after_start(loss, validation)
        yield chart(shown, *size, "step", "" if len(shown) > 1 else "loss", y_range)


def range_after_start(loss: Series, validation: Series) -> tuple[float, float] | None:
    """A y-axis range that ignores the first tenth of the losses, whose fall would make the rest look flat."""
    known = [value for value in (*loss.y, *validation.y) if math.isfinite(value)]
    later = [value for value in loss.y[len(loss.y) // 10 :] if math.isfinite(value)]
    return (min(known), max(later)) if len(later) >= 20 and max(later) > min(known) else None


# ---- the page --------------------------------------------------------------------------------------------------------

RUN_COLUMNS = 76  # columns of a run beside another one
LOSS_ROWS = 6  # least rows of the chart of the loss


def page(watches: Sequence[LiveRun], width: int, height: int) -> Layout:
    """Lay out runs on one screen: side by side if it is wide; the more runs, the fewer lines each."""
    across = max(1, min(width // RUN_COLUMNS, math.ceil(len(watches) / 2)))
    down = math.ceil(len(watches) / across)
    apart = (0, int(across > 1), int(down > 1 and height // down > 5), 0)
    rows = []
    for first in range(0, len(watches), across):
        row = Layout()
        row.split_row(*(Layout(Padding(RunView(watch), apart)) for watch in watches[first : first + across]))
        rows.append(row)
    return stacked(*rows)


def stacked(*parts: Layout) -> Layout:
    column = Layout()
    column.split_column(*parts)
    return column


@dataclass
class RunView:
    """One run in the space which rich gives it: figures above and below, the chart of the loss in the rest."""

    watch: LiveRun

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, width, height = self.watch.state, options.max_width, options.height or options.max_height
        above = [title(state, width), progress(state)]
        if state.get("reason") and state["status"] not in ("running", "dead"):
            above.append(Text(f"{state['status']}: {one_line(state['reason'])}", no_wrap=True, overflow="ellipsis"))
        above.append(in_row(training_facts(state)))
        below: list[RenderableType] = [*alert_lines(state, height // 8)]
        below += [in_row(machine_facts(state, height // 5)), in_row(checkpoint_facts(state))]
        room = height - height_of(above, console, width) - height_of(below, console, width)
        if room < LOSS_ROWS or not self.watch.curve("train/loss").x:
            yield Group(*above, *below)
            return
        top, bottom = (Layout(Group(*parts), size=height_of(parts, console, width)) for parts in (above, below))
        places = stacked(top, Layout(LossChart(self.watch)), bottom)
        yield from console.render(places, options)  # a Layout that is yielded directly would not get the height


def height_of(parts: Sequence[RenderableType], console: Console, width: int) -> int:
    return len(console.render_lines(Group(*parts), console.options.update(width=width, height=None), pad=False))
