"""Figures and tables of a run: its curves, alerts and samples."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lm.inspection.drawing import VERMILION, Html, figure, label_axes, plot_curves, table, wrapped
from lm.runs.facts import run_row
from lm.runs.history import Series, curve, read_samples, spread_steps
from lm.runs.metrics import METRICS
from lm.runs.postmortem import Incident
from lm.runs.run import Run

PANELS = (("train/loss", "val/loss"), ("val/bpb",), ("optim/lr",), ("optim/grad_norm",))  # metrics of each panel
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
    """The facts that `lm runs ls --json` has of a run, and its checkpoints."""
    rows = run_row(run) | {"checkpoints": ", ".join(path.name for path in run.steps().values())}
    return table([(name, value) for name, value in rows.items() if isinstance(value, str | int | float)], ("", ""))


def alerts_table(run: Run) -> Html:
    rows = [
        (alert["step"], str(alert["guard"]), str(alert["action"]), wrapped(str(alert["message"]), 80))
        for alert in run.alerts()
    ]
    return table(rows, ("step", "guard", "action", "message"), "" if rows else "There were no alerts.")


def samples_table(run: Run, most: int = 8) -> Html:
    """The texts generated from each prompt, at up to `most` steps spread over the run."""
    samples = read_samples(run)
    prompts = list(dict.fromkeys(sample["prompt"] for sample in samples))
    texts = {(sample["step"], sample["prompt"]): wrapped(sample["text"], 56) for sample in samples}
    rows = [(step, *(texts.get((step, prompt), "") for prompt in prompts)) for step in spread_steps(samples, most)]
    return table(rows, ("step", *prompts), "" if rows else "The run has no samples (`samples.prompts`).")
