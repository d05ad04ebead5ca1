"""A run as one HTML page: `lm runs export --html`.

`run.html` has the text and the tables, so they read without JavaScript, too. `page.js` draws the charts with uPlot from
the JSON at the end of the page. Nothing here imports torch.
"""

import json as jsonlib
import math
import re
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from markupsafe import Markup

from lm import __version__
from lm.cli.options import changed_settings
from lm.cli.report.page import printable, render, source
from lm.cli.runs_show import checks_of, describe_run, machine_of, start_command
from lm.errors import RequestError
from lm.runs.evaluations import core_sentence, merge_evaluations
from lm.runs.history import read_samples
from lm.runs.metrics import BY_SOURCE, METRICS, Metric
from lm.runs.run import Run
from lm.system.files import check_local_path, read_lines, write_atomically
from lm.system.parsing import finite_or_none
from lm.system.removed_options import REMOVED
from lm.system.units import format_bytes, format_figure, utc

OPENING = "<!doctype html>\n<!-- A run of lm -->\n"  # of every page: a file that begins otherwise is not replaced
POINTS = 1000  # of a curve
ALL_POINTS = 30_000  # of all curves together, as long as each has `FEWEST_POINTS`
FEWEST_POINTS = 100

# ---- the file --------------------------------------------------------------------------------------------------------


def write_page(run: Run, path: str) -> None:
    """Write or replace the page of a run; raise RequestError if another kind of file would be overwritten."""
    check_local_path("--html", path)
    target = Path(path).resolve()  # a symbolic link is kept
    with suppress(FileNotFoundError), open(target, encoding="utf-8", errors="replace") as file:
        if file.read(len(OPENING)) != OPENING:
            raise RequestError(f"--html {path} is there already and not the page of a run; choose another")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page(run), durable=False)


# ---- the page --------------------------------------------------------------------------------------------------------


def page(run: Run) -> str:
    """The whole document."""
    found = public({name: part for name, part in describe_run(run).items() if name != "samples"})
    live = found["status"] == "running"
    data, figures = chart_data(run, run.metrics())
    torch, started = found["versions"].get("torch"), found["started"]
    made = [machine_of(found), f"torch {torch}" if torch else "", f"started {started}" if started else ""]
    return render(
        "run.html", kind="run", found=found, live=live, written=time.time(),
        made="; ".join(filter(None, made)), checks=checks_of(found), metrics=METRICS, figures=figures,
        data=finite_or_none(data), evaluations=_evaluations(run), samples=_samples(run), alerts=_alerts(found),
        postmortems=_postmortems(found), model=_model(found), changed=_changed(found["config"]),
        whole_config=yaml.safe_dump(found["config"], allow_unicode=True, sort_keys=False, width=100),
        checkpoints=_checkpoints(found), provenance=_provenance(found),
        script=Markup(f"/*\nuPlot\n{source('uPlot.LICENSE')}*/\n") + source("uPlot.iife.min.js", "page.js"),
    )  # fmt: skip


def _evaluations(run: Run) -> list[dict[str, Any]]:
    """The tables of each evaluation, the newest first."""
    every = public(run.evaluations())
    steps = sorted({one["step"] for one in every if one["step"] is not None}, reverse=True)
    found = []
    for step in steps:
        merged = merge_evaluations(every, step) or {}
        tasks = [
            (name, f"{task['accuracy']:.1%}", "{:.1%} to {:.1%}".format(*task["interval"]), f"{task['baseline']:.1%}",
             f"{task['centered']:.3f}", f"{task['items']:,}", task["num_fewshot"])
            for name, task in merged["tasks"].items()
        ]  # fmt: skip
        texts = [
            (name, *_estimate(one["bits_per_byte"], one.get("stderr")),
             *_estimate(one["loss"], one.get("loss_stderr")), f"{one['tokens']:,}")
            for name, one in merged["texts"].items()
        ]  # fmt: skip
        found.append({"title": f"Step {step:,}{core_sentence(merged)}", "tasks": tasks, "texts": texts})
    return found


def _estimate(mean: float | None, error: float | None) -> tuple[str, str]:
    """A mean, and its 95 % interval from its standard error; empty where they are not known."""
    interval = "" if mean is None or error is None else f"{mean - 1.96 * error:.4f} to {mean + 1.96 * error:.4f}"
    return "" if mean is None else f"{mean:.4f}", interval


def _samples(run: Run) -> dict[str, Any]:
    """The model's samples by step, newest first; if there are many steps, some spread over the whole run."""
    samples = read_samples(run)
    every = sorted({sample["step"] for sample in samples}, reverse=True)
    places = np.linspace(0, len(every) - 1, min(20, len(every)))
    steps = list(dict.fromkeys(every[round(place)] for place in places))
    found = [
        (f"Step {step:,}", [(one["prompt"], str(one["text"])) for one in samples if one["step"] == step])
        for step in steps
    ]
    return {"shown": found, "left_out": len(every) - len(found)}


def _alerts(found: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(f"{one['step']:,}", utc(one["time"]), one["guard"], one["action"], one["message"])
            for one in reversed(found["alerts"])]  # fmt: skip


def _postmortems(found: dict[str, Any]) -> list[tuple[str, str]]:
    pages = []
    for folder in map(Path, reversed(found["post_mortems"])):
        step = folder.name.removeprefix("postmortem-").lstrip("0") or "0"
        with suppress(OSError):  # it is being written
            text = public((folder / "postmortem.md").read_text(encoding="utf-8", errors="replace"))
            pages.append((f"Post-mortem of step {step}", text))
    return pages


def _model(found: dict[str, Any]) -> dict[str, Any]:
    decoder = found["config"].get("model", {}).get("decoder")
    shape = {name: value for name, value in decoder.items() if value is not None} if isinstance(decoder, dict) else {}
    if found["checkpoints"]:  # in the config it may be left to the tokenizer
        shape["vocab_size"] = Run(found["checkpoints"][-1]["path"]).read("config.json").get("vocab_size")
    counted = {
        "parameters": None if found["parameters"] is None else f"{found['parameters']:,}",
        "operations of training": f"{found['flops']:.3g}" if found["flops"] else None,
    }
    return {**counted, **shape}


def _changed(config: dict[str, Any]) -> dict[str, Any]:
    changed = {name: value for name, value in changed_settings(config).items() if name not in ("run", "tags", "note")}
    return {name: jsonlib.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
            for name, value in changed.items()}  # fmt: skip


def _checkpoints(found: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (f"{one['step']:,}", Path(one["path"]).name, format_bytes(one["bytes"]),
         ", ".join(mark for mark in ("best", "last") if one[mark]))
        for one in found["checkpoints"]
    ]  # fmt: skip


def _provenance(found: dict[str, Any]) -> dict[str, Any]:
    """How the run was started, on what, with which versions, and what it cost."""
    spent = (found["budget"] or {}).get("spent_usd")
    versions = {"python": found["python"], **found["versions"]}
    return {
        "machine": machine_of(found),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "started": found["started"],
        "command": shlex.join(public_command(start_command(found))) or None,
        "git": found["git"],
        "config, SHA-256": found["config_sha256"],
        "cost": None if spent is None else f"{format_figure(spent)} USD",
        "page": f"lm {__version__}; charts by uPlot, whose licence is in the source of this page",
    }


# ---- charts ----------------------------------------------------------------------------------------------------------

PLACES = {  # the first part of a metric's name -> the heading over its chart, in the order of the page
    "train": "Loss", "val": "Loss", "eval": "Evaluation", "optim": "Optimization", "perf": "Speed and machine",
    "mem": "Speed and machine", "data": "Data",
}  # fmt: skip
AXES = {"step", "tokens", "time"}
OWN = "Other metrics"  # the heading over those that a user's callbacks log
EVALUATED = {"accuracy": "accuracy by task", "centered": "centred accuracy by task", "bpb": "bits per byte by text"}


def chart_data(run: Run, metrics: list[dict[str, Any]]) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """All curves of a run, and their figures as text.

    Returns:
        What `page.js` reads, and a row of the table of figures for each metric. The script reads
        `charts`: each with `place`, `title`, `unit` and `curves`; a curve has `label`, `form` (of its values), `points`
        (whether it is drawn as points, too, and never smoothed), `table`, and values as in `_bucketed`;
        `tables`: x values by `step`, `tokens` and `hours`, each for all curves that were logged in the same lines;
        `marks`: resumes and rollbacks, with `label` and their place on each axis;
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
        chart["curves"].append({
            "label": printable(label), "form": metric.form, "points": name.startswith(("val/", "eval/")),
            "table": number, **_bucketed(values, each),
        })  # fmt: skip
        rows.append(_figures(public(name), label, metric, values, axes["step"][at]))
        size = max(size, each)
    found = sorted(charts.values(), key=lambda chart: [*dict.fromkeys(PLACES.values()), OWN].index(chart["place"]))
    return {
        "charts": [{**chart, "title": printable(chart["title"])} for chart in found],
        "tables": [table for _, table in tables.values()],
        "marks": _marks(run, axes), "size": size,
    }, rows  # fmt: skip


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
    place = PLACES.get(name.partition("/")[0], OWN)
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
    found = {"mean": mean} if each == 1 else {"mean": mean, "low": low, "high": high}
    shown = {name: [float(f"{value:.6g}") for value in one.tolist()] for name, one in found.items()}
    return {**shown, "bad": bad}


def _figures(name: str, label: str, metric: Metric, values: np.ndarray, steps: np.ndarray) -> tuple[str, ...]:
    finite = np.flatnonzero(np.isfinite(values))
    lowest, highest = (finite[find(values[finite])] if len(finite) else None for find in (np.argmin, np.argmax))
    ends = [("", "") if at is None else (metric.shown(float(values[at])), f"{steps[at]:,}") for at in (lowest, highest)]
    bad = len(values) - len(finite)
    full = label if label == name else f"{label} ({name})"
    return full, metric.shown(float(values[-1])), *ends[0], *ends[1], f"{len(values):,}", f"{bad:,}" if bad else ""


def _marks(run: Run, axes: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Resumes and rollbacks, by step, with their place on each axis."""
    resumed = read_lines(run.path / "metrics.jsonl", ('"resumed_at"',))
    found = {(line["resumed_at"], "resumed") for line in resumed if type(line.get("resumed_at")) is int}
    if origin := run.read("run.json").get("branch"):
        found.discard((origin["step"], "resumed"))
        found.add((origin["step"], f"branched off {Path(origin['path']).name}"))
    for one in run.read("run.json").get("rollbacks", []):
        found.add((one["step"], f"weights of step {one['to']:,}"))
    steps = axes["step"]
    places = {step: max(0, int(np.searchsorted(steps, step, side="right")) - 1) for step, _ in found}
    return [
        {"label": label, **{axis: values[places[step]].item() for axis, values in axes.items()}, "step": step}
        for step, label in sorted(found) if len(steps)
    ]  # fmt: skip


# ---- secrets ---------------------------------------------------------------------------------------------------------

USER = re.compile(r"(?<=://)(?:[^\s/@]*@|[^\s/:]*:(?!\d+/)[^\s]*@)")  # user and password in a URL
QUERY = re.compile(r"(://[^\s?#'\"]*)[?#][^\s'\"]*")  # query of a URL, which may be a signature
SECRET = re.compile(r"passw|secret|credential|(api|access|private)_?key|(auth|access|api|hf|bearer)_?token", re.I)
PRIVATE = ("on_event", *REMOVED)  # it may hold addresses to which anybody who knows them can write


def public(value: Any) -> Any:
    """Copy a tree of values without secrets: users and queries of URLs, values with a secret's name, and `PRIVATE`."""
    if isinstance(value, dict):
        return {name: "(left out)" if SECRET.search(str(name)) and part else public(part)
                for name, part in value.items() if name not in PRIVATE}  # fmt: skip
    if isinstance(value, list | tuple):
        return [public(part) for part in value]
    return QUERY.sub(r"\1", USER.sub("", value)) if isinstance(value, str) else value


def public_command(command: list[str]) -> list[str]:
    """A command line without the options that `public` leaves out."""
    shown, private = [], False
    for argument in command:
        if argument.startswith("--"):
            option = argument.partition("=")[0]
            private = option[2:].rstrip("+") in PRIVATE or bool(SECRET.search(option))
        if not private:
            shown.append(public(argument))
    return shown
