"""The metrics of a run, in one table with the label, unit and format of each, and the evaluations of its model.

A metric is a number in lines of `metrics.jsonl`; a line of `evaluations.jsonl` is an evaluation on tasks and texts.
"""

import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from lm.errors import RequestError
from lm.system.files import DAMAGE, finite_or_none
from lm.system.units import format_count


class Metric(NamedTuple):
    """How a logged metric is shown."""

    label: str
    unit: str = ""  # of an axis
    form: str = "{:.4g}"  # of a value
    short: str = ""  # label where space is limited; default: the label
    alert: str = ""  # its name in the conditions of alerts
    chart: str = ""  # title of the chart it shares with others on the page of a run; default: the label

    def shown(self, value: float) -> str:
        """Format a value for display."""
        return format_count(value) if self.form == "count" else self.form.format(value)


NATS = "nats a token"
LOSSES = "training and validation"
METRICS = {  # every metric of metrics.jsonl and TensorBoard, except those of an evaluation's tasks and `BY_SOURCE`
    "train/loss": Metric("loss", NATS, "{:.4f}", alert="loss", chart=LOSSES),
    "train/max_loss": Metric("highest loss of a step", NATS, "{:.4f}", alert="max_loss"),
    "train/perplexity": Metric("training perplexity", form="{:.2f}", alert="perplexity", chart="perplexity"),
    "optim/lr": Metric("learning rate", "", "{:.2e}", "lr", "lr"),
    "optim/grad_norm": Metric("gradient norm", "L2 norm before clipping", "{:.3g}", alert="grad_norm"),
    "optim/param_norm": Metric("parameter norm", "L2 norm", alert="param_norm"),
    "val/loss": Metric("validation loss", NATS, "{:.4f}", alert="val_loss", chart=LOSSES),
    "val/perplexity": Metric("validation perplexity", "", "{:.2f}", "perplexity", "val_perplexity", chart="perplexity"),
    "val/bpb": Metric("validation bits per byte", "bits per byte", "{:.4f}", "bits per byte", "val_bpb"),
    "eval/core": Metric("mean centred accuracy", form="{:.4f}", alert="core"),
    "perf/tokens_per_second": Metric(
        "tokens a second", "tokens a second", "count", "tokens/s", alert="tokens_per_second"
    ),
    "perf/mfu": Metric("MFU (causal)", "share of the peak", "{:.1%}", alert="mfu", chart="MFU"),
    "perf/mfu_full_attention": Metric("MFU (full)", "share of the peak", "{:.1%}", chart="MFU"),
    "perf/data_wait": Metric("waiting for data", "share of the time", "{:.1%}", alert="data_wait"),
    "perf/gpu_load": Metric("GPU load", "percent", alert="gpu_load"),
    "perf/gpu_temperature": Metric("GPU temperature", "degrees Celsius", alert="gpu_temperature"),
    "perf/gpu_power": Metric("GPU power", "watts", alert="gpu_power"),
    "perf/cpu_load": Metric("CPU load", "percent", alert="cpu_load"),
    "mem/process_gib": Metric("memory of the process", "GiB", alert="process_gib"),
    "mem/gpu_gib": Metric("memory of the fullest GPU", "GiB", alert="gpu_gib"),
    "mem/cuda_peak_gib": Metric("peak memory of tensors", "GiB", alert="cuda_peak_gib"),
    "data/tokens": Metric("tokens", "tokens", "count", alert="tokens"),
    "data/epochs": Metric("epochs", "epochs", "{:.2f}"),
    "data/injected": Metric("injected samples", form="{:.0f}"),
}
BY_SOURCE = ("train/loss", "val/loss", "val/bpb", "data/epochs")  # for each source of a mixture also `train/loss/NAME`


def refuse_unknown_metric(name: str, where: str = "") -> None:
    """Raise RequestError with the nearest name if nothing logs such a metric; callbacks may log others with a slash."""
    aliases = {metric.alert: known for known, metric in METRICS.items() if metric.alert}
    close = get_close_matches(name, METRICS, 1, cutoff=0.8)
    known = name in METRICS or name.startswith(tuple(f"{each}/" for each in BY_SOURCE))
    if not known and ("/" not in name or close):
        meant = aliases.get(name) or next(iter(close or get_close_matches(name, METRICS, 1)), "val/loss")
        raise RequestError(f"{where}nothing logs a metric {name!r}; did you mean {meant!r}?")


def numbers(document: dict[str, Any]) -> dict[str, float]:
    """The entries that are numbers, including non-finite ones, since a loss may be NaN."""
    return {name: value for name, value in document.items() if type(value) in (int, float)}


def valid_metrics(line: dict[str, Any]) -> dict[str, float] | None:
    """The numbers of a line of `metrics.jsonl`; None if it has neither a step nor the step of a resume."""
    found = numbers(line)
    steps = [type(found[name]) is int for name in ("step", "resumed_at") if name in found]
    return found if steps and all(steps) else None


# ---- evaluations -----------------------------------------------------------------------------------------------------
# `training/callbacks/evaluation` writes them while a run trains, `lm evaluate` afterwards; `Run.evaluations` reads.

Evaluation = dict[str, Any]


def evaluation_record(
    step: int | None,
    checkpoint: str | None,
    tasks: Mapping[str, Mapping[str, Any]],
    core: tuple[float, tuple[float, float]] | None,
    texts: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> Evaluation:
    """Make the line of `evaluations.jsonl` for an evaluation; `Run.evaluations` describes its content.

    The step is None for a model that no run trained, the checkpoint's name while a run trains. Tasks are the fields of
    `TaskResult` by name, texts those of `CorpusResult`; core is the mean centred accuracy with its interval.
    """
    mean, interval = core or (None, None)
    return finite_or_none({
        "step": step, "checkpoint": checkpoint, "time": time.time(), "tasks": tasks, "core": mean,
        "core_interval": interval, "texts": texts, "settings": settings,
    })  # fmt: skip


def is_evaluation(line: Evaluation) -> bool:
    """Whether a line has everything that the functions below use: a damaged line may still be valid JSON."""
    try:
        evaluation_metrics(line)
        return bool(describe_evaluation(merge_evaluations([line])))
    except DAMAGE:
        return False


def merge_evaluations(evaluations: Sequence[Evaluation], step: int | None = None) -> Evaluation | None:
    """Merge all evaluations of the model at `step` (default: of the newest evaluation); None if there is none.

    For each task and text, take the result with the most items or tokens, and the newest of equals; the mean centred
    accuracy is taken from the evaluation with the most items.
    """
    step = evaluations[-1]["step"] if step is None and evaluations else step
    of_step = [evaluation for evaluation in evaluations if evaluation["step"] == step]
    if not of_step:
        return None
    best: dict[str, dict[str, Any]] = {"tasks": {}, "texts": {}}
    for kind, size in (("tasks", "items"), ("texts", "tokens")):
        for name, result in ((name, result) for one in of_step for name, result in one[kind].items()):
            if name not in best[kind] or result[size] >= best[kind][name][size]:
                best[kind][name] = result
    largest = max(reversed(of_step), key=lambda one: sum(task["items"] for task in one["tasks"].values()))
    return {**of_step[-1], **best, "core": largest["core"], "core_interval": largest["core_interval"]}


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """The numbers that are plotted as curves, by their names in TensorBoard and `metrics.jsonl`."""
    found: dict[str, float] = {}
    for name, task in evaluation["tasks"].items():
        found[f"eval/{name}/accuracy"] = task["accuracy"]
        found[f"eval/{name}/centered"] = task["centered"]
    if evaluation["core"] is not None:
        found["eval/core"] = evaluation["core"]
    found |= {f"eval/{name}/bpb": texts["bits_per_byte"] for name, texts in evaluation["texts"].items()}
    return {name: value for name, value in found.items() if value is not None}


def describe_evaluation(evaluation: Evaluation | None) -> list[str]:
    """An evaluation in lines: its step, the mean, and each task and text, with 95 % intervals."""
    if evaluation is None:
        return []
    step = "" if evaluation["step"] is None else f"step {evaluation['step']:,}"
    head = (step + core_sentence(evaluation)).removeprefix(", ")
    return [head, *(f"{name}: {text}" for name, text in evaluation_rows(evaluation).items())]


def evaluation_rows(evaluation: Evaluation) -> dict[str, str]:
    """The results of each task and text by its name, with 95 % intervals."""
    rows = {}
    for name, task in evaluation["tasks"].items():
        low, high = task["interval"]
        rows[name] = (
            f"{task['accuracy']:.1%} right ({low:.1%} to {high:.1%}), guessing {task['baseline']:.1%}, "
            f"centred {task['centered']:.3f}; {task['items']:,} items, {task['num_fewshot']} shots"
        )
    for name, texts in evaluation["texts"].items():
        around = f" ± {1.96 * texts['stderr']:.4f}" if texts.get("stderr") else ""
        bits = "" if texts["bits_per_byte"] is None else f"{texts['bits_per_byte']:.4f}{around} bits per byte, "
        loss = "not finite" if texts["loss"] is None else f"{texts['loss']:.4f}"
        rows[name] = f"{bits}loss {loss} over {texts['tokens']:,} tokens"
    return rows


def core_sentence(evaluation: Evaluation) -> str:
    """`, mean centred accuracy 0.0123 (-0.004 to 0.029)`; empty where there is no mean."""
    if evaluation["core"] is None:
        return ""
    low, high = evaluation["core_interval"]
    return f", mean centred accuracy {evaluation['core']:.4f} ({low:.4f} to {high:.4f})"
