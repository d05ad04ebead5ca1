"""Conditions of alerts over logged metrics, such as `loss > 1.5 * median(loss, 50)`, and their evaluation.

A condition is undecided (None) until its metric has a value and the window of its median is full; then it does not
fire.
"""

import math
import operator
import re
from collections import deque
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from statistics import median
from typing import Any

from lm.errors import RequestError
from lm.runs.metrics import METRICS
from lm.system.units import format_figure

COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
               "==": operator.eq, "!=": operator.ne}  # fmt: skip
FORM = re.compile(
    r"([\w/]+) *([<>]=?|[=!]=) *([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
    r"(?: *\* *median\( *([\w/]+) *, *([1-9]\d{0,3}) *\))?",
    re.ASCII,
)
ALLOWED = (
    "a condition is `metric op number`, such as `loss > 10`, or `metric op number * median(metric, n)`, such "
    f"as `loss > 1.5 * median(loss, 50)`, where op is one of {' '.join(COMPARISONS)} and n is at most 9,999"
)

# Name of a metric in a condition -> its name in the log.
NAMES = {metric.alert: name for name, metric in METRICS.items() if metric.alert} | {"step": "step"}
LOGGED = {name.replace("/", "_"): alert for alert, name in NAMES.items()}  # a condition may also say `val/loss`


class Condition:
    """A condition on a metric; `depths` has the number of earlier values that it needs of each metric."""

    def __init__(self, text: str) -> None:
        self.text = str(text).strip()
        shown, form = repr(self.text[:200]), FORM.fullmatch(self.text)
        if form is None:
            raise RequestError(f"condition {shown}: {ALLOWED}")
        metric, sign, number, median_of, count = form.groups()
        self.metric, self.median_of = (
            name and LOGGED.get(name.replace("/", "_"), name) for name in (metric, median_of)
        )
        self.compare, self.number, self.count = COMPARISONS[sign], float(number), int(count or 0)
        self.depths = {self.metric: 0} | ({self.median_of: self.count} if self.median_of else {})
        for name in self.depths.keys() - NAMES:
            close = get_close_matches(name[:40].replace("/", "_"), NAMES, 1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise RequestError(f"condition {shown}: no such metric {name[:40]}{hint}; there are {', '.join(NAMES)}")


class AlertEvaluator:
    """Evaluates several conditions over the newest value of each metric and its last finite values before."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.conditions = [Condition(text) for text in texts]
        names = sorted({name for condition in self.conditions for name in condition.depths})
        depths = {name: max(each.depths.get(name, 0) for each in self.conditions) for name in names}
        self.newest: dict[str, float] = {}
        self.before = {name: deque[float](maxlen=depth) for name, depth in depths.items()}

    def evaluate(self, metrics: Mapping[str, float]) -> dict[Condition, bool | None]:
        """Add the metrics of a log line, and evaluate the conditions whose metric is in the line; None: undecided."""
        values = {name: float(metrics[tag]) for name, tag in NAMES.items() if tag in metrics}
        for name in self.before.keys() & values.keys():
            if math.isfinite(self.newest.get(name, math.nan)):
                self.before[name].append(self.newest[name])
            self.newest[name] = values[name]
        return {each: self._holds(each) for each in self.conditions if each.metric in values}

    def _holds(self, condition: Condition) -> bool | None:
        value, limit = self.newest[condition.metric], condition.number
        if condition.median_of:
            limit *= self._median(condition)
        return None if math.isnan(value) or math.isnan(limit) else condition.compare(value, limit)

    def _median(self, condition: Condition) -> float:
        values = list(self.before[condition.median_of])[-condition.count :]
        return median(values) if len(values) == condition.count else math.nan

    def explain(self, condition: Condition, step: int) -> str:
        """A condition, and the values of its metric and median: `loss > 10: loss is 12.31 at step 130`."""
        figures = []
        if condition.metric != "step":
            figures.append(f"{condition.metric} is {format_figure(self.newest[condition.metric])}")
        if condition.median_of:
            median_value = format_figure(self._median(condition))
            figures.append(f"median({condition.median_of}, {condition.count}) is {median_value}")
        return " ".join(filter(None, [f"{condition.text}:", ", ".join(figures), f"at step {step}"]))

    def state_dict(self) -> dict[str, Any]:
        newest = {name: value for name, value in self.newest.items() if math.isfinite(value)}
        return {"newest": newest, "before": {name: list(values) for name, values in self.before.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.newest = {name: value for name, value in state["newest"].items() if name in self.before}
        for name, values in self.before.items():
            values.clear()
            values.extend(state["before"].get(name, []))
