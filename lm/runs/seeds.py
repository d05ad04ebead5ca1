"""Runs that differ only in their seed: group them, compute mean and spread of each group, and test whether two groups
differ by more than the noise between seeds.

Nothing here imports torch.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from statistics import fmean, stdev
from typing import Any, NamedTuple

from lm.errors import RequestError
from lm.runs.history import Series, curve
from lm.runs.run import Run
from lm.system.files import flatten

SEED = "seed_everything"
OF_A_RUN = ("run", "trainer.default_root_dir", SEED)  # settings that runs of one group may differ in
CONFIDENCE = 0.95

# ---- groups ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Runs with the same config and different seeds; or a single run."""

    name: str
    members: tuple[int, ...]  # their indices in the list of runs
    seeds: tuple[int | None, ...]  # None: the config has none


def group_by_seed(runs: Sequence[Run], names: Sequence[str]) -> list[Group]:
    """Group runs by config, in order of first occurrence; one group per run if no config has several seeds.

    A group is named by the common beginning of its runs' names, without `-s` or `-seed` at the end.
    """
    configs = [flatten(run.settings()) for run in runs]
    # A config that cannot be read differs from all others.
    shared = [{key: value for key, value in config.items() if key not in OF_A_RUN} or {"unknown": index}
              for index, config in enumerate(configs)]  # fmt: skip
    equal = [[other for other, config in enumerate(shared) if config == shared[index]] for index in range(len(runs))]
    together = [same for index, same in enumerate(equal) if same[0] == index]
    seeds = [[configs[index].get(SEED) for index in same] for same in together]
    if all(len(set(map(str, each))) == 1 for each in seeds):
        return [Group(name, (index,), (configs[index].get(SEED),)) for index, name in enumerate(names)]
    for same, each in zip(together, seeds, strict=True):
        for place, seed in enumerate(each):
            if seed in each[:place]:
                twins = names[same[each.index(seed)]], names[same[place]]
                raise RequestError(f"runs {' and '.join(twins)} have the same config and the same seed {seed}, so they "
                                   "do not show how much seeds differ: name one of them")  # fmt: skip
    labels = []
    for same in together:
        begin = commonprefix([names[index] for index in same])
        labels.append(begin if len(same) == 1 else re.sub(r"([-_.+=]+(s|seed))?[-_.+=]*$", "", begin))
    return [
        Group(label if label and labels.count(label) == 1 else names[same[0]], tuple(same), tuple(each))
        for label, same, each in zip(labels, together, seeds, strict=True)
    ]


def mean_curve(name: str, runs: Sequence[list[dict[str, Any]]], metric: str, x: str = "step") -> Series:
    """The mean of a metric at each step that all runs have, with the lowest and highest value; see `curve`."""
    found = []
    for lines in runs:
        there = [line for line in lines if x in line]
        drawn = curve(name, lines, metric, x)
        found.append(dict(zip(curve(name, there, metric).x, zip(drawn.x, drawn.y, strict=True), strict=True)))
    steps = sorted(set.intersection(*map(set, found)))
    points = [[one[step] for one in found] for step in steps]
    xs, ys = ([[point[axis] for point in same] for same in points] for axis in (0, 1))
    return Series(name, list(map(fmean, xs)), list(map(fmean, ys)), list(map(min, ys)), list(map(max, ys)))


# ---- statistics ------------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """Statistics of one number over the runs of a group."""

    seeds: int
    mean: float
    lowest: float
    highest: float
    stderr: float | None  # of the mean; None for a single seed


class Difference(NamedTuple):
    """The difference of the means of two groups; the last three fields are None if a group has a single seed."""

    mean: float
    low: float | None  # of the 95 % interval
    high: float | None
    p: float | None  # probability of a difference at least as large from noise alone

    @property
    def significant(self) -> bool | None:
        """Whether the difference is significant at 5 %, given the noise between seeds."""
        return None if self.p is None else self.p < 1 - CONFIDENCE


def spread(values: Sequence[float]) -> Spread:
    """Mean, range and standard error of at least one value."""
    several = len(values) > 1 and all(map(math.isfinite, values))
    stderr = stdev(values) / math.sqrt(len(values)) if several else None
    return Spread(len(values), fmean(values), min(values), max(values), stderr)


def welch(after: Sequence[float], before: Sequence[float]) -> Difference:
    """The difference of the means of independent values, by Welch's t-test, which does not assume equal variances.

    Welch, 1947, "The generalization of 'Student's' problem when several different population variances are involved",
    Biometrika 34. It assumes normal values; with few seeds that cannot be checked.
    """
    second, first = spread(after), spread(before)
    difference = second.mean - first.mean
    if second.stderr is None or first.stderr is None:
        return Difference(difference, None, None, None)
    squares = [(second.stderr**2, second.seeds - 1), (first.stderr**2, first.seeds - 1)]
    error = math.sqrt(sum(square for square, _ in squares))
    if error == 0:  # no noise at all
        return Difference(difference, difference, difference, 1.0 if difference == 0 else 0.0)
    freedom = error**4 / sum(square**2 / count for square, count in squares)
    half = t_exceeded(1 - CONFIDENCE, freedom) * error
    return Difference(difference, difference - half, difference + half, t_tails(difference / error, freedom))


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
