"""The metrics that a run logs: one table with the label, unit and format of each, and what a line of them must hold."""

from typing import Any, NamedTuple

from lm.system.units import format_count


class Metric(NamedTuple):
    """How a logged metric is shown."""

    label: str
    unit: str = ""  # of an axis
    form: str = "{:.4g}"  # of a value
    short: str = ""  # where there is little space; else the label
    alert: str = ""  # its name in the conditions of alerts
    chart: tuple[str, str] | None = None  # category and name of its chart in TensorBoard

    def shown(self, value: float) -> str:
        """A value for people."""
        return format_count(value) if self.form == "count" else self.form.format(value)


NATS = "nats a token"
LOSSES, OPTIMIZATION, THROUGHPUT = ("loss", "training and validation"), "optimization", "throughput"
METRICS = {  # every metric of metrics.jsonl and TensorBoard, except those of an evaluation's tasks and `BY_SOURCE`
    "train/loss": Metric("loss", NATS, "{:.4f}", alert="loss", chart=LOSSES),
    "train/max_loss": Metric("highest loss of a step", NATS, "{:.4f}", alert="max_loss"),
    "train/perplexity": Metric("training perplexity", form="{:.2f}", alert="perplexity"),
    "optim/lr": Metric("learning rate", "", "{:.2e}", "lr", "lr", (OPTIMIZATION, "learning rate")),
    "optim/grad_norm": Metric(
        "gradient norm", "L2 norm before clipping", "{:.3g}", alert="grad_norm", chart=(OPTIMIZATION, "gradient norm")
    ),
    "optim/param_norm": Metric("parameter norm", "L2 norm", alert="param_norm"),
    "val/loss": Metric("validation loss", NATS, "{:.4f}", alert="val_loss", chart=LOSSES),
    "val/perplexity": Metric("validation perplexity", form="{:.2f}", short="perplexity", alert="val_perplexity"),
    "val/bpb": Metric("validation bits per byte", "bits a byte", "{:.4f}", "bits per byte", "val_bpb"),
    "eval/core": Metric("mean centred accuracy", form="{:.4f}", alert="core"),
    "perf/tokens_per_second": Metric(
        "tokens a second", "tokens a second", "count", "tokens/s", "tokens_per_second", (THROUGHPUT, "tokens a second")
    ),
    "perf/mfu": Metric("MFU (causal)", "share of the peak", "{:.1%}", alert="mfu", chart=(THROUGHPUT, "MFU")),
    "perf/mfu_full_attention": Metric("MFU (full)", "share of the peak", "{:.1%}", chart=(THROUGHPUT, "MFU")),
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
    "data/skipped_samples": Metric("skipped samples", "samples", "{:,.0f}"),
    "data/injected": Metric("injected samples", form="{:.0f}"),
}
BY_SOURCE = ("train/loss", "val/loss", "val/bpb", "data/epochs")  # also `train/loss/NAME` of each source of a mixture


def numbers(document: dict[str, Any]) -> dict[str, float]:
    """The entries that are numbers, also those that are not finite, as a loss may be."""
    return {name: value for name, value in document.items() if type(value) in (int, float)}


def valid_metrics(line: dict[str, Any]) -> dict[str, float] | None:
    """The numbers of a line of `metrics.jsonl`; None where it has neither its step nor the step of a resume."""
    found = numbers(line)
    steps = [type(found[name]) is int for name in ("step", "resumed_at") if name in found]
    return found if steps and all(steps) else None
