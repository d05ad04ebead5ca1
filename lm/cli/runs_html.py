"""A run as one HTML page: `lm runs export --html` and `lm monitor --html`. It opens without a server or a network.

Python writes the text and the tables, so they read without JavaScript, too. `html/page.js` draws the charts with uPlot
from the JSON at the end of the page. All text of users and models passes through `escaped`, or is in that JSON. Nothing
here imports torch.
"""

import base64
import functools
import hashlib
import html
import json as jsonlib
import math
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lm import __version__
from lm.cli.options import changed_settings
from lm.cli.runs import describe_run
from lm.errors import RequestError, RunError
from lm.runs.history import Expectation, read_samples
from lm.runs.metrics import BY_SOURCE, METRICS, Metric, core_sentence, merge_evaluations
from lm.runs.run import Run
from lm.system.files import finite_or_none, read_lines, refuse_url, write_atomically
from lm.system.units import format_bytes, format_count, format_duration, format_figure, plural

PARTS = Path(__file__).parent / "html"
OPENING = "<!doctype html>\n<!-- A run of lm -->\n"  # of every page: a file that begins otherwise is not replaced
POINTS = 1000  # of a curve
ALL_POINTS = 30_000  # of all curves together, as long as each has `FEWEST_POINTS`
FEWEST_POINTS = 100
CHARTS = 150
SAMPLED_STEPS = 20
SAMPLE_CHARACTERS = 4000
EVALUATED_STEPS = 20
ALERTS = 100
POSTMORTEMS = 10
POSTMORTEM_CHARACTERS = 40_000

Tile = tuple[str, str, str]  # label, value, what stands below it


# ---- the file --------------------------------------------------------------------------------------------------------


def refuse_html_path(path: str) -> Path:
    """The file for a page, if a page may be written there.

    Raises:
        RequestError: there is a folder, or a file that is no page of a run, which would be lost.
    """
    refuse_url("--html", path)
    target = Path(path)
    if target.is_dir():
        raise RequestError(f"--html {target} is a folder; name a file in it, such as {target / 'run.html'}")
    try:
        with open(target, encoding="utf-8", errors="replace") as file:
            ours = file.read(len(OPENING)) == OPENING
    except FileNotFoundError:
        return target.resolve()
    except OSError as error:
        raise RequestError(f"--html {target} cannot be read: {error.strerror}") from error
    if not ours:
        raise RequestError(f"--html {target} is there already and not the page of a run; choose another")
    return target.resolve()  # a link stays one


def write_page(run: Run, target: Path, reload: int | None = None) -> str:
    """Write or replace the page of a run.

    Args:
        target: from `refuse_html_path`.
        reload: seconds after which the page loads itself again, if the run is being trained; None: never.

    Returns:
        The status that the page shows.

    Raises:
        RunError: it cannot be written.
    """
    metrics = run.metrics()
    found = describe_run(run, metrics)
    text = page(run, found, metrics, reload)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text, durable=False)
    except OSError as error:
        raise RunError(f"could not write {target}: {error.strerror or error}") from error
    return found["status"]


# ---- the page --------------------------------------------------------------------------------------------------------


def page(run: Run, found: dict[str, Any], metrics: list[dict[str, Any]], reload: int | None = None) -> str:
    """The whole document.

    Args:
        found: `describe_run(run)`.
        metrics: `run.metrics()`.
        reload: as in `write_page`.
    """
    found = public({name: part for name, part in found.items() if name != "samples"})
    live = found["status"] == "running"
    data, figures = chart_data(run, metrics)
    sections = {
        "Curves": _curves(data, figures),
        "Evaluation": _evaluations(run),
        "Samples": _samples(run),
        "Alerts": _alerts(found),
        "Model": _model(found),
        "Settings": _settings(found["config"]),
        "Checkpoints": _checkpoints(found),
        "Provenance": _provenance(found),
    }
    sections = {title: body for title, body in sections.items() if body}
    style = (PARTS / "uPlot.min.css").read_text(encoding="utf-8") + (PARTS / "page.css").read_text(encoding="utf-8")
    script = _script()
    policy = (
        f"default-src 'none'; script-src '{source_digest(script)}'; style-src '{source_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    refresh = f'<meta http-equiv="refresh" content="{reload}">\n' if live and reload else ""
    links = "".join(f'<a href="#{title.lower()}">{title}</a>' for title in sections)
    return (
        f'{OPENING}<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escaped(found['name'])}: {escaped(found['status'])}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n{_header(found, live, reload)}<nav aria-label=\"Parts of this page\">{links}</nav>\n<main>\n"
        + "".join(
            f'<section id="{title.lower()}">\n<h2>{title}</h2>\n{body}</section>\n' for title, body in sections.items()
        )
        + f'</main>\n<script type="application/json" id="data">{_script_json(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


@functools.cache
def _script() -> str:
    """uPlot with its licence, and the page's own script."""
    licence, uplot, own = (
        (PARTS / name).read_text(encoding="utf-8") for name in ("uPlot.LICENSE", "uPlot.iife.min.js", "page.js")
    )
    return f"/*\nuPlot\n{licence}*/\n{uplot}\n{own}"


def source_digest(source: str) -> str:
    """The name of an inline script or style in a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _header(found: dict[str, Any], live: bool, reload: int | None) -> str:
    written = f"Written {utc(time.time())}"
    if live:
        written += "; the run goes on" + (f", and this page loads itself again every {reload} s" if reload else "")
    lines = [f'<p class="reason">{escaped(found["reason"])}</p>' if found["reason"] and not live else ""]
    lines.append(f'<p class="note">{escaped(found["note"])}</p>' if found["note"] else "")
    tags = "".join(f"<li>{escaped(tag)}</li>" for tag in found["tags"])
    lines.append(f'<ul class="tags" aria-label="Tags">{tags}</ul>' if tags else "")
    checks = (found["acceptance"] or {}).get("checks", [])
    judged = [str(Expectation(each["metric"], each["low"], each["high"], each["value"])) for each in checks]
    lines += [f'<p class="{"met" if each["met"] else "missed"}">{escaped(said)}</p>'
              for each, said in zip(checks, judged, strict=True)]  # fmt: skip
    tiles = "".join(
        f'<div><dt>{escaped(label)}</dt><dd>{escaped(value)}</dd><dd class="below">{escaped(below)}</dd></div>'
        for label, value, below in _tiles(found)
    )
    torch = found["versions"].get("torch")
    made = "; ".join([_machine(found), *([f"torch {torch}"] if torch else []),
                      *([f"started {found['started']}"] if found["started"] else [])])  # fmt: skip
    return (
        f'<header>\n<h1>{escaped(found["name"])} <span class="status {escaped(found["status"])}">'
        f'{escaped(found["status"])}</span></h1>\n<p class="written">{written}.<br>{escaped(made)}.</p>\n'
        f'{"".join(lines)}\n'
        f'<dl class="tiles">{tiles}</dl>\n</header>\n'
    )


def _tiles(found: dict[str, Any]) -> Iterable[Tile]:
    """The figures at the top: losses, progress, time."""
    curves = found["curves"]
    for name, label in (("val/loss", "best validation loss"), ("val/bpb", "best bits per byte")):
        if best := curves.get(name):
            last = "" if best["last"] == best["lowest"] else f"; last {METRICS[name].shown(best['last'])}"
            yield label, METRICS[name].shown(best["lowest"]), f"at step {best['lowest_step']:,}{last}"
    if loss := curves.get("train/loss"):
        yield "training loss", METRICS["train/loss"].shown(loss["last"]), f"from {loss['first']:.4f}"
    if found["step"] is None:
        yield "step", "none", "no step taken"
    else:
        share = f" ({found['step'] / found['max_steps']:.0%})" if found["max_steps"] else ""
        yield "step", f"{found['step']:,}", f"of {found['max_steps']:,}{share}" if found["max_steps"] else ""
    if found["tokens"] is not None:
        of = f"of {format_count(float(found['max_tokens']))}" if found["max_tokens"] else ""
        yield "tokens", format_count(float(found["tokens"])), of
    if trained := found["seconds"]["computing"] + found["seconds"]["waiting for data"]:
        left = f"{format_duration(found['eta_seconds'])} left" if found["eta_seconds"] else ""
        yield "time trained", format_duration(trained), left
    if speed := curves.get("perf/tokens_per_second"):
        mfu = curves.get("perf/mfu")
        yield "tokens a second", format_count(speed["median"]), "median" + (f"; MFU {mfu['median']:.1%}" if mfu else "")
    if found["parameters"] is not None:
        yield "parameters", format_count(float(found["parameters"])), ""


def _evaluations(run: Run) -> str:
    every = public(run.evaluations())
    steps = sorted({one["step"] for one in every if one["step"] is not None}, reverse=True)
    parts = []
    for step in steps[:EVALUATED_STEPS]:
        merged = merge_evaluations(every, step)
        tasks = [
            (name, f"{task['accuracy']:.1%}", _interval(task["interval"], "{:.1%}"), f"{task['baseline']:.1%}",
             f"{task['centered']:.3f}", f"{task['items']:,}", f"{task['num_fewshot']}")
            for name, task in merged["tasks"].items()
        ]  # fmt: skip
        texts = [
            (name, _figure(one["bits_per_byte"]), _interval(_around(one, "bits_per_byte", "stderr"), "{:.4f}"),
             _figure(one["loss"]), _interval(_around(one, "loss", "loss_stderr"), "{:.4f}"), f"{one['tokens']:,}")
            for name, one in merged["texts"].items()
        ]  # fmt: skip
        shown = table(("task", "accuracy", "95 % interval", "guessing", "centred", "items", "shots"), tasks)
        shown += table(("text", "bits per byte", "95 % interval", "loss", "95 % interval", "tokens"), texts)
        parts.append(details(f"Step {step:,}{core_sentence(merged)}", shown, step == steps[0]))
    return "".join(parts) + _left_out(len(steps) - EVALUATED_STEPS, "earlier evaluation")


def _around(text: dict[str, Any], value: str, error: str) -> tuple[float, float] | None:
    """The 95 % interval of a mean, from its standard error."""
    if text.get(value) is None or text.get(error) is None:
        return None
    return text[value] - 1.96 * text[error], text[value] + 1.96 * text[error]


def _interval(ends: Sequence[float] | None, form: str) -> str:
    return "" if ends is None else f"{form.format(ends[0])} to {form.format(ends[1])}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _samples(run: Run) -> str:
    """What the model wrote, a fold for each step, the newest first and open; of many steps some from the whole run."""
    samples = read_samples(run)
    every = sorted({sample["step"] for sample in samples}, reverse=True)
    places = np.linspace(0, len(every) - 1, min(SAMPLED_STEPS, len(every)))
    steps = list(dict.fromkeys(every[round(place)] for place in places))
    parts = []
    for step in steps:
        rows = "".join(
            f'<dt>{escaped(one["prompt"]) or "<i>none</i>"}</dt><dd dir="auto">{escaped(_cut(one["text"]))}</dd>'
            for one in samples if one["step"] == step
        )  # fmt: skip
        parts.append(details(f"Step {step:,}", f'<dl class="samples">{rows}</dl>', step == steps[0]))
    return "".join(parts) + _left_out(len(every) - len(steps), "other step")


def _cut(text: Any) -> str:
    return str(text) if len(str(text)) <= SAMPLE_CHARACTERS else f"{str(text)[:SAMPLE_CHARACTERS]}…"


def _alerts(found: dict[str, Any]) -> str:
    """The newest alerts, and the pages of the newest post-mortems."""
    alerts = found["alerts"]
    rows = [(f"{one['step']:,}", utc(one["time"]), one["guard"], one["action"], one["message"])
            for one in reversed(alerts[-ALERTS:])]  # fmt: skip
    parts = [table(("step", "time", "guard", "action", "message"), rows, numbers=1),
             _left_out(len(alerts) - ALERTS, "earlier alert")]  # fmt: skip
    folders = [Path(path) for path in reversed(found["post_mortems"])]
    for folder in folders[:POSTMORTEMS]:
        try:
            text = (folder / "postmortem.md").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it is being written
            continue
        text = public(text) if len(text) <= POSTMORTEM_CHARACTERS else f"{public(text[:POSTMORTEM_CHARACTERS])}…"
        parts.append(details(f"Post-mortem of step {folder.name.removeprefix('postmortem-').lstrip('0') or '0'}",
                             f'<pre tabindex="0">{escaped(text)}</pre>'))  # fmt: skip
    parts.append(_left_out(len(folders) - POSTMORTEMS, "earlier post-mortem"))
    return "".join(parts)


def _model(found: dict[str, Any]) -> str:
    decoder = found["config"].get("model", {}).get("decoder")
    shape = {name: value for name, value in decoder.items() if value is not None} if isinstance(decoder, dict) else {}
    if found["checkpoints"]:  # in the config it may be left to the tokenizer
        shape["vocab_size"] = Run(found["checkpoints"][-1]["path"]).read("config.json").get("vocab_size")
    counted = {
        "parameters": None if found["parameters"] is None else f"{found['parameters']:,}",
        "operations of training": f"{found['flops']:.3g}" if found["flops"] else None,
    }
    return facts({**counted, **shape}, short=True)


def _settings(config: dict[str, Any]) -> str:
    """Settings that are not the defaults, then the whole config."""
    if not config:
        return ""
    changed = {name: value for name, value in changed_settings(config).items() if name not in ("run", "tags", "note")}
    whole = yaml.safe_dump(config, allow_unicode=True, sort_keys=False, width=100)
    return (
        "<p>What differs from the defaults:</p>\n" * bool(changed)
        + facts({name: jsonlib.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
                 for name, value in changed.items()}, short=True)
        + details("All settings", f'<pre tabindex="0">{escaped(whole)}</pre>')
    )  # fmt: skip


def _checkpoints(found: dict[str, Any]) -> str:
    rows = [
        (f"{one['step']:,}", Path(one["path"]).name, format_bytes(one["bytes"]),
         ", ".join(mark for mark in ("best", "last") if one[mark]))
        for one in found["checkpoints"]
    ]  # fmt: skip
    return table(("step", "folder", "size", ""), rows, numbers=1)


def _provenance(found: dict[str, Any]) -> str:
    """How the run was started, on what, with which versions, and what it cost."""
    spent = (found["budget"] or {}).get("spent_usd")
    versions = {"python": found["python"], **found["versions"]}
    return facts({
        "machine": _machine(found),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "started": found["started"],
        "command": shlex.join(public_command(["lm", *found["command"][1:]])) if found["command"] else None,
        "git": found["git"],
        "config, SHA-256": found["config_sha256"],
        "cost": None if spent is None else f"{format_figure(spent)} USD",
        "page": f"lm {__version__}; charts by uPlot, whose licence is in the source of this page",
    })  # fmt: skip


def _machine(found: dict[str, Any]) -> str:
    devices = f"{found['world_size'] or 1} x {found['device'] or 'unknown device'}"
    return devices + (f" on {found['host']}" if found["host"] else "")


# ---- charts ----------------------------------------------------------------------------------------------------------

PLACES = {  # the first part of a metric's name -> the heading over its chart, in the order of the page
    "train": "Loss", "val": "Loss", "eval": "Evaluation", "optim": "Optimization", "perf": "Speed and machine",
    "mem": "Speed and machine", "data": "Data",
}  # fmt: skip
OWN = "Other metrics"  # the heading over those of the user's own
TITLES = {"train/perplexity": "perplexity", "val/perplexity": "perplexity"}  # of charts with several metrics
EVALUATED = {"accuracy": "accuracy by task", "centered": "centred accuracy by task", "bpb": "bits per byte by text"}
FIGURES = ("metric", "last", "lowest", "at step", "highest", "at step", "values", "not finite")


def chart_data(run: Run, metrics: list[dict[str, Any]]) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """All curves of a run, and their figures as text.

    Returns:
        What `page.js` reads, and a row of `FIGURES` for each metric. The script reads
        `charts`: each with `place`, `title`, `unit` and `curves`; a curve has `label`, `form` (of its values), `points`
        (whether it is drawn as points, too, and never smoothed), `table`, and values as in `_bucketed`;
        `tables`: x values by `step`, `tokens` and `hours`, each for all curves that were logged in the same lines;
        `marks`: resumes and rollbacks, with `label` and their place on each axis;
        `size`: the most log lines that a point of a curve stands for; `left_out`: charts that are left out.
    """
    lines = sorted(metrics, key=lambda line: line["step"])
    places: dict[str, list[int]] = {}  # metric -> the lines that have it
    for index, line in enumerate(lines):
        for name in line.keys() - {"step", "tokens", "time"}:
            places.setdefault(name, []).append(index)
    order = {name: index for index, name in enumerate(METRICS)}
    names = sorted(places, key=lambda name: (order.get(name, len(order)), name))
    most = min(POINTS, max(FEWEST_POINTS, ALL_POINTS // max(1, len(names))))
    axes, rows, size = _axes(lines), [], 1
    tables: dict[tuple[int, ...], tuple[int, dict[str, list]]] = {}  # lines -> number and content of their table
    charts: dict[tuple[str, str], dict[str, Any]] = {}
    for name in names:
        place, title, label, metric = _chart_of(public(name))
        at, values = np.array(places[name]), np.array([lines[index][name] for index in places[name]], dtype=float)
        each = math.ceil(len(at) / most)
        middles = at[np.minimum(np.arange(0, len(at), each) + each // 2, len(at) - 1)]
        table_of = tables.setdefault(
            tuple(places[name]), (len(tables), {axis: all_x[middles].tolist() for axis, all_x in axes.items()})
        )
        chart = charts.setdefault((place, title), {"place": place, "title": title, "unit": metric.unit, "curves": []})
        chart["curves"].append({
            "label": printable(label), "form": metric.form, "points": name.startswith(("val/", "eval/")),
            "table": table_of[0], **_bucketed(values, each),
        })  # fmt: skip
        rows.append(_figures(public(name), label, metric, values, axes["step"][at]))
        size = max(size, each)
    found = sorted(charts.values(), key=lambda chart: [*dict.fromkeys(PLACES.values()), OWN].index(chart["place"]))
    return {
        "charts": [{**chart, "title": printable(chart["title"])} for chart in found[:CHARTS]],
        "tables": [table for _, table in tables.values()],
        "marks": _marks(run, axes), "size": size, "left_out": max(0, len(found) - CHARTS),
    }, rows  # fmt: skip


def _axes(lines: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What curves are drawn over, for every line: never less than before, as where a clock was set back."""
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
        return place, metric.chart[1] if metric.chart else TITLES.get(name, metric.label), metric.label, metric
    for base in BY_SOURCE:
        if name.startswith(f"{base}/"):
            return place, f"{METRICS[base].label} by source", name.removeprefix(f"{base}/"), METRICS[base]
    task, _, kind = name.removeprefix("eval/").rpartition("/")
    if name.startswith("eval/") and task and kind in EVALUATED:
        return place, EVALUATED[kind], task, Metric(task, form="{:.1%}" if kind == "accuracy" else "{:.4f}")
    return place, name, name, Metric(name)


def _bucketed(values: np.ndarray, each: int) -> dict[str, list]:
    """A curve with one point for each so many values: `mean`, their `low` and `high`, and `bad`.

    What is not finite is left out; a point without any finite value is None. `bad` has the places of points that left
    something out. `low` and `high` are there where a point stands for several values.
    """
    rows = np.full((-(-len(values) // each), each), np.nan)
    rows.flat[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    low, high = np.fmin.reduce(rows, axis=1), np.fmax.reduce(rows, axis=1)
    known = np.isfinite(rows).sum(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.nansum(rows, axis=1) / known
    bad = np.unique(np.flatnonzero(~np.isfinite(values)) // each).tolist()
    found = {"mean": mean} if each == 1 else {"mean": mean, "low": low, "high": high}
    return {**{name: [_rounded(value) for value in one.tolist()] for name, one in found.items()}, "bad": bad}


def _rounded(value: float) -> float | None:
    """Six significant digits, as a line of a chart has; None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


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
    for one in run.read("run.json").get("rollbacks", []):
        found.add((one["step"], f"weights of step {one['to']:,}"))
    steps = axes["step"]
    places = {step: max(0, int(np.searchsorted(steps, step, side="right")) - 1) for step, _ in found}
    return [
        {"label": label, **{axis: values[places[step]].item() for axis, values in axes.items()}, "step": step}
        for step, label in sorted(found) if len(steps)
    ]  # fmt: skip


def _curves(data: dict[str, Any], rows: list[tuple[str, ...]]) -> str:
    """The frames of the charts, the controls, and all figures as a table."""
    if not rows:
        return "<p>Nothing was logged.</p>\n"
    parts, place = [CONTROLS], ""
    for index, chart in enumerate(data["charts"]):
        if chart["place"] != place:
            parts.append(f"{'</div>' if place else ''}<h3>{chart['place']}</h3>\n<div class=\"charts\">\n")
            place = chart["place"]
        wide = ' class="wide"' if index == 0 else ""
        unit = f" <span>{escaped(chart['unit'])}</span>" if chart["unit"] else ""
        bad = " <span>× not finite</span>" if any(curve["bad"] for curve in chart["curves"]) else ""
        parts.append(
            f'<figure{wide}><figcaption>{escaped(chart["title"])}{unit}{bad}</figcaption>'
            f'<div class="plot" data-chart="{index}"></div></figure>\n'
        )
    parts.append("</div>\n<noscript><p>The charts need JavaScript; the table has the figures.</p></noscript>\n")
    if data["size"] > 1:
        parts.append(
            f'<p class="said">A point of a curve stands for up to {plural(data["size"], "log line")}: the line is '
            "their mean, and the band reaches from the lowest to the highest. The table is of all log lines.</p>\n"
        )
    parts.append(_left_out(data["left_out"], "other chart"))
    parts.append(details("All metrics as a table", table(FIGURES, rows)))
    return "".join(parts)


CONTROLS = """<form class="controls" hidden>
<fieldset><legend>x axis</legend>
<label><input type="radio" name="x" value="step" checked> steps</label>
<label><input type="radio" name="x" value="tokens"> tokens</label>
<label><input type="radio" name="x" value="hours"> hours</label></fieldset>
<label><input type="checkbox" name="log"> log scale of losses</label>
<label>smoothing <input type="range" name="smooth" min="0" max="0.99" step="0.01" value="0"> <output>0</output></label>
<button type="button" disabled>reset zoom</button>
<p>Drag over a chart to zoom into all of them, double-click to reset. With the keyboard: arrows, + and -, 0.</p>
</form>
"""


# ---- HTML ------------------------------------------------------------------------------------------------------------

# Control characters, those that change the direction of what follows, and halves of a character, which UTF-8 has not.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: Any) -> str:
    """A text of others, each character of which is shown as it stands; others are replaced by U+FFFD."""
    return UNPRINTABLE.sub("\ufffd", str(text).replace("\r\n", "\n"))


def escaped(text: Any) -> str:
    """A text of others for a page, also within quotes."""
    return html.escape(printable(text))


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], numbers: int | None = None) -> str:
    """A table that scrolls by itself; empty without rows. The first column is text, and the others are numbers.

    Args:
        numbers: how many columns are numbers: the first ones then, and the others are text.
    """
    if not rows:
        return ""
    kinds = ["" if (index == 0 if numbers is None else index >= numbers) else ' class="number"'
             for index in range(len(heads))]  # fmt: skip
    head = "".join(f'<th scope="col"{kind}>{escaped(one)}</th>' for one, kind in zip(heads, kinds, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{escaped(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>\n"
        for row in rows
    )
    whole = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{whole}</div>\n'


def facts(pairs: dict[str, Any], short: bool = False) -> str:
    """Names with their values, in two columns where these are short; those that are None are left out."""
    rows = [f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>\n"
            for name, value in pairs.items() if value is not None]  # fmt: skip
    return f'<dl class="facts{" short" * short}">\n{"".join(rows)}</dl>\n' if rows else ""


def details(summary: str, body: str, is_open: bool = False) -> str:
    """A part that folds."""
    return f"<details{' open' * is_open}><summary>{escaped(summary)}</summary>\n{body}</details>\n"


def _left_out(number: int, noun: str) -> str:
    return f'<p class="said">Left out: {plural(number, noun)}.</p>\n' if number > 0 else ""


def _script_json(value: Any) -> str:
    """JSON that cannot end the element that it stands in."""
    text = jsonlib.dumps(finite_or_none(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def utc(seconds: float) -> str:
    """A time for people all over the world."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


# ---- secrets ---------------------------------------------------------------------------------------------------------

USER = re.compile(r"(?<=://)(?:[^\s/@]*@|[^\s/:]*:(?!\d+/)[^\s]*@)")  # and the password, in a URL
QUERY = re.compile(r"(://[^\s?#'\"]*)[?#][^\s'\"]*")  # which may be a signature
SECRET = re.compile(r"passw|secret|credential|(api|access|private)_?key|(auth|access|api|hf|bearer)_?token", re.I)
NOTIFY = "notify"  # addresses to which anybody who knows them can write


def public(value: Any) -> Any:
    """The same tree of values without passwords: users and queries of URLs, values with such a name, `notify`."""
    if isinstance(value, dict):
        return {name: "(left out)" if SECRET.search(str(name)) and part else public(part)
                for name, part in value.items() if name != NOTIFY}  # fmt: skip
    if isinstance(value, list | tuple):
        return [public(part) for part in value]
    return QUERY.sub(r"\1", USER.sub("", value)) if isinstance(value, str) else value


def public_command(command: Iterable[Any]) -> list[str]:
    """A command line without the options that `public` leaves out."""
    shown, private = [], False
    for argument in map(str, command):
        if argument.startswith("--"):
            option = argument.partition("=")[0]
            private = option.startswith(f"--{NOTIFY}") or bool(SECRET.search(option))
        if not private:
            shown.append(public(argument))
    return shown
