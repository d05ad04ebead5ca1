"""Conditions of alerts over logged metrics, such as `loss > 1.5 * median(loss, 50)`; `callbacks/alerts` evaluates them.

Nothing here imports torch.
"""

import operator
import re
from difflib import get_close_matches

from lm.errors import RequestError
from lm.runs.metrics import METRICS

COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
               "==": operator.eq, "!=": operator.ne}  # fmt: skip
FORM = re.compile(
    r"([\w/]+) *([<>]=?|[=!]=) *([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
    r"(?: *\* *median\( *([\w/]+) *, *([1-9]\d{0,3}) *\))?",
    re.ASCII,
)
# Name of a metric in a condition -> its name in the log.
NAMES = {metric.alert: name for name, metric in METRICS.items() if metric.alert} | {"step": "step"}
ALLOWED = (
    "a condition is `metric op number`, such as `loss > 10`, or `metric op number * median(metric, n)`, such "
    f"as `loss > 1.5 * median(loss, 50)`, where op is one of {' '.join(COMPARISONS)} and n is at most 9,999; "
    f"metrics are {', '.join(NAMES)}"
)
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
            hint = f"did you mean {close[0]}? " if close else ""
            raise RequestError(f"condition {shown}: no such metric {name[:40]}; {hint}there are {', '.join(NAMES)}")
