"""The metrics of a run, numbers in lines of `metrics.jsonl`, in one table with the label, unit and format of each."""

from difflib import get_close_matches
from typing import Any, NamedTuple

from lm.errors import RequestError
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


def check_metric(name: str, where: str = "") -> None:
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
    metrics = numbers(line)
    steps = [type(metrics[name]) is int for name in ("step", "resumed_at") if name in metrics]
    return metrics if steps and all(steps) else None
