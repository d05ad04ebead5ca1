"""Several runs as one HTML page, `lm runs ls --html`: a table, their curves, their scores as bars, and what differs."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from lm.cli.report.page import render
from lm.cli.report.run import axes_of, chart_script, curve_of, public, write_document
from lm.runs.config_diff import differences
from lm.runs.history import labels, trunk_metrics
from lm.runs.metrics import METRICS, merge_evaluations
from lm.runs.run import Run
from lm.system.files import finite_or_none

CHARTS = {  # metric -> the heading over its chart
    "val/loss": "Loss", "train/loss": "Loss", "val/bpb": "Loss", "optim/lr": "Optimization",
    "optim/grad_norm": "Optimization", "perf/tokens_per_second": "Speed",
}  # fmt: skip
POINTS = 300  # of a curve
COLORS = 8  # of `page.css`


def write_overview(rows: list[dict[str, Any]], heads: tuple[str, ...], cells: list[tuple[str, ...]], path: Path) -> None:
    """Write the page of runs, of which `rows` are `run_row` and `cells` the lines of their table."""
    runs = [Run(Path(row["path"])) for row in rows]
    names = labels(runs)
    settings = differences([public(run.settings()) for run in runs])
    write_document(path, render(
        "runs.html", kind="list of runs", written=time.time(), names=names, heads=heads, rows=cells,
        data=finite_or_none(chart_data(runs, names)), scores=scores(runs, names),
        settings=[(key, *("" if value is None else value for value in values)) for key, values in settings.items()
                  if key != "run"],
        script=chart_script(),
    ))  # fmt: skip


def chart_data(runs: list[Run], names: list[str]) -> dict[str, Any]:
    """The curves of all runs, as `report.run.chart_data` has those of one; a branch begins with those of its trunk."""
    charts = {name: {"place": place, "title": METRICS[name].label, "unit": METRICS[name].unit, "curves": []}
              for name, place in CHARTS.items()}  # fmt: skip
    tables = []
    for run, label in zip(runs, names, strict=True):
        lines = sorted(trunk_metrics(run) + run.metrics(), key=lambda line: line["step"])
        axes = axes_of(lines)
        for name, chart in charts.items():
            at = np.array([index for index, line in enumerate(lines) if name in line], dtype=np.int64)
            if len(at):
                values = np.array([lines[index][name] for index in at], dtype=float)
                curve, table = curve_of(name, label, METRICS[name].form, at, values, axes, POINTS)
                chart["curves"].append({**curve, "table": len(tables)})
                tables.append(table)
    return {"charts": [chart for chart in charts.values() if chart["curves"]], "tables": tables, "marks": []}


def scores(runs: list[Run], names: list[str]) -> list[dict[str, Any]]:
    """Of each task, the accuracy of every run's newest evaluation with its 95 % interval, and that of guessing."""
    found: dict[str, dict[str, Any]] = {}
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        evaluation = merge_evaluations(run.evaluations())
        for task, result in evaluation["tasks"].items() if evaluation else ():
            low, high = result["interval"]
            bars = found.setdefault(task, {"task": task, "guessing": result["baseline"], "bars": []})["bars"]
            bars.append({"run": name, "color": index % COLORS, "accuracy": result["accuracy"], "low": low, "high": high,
                         "step": evaluation["step"]})  # fmt: skip
    return list(found.values())
