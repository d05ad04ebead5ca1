"""Statistics of benchmarks: standard errors and 95 % intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z = 1.959963984540054  # a normal variable is within Z standard deviations of its mean in 95 % of cases


class Interval(NamedTuple):
    """The 95 % confidence interval of a number."""

    low: float
    high: float


def wilson(right: int, total: int) -> Interval:
    """Interval of a proportion (Wilson, 1927, "Probable inference, the law of succession, and statistical inference").

    It stays inside [0, 1] and has a width even if all or none are right, unlike share +- Z x standard error.
    """
    accuracy, spread = right / total, Z**2 / total
    middle = (accuracy + spread / 2) / (1 + spread)
    half = Z * math.sqrt(accuracy * (1 - accuracy) / total + spread / (4 * total)) / (1 + spread)
    # Rounding would give not exactly 0 or 1.
    return Interval(middle - half if right else 0.0, middle + half if right < total else 1.0)


def standard_error(right: int, total: int) -> float:
    """Standard error of a proportion: sample standard deviation / sqrt(`total`); infinite for a single item."""
    accuracy = right / total
    return math.sqrt(accuracy * (1 - accuracy) / (total - 1)) if total > 1 else math.inf


def centered(accuracy: float, baseline: float) -> float:
    """Rescale an accuracy so that guessing (`baseline`) gives 0, and all right gives 1.

    Li et al., 2024, "DataComp-LM" (arXiv:2406.11794), section 3.5.
    """
    return (accuracy - baseline) / (1 - baseline)


def mean_interval(values: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """The interval of the mean of independent estimates, computed from their intervals.

    On each side, squared distances are added (Zou and Donner, 2008, "Construction of confidence limits about effect
    measures: a general approach"), so the result is asymmetric if they are.
    """
    count, mean = len(values), sum(values) / len(values)
    below = math.sqrt(sum((value - interval.low) ** 2 for value, interval in zip(values, intervals, strict=True)))
    above = math.sqrt(sum((interval.high - value) ** 2 for value, interval in zip(values, intervals, strict=True)))
    return Interval(mean - below / count, mean + above / count)


def ratio_error(above: np.ndarray, below: np.ndarray) -> float:
    """The standard error of `above.sum() / below.sum()`, `(n,)` each, with pairs sampled together, such as documents.

    The linear approximation of a ratio (Cochran, 1977, "Sampling techniques", section 6.4); NaN for fewer than two.
    """
    count = len(above)
    if count < 2:
        return math.nan
    residuals = above - above.sum() / below.sum() * below  # (n,) residuals from the ratio
    return float(math.sqrt(count / (count - 1) * np.square(residuals).sum()) / below.sum())
