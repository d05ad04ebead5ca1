"""`lm runs compare`: curves of several runs in one chart, where they ended, and the settings in which they differ."""

import math
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lm.cli.charts import MARKERS, chart
from lm.cli.runs import summarize, to_json
from lm.errors import RequestError
from lm.runs import registry
from lm.runs.history import Series, curve, differences, labels
from lm.runs.run import ROOT

CHART_HEIGHT = 20
X_LABELS = {"step": "step", "tokens": "tokens", "time": "hours"}
DASHES = ("-", "--", "-.", ":")  # so that curves are told apart without colour


def compare(
    runs: list[str],
    metric: str = "train/loss",
    x: Literal["step", "tokens", "time"] = "step",
    smooth: float = 0.0,
    png: str | None = None,
    json: bool = False,
    root: str = str(ROOT),
) -> None:
    """Draw curves of runs in one chart, with their values and the settings in which they differ.

    Args:
        runs: Names under the root or in the registry, or paths; at least two.
        metric: The metric to draw, by its name in TensorBoard.
        x: The x axis; time is hours since the run's first log line.
        smooth: Weight of the earlier values in a moving average, from 0 to below 1.
        png: A file to write the chart to, as a picture.
        json: Print one JSON object instead.
        root: Folder of the runs.
    """
    if len(runs) < 2:
        raise RequestError("name two runs or more; `lm runs ls` lists them")
    if not 0 <= smooth < 1:
        raise RequestError(f"--smooth {smooth} must lie in [0, 1)")
    folders = [registry.find_run(name, root) for name in runs]
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise RequestError("a run cannot be compared with itself; name each once")
    metrics = [folder.metrics() for folder in folders]
    names = labels(folders)
    series = [curve(name, lines, metric, x, smooth) for name, lines in zip(names, metrics, strict=True)]
    if not any(one.x for one in series):
        raise RequestError(_no_metric(metric, metrics))
    rows = [
        {"run": name, "path": str(folder.path.resolve()), "status": folder.status(),
         metric: summarize(lines, metric), "val/loss": summarize(lines, "val/loss"),
         "val/bpb": summarize(lines, "val/bpb")}
        for name, folder, lines in zip(names, folders, metrics, strict=True)
    ]  # fmt: skip
    differing = differences([folder.settings() for folder in folders])
    if png is not None:
        try:
            draw_curves(Path(png), series, X_LABELS[x], metric)
        except OSError as error:
            raise RequestError(f"--png {png} cannot be written: {error.strerror}") from error
    if json:
        curves = {one.name: {"x": list(one.x), "y": list(one.y)} for one in series}
        settings_by_run = {key: dict(zip(names, values, strict=True)) for key, values in differing.items()}
        print(to_json({"metric": metric, "x": x, "runs": rows, "curves": curves, "settings": settings_by_run}))
        return
    console = Console(highlight=False)
    color = console.is_terminal and not console.no_color
    print(chart(series, console.width, CHART_HEIGHT, color, x_label=X_LABELS[x], title=metric))
    console.print()
    _print_values(console, rows, metric)
    _print_settings(console, names, differing)


def _no_metric(metric: str, metrics: list[list[dict[str, Any]]]) -> str:
    known = sorted({key for lines in metrics for line in lines for key in line if "/" in key})
    close = get_close_matches(metric, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known) or 'none yet'}"
    return f"none of the runs has a metric {metric!r}; {hint}"


def draw_curves(path: Path, series: Sequence[Series], x_label: str, y_label: str, title: str = "") -> None:
    """Write a picture of curves over one pair of axes; a legend tells several apart.

    Args:
        path: the PNG file; one that is there is replaced.
        series: the curves. Values that are not finite leave a gap.
        x_label, y_label, title: the texts.
    """
    from lm.inspection.drawing import figure  # matplotlib takes half a second

    drawn, axes = figure()
    for index, one in enumerate(series):
        sparse = len(one.x) <= 30  # a curve of few points, such as validations, shows them
        axes.plot(
            list(one.x), list(one.y), DASHES[index % len(DASHES)], label=one.name, linewidth=1.4,
            marker="o" if sparse else None, markersize=3,
        )  # fmt: skip
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(frameon=False)
    drawn.savefig(path, format="png")


# ---- the tables ------------------------------------------------------------------------------------------------------


def _print_values(console: Console, rows: list[dict[str, Any]], metric: str) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("run", overflow="fold")
    table.add_column("status")
    for name in ("last", "lowest", "at step", "val loss", "val bpb"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        own = row[metric] or {}
        cells = [own.get("last"), own.get("lowest"), own.get("lowest_step")]
        cells += [(row[name] or {}).get("lowest") for name in ("val/loss", "val/bpb")]
        table.add_row(MARKERS[index % len(MARKERS)], Text(row["run"]), row["status"], *map(_number, cells))
    console.print(table)
    console.print(Text(f"last and lowest {metric}; lowest validation loss and bits per byte", style="dim"))


def _print_settings(console: Console, names: list[str], differing: dict[str, list[Any]]) -> None:
    console.print()
    if not differing:
        console.print("the configs are the same")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("setting", overflow="fold")
    for name in names:
        table.add_column(Text(name), overflow="fold", justify="right")
    for key, values in differing.items():
        table.add_row(Text(key), *(Text("" if value is None else str(value)) for value in values))
    console.print(table)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) or not math.isfinite(value) else f"{value:.5g}"
