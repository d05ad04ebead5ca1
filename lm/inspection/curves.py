"""Curves of a run: what its log lines have of a metric, what TensorBoard's event files have, and whether they agree."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lm.runs import Run


@dataclass(frozen=True)
class Series:
    """One curve: values that are not finite leave a gap.

    Args:
        name: what the legend says.
        x: ascending.
        y: of the same length.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]


def curve(name: str, lines: list[dict[str, Any]], metric: str, x: str = "step", weight: float = 0.0) -> Series:
    """One metric of a run.

    Args:
        name: of the curve.
        lines: `Run.metrics()`.
        metric: by its name in TensorBoard.
        x: `step` (optimizer steps), `tokens`, or `time`, which is hours since the run's first log line.
        weight: smooth with it, see `smooth`.
    """
    points = [line for line in lines if metric in line and x in line]
    began = lines[0]["time"] if x == "time" and points else 0.0
    xs = [(line["time"] - began) / 3600 if x == "time" else line[x] for line in points]
    return Series(name, xs, smooth([line[metric] for line in points], weight))


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """The exponential moving average with the bias of its beginning taken out, as TensorBoard's slider has it.

    Args:
        values: one curve; what is not finite passes through and is not averaged.
        weight: of what was before, 0 (nothing is smoothed) to below 1.
    """
    smoothed, mean, total = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean = weight * mean + (1 - weight) * value
            total = weight * total + (1 - weight)
            smoothed.append(mean / total)
        else:
            smoothed.append(value)
    return smoothed


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


class Agreement(NamedTuple):
    """How a metric's log lines and its points in TensorBoard compare.

    Args:
        metric: its name in both.
        points: steps that are in both.
        only_in_lines: steps that `metrics.jsonl` alone has.
        only_in_events: steps that the event files alone have.
        largest_difference: of two values of a step, relative to the larger; event files hold single precision, which
            is 6e-8 at most.
    """

    metric: str
    points: int
    only_in_lines: int
    only_in_events: int
    largest_difference: float

    @property
    def agrees(self) -> bool:
        """Whether both have the same steps, and the same values but for rounding."""
        return not self.only_in_lines and not self.only_in_events and self.largest_difference < 1e-6


def event_curves(run: Run) -> dict[str, Series]:
    """Every scalar of a run's TensorBoard files over steps, by tag, as TensorBoard itself would show it."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(run.path), size_guidance={SCALARS: 0})  # 0: all of them
    logger = logging.getLogger("tensorboard")
    told = logger.level
    logger.setLevel(logging.ERROR)  # it warns of every resume, which is nothing to worry about
    try:
        events.Reload()
    finally:
        logger.setLevel(told)
    points = {tag: events.Scalars(tag) for tag in events.Tags()[SCALARS]}
    return {tag: Series(tag, [one.step for one in ones], [one.value for one in ones]) for tag, ones in points.items()}


def compare_with_events(run: Run) -> list[Agreement]:
    """Every metric of `metrics.jsonl` beside its points in TensorBoard, by name."""
    lines, events = run.metrics(), event_curves(run)
    metrics = sorted({name for line in lines for name in line if "/" in name})
    return [_agreement(metric, curve(metric, lines, metric), events.get(metric)) for metric in metrics]


def _agreement(metric: str, logged: Series, shown: Series | None) -> Agreement:
    ours = dict(zip(logged.x, logged.y, strict=True))
    theirs = {} if shown is None else dict(zip(shown.x, shown.y, strict=True))
    both = ours.keys() & theirs.keys()
    apart = [abs(ours[step] - theirs[step]) / max(abs(ours[step]), abs(theirs[step]), 1e-30) for step in both]
    return Agreement(metric, len(both), len(ours) - len(both), len(theirs) - len(both), max(apart, default=0.0))
