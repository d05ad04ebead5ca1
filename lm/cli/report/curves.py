"""The curves of a run for `page.js`, which draws them, and their figures as text."""

import math
from typing import Any

import numpy as np

from lm.cli.report.page import printable
from lm.cli.report.public import public
from lm.runs.metrics import BY_SOURCE, METRICS, Metric

POINTS = 1000  # of a curve
ALL_POINTS = 30_000  # of all curves together, as long as each has `FEWEST_POINTS`
FEWEST_POINTS = 100
PLACES = {  # the first part of a metric's name -> the heading over its chart, in the order of the page
    "train": "Loss",
    "val": "Loss",
    "eval": "Evaluation",
    "optim": "Optimization",
    "perf": "Speed and machine",
    "mem": "Speed and machine",
    "data": "Data",
}
AXES = {"step", "tokens", "time"}
OTHERS = "Other metrics"  # the heading over those that a user's callbacks log
EVALUATED = {"accuracy": "accuracy by task", "centered": "centred accuracy by task", "bpb": "bits per byte by text"}


def chart_data(metrics: list[dict[str, Any]]) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """All curves of a run, and their figures as text.

    Returns:
        What `page.js` reads, and a row of the table of figures for each metric. The script reads
        `charts`: each with `place`, `title`, `unit` and `curves`; a curve has `label`, `form` (of its values), `points`
        (whether it is drawn as points, too, and never smoothed), `table`, and values as in `_bucketed`;
        `tables`: x values by `step`, `tokens` and `hours`, each for all curves that were logged in the same lines;
        `size`: the most log lines that a point of a curve stands for.
    """
    places: dict[str, list[int]] = {}  # metric -> the lines that have it
    for index, line in enumerate(metrics):
        for name in line.keys() - AXES:
            places.setdefault(name, []).append(index)
    order = {name: index for index, name in enumerate(METRICS)}
    names = sorted(places, key=lambda name: (order.get(name, len(order)), name))
    most = min(POINTS, max(FEWEST_POINTS, ALL_POINTS // max(1, len(names))))
    axes, rows, size = axes_of(metrics), [], 1
    tables: dict[tuple[int, ...], tuple[int, dict[str, list]]] = {}  # lines -> number and content of their table
    charts: dict[tuple[str, str], dict[str, Any]] = {}
    for name in names:
        place, title, label, metric = _chart_of(public(name))
        at, values = np.array(places[name]), np.array([metrics[index][name] for index in places[name]], dtype=float)
        each = math.ceil(len(at) / most)
        middles = at[np.minimum(np.arange(0, len(at), each) + each // 2, len(at) - 1)]
        table = {axis: all_x[middles].tolist() for axis, all_x in axes.items()}
        number, _ = tables.setdefault(tuple(places[name]), (len(tables), table))
        chart = charts.setdefault((place, title), {"place": place, "title": title, "unit": metric.unit, "curves": []})
        style = {"form": metric.form, "points": name.startswith(("val/", "eval/"))}
        chart["curves"].append({"label": printable(label), "table": number} | style | _bucketed(values, each))
        rows.append(_figures(public(name), label, metric, values, axes["step"][at]))
        size = max(size, each)
    headings = [*dict.fromkeys(PLACES.values()), OTHERS]
    in_order = sorted(charts.values(), key=lambda chart: headings.index(chart["place"]))
    data = {
        "charts": [{**chart, "title": printable(chart["title"])} for chart in in_order],
        "tables": [table for _, table in tables.values()],
        "size": size,
    }
    return data, rows


def axes_of(lines: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The x values of every line, made non-decreasing, since a clock may have been set back."""
    steps, tokens, times = (
        np.maximum.accumulate(np.nan_to_num([line.get(name, 0) for line in lines], posinf=0.0))
        for name in ("step", "tokens", "time")
    )
    hours = (times - times[:1].sum()) / 3600
    return {"step": steps.astype(np.int64), "tokens": tokens.astype(np.int64), "hours": hours.round(5)}


def _chart_of(name: str) -> tuple[str, str, str, Metric]:
    """The heading and the title of a metric's chart, and the label and the format of its curve."""
    place = PLACES.get(name.partition("/")[0], OTHERS)
    if metric := METRICS.get(name):
        return place, metric.chart or metric.label, metric.label, metric
    for base in BY_SOURCE:
        if name.startswith(f"{base}/"):
            return place, f"{METRICS[base].label} by source", name.removeprefix(f"{base}/"), METRICS[base]
    task, _, kind = name.removeprefix("eval/").rpartition("/")
    if name.startswith("eval/") and task and kind in EVALUATED:
        return place, EVALUATED[kind], task, Metric(task, form="{:.1%}" if kind == "accuracy" else "{:.4f}")
    return place, name, name, Metric(name)


def _bucketed(values: np.ndarray, each: int) -> dict[str, list]:
    """Reduce a curve to one point per `each` values: `mean`, `low` and `high` of these, and `bad`.

    Non-finite values are left out; a point without any finite value is NaN. `bad` has the indices of points that leave
    values out. `low` and `high` exist only if a point stands for several values.
    """
    rows = np.full((-(-len(values) // each), each), np.nan)
    rows.flat[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    low, high = np.fmin.reduce(rows, axis=1), np.fmax.reduce(rows, axis=1)
    known = np.isfinite(rows).sum(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.nansum(rows, axis=1) / known
    bad = np.unique(np.flatnonzero(~np.isfinite(values)) // each).tolist()
    curves = {"mean": mean} if each == 1 else {"mean": mean, "low": low, "high": high}
    rounded = {name: [float(f"{value:.6g}") for value in curve.tolist()] for name, curve in curves.items()}
    return {**rounded, "bad": bad}


def _figures(name: str, label: str, metric: Metric, values: np.ndarray, steps: np.ndarray) -> tuple[str, ...]:
    finite = np.flatnonzero(np.isfinite(values))
    lowest, highest = (finite[find(values[finite])] if len(finite) else None for find in (np.argmin, np.argmax))
    ends = [("", "") if at is None else (metric.shown(float(values[at])), f"{steps[at]:,}") for at in (lowest, highest)]
    bad = len(values) - len(finite)
    full = label if label == name else f"{label} ({name})"
    return full, metric.shown(float(values[-1])), *ends[0], *ends[1], f"{len(values):,}", f"{bad:,}" if bad else ""
