"""Scaling laws: fits find the laws that made the losses, and intervals hold what they promise."""

import math

import numpy as np
import pytest

from lm.runs.scaling_laws import backtest, distance, fit_bending, fit_sizes, fit_straight

SIZES = [1e15, 4e15, 2e16, 7e16, 3e17]


def law(x: float, offset: float = 1.0, factor: float = 4.0, exponent: float = 0.1) -> float:
    return offset + factor * x**-exponent


def test_a_law_is_found_with_and_without_an_offset():
    law_found = fit_straight(SIZES, [law(x, offset=0.0) for x in SIZES])
    assert (law_found.factor, law_found.exponent, law_found.offset) == pytest.approx((4.0, 0.1, 0.0))
    for offset, factor, exponent in ((1.0, 4.0, 0.1), (1.7, 900.0, 0.25), (0.3, 8.0, 0.08)):
        losses = [law(x, offset, factor, exponent) for x in SIZES]
        law_found = fit_bending(SIZES, losses)
        assert law_found(1e19) == pytest.approx(law(1e19, offset, factor, exponent), rel=1e-3)
        assert law_found.exponent == pytest.approx(exponent, rel=0.03)


def test_losses_that_do_not_fall_are_not_expected_to_fall():
    rising = fit_bending([1.0, 2.0, 4.0], [2.0, 2.1, 2.2])
    assert 2.0 < rising(8.0) < 2.3


@pytest.mark.parametrize("count, seeds", [(3, 3), (5, 2)])
def test_intervals_cover_what_they_predict(count, seeds):
    """Of ladders with a bending law and noise of 0.3 %, extrapolated by half of their range, nine of ten or more."""
    random, inside, trials = np.random.default_rng(1), 0, 30
    x = list(np.geomspace(1e15, 1e16, count))
    for _ in range(trials):
        losses = [[law(at) * math.exp(random.normal(0, 0.003)) for _ in range(seeds)] for at in x]
        prediction = fit_sizes(x, losses).predict(10**16.5)
        inside += prediction.low <= law(10**16.5) * math.exp(random.normal(0, 0.003)) <= prediction.high
        assert prediction.loss == pytest.approx(law(10**16.5), rel=0.03) and prediction.distance == pytest.approx(0.5)
    assert inside >= 0.9 * trials


def test_sizes_that_lie_on_no_law_have_a_wide_interval():
    """Also with one seed, from five sizes on; of fewer nothing tells how wrong the law is."""
    x = [1.0, 2.0, 4.0, 8.0, 16.0]
    scattered = fit_sizes(x, [[3.04], [3.04], [2.85], [2.84], [2.7]]).predict(32.0)
    smooth = fit_sizes(x, [[3.04], [2.94], [2.85], [2.77], [2.7]]).predict(32.0)
    assert scattered.high - scattered.low > 0.1 > 4 * (smooth.high - smooth.low)
    assert fit_sizes(x[:4], [[3.04], [2.94], [2.85], [2.77]]).predict(32.0).low is None


def test_the_largest_size_is_predicted_from_the_others_in_whose_range_distance_is_counted():
    losses = [[law(x, offset=0.0)] for x in SIZES[:4]]
    assert backtest(SIZES[:4], losses) == pytest.approx((losses[3][0], losses[3][0]), rel=1e-3)
    assert distance([1.0, 10.0], 100.0) == pytest.approx(1) and distance([1.0, 10.0], 0.1) == pytest.approx(1)
    assert distance([1.0, 10.0], 5.0) == 0
