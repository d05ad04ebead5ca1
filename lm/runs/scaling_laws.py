"""Scaling laws: the loss of small models as a function of their FLOPs, and predictions from it.

A law is fitted to the losses of several sizes, each trained with one seed or with several. Nothing here imports torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

MIN_SIZES = 3  # sizes for a law: any two lie on one
MIN_SIZES_WITH_OFFSET = 5  # sizes for a law with three parameters, so that two are left to show how well it fits
FAR = 1.0  # extrapolation up to which a prediction counts as near, as in `distance`
DRAWS = 1000  # samples of the bootstrap
INTERVAL = (2.5, 97.5)  # percent
EXPONENTS = np.geomspace(0.005, 1, 200)  # the grid of exponents; published values lie between 0.05 and 0.5


@dataclass(frozen=True)
class PowerLaw:
    """`loss = offset + factor / x ^ exponent`, or several laws if the three are arrays."""

    offset: Any  # the limit of the loss for infinite size; 0 in a law without an offset
    factor: Any
    exponent: Any

    def __call__(self, x: float) -> Any:
        return self.offset + self.factor * x**-self.exponent

    def formula(self) -> str:
        offset = f"{self.offset:.4g} + " if self.offset > 1e-4 else ""
        return f"{offset}{self.factor:.4g} / FLOPs^{self.exponent:.3g}"


class Prediction(NamedTuple):
    """The predicted loss of a run of some size with one seed."""

    loss: float
    low: float | None  # of the 95 % interval; None: not known, see `fit_sizes`
    high: float | None
    distance: float  # see `distance`


def fit_straight(x: Sequence[float], losses: np.ndarray) -> PowerLaw:
    """Fit the law without an offset: least squares for a straight line in logarithms.

    Kaplan et al., 2020, arXiv:2001.08361, section 3. `losses` are above 0: (sizes,) for one law, or (draws, sizes) for
    several.
    """
    slope, height = np.polyfit(np.log(x), np.log(losses).T, 1)
    return PowerLaw(0.0 * height, np.exp(height), -slope)


def fit_bending(x: Sequence[float], losses: np.ndarray) -> PowerLaw:
    """Fit the law with an offset by least squares of the relative error; the offset is 0 if none above 0 fits better.

    Henighan et al., 2020, arXiv:2010.14701, equation 1.1. Given the exponent, the best offset and factor are linear
    least squares, so all exponents of a fine grid are tried. The arguments are those of `fit_straight`.
    """
    weights = 1 / np.atleast_2d(losses)[:, None, :]  # [draws, 1, sizes]
    middle = np.exp(np.log(x).mean())  # the factor is fitted here, so that it does not depend on the exponent
    powers = (np.array(x) / middle) ** -EXPONENTS[:, None]  # [exponents, sizes]
    ones, terms = weights + 0 * powers, weights * powers  # an offset and a factor of 1, divided by the loss
    ones_ones, terms_terms, ones_terms = (ones * ones).sum(-1), (terms * terms).sum(-1), (ones * terms).sum(-1)
    determinant = ones_ones * terms_terms - ones_terms**2
    offset = (ones.sum(-1) * terms_terms - terms.sum(-1) * ones_terms) / determinant  # [draws, exponents]
    offset = np.maximum(offset, 0)
    factor = (terms.sum(-1) - offset * ones_terms) / terms_terms
    errors = ((offset[..., None] * ones + factor[..., None] * terms - 1) ** 2).sum(-1)
    best = errors.argmin(-1)
    draws = np.arange(len(best))
    exponent = EXPONENTS[best]
    law = PowerLaw(offset[draws, best], factor[draws, best] * middle**exponent, exponent)
    return law if np.ndim(losses) > 1 else PowerLaw(*(float(part[0]) for part in vars(law).values()))


def fit_laws(x: Sequence[float], losses: np.ndarray) -> list[PowerLaw]:
    """Fit the kinds of law that this number of sizes allows; the prediction is the mean of the laws.

    Five sizes or more: the law with an offset; two: the law without one. Three or four sizes cannot tell which, so
    both are used: without an offset, predictions are too low if the loss bends; with one, they are too high if noise
    makes it seem to bend. The arguments are those of `fit_straight`.
    """
    laws = []
    if len(x) < MIN_SIZES_WITH_OFFSET:
        laws.append(fit_straight(x, losses))
    if len(x) >= MIN_SIZES:
        laws.append(fit_bending(x, losses))
    return laws


def distance(x: Sequence[float], target: float) -> float:
    """How far `target` lies outside the range of `x`, divided by that range, in logarithms; 0 inside."""
    low, high, at = math.log(min(x)), math.log(max(x)), math.log(target)
    return max(at - high, low - at, 0.0) / (high - low)


@dataclass(frozen=True)
class Fit:
    """The laws fitted to some sizes, and bootstrap draws of them for intervals; made by `fit_sizes`."""

    x: Sequence[float]  # FLOPs of each size
    laws: Sequence[PowerLaw]
    drawn: Sequence[PowerLaw]
    noise: np.ndarray  # [draws], the factor by which a run deviates from its law

    def predict(self, target: float) -> Prediction:
        """Predict the loss of a size, given by its FLOPs, as the mean of the laws."""
        loss = fmean(float(law(target)) for law in self.laws)
        if not self.drawn:
            return Prediction(loss, None, None, distance(self.x, target))
        drawn = np.concatenate([law(target) * self.noise for law in self.drawn])
        low, high = map(float, np.percentile(drawn, INTERVAL))
        return Prediction(loss, min(low, loss), max(high, loss), distance(self.x, target))


def fit_sizes(x: Sequence[float], losses: Sequence[Sequence[float]]) -> Fit:
    """Fit laws to sizes with `fit_laws`, and draw bootstrap samples of them.

    A draw adds the deviation of some run to each loss, and one to the prediction: a bootstrap of residuals
    (Davison and Hinkley, 1997, "Bootstrap methods and their application", section 6.2.3). A deviation is a mean's from
    the law plus a run's from its mean, each scaled up for the degrees of freedom of the fit. With one seed the
    second is not known; if there are also fewer than five sizes, neither is the first, since a law with an offset fits
    three exactly: there is then no interval.

    `x` has the FLOPs of three or more sizes, `losses` the losses of each, one per seed.
    """
    means = [fmean(each) for each in losses]
    laws = fit_laws(x, np.array(means))
    misfit = [math.sqrt(len(x) / max(1, len(x) - 3)) * math.log(mean / laws[-1](at)) for at, mean in zip(x, means)]
    noise = []
    for mean, each in zip(means, losses):
        if len(each) > 1:
            noise += [math.sqrt(len(each) / (len(each) - 1)) * math.log(loss / mean) for loss in each]
    if not noise and len(x) < MIN_SIZES_WITH_OFFSET:
        return Fit(x, laws, (), np.ones(0))
    random, noise = np.random.default_rng(0), noise or [0.0]
    moves = random.choice(misfit, (DRAWS, len(x)))
    moves += np.stack([random.choice(noise, (DRAWS, len(each))).mean(1) for each in losses], 1)
    drawn = fit_laws(x, np.array(means) * np.exp(moves))
    return Fit(x, laws, drawn, np.exp(random.choice(misfit, DRAWS) + random.choice(noise, DRAWS)))


def backtest(x: Sequence[float], losses: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The loss of the largest size as predicted from the others, and as measured; arguments as in `fit_sizes`."""
    order = np.argsort(x)
    at, means = [x[place] for place in order], [fmean(losses[place]) for place in order]
    return fmean(float(law(at[-1])) for law in fit_laws(at[:-1], np.array(means[:-1]))), means[-1]
