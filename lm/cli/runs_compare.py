"""`lm runs compare`: curves of runs in one chart, and the settings that differ. `lm runs export`: a run for others.

`cli/report/run` has the export as a page. Nothing here imports torch.
"""

import csv
import json as jsonlib
import logging
import math
import shutil
import time
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console
from rich.text import Text

from lm.cli.charts import MARKERS, chart, plain_table
from lm.cli.report.public import PRIVATE
from lm.cli.runs_show import summarize
from lm.errors import RequestError, RunError
from lm.runs.config_diff import differences
from lm.runs.facts import read_facts, run_row
from lm.runs.find import find_run, find_runs
from lm.runs.history import curve, labels
from lm.runs.metrics import METRICS, check_metric
from lm.runs.run import ROOT, Run
from lm.runs.trainer_json import find_damage
from lm.system.files import check_local_path, digest, new_folder
from lm.system.parsing import finite_or_none, to_json

log = logging.getLogger(__name__)

VALIDATION_DATA = {"data.path", "data.val", "data.sources"}  # options that decide the text of validations
X_LABELS = {"step": "step", "tokens": "tokens", "time": "hours"}


def compare(
    runs: list[str],
    metric: str = "train/loss",
    x: Literal["step", "tokens", "time"] = "step",
    png: str | None = None,
    json: bool = False,
    root: str = str(ROOT),
) -> None:
    """Draw curves of runs in one chart, with their values and the settings in which they differ.

    Args:
        runs: Names under the root or in the registry, such as 'lr-*' in quotes, or paths; at least two.
        metric: Metric to draw, by its name in TensorBoard.
        x: The x axis; time is hours since the run's first log line.
        png: Image file to write the chart to: .png, .svg or .pdf.
        json: Print one JSON object instead.
        root: Folder of the runs.
    """
    check_local_path("--png", png or "")
    folders = find_runs(runs, root)
    if len(folders) < 2:
        raise RequestError("name two runs or more; `lm runs ls` lists them")
    folders, metrics = best_first(folders)
    names = labels(folders)
    series = [curve(name, lines, metric, x) for name, lines in zip(names, metrics, strict=True)]
    if not any(one.x for one in series):
        check_metric(metric)
        raise RequestError(f"none of the runs has logged {metric}")
    rows = []
    for name, folder, lines in zip(names, folders, metrics, strict=True):
        summaries = {shown: summarize(lines, shown) for shown in (metric, "val/loss", "val/bpb")}
        rows.append({"run": name, "path": str(folder.path.resolve()), "status": folder.status(), **summaries})
    differing = differences([folder.settings() for folder in folders])
    other_data = sorted(differing.keys() & VALIDATION_DATA)
    if png is not None:
        from lm.inspection.drawing import draw_curves  # matplotlib takes half a second

        Path(png).absolute().parent.mkdir(parents=True, exist_ok=True)
        draw_curves(series, X_LABELS[x], metric).savefig(png)
        log.info("the chart is in %s", png)
    if json:
        curves = {one.name: {"x": list(one.x), "y": list(one.y)} for one in series}
        settings_by_run = {key: dict(zip(names, values, strict=True)) for key, values in differing.items()}
        print(to_json({"metric": metric, "x": x, "runs": rows, "curves": curves, "settings": settings_by_run}))
        return
    console = Console(highlight=False)
    console.print(chart(series, console.width, 20, X_LABELS[x], metric))
    console.print()
    _print_values(console, rows, metric, not other_data)
    if other_data:
        what = f"{' and '.join(other_data)} differ: only of runs with the same validation text is one the best"
        console.print(Text(what, style="dim"))
    _print_settings(console, names, differing)


def best_first(runs: list[Run]) -> tuple[list[Run], list[list[dict[str, Any]]]]:
    """Runs with their metrics, by the lowest bits per byte; by validation loss where one has no bits per byte."""
    metrics = [run.metrics() for run in runs]
    lowest = [
        [summary["lowest"] if (summary := summarize(lines, name)) else math.inf for lines in metrics]
        for name in ("val/bpb", "val/loss")
    ]
    losses = next((losses for losses in lowest if max(losses) < math.inf), lowest[-1])
    order = sorted(range(len(runs)), key=lambda index: losses[index])
    return [runs[index] for index in order], [metrics[index] for index in order]


def _print_values(console: Console, rows: list[dict[str, Any]], metric: str, name_best: bool) -> None:
    cells = []
    for index, row in enumerate(rows):
        summary = row[metric] or {}
        numbers = [summary.get(name) for name in ("last", "lowest", "lowest_step")]
        numbers += [(row[name] or {}).get("lowest") for name in ("val/loss", "val/bpb")]
        best = " (best)" if name_best and not index and numbers[3] is not None else ""
        cells.append([MARKERS[index % len(MARKERS)], row["run"] + best, row["status"], *map(_number, numbers)])
    heads = ("", "run", "status", "last", "lowest", "at step", "val loss", "val bpb")
    console.print(plain_table(heads, "tttnnnnn", cells))
    console.print(Text(f"'last' and 'lowest' are of {metric}; 'val loss' and 'val bpb' are the lowest", style="dim"))


def _print_settings(console: Console, names: list[str], differing: dict[str, list[Any]]) -> None:
    console.print()
    if differing:
        rows = [[key, *("" if value is None else str(value) for value in values)] for key, values in differing.items()]
        console.print(plain_table(["setting", *names], "t" * (1 + len(names)), rows))
    else:
        console.print("the configs are the same")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) or not math.isfinite(value) else f"{value:.5g}"


# ---- export ----------------------------------------------------------------------------------------------------------

PICTURES = {  # file -> the metrics that it shows, over what, and the scale of their axis
    "loss.png": (("train/loss", "val/loss"), "step", "linear"),
    "norms.png": (("optim/grad_norm", "optim/param_norm"), "step", "log"),
    "throughput.png": (("perf/tokens_per_second",), "time", "linear"),  # so that pauses show
}


def export(
    run: str,
    output: str | None = None,
    checkpoint: Literal["last", "best", "none"] = "last",
    html: str | None = None,
    root: str = str(ROOT),
) -> None:
    """Export a run to a folder for sharing: manifest, metrics, charts, config, TensorBoard files and weights.

    Args:
        run: Name under the root or in the registry, or a path.
        output: Folder to create; it must be empty or not exist; `exports/RUN` if not given.
        checkpoint: Checkpoint whose weights to copy; none leaves them out.
        html: File to write instead of the folder: one page that opens offline, with charts to zoom into, samples,
            evaluations, alerts and settings. An existing page of a run is replaced, any other file is not. Passwords
            in URLs and values with names such as `api_key` are left out.
        root: Folder of the runs.
    """
    exported = find_run(run, root)
    if html is not None:
        from lm.cli.report.run import write_page

        if output is not None or checkpoint != "last":
            raise RequestError("--html writes a page instead of the folder: leave out --output and --checkpoint")
        write_page(exported, html)
        print(html)
        return
    target = Path("exports") / exported.name if output is None else Path(output)
    with new_folder(target) as folder:
        write_export(exported, None if checkpoint == "none" else exported.checkpoint(checkpoint), folder)
    print(target)


def write_export(run: Run, checkpoint: Path | None, folder: Path) -> None:
    """Fill a folder with everything; the manifest, which has a digest of every other file, comes last."""
    metrics = run.metrics()
    write_metrics(metrics, folder)
    draw_pictures(metrics, folder, run.name)
    settings = run.settings()
    if any([settings.pop(name, None) for name in PRIVATE]):
        (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    elif run.config.exists():
        shutil.copyfile(run.config, folder / "config.yaml")
    for events in run.path.glob("events.out.tfevents.*"):
        shutil.copy2(events, folder / events.name)
    exported = None
    if checkpoint is not None:
        if damage := find_damage(checkpoint):
            raise RunError(f"checkpoint {checkpoint}: {damage}; choose another with --checkpoint")
        weights = folder / "final.safetensors"
        shutil.copyfile(checkpoint / "model.safetensors", weights)
        exported = {"step": int(checkpoint.name.removeprefix("step-")), "sha256": digest(weights)}
    files = {path.name: digest(path) for path in sorted(folder.iterdir())}
    manifest = manifest_of(run, metrics) | {"checkpoint": exported, "files": files}
    text = jsonlib.dumps(finite_or_none(manifest), indent=2, ensure_ascii=False)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")


def manifest_of(run: Run, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest without checkpoint and files: how the run was made, on what, at what cost, and where it ended."""
    facts, row = read_facts(run), run_row(run)
    final: dict[str, Any] = {}
    for name in ("train/loss", "val/loss", "val/bpb"):
        if summary := summarize(metrics, name):
            final[name] = {key: summary[key] for key in ("last", "lowest", "lowest_step")}
    return {
        "format": 1,
        "run": run.name,
        "status": facts["status"],
        "reason": facts["reason"],
        "seed": run.settings().get("seed_everything"),
        "config_sha256": row["config_sha256"],
        "versions": {"python": facts["python"], **facts["versions"]},
        "git": facts["git"],
        "command": facts["command"],
        "machine": {**{name: facts[name] for name in ("host", "device", "world_size")}, **facts["machine"]},
        "cost": facts["budget"],
        "started": facts["started"],
        "last_logged": _utc(metrics[-1]["time"]) if metrics else None,
        "exported": _utc(time.time()),
        "steps": row["step"],
        "tokens": facts["tokens"],
        "final": final,
    }


def write_metrics(metrics: list[dict[str, Any]], folder: Path) -> None:
    """Write `metrics.csv` and `metrics.parquet`: one row a step and name, by step; numbers are exact in both."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values: dict[tuple[int, str], float] = {}
    for line in metrics:
        for name, value in line.items():
            if name != "step":
                values[line["step"], {"tokens": "data/tokens"}.get(name, name)] = float(value)
    rows = sorted((step, name, value) for (step, name), value in values.items())
    with open(folder / "metrics.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("step", "name", "value"))
        writer.writerows((step, name, repr(value)) for step, name, value in rows)
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    schema = pa.schema({"step": pa.int64(), "name": pa.string(), "value": pa.float64()})
    pq.write_table(pa.table([list(column) for column in columns], schema=schema), folder / "metrics.parquet")


def draw_pictures(metrics: list[dict[str, Any]], folder: Path, title: str) -> None:
    from lm.inspection.drawing import draw_curves  # matplotlib takes half a second

    for file, (names, x, scale) in PICTURES.items():
        series = [curve(METRICS[name].label, metrics, name, x) for name in names]
        if any(one.x for one in series):
            label = {"step": "optimizer step", "time": "hours since the first log line"}[x]
            draw_curves(series, label, METRICS[names[0]].unit, title, scale).savefig(folder / file)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
