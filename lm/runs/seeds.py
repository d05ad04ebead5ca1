"""Losses of several seeds: their mean and spread, and Student's t. `lm ladder` compares recipes with it."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95


class Spread(NamedTuple):
    """One number of runs that differ in their seed alone."""

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
    """How often Student's t with so many degrees of freedom lies further from 0 than `t`, on either side.

    Abramowitz and Stegun, 1964, "Handbook of mathematical functions", section 26.7.
    """
    import mpmath

    return float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t**2), regularized=True))


def t_exceeded(p: float, freedom: float) -> float:
    """The t for which `t_tails` is `p`; for a p of 1 % to 30 %, and 1 degree of freedom or more."""
    import mpmath

    return float(mpmath.findroot(lambda t: t_tails(t, freedom) - p, (1, 100), solver="illinois"))
