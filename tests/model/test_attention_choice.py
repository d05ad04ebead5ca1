"""A named attention kernel is tried before it is used; on a CPU there are two to try."""

import pytest
import torch

from lm.errors import RequestError
from lm.model.attention_choice import use_attention, why_it_fails
from lm.model.config import DecoderConfig

CPU = torch.device("cpu")
CONFIG = DecoderConfig(hidden_size=128, num_attention_heads=4, num_key_value_heads=2)


def test_a_kernel_that_does_not_run_says_why_and_no_random_number_is_drawn():
    drawn = torch.get_rng_state()
    found = {name: why_it_fails(name, CPU, torch.bfloat16, CONFIG) for name in ("flash", "math", "cudnn")}
    assert torch.equal(torch.get_rng_state(), drawn)  # a training's random numbers are its own
    assert found["flash"] is found["math"] is None and "kernel" in found["cudnn"].lower()
    with pytest.raises(RequestError, match="model.attention cudnn does not run here"):
        use_attention(torch.nn.Module(), "cudnn", CPU, torch.bfloat16, CONFIG)
