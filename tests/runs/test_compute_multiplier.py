"""The effective compute multiplier of a recipe, on losses of which it is known."""

import numpy as np
import pytest

from lm.cli.ladder_report import verdict
from lm.runs.compute_multiplier import Compared, Estimate, compute_multipliers, t_exceeded


def sizes(multiplier, noise=0.0, seeds=3, random=np.random.default_rng(0)):
    """Losses that are powers of the tokens, with another recipe that is `multiplier(flops)` times as good."""

    def losses(flops, tokens):
        return (3 * flops**-0.05 * tokens**-0.1 * np.exp(noise * random.standard_normal(seeds))).tolist()

    return [Compared(losses(x, 0.5), losses(x, 1.0), losses(x, multiplier(x)), 2.0, x) for x in (1.0, 10.0, 100.0)]


def test_without_noise_the_multipliers_of_all_sizes_and_their_trend_are_exact():
    multipliers = compute_multipliers(sizes(lambda flops: 1.5 * flops**-0.1))
    assert [one.value for one in multipliers.sizes] == pytest.approx([1.5, 1.5 * 10**-0.1, 1.5 * 10**-0.2])
    assert multipliers.trend.value == pytest.approx(10**-0.1)
    itself = compute_multipliers(sizes(lambda flops: 1.0))
    assert itself.mean.value == pytest.approx(1) and itself.trend.value == pytest.approx(1)
    assert "Not distinguishable" in verdict(itself._replace(mean=Estimate(1.0, 1.0, 1.0))) and itself.seeds_needed == 1


@pytest.mark.parametrize("multiplier", [0.8, 1.3])
def test_the_interval_has_the_truth_in_it_as_often_as_it_says(multiplier):
    random = np.random.default_rng(1)
    draws = [compute_multipliers(sizes(lambda flops: multiplier, 0.002, random=random)) for _ in range(300)]
    for estimates in ([one.mean for one in draws], [one.sizes[0] for one in draws]):
        assert 0.92 < np.mean([one.low <= multiplier <= one.high for one in estimates]) < 0.98


def test_the_seeds_that_are_needed_make_the_interval_narrow_enough():
    needed = compute_multipliers(sizes(lambda flops: 1.0, 0.002)).seeds_needed
    mean = compute_multipliers(sizes(lambda flops: 1.0, 0.002, seeds=needed)).mean
    assert needed > 3 and 1.01 < mean.high / mean.value < 1.025


def test_what_cannot_be_told_is_none():
    estimate = compute_multipliers(sizes(lambda flops: 1.2, seeds=1))
    assert estimate.mean.value == pytest.approx(1.2) and estimate.mean.low is None and estimate.seeds_needed is None
    flat = [estimate._replace(half=estimate.full) for estimate in sizes(lambda flops: 1.2)]
    assert compute_multipliers(flat).mean is None and compute_multipliers(flat).sizes == [None] * 3
    missing = [sizes(lambda flops: 1.2)[0], sizes(lambda flops: 1.2)[1]._replace(other=[])]
    multipliers = compute_multipliers(missing)
    assert multipliers.sizes[1] is None and multipliers.mean.value == pytest.approx(1.2) and multipliers.trend is None


@pytest.mark.parametrize("freedom, exceeded", [
    (1, 12.706204736174694), (2.5, 3.5746548420036817), (40, 2.021075390306273),
])  # fmt: skip
def test_students_t_is_that_of_scipy(freedom, exceeded):
    """Its `stdtrit(freedom, 0.975)`."""
    assert t_exceeded(0.05, freedom) == pytest.approx(exceeded, rel=1e-9)
