"""Shares of sources are right after every sample, and where sample `i` is follows from `i` alone."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.config import PhaseConfig, SourceConfig
from lm.data.mixture import (
    MAX_PERIOD,
    Mixture,
    Phase,
    describe_change,
    merge_phases,
    source_counts,
    turns,
    whole_shares,
)
from lm.data.sampler import Order


def orders(count, seed=0):
    return [Order([3, 0, 5 + index], seed=seed + index, lanes=2) for index in range(count)]


@pytest.mark.parametrize("weights, shares", [
    ((0.7, 0.2, 0.1), (7, 2, 1)), ((700, 200, 100), (7, 2, 1)), ((1, 1), (1, 1)), ((5,), (1,)), ((0, 3), (0, 1)),
    ((1e-3, 1), (1, 1_000)), ((1 / 3, 2 / 3), (21_845, 43_691))])  # fmt: skip
def test_weights_in_any_unit_are_whole_shares(weights, shares):
    found = whole_shares(weights)
    assert found == shares or sum(found) <= MAX_PERIOD + 1
    exact = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    for actual, one in zip(found, exact):
        assert abs(Fraction(actual, sum(found)) - one) <= Fraction(1, MAX_PERIOD)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=16).filter(any))
@settings(deadline=None)
def test_after_every_sample_each_source_has_its_share_to_less_than_one(weights):
    shares = whole_shares(weights)
    period = sum(shares)
    sources, earlier = turns(shares)
    counted = np.cumsum(sources[:, None] == np.arange(len(shares)), axis=0)  # (P, sources)
    fair = np.arange(1, period + 1)[:, None] * np.array(shares) / period
    assert np.abs(counted - fair).max() < 1
    assert counted[-1].tolist() == list(shares)
    assert (earlier == counted[np.arange(period), sources] - 1).all()


three_weights = st.tuples(*[st.integers(0, 9)] * 3).filter(any)
phases = st.lists(st.tuples(st.integers(1, 60), three_weights), min_size=1, max_size=4)


@given(phases, st.integers(0, 300))
@settings(deadline=None)
def test_every_source_goes_through_its_own_order(lengths, probe):
    starts = np.cumsum([0, *(length for length, _ in lengths[:-1])]).tolist()
    mixture = Mixture(orders(3), [Phase(start, whole_shares(weights)) for start, (_, weights) in zip(starts, lengths)])
    sources, indices = mixture.sources(np.arange(301))
    for source, order in enumerate(mixture.orders):
        indices_of_source = indices[sources == source]
        assert indices_of_source.tolist() == list(range(len(indices_of_source)))
        blocks, windows = mixture.locate(np.flatnonzero(sources == source))
        alone = order.locate(indices_of_source)
        assert (blocks - mixture.first_block[source]).tolist() == alone[0].tolist()
        assert windows.tolist() == alone[1].tolist()
    assert source_counts(mixture.phases, probe).tolist() == np.bincount(sources[:probe], minlength=3).tolist()
    assert [int(part[0]) for part in mixture.sources([probe])] == [sources[probe], indices[probe]]


def test_a_phase_that_changes_no_share_changes_no_sample():
    sources, phase = [SourceConfig("a", weight=2), SourceConfig("b", weight=1)], PhaseConfig(640, {"b": 1})
    split = [PhaseConfig(320, {"a": 0.5, "b": 0.25}), phase, PhaseConfig(960, {"b": 7})]
    for phases in (split, [phase]):
        assert merge_phases(sources, phases, 32) == [Phase(0, (2, 1)), Phase(20, (0, 1))]
    recorded = {"sources": ["a", "b"], "phases": [[0, [2, 1]], [10, [2, 1]]]}
    now = {"sources": ["a", "b"], "phases": [[0, [2, 1]]]}
    assert describe_change(now, now, 30) == ("", "")
    reason, _ = describe_change(recorded, now, 30)
    assert "of 30 samples seen, the weights of a, b were 2:1 from sample 0; 2:1 from sample 10, and are 2:1" in reason
