"""Generation on a CUDA device: `pytest -m gpu`."""

import time
from dataclasses import replace

import pytest
import torch
from decoders import SHAPES, trained_like, written_by

from lm.inference import steps
from lm.inference.generation import generate
from lm.inference.sampling import Sampling
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder
from lm.model.fused import fuse

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
UNEQUAL = [[5, 3, 8, 1, 90, 4, 7, 7, 2], [9], [40, 41, 42]]


def on_gpu(config: DecoderConfig, fused: bool) -> Decoder:
    decoder = trained_like(config).cuda()
    if fused:
        fuse(decoder)
    return decoder


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_recorded_steps_write_the_same_tokens(config, fused, monkeypatch):
    """Rows of unequal length, windows, groups of heads, and graphs that are recorded anew for more slots."""
    monkeypatch.setattr(steps, "MIN_SLOTS", 16)
    decoder = on_gpu(config, fused)
    for sampling in (Sampling(0, max_new_tokens=50), Sampling(0.8, 20, max_new_tokens=50, seed=1)):
        dynamic, graphed = (written_by(decoder, UNEQUAL, sampling, step=step) for step in ("dynamic", "cuda_graph"))
        assert dynamic == graphed


def test_tokens_are_those_of_the_cpu():
    decoder = trained_like(replace(SHAPES["qwen3, windows"], num_key_value_heads=2))
    for filters in ({"temperature": 0}, {"top_k": 20}, {"top_p": 0.8}):
        sampling = Sampling(**{"temperature": 0.7, "max_new_tokens": 30, "seed": 1, **filters})
        here, there = (written_by(decoder.to(device), UNEQUAL, sampling) for device in ("cpu", "cuda"))
        assert here == there


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recorded_steps_in_half_precision_give_the_figures_of_those_that_are_not(dtype, monkeypatch):
    decoder = on_gpu(SHAPES["qwen3, tied, grouped wide heads"], True).to(dtype)
    greedy = Sampling(0, max_new_tokens=40)
    graphed = list(generate(decoder, UNEQUAL, greedy, step="cuda_graph"))
    monkeypatch.setattr(steps, "WARMUP", 1000)  # no graph is captured
    static = list(generate(decoder, UNEQUAL, greedy, step="cuda_graph"))
    assert [new[:3] for new in static] == [new[:3] for new in graphed]
    one, two = (torch.tensor([new.log_probability for new in news]) for news in (static, graphed))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_deterministic_algorithms_are_no_obstacle():
    torch.use_deterministic_algorithms(True)
    try:
        decoder = on_gpu(SHAPES["llama, tied"], True)
        for sampling in (Sampling(0), Sampling(0.7, 20, 0.9), Sampling(0.7, top_p=0.8)):
            written_by(decoder, UNEQUAL, replace(sampling, max_new_tokens=10))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_recorded_steps_are_faster(capsys):
    """For a model of 124 million parameters in bf16; the figures are printed (`-s`)."""
    config = DecoderConfig(
        vocab_size=50304, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        intermediate_size=2048, max_position_embeddings=1024, qk_norm=True,
    )  # fmt: skip
    decoder, rates = on_gpu(config, True).bfloat16(), {}
    for step in ("dynamic", "cuda_graph"):
        for _ in range(2):  # the first warms up
            began = time.perf_counter()
            written_by(decoder, [[1, 2, 3]], Sampling(0, max_new_tokens=500), step=step)
            rates[step] = 500 / (time.perf_counter() - began)
    with capsys.disabled():
        print({step: f"{rate:.0f} tokens/s" for step, rate in rates.items()})
    assert rates["cuda_graph"] > 1.3 * rates["dynamic"]
