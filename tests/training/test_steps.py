"""What is asked for in tokens comes out as whole micro-batches and steps, or is refused with the arithmetic."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.errors import RequestError
from lm.training.schedule import plan_steps
from lm.training.trainer import Trainer

REQUEST = dict(seq_len=1024, micro_batch_size=16, global_batch_tokens=524_288, world_size=1, max_steps=10,
               max_tokens=None)  # fmt: skip


def test_accumulation_is_what_is_left_of_the_global_batch():
    steps = plan_steps(**REQUEST)
    assert (steps.accumulate, steps.global_batch, steps.tokens_per_step) == (32, 512, 524_288)
    assert plan_steps(**{**REQUEST, "world_size": 8}).accumulate == 4


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 16), st.integers(1, 512))
def test_every_division_of_a_global_batch_has_the_same_tokens(micro, accumulate, world, seq_len):
    tokens = micro * accumulate * world * seq_len
    steps = plan_steps(seq_len=seq_len, micro_batch_size=micro, global_batch_tokens=tokens, world_size=world,
                       max_steps=None, max_tokens=tokens * 3 + 1)  # fmt: skip
    assert steps.tokens_per_step == tokens and steps.accumulate == accumulate and steps.max_steps == 4


@pytest.mark.parametrize("change, words", [
    ({"world_size": 3}, r"16 x seq_len 1024 x 3 ranks = 49,152 tokens.*10\.667.*540,672"),
    ({"global_batch_tokens": 1024}, "nearest that fits is 16,384"),
    ({"max_steps": None}, "one of trainer.max_steps and trainer.max_tokens"),
    ({"max_tokens": 5}, "one of trainer.max_steps and trainer.max_tokens"),
])  # fmt: skip
def test_what_does_not_come_out_even_is_refused_with_the_arithmetic(change, words):
    with pytest.raises(RequestError, match=words):
        plan_steps(**{**REQUEST, **change})


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has it")
def test_a_device_that_is_not_there_is_refused_with_the_cure():
    with pytest.raises(RequestError, match="give --trainer.accelerator cpu, or auto"):
        Trainer(max_steps=1, accelerator="mps")
