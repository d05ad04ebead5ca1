"""Figures and tables of a run: its curves, alerts and samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lm.inspection.drawing import VERMILION, Html, figure, label_axes, plot_curves, table, wrapped
from lm.runs.facts import read_facts, run_row
from lm.runs.history import Series, curve, labels, read_samples
from lm.runs.metrics import METRICS
from lm.runs.postmortem import Incident
from lm.runs.run import Run
from lm.system.units import format_count

PANELS = (("train/loss", "val/loss"), ("val/bpb",), ("optim/lr",), ("optim/grad_norm",))  # metrics of each panel
AXES = {  # x of a curve -> quantity on the x axis, and the label of the axis
    "step": ("steps", "optimizer step"),
    "tokens": ("tokens", "tokens"),
    "time": ("time", "hours since the first log line"),
}


# ---- figures ---------------------------------------------------------------------------------------------------------


def draw_training(run: Run) -> Figure:
    """Loss, bits per byte, learning rate and gradient norm over steps; dotted lines are alerts."""
    lines, alerts = run.metrics(), run.alerts()
    picture, axes = figure(2, 2, width=10, height=6.5)
    for panel, names in zip(axes.flat, PANELS, strict=True):
        plot_curves(panel, [curve(METRICS[name].label, lines, name) for name in names])
        for alert in alerts:
            panel.axvline(alert["step"], color=VERMILION, linestyle=":", linewidth=1)
        shown = METRICS[names[0]]
        label_axes(panel, shown.label, "optimizer step", shown.unit or shown.label)
    return picture


def draw_sources(run: Run) -> Figure | None:
    """Training and validation loss over steps, a line per source of a mixture; None without a mixture."""
    sources = run.read("run.json").get("mixture", {}).get("sources", [])
    if not sources:
        return None
    lines, columns = run.metrics(), max(1, min(4, 110 // max(map(len, sources))))
    picture, axes = figure(1, 2, width=10, height=3.8 + 0.2 * len(sources) / columns, sharey=True)
    for panel, name in zip(axes, ("train/loss", "val/loss"), strict=True):
        label_axes(panel, f"{METRICS[name].label} by source", "optimizer step", METRICS[name].unit)
        plot_curves(panel, [curve(source, lines, f"{name}/{source}") for source in sources])
    named = {line.get_label(): line for panel in axes for line in panel.get_lines()}  # one legend for both
    shown = [source for source in sources if source in named]
    picture.legend([named[source] for source in shown], shown, loc="outside lower center", ncols=columns, frameon=False)
    return picture


def draw_comparison(runs: Sequence[Run], metric: str = "train/loss") -> Figure:
    """One metric of several runs, by its name in TensorBoard: over steps, over tokens and over time."""
    named = list(zip(labels(runs), [run.metrics() for run in runs], strict=True))
    unit = METRICS[metric].unit if metric in METRICS else ""
    picture, axes = figure(1, 3, width=12, height=4, sharey=True)
    for panel, (x, (over, label)) in zip(axes, AXES.items(), strict=True):
        plot_curves(panel, [curve(name, lines, metric, x) for name, lines in named])
        label_axes(panel, f"{metric} over {over}", label, unit if panel is axes[0] else "")
        panel.xaxis.set_major_formatter(lambda value, _: format_count(value) if abs(value) >= 1000 else f"{value:g}")
    return picture


def draw_incident(incident: Incident, lines: list[dict[str, Any]]) -> dict[str, Figure]:
    """The figures of a post-mortem by file name, from the log lines around it and the steps in question."""
    pictures = {}
    for file, metric, column in (("loss.png", "train/loss", 1), ("grad_norm.png", "optim/grad_norm", 2)):
        picture, axes = figure(width=9)
        values = np.array([step[column] for step in incident.steps], float)  # NaN for None, which JSON has
        steps = Series("steps since the log line before", [step[0] for step in incident.steps], values)
        plot_curves(axes, [curve("log lines", lines, metric), steps])
        axes.axvline(incident.worst, color=VERMILION, linestyle="--", label=f"step {incident.worst}, the worst")
        if metric == "train/loss" and incident.baseline is not None:
            axes.axhline(incident.baseline, color="gray", linestyle=":", label=f"{incident.baseline:.3f}, as before")
        if metric == "optim/grad_norm":
            axes.set_yscale("log")
        title = f"{incident.run}, step {incident.step}: {incident.guard}"
        label_axes(axes, title, "optimizer step", METRICS[metric].label)
        pictures[file] = picture
    return pictures


# ---- tables ----------------------------------------------------------------------------------------------------------


def summary_table(run: Run) -> Html:
    facts, row = read_facts(run), run_row(run)
    rows = {
        "run": facts["name"], "status": facts["status"], "reason": facts["reason"],
        "optimizer steps": row["step"], "tokens": facts["tokens"],
        "last training loss (nats a token)": row["loss"],
        "last validation loss (nats a token)": row["val_loss"],
        "lowest validation loss (nats a token)": row["best_loss"],
        "checkpoints": ", ".join(path.name for path in run.steps().values()),
        "best": path.name if (path := run.link("best")) else None,
        "device": facts["device"], "devices": facts["world_size"], "host": facts["host"],
        "started": facts["started"],
    }  # fmt: skip
    return table([(name, value) for name, value in rows.items() if value not in (None, "")], ("", ""))


def alerts_table(run: Run) -> Html:
    rows = [
        (alert["step"], str(alert["guard"]), str(alert["action"]), wrapped(str(alert["message"]), 80))
        for alert in run.alerts()
    ]
    return table(rows, ("step", "guard", "action", "message"), "" if rows else "There were no alerts.")


def samples_table(run: Run, most: int = 8) -> Html:
    """The texts generated from each prompt, at up to `most` steps spread over the run."""
    samples = read_samples(run)
    all_steps = sorted({sample["step"] for sample in samples})
    steps = [all_steps[int(place)] for place in np.linspace(0, len(all_steps) - 1, min(most, len(all_steps)))]
    prompts = list(dict.fromkeys(sample["prompt"] for sample in samples))
    texts = {(sample["step"], sample["prompt"]): wrapped(sample["text"], 56) for sample in samples}
    rows = [(step, *(texts.get((step, prompt), "") for prompt in prompts)) for step in steps]
    return table(rows, ("step", *prompts), "" if rows else "The run has no samples (`samples.prompts`).")
