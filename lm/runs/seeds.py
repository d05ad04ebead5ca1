"""The noise between trainings that differ in their seed alone. Nothing here imports torch."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95


class Spread(NamedTuple):
    """One number of several trainings."""

    seeds: int
    mean: float
    lowest: float
    highest: float
    stderr: float | None  # of the mean; None for a single seed


def spread(values: Sequence[float]) -> Spread:
    """Mean, range and standard error of at least one value."""
    several = len(values) > 1 and all(map(math.isfinite, values))
    stderr = stdev(values) / math.sqrt(len(values)) if several else None
    return Spread(len(values), fmean(values), min(values), max(values), stderr)


def t_exceeded(p: float, freedom: float) -> float:
    """The t that Student's t with so many degrees of freedom exceeds, on either side, with the probability `p`, of 1 %
    to 30 %.

    Abramowitz and Stegun, 1964, "Handbook of mathematical functions", section 26.7.
    """
    import mpmath

    def tails(t: float) -> float:
        return mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t**2), regularized=True)

    return float(mpmath.findroot(lambda t: tails(t) - p, (1, 100), solver="illinois"))
