"""Alerts: conditions of `lm/expressions` over what the run log writes, such as `loss > 10` or `val_loss > 4`."""

from collections.abc import Iterable, Mapping

from lm.expressions import Expression, History, parse

METRICS = {  # as an expression says it -> as the run log does
    "loss": "train/loss", "max_loss": "train/max_loss", "perplexity": "train/perplexity",
    "val_loss": "val/loss", "val_perplexity": "val/perplexity", "val_bpb": "val/bpb",
    "core": "eval/core",
    "lr": "optim/lr", "grad_norm": "optim/grad_norm", "param_norm": "optim/param_norm",
    "tokens_per_second": "perf/tokens_per_second", "mfu": "perf/mfu", "data_wait": "perf/data_wait",
    "gpu_load": "perf/gpu_load", "gpu_temperature": "perf/gpu_temperature", "gpu_power": "perf/gpu_power",
    "cpu_load": "perf/cpu_load", "process_gib": "mem/process_gib", "gpu_gib": "mem/gpu_gib",
    "cuda_peak_gib": "mem/cuda_peak_gib",
    "step": "step", "tokens": "data/tokens",
}  # fmt: skip
CLOCKS = {"step", "tokens"}  # known at every line, so that they are no reason to look at an expression again


class Watch:
    """Expressions over one history.

    Args:
        texts: the expressions.

    Raises:
        RequestError: one of them cannot be read.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.expressions = [parse(text, METRICS) for text in texts]
        names = {name for expression in self.expressions for name in expression.depths}
        self.history = History(
            {name: max(expression.depths.get(name, 0) for expression in self.expressions) for name in sorted(names)}
        )

    def look(self, metrics: Mapping[str, float]) -> dict[Expression, bool | None]:
        """Take the metrics of a log line, by the log's names, and say which of the expressions they touch hold."""
        values = {name: metrics[tag] for name, tag in METRICS.items() if tag in metrics}
        self.history.add(values)
        return {each: each.holds(self.history) for each in self.expressions if _measured(each) & values.keys()}


def _measured(expression: Expression) -> set[str]:
    """The names whose new values are a reason to look at it."""
    return expression.depths.keys() - CLOCKS or set(expression.depths)
