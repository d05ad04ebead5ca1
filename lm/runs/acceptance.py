"""`expect`: the range that each metric of a run must end in, and whether it did."""

import math
from difflib import get_close_matches
from typing import Any, NamedTuple

from lm.errors import RequestError
from lm.runs.metrics import METRICS
from lm.runs.run import Run


class Expectation(NamedTuple):
    """A metric's range, and its last value; None where it was never logged."""

    metric: str
    low: float
    high: float
    value: float | None

    @property
    def met(self) -> bool:
        return self.value is not None and self.low <= self.value <= self.high

    def __str__(self) -> str:
        value = "was never logged; expected" if self.value is None else (
            f"is {self.value:.4f}, {'within' if self.met else 'outside'} the expected range"
        )
        return f"{self.metric} {value} {self.low:g} to {self.high:g}"


def refuse_wrong_ranges(expect: dict[str, list[float]]) -> None:
    """Raises:
    RequestError: a range is not a lowest and a highest value, or nothing logs such a metric.
    """
    aliases = {metric.alert: name for name, metric in METRICS.items() if metric.alert}
    for metric, given in expect.items():
        close = get_close_matches(metric, METRICS, 1, cutoff=0.8)  # callbacks may log metrics of other names
        if metric not in METRICS and ("/" not in metric or close):
            meant = aliases.get(metric) or next(iter(close or get_close_matches(metric, METRICS, 1)), "val/loss")
            raise RequestError(f"expect: nothing logs a metric {metric!r}; did you mean {meant!r}?")
        if len(given) != 2 or not given[0] <= given[1]:
            raise RequestError(f"expect: {metric} {given} is no range: give [LOWEST, HIGHEST]")


def expectations(run: Run) -> list[Expectation]:
    """What the config of a run expects, with the last value that was logged of each metric."""
    found = []
    for metric, (low, high) in (run.settings().get("expect") or {}).items():
        values = [line[metric] for line in run.metrics(metric) if not math.isnan(line[metric])]
        found.append(Expectation(metric, low, high, values[-1] if values else None))
    return found


def acceptance(found: list[Expectation]) -> dict[str, Any]:
    """Expectations as they are kept in `run.json`."""
    checks = [{**each._asdict(), "met": each.met} for each in found]
    return {"passed": all(each.met for each in found), "checks": checks}
