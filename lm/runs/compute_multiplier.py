"""The effective compute multiplier of a recipe: tokens a reference recipe needs for the same loss / the recipe's own.

The reference is trained with half of its tokens and with all of them, at each of several sizes and with several seeds;
the recipe in question is trained at the same sizes. Nothing here imports torch.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

CONFIDENCE = 0.95
MIN_MULTIPLIER = 1.02  # the smallest multiplier that a comparison should distinguish from 1


class Compared(NamedTuple):
    """Final losses of the runs of one size, one per seed; all above 0."""

    half: Sequence[float]  # of the reference with fewer tokens
    full: Sequence[float]  # of the reference
    other: Sequence[float]  # of the recipe in question
    ratio: float  # tokens of `full` / tokens of `half`
    flops: float  # of a run of the reference


class Estimate(NamedTuple):
    """A number with its 95 % interval, which is None with one seed."""

    value: float
    low: float | None
    high: float | None


class Multipliers(NamedTuple):
    """The multiplier at each size, their mean and their trend over sizes."""

    sizes: list[Estimate | None]  # None: the reference gains nothing from more tokens, or a loss is missing
    mean: Estimate | None
    trend: Estimate | None  # factor on the multiplier for ten times the FLOPs
    seeds_needed: int | None  # per size and recipe, to tell a mean of `MIN_MULTIPLIER` from 1


def compute_multipliers(sizes: Sequence[Compared]) -> Multipliers:
    """Compare log losses, where the reference's is linear in log tokens through its two lengths.

    This assumes that loss is a power of tokens at one size (Kaplan et al., 2020, arXiv:2001.08361, section 3); a gain
    far above twice is overestimated if the loss bends. The noise between seeds is assumed to be the same factor at all
    sizes, and independent; errors of quotients are propagated by first derivatives.
    """
    groups = [list(map(math.log, losses)) for size in sizes for losses in size[:3] if losses]
    squares = sum((value - fmean(group)) ** 2 for group in groups for value in group)
    freedom = sum(len(group) - 1 for group in groups)
    noise = math.sqrt(squares / freedom) if freedom else None
    reach = t_exceeded(1 - CONFIDENCE, freedom) if freedom else math.nan

    def estimate(log: float, variance: float) -> Estimate:
        if noise is None:
            return Estimate(math.exp(log), None, None)
        half = reach * noise * math.sqrt(variance)
        return Estimate(math.exp(log), math.exp(log - half), math.exp(log + half))

    logs = [_log_multiplier(size) for size in sizes]
    known = [(math.log10(size.flops), *log) for size, log in zip(sizes, logs) if log is not None]
    each = [None if log is None else estimate(*log) for log in logs]
    if not known:
        return Multipliers(each, None, None, None)
    weights = [1 / variance for _, _, variance in known]
    total = sum(weights)
    center, mean = (sum(w * point[i] for w, point in zip(weights, known)) / total for i in (0, 1))
    spread = sum(w * (at - center) ** 2 for w, (at, *_) in zip(weights, known))
    slope = sum(w * (at - center) * (log - mean) for w, (at, log, _) in zip(weights, known)) / spread if spread else 0.0
    needed = None
    if noise is not None:
        seeds = min(len(losses) for size in sizes for losses in size[:3] if losses)
        needed = max(1, math.ceil(seeds * (reach * noise / math.sqrt(total) / math.log(MIN_MULTIPLIER)) ** 2))
    trend = estimate(slope, 1 / spread) if spread else None
    return Multipliers(each, estimate(mean, 1 / total), trend, needed)


def _log_multiplier(size: Compared) -> tuple[float, float] | None:
    """The log multiplier of one size, and its variance in units of the variance of a run's log loss."""
    if not all(size[:3]):
        return None
    half, full, other = (fmean(map(math.log, losses)) for losses in size[:3])
    gained, log_ratio = half - full, math.log(size.ratio)
    if gained <= 0:
        return None
    doublings = (full - other) / gained  # of the reference's tokens, for the loss of the recipe
    by_half = -doublings / gained
    by_full = (1 + doublings) / gained
    by_other = -1 / gained
    variance = by_half**2 / len(size.half) + by_full**2 / len(size.full) + by_other**2 / len(size.other)
    return log_ratio * doublings, log_ratio**2 * variance


def t_exceeded(p: float, freedom: float) -> float:
    """The value that Student's t is further from 0 with probability `p`: from 1 % to 30 %, 1 degree of freedom or more.

    Abramowitz and Stegun, 1964, "Handbook of mathematical functions", section 26.7.
    """
    import mpmath

    def tails(t: float) -> float:  # probability of a value further from 0 than t
        return mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t**2), regularized=True)

    return float(mpmath.findroot(lambda t: tails(t) - p, (1, 100), solver="illinois"))
