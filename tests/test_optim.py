"""Schedules are pure functions, decay falls on matrices only, and state survives its names."""

import pytest
import torch
from torch import nn

from lm.errors import RequestError
from lm.optim import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    index_state,
    name_state,
    parameter_groups,
    schedule,
)


def curve(config, steps=100):
    return [schedule(step, steps, config) for step in range(steps + 1)]


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_rises_to_the_peak_and_stays_within_bounds(name):
    values = curve(ScheduleConfig(name, warmup_steps=10, final_fraction=0.1, decay_steps=20 if name == "wsd" else None))
    assert values[0] == pytest.approx(0.1) and values[9] == 1.0
    assert all(0 < value <= 1 for value in values)


def test_cosine_and_linear_end_at_the_final_fraction_and_pass_the_middle():
    for name in ("cosine", "linear"):
        values = curve(ScheduleConfig(name, warmup_steps=0, final_fraction=0.1))
        assert values[100] == pytest.approx(0.1) and values[50] == pytest.approx(0.55)


def test_wsd_is_flat_then_falls():
    values = curve(ScheduleConfig("wsd", warmup_steps=10, final_fraction=0.0, decay_steps=20))
    assert set(values[9:81]) == {1.0} and values[90] == pytest.approx(0.5) and values[100] == 0


def test_beyond_the_end_the_rate_stays_at_the_final_fraction():
    assert schedule(500, 100, ScheduleConfig("cosine", final_fraction=0.2)) == pytest.approx(0.2)


def test_decay_falls_on_matrices_only():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    decayed, plain = parameter_groups(module.named_parameters(), 0.1)
    assert decayed["names"] == ["0.weight"] and decayed["weight_decay"] == 0.1
    assert plain["names"] == ["0.bias", "1.weight", "1.bias"] and plain["weight_decay"] == 0.0


def test_optimizer_state_starts_empty_and_survives_its_names():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = build_optimizer(module, OptimizerConfig())
    assert optimizer.state_dict()["state"] == {}
    module(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    groups = parameter_groups(module.named_parameters(), 0.1)
    names = [name for group in groups for name in group["names"]]
    flat = name_state(optimizer.state_dict(), names)
    assert set(flat) == {f"{name}/{slot}" for name in names for slot in ("step", "exp_avg", "exp_avg_sq")}
    restored = index_state(flat, groups)
    for index, slots in optimizer.state_dict()["state"].items():
        assert all(torch.equal(slots[slot], restored[index][slot]) for slot in slots)


def test_nonsense_is_refused():
    with pytest.raises(RequestError, match="lr"):
        OptimizerConfig(lr=0.0)
    with pytest.raises(RequestError, match="final_fraction"):
        ScheduleConfig(final_fraction=2.0)
