"""What a config expects of a run, `expect`: metrics and the range in which each must end."""

from typing import Any, NamedTuple

from lm.errors import RequestError
from lm.runs.history import last_value
from lm.runs.metrics import check_metric
from lm.runs.run import Run


class Expectation(NamedTuple):
    """The expected range of a metric, and its `last_value`."""

    metric: str
    low: float
    high: float
    value: float | None

    @property
    def met(self) -> bool:
        return self.value is not None and self.low <= self.value <= self.high

    def __str__(self) -> str:
        expected = f"{self.low:g} to {self.high:g}"
        if self.value is None:
            return f"{self.metric} was never logged, or was not finite at the end; expected {expected}"
        return f"{self.metric} is {self.value:.4f}, {'within' if self.met else 'outside'} the expected range {expected}"


def check_ranges(expect: dict[str, list[float]]) -> None:
    """Raise RequestError if a range is not [lowest, highest], or if nothing logs its metric."""
    for metric, bounds in expect.items():
        check_metric(metric, "expect: ")
        if len(bounds) != 2 or not bounds[0] <= bounds[1]:
            raise RequestError(f"expect: {metric} {bounds} is not a range: give [LOWEST, HIGHEST]")


def expectations(run: Run) -> list[Expectation]:
    """The expectations in the config of a run, with the last values of their metrics."""
    expected = run.settings().get("expect") or {}
    return [Expectation(metric, low, high, last_value(run, metric)) for metric, (low, high) in expected.items()]


def acceptance(expected: list[Expectation]) -> dict[str, Any]:
    checks = [{**each._asdict(), "met": each.met} for each in expected]
    return {"passed": all(each.met for each in expected), "checks": checks}
