"""Statistics of runs that differ only in their seed: mean, spread, and Student's t. Nothing here imports torch."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95


class Spread(NamedTuple):
    """Statistics of one number over the seeds."""

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


def t_tails(t: float, freedom: float) -> float:
    """Two-sided tail probability of Student's t with `freedom` degrees of freedom: of a value further from 0 than `t`.

    Abramowitz and Stegun, 1964, "Handbook of mathematical functions", section 26.7.
    """
    import mpmath

    return float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t**2), regularized=True))


def t_exceeded(p: float, freedom: float) -> float:
    """The t for which `t_tails` is `p`; for p from 1 % to 30 %, and at least 1 degree of freedom."""
    import mpmath

    return float(mpmath.findroot(lambda t: t_tails(t, freedom) - p, (1, 100), solver="illinois"))
