"""Schedules and counts of steps are pure functions, settings are those of a parameter's group, state has names."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lm.data.config import DataConfig, PhaseConfig, SourceConfig
from lm.errors import RequestError
from lm.model.config import DecoderConfig, matrix_rows
from lm.model.decoder import Decoder
from lm.training.checkpoint_content import index_state, name_state, parameter_names
from lm.training.config import GroupConfig, GroupsConfig, OptimizerConfig, ScheduleConfig, TrainerConfig
from lm.training.optim import build_optimizer, parameter_groups
from lm.training.schedule import lr_fraction, plan_steps, warmup_and_decay_steps

SHAPE = dict(
    vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=20, max_position_embeddings=8, qk_norm=True,
)  # fmt: skip


def curve(config, steps=100):
    return [lr_fraction(step, steps, config) for step in range(steps + 1)]


def decoder(**changes):
    return Decoder(DecoderConfig(**{**SHAPE, **changes}))


def optimizer_of(model, config):
    return build_optimizer(model, config, matrix_rows(model.config))


def settings(model, config):
    """Each parameter's learning rate and decay, by name."""
    optimizer = optimizer_of(model, config)
    each = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups for _ in group["params"]]
    return dict(zip(parameter_names(model, optimizer), each, strict=True))


# ---- schedules ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_rises_to_the_peak_and_stays_within_bounds(name):
    values = curve(ScheduleConfig(name, warmup_steps=10, final_fraction=0.1, decay_steps=20 if name == "wsd" else None))
    assert values[0] == pytest.approx(0.1) and values[9] == 1.0
    assert all(0 < value <= 1 for value in values)


@pytest.mark.parametrize("config, values", [
    (ScheduleConfig("cosine", final_fraction=0.1), {50: 0.55, 100: 0.1, 500: 0.1}),
    (ScheduleConfig("linear", final_fraction=0.1), {50: 0.55, 100: 0.1, 500: 0.1}),
    (ScheduleConfig("wsd", warmup_steps=10, final_fraction=0.2, decay_steps=20),
     {9: 1.0, 79: 1.0, 89: 0.6, 98: 0.24, 99: 0.2, 100: 0.2}),
    (ScheduleConfig("wsd", final_fraction=0.2, decay_steps=1), {98: 1.0, 99: 0.2}),
])  # fmt: skip
def test_a_rate_falls_to_the_final_fraction_and_stays_there(config, values):
    """`wsd` is flat before, and reaches it in the last step."""
    assert {step: lr_fraction(step, 100, config) for step in values} == pytest.approx(values)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("steps", [100, 250, 7])
def test_shares_of_the_run_are_the_steps_that_they_come_to(name, steps):
    ratios = ScheduleConfig(name, warmup_ratio=0.1, decay_ratio=0.4)
    warmup, decay = warmup_and_decay_steps(steps, ratios)
    assert (warmup, decay) == (round(0.1 * steps), round(0.4 * steps))
    assert curve(ratios, steps) == curve(ScheduleConfig(name, warmup_steps=warmup, decay_steps=decay), steps)


def test_a_warm_up_and_a_decay_that_do_not_fit_into_the_run_are_refused():
    """They may fill it; more would let the rate jump from the warm-up into the middle of the fall."""
    filled = ScheduleConfig("wsd", warmup_steps=10, decay_steps=90)
    assert warmup_and_decay_steps(100, filled) == (10, 90) and curve(filled)[9] == 1.0
    for config in (filled, ScheduleConfig("wsd", warmup_steps=10, decay_ratio=0.95)):
        with pytest.raises(RequestError, match=r"warm-up 10 \+ decay \d+ steps are more than the run's 99"):
            lr_fraction(0, 99, config)
    cosine = ScheduleConfig("cosine", warmup_steps=10, decay_steps=90)
    assert warmup_and_decay_steps(99, cosine) == (10, 90)  # a fall that ends at 90


@pytest.mark.parametrize("warmup", [0.1, 0.3, 0.5])
def test_shares_that_make_a_whole_fill_every_run(warmup):
    """Though both may come to half a step and be rounded up."""
    config = ScheduleConfig("wsd", warmup_ratio=warmup, decay_ratio=1 - warmup)
    assert all(sum(warmup_and_decay_steps(steps, config)) <= steps for steps in range(1, 40))


# ---- steps ----------------------------------------------------------------------------------------------------------
DATA = DataConfig("data/a", seq_len=1024, micro_batch_size=16, global_batch_tokens=524_288)
REQUEST = dict(data=DATA, world_size=1, max_steps=10, max_tokens=None)


def test_accumulation_is_what_is_left_of_the_global_batch():
    steps = plan_steps(**REQUEST)
    assert (steps.accumulate, steps.global_batch, steps.tokens_per_step) == (32, 512, 524_288)
    assert plan_steps(**{**REQUEST, "world_size": 8}).accumulate == 4


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 16), st.integers(1, 512))
def test_every_division_of_a_global_batch_has_the_same_tokens(micro, accumulate, world, seq_len):
    tokens = micro * accumulate * world * seq_len
    data = DataConfig("data/a", seq_len=seq_len, micro_batch_size=micro, global_batch_tokens=tokens)
    steps = plan_steps(data, world, max_steps=None, max_tokens=tokens * 3 + 1)
    assert steps.tokens_per_step == tokens and steps.accumulate == accumulate and steps.max_steps == 4


@pytest.mark.parametrize("config, changes, message", [
    (ScheduleConfig, dict(final_fraction=2.0), "final_fraction 2.0"),
    (ScheduleConfig, dict(warmup_ratio=-0.1), "warmup_ratio -0.1"),
    (ScheduleConfig, dict(decay_ratio=1.5), "decay_ratio 1.5"),
    (ScheduleConfig, dict(warmup_steps=10, warmup_ratio=0.1), "warmup_steps 10 .* two lengths"),
    (ScheduleConfig, dict(decay_steps=10, decay_ratio=0.1), "decay_steps 10 .* two lengths"),
    (OptimizerConfig, dict(lr=-1.0), "model.optimizer.lr -1.0"),
    (OptimizerConfig, dict(weight_decay=-1.0), "model.optimizer.weight_decay -1.0"),
    # no numbers
    (OptimizerConfig, dict(lr=math.inf), "model.optimizer.lr inf must be at least 0, and finite"),
    (OptimizerConfig, dict(eps=math.inf), "model.optimizer.eps inf"),
    (OptimizerConfig, dict(weight_decay=math.inf), "weight_decay inf must be at least 0, and finite"),
    (ScheduleConfig, dict(warmup_steps=math.nan), "model.schedule.warmup_steps nan must be at least 0"),
    (TrainerConfig, dict(val_interval=math.nan), "trainer.val_interval nan must be at least 1"),
    (TrainerConfig, dict(gradient_clip_val=math.nan), "trainer.gradient_clip_val nan must be at least 0"),
    (DataConfig, dict(path="a", micro_batch_size=0), "data.micro_batch_size 0 must be at least 1"),
    (DataConfig, dict(sources=[SourceConfig("a", "b")], phases=[PhaseConfig(math.nan, {"a": 1})]), "sort the phases"),
    # with the arithmetic
    (plan_steps, REQUEST | {"world_size": 3}, r"16 x seq_len 1024 x 3 ranks = 49,152 tokens.*10\.667.*540,672"),
    (plan_steps, REQUEST | {"data": replace(DATA, global_batch_tokens=1024)}, "nearest that fits is 16,384"),
    (plan_steps, REQUEST | {"max_steps": None}, "one of trainer.max_steps and trainer.max_tokens"),
    (plan_steps, REQUEST | {"max_tokens": 5}, "one of trainer.max_steps and trainer.max_tokens"),
])  # fmt: skip
def test_nonsense_is_refused(config, changes, message):
    with pytest.raises(RequestError, match=message):
        config(**changes)


# ---- groups ---------------------------------------------------------------------------------------------------------
def test_without_groups_adamw_has_matrices_and_vectors():
    """Two launches of the fused step, in this order, as ever."""
    model = decoder()
    first, second = parameter_groups(model.named_parameters(), OptimizerConfig(weight_decay=0.2), {}, ())
    assert all(p.ndim == 2 for p in first["params"]) and first["weight_decay"] == 0.2
    assert all(p.ndim == 1 for p in second["params"]) and second["weight_decay"] == 0.0
    assert len(first["params"]) + len(second["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_group_has_its_own_rate_and_decay(name):
    groups = GroupsConfig(
        matrices=GroupConfig(lr=0.2), embedding=GroupConfig(lr=0.3, weight_decay=0.0),
        output=GroupConfig(weight_decay=0.01), norms=GroupConfig(lr=0.5, weight_decay=0.02),
    )  # fmt: skip
    model = decoder(tie_word_embeddings=False)
    found = settings(model, OptimizerConfig(name, lr=0.1, weight_decay=0.7, groups=groups))
    assert found.pop("embed_tokens.weight") == (0.3, 0.0)
    assert found.pop("lm_head.weight") == (0.1, 0.01)
    for parameter, values in found.items():
        assert values == ((0.5, 0.02) if "norm" in parameter else (0.2, 0.7)), parameter


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_of_the_blocks_and_nothing_else(tied):
    """Each group holds one shape, and the rows are those of a head, of gate or up, or of the whole matrix."""
    model = decoder(tie_word_embeddings=tied, head_dim=6)
    optimizer = optimizer_of(model, OptimizerConfig("muon"))
    names = iter(parameter_names(model, optimizer))
    rows = {next(names): group.get("rows") for group in optimizer.param_groups for _ in group["params"]}
    for name, found in rows.items():
        last = name.removesuffix(".weight").split(".")[-1]
        wanted = {"qkv_proj": 6, "o_proj": 16, "gate_up_proj": 20, "down_proj": 16}.get(last)
        assert found == wanted, name
    assert [len({p.shape for p in group["params"]}) for group in optimizer.groups("muon")] == [1, 1, 1, 1]
    assert sorted(rows) == sorted(name for name, _ in model.named_parameters())


def test_an_option_that_a_class_would_not_get_is_refused():
    message = "momentum of the built-in optimizers: leave them out of the config; arguments of .* stand in"
    with pytest.raises(RequestError, match=message):
        OptimizerConfig(class_path="torch.optim.SGD", momentum=0.9)
    OptimizerConfig(class_path="torch.optim.SGD", name="muon", lr=0.1, init_args={"momentum": 0.5})
    OptimizerConfig(name="muon", momentum=0.9)


@pytest.mark.parametrize("given", [dict(), dict(name="muon"), dict(class_path="torch.optim.SGD")])
def test_nothing_to_train_is_refused(given):
    with pytest.raises(RequestError, match="all of the model's weights are frozen"):
        build_optimizer(nn.Linear(4, 4).requires_grad_(False), OptimizerConfig(**given), {})


# ---- state ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_starts_empty_and_survives_its_names(name):
    model = decoder()
    optimizer = optimizer_of(model, OptimizerConfig(name))
    assert optimizer.state_dict()["state"] == {}
    model(torch.arange(8)[None]).square().sum().backward()
    optimizer.step()
    names = parameter_names(model, optimizer)
    flat = name_state(optimizer.state_dict()["state"], names)
    muon = {n for n, p in model.named_parameters() if name == "muon" and p.ndim == 2 and n != "embed_tokens.weight"}
    assert set(flat) == {
        f"{n}/{slot}" for n in names
        for slot in (("momentum_buffer",) if n in muon else ("exp_avg", "exp_avg_sq", "step"))
    }  # fmt: skip
    restored = index_state(flat, names)
    for index, slots in optimizer.state_dict()["state"].items():
        assert all(torch.equal(slots[slot], restored[index][slot]) for slot in slots)
