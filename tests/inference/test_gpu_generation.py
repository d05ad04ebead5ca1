"""Generation on a CUDA device: `pytest -m gpu`."""

import time
from dataclasses import replace

import pytest
import torch
from decoders import SHAPES, trained_like

from lm.errors import RequestError
from lm.inference import generation
from lm.inference.generation import Sampling, stream
from lm.kernels.operations import choose_kernels
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder
from lm.model.fused import fuse

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GREEDY = Sampling(temperature=0)
UNEQUAL = [[5, 3, 8, 1, 90, 4, 7, 7, 2], [9], [40, 41, 42]]


def tokens_of(decoder, prompts, **options):
    """The tokens that follow each prompt."""
    rows = [[] for _ in prompts]
    for new in stream(decoder, prompts, **options):
        rows[new.row].append(new.token)
    return rows


def on_gpu(config: DecoderConfig, kernels: str) -> Decoder:
    decoder = trained_like(config).cuda()
    fuse(decoder, choose_kernels(kernels, torch.device("cuda"))[0])
    return decoder


@pytest.mark.parametrize("kernels", ["off", "on"])
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_recorded_steps_write_the_same_tokens(config, kernels, monkeypatch):
    """Rows of unequal length, windows, groups of heads, and graphs that are recorded anew for more slots."""
    monkeypatch.setattr(generation, "SMALLEST", 16)
    decoder = on_gpu(config, kernels)
    for sampling in (GREEDY, Sampling(0.8, 20, repetition_penalty=1.2)):
        written = [
            tokens_of(decoder, UNEQUAL, max_new_tokens=50, sampling=sampling, step=step,
                      generator=torch.Generator().manual_seed(1))
            for step in ("dynamic", "static", "cuda_graph")
        ]  # fmt: skip
        assert written[0] == written[1] == written[2]


def test_tokens_are_those_of_the_cpu():
    """Greedily, and from a seed."""
    decoder = trained_like(replace(SHAPES["qwen3, windows"], num_key_value_heads=2))
    for sampling in (GREEDY, Sampling(0.7, 20), Sampling(0.7, top_p=0.8), Sampling(0.7, min_p=0.05)):
        here, there = (
            tokens_of(decoder.to(device), UNEQUAL, max_new_tokens=30, sampling=sampling,
                      generator=torch.Generator().manual_seed(1))
            for device in ("cpu", "cuda")
        )  # fmt: skip
        assert here == there


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recorded_steps_in_half_precision_give_the_figures_of_those_that_are_not(dtype):
    decoder = on_gpu(SHAPES["qwen3, tied, grouped wide heads"], "on").to(dtype)
    options = {"max_new_tokens": 40, "sampling": GREEDY}
    static, graphed = (list(stream(decoder, UNEQUAL, **options, step=step)) for step in ("static", "cuda_graph"))
    assert [new[:3] for new in static] == [new[:3] for new in graphed]
    one, two = (torch.tensor([new.log_probability for new in news]) for news in (static, graphed))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_deterministic_algorithms_are_no_obstacle():
    torch.use_deterministic_algorithms(True)
    try:
        decoder = on_gpu(SHAPES["llama, tied"], "on")
        for sampling in (GREEDY, Sampling(0.7, 20, 0.9, 0.01, 1.1), Sampling(0.7, top_p=0.8)):
            tokens_of(decoder, UNEQUAL, max_new_tokens=10, sampling=sampling)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_step_inside_autocast_is_not_recorded():
    with torch.autocast("cuda", torch.bfloat16), pytest.raises(RequestError, match="inside torch.autocast"):
        stream(on_gpu(SHAPES["llama, tied"], "off"), [[1]], max_new_tokens=2, step="cuda_graph")


@pytest.mark.slow
def test_recorded_steps_are_faster(capsys):
    """For a model of 124 million parameters in bf16; the figures are printed (`-s`)."""
    config = DecoderConfig(
        vocab_size=50304, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        intermediate_size=2048, max_position_embeddings=1024, qk_norm=True,
    )  # fmt: skip
    decoder, rates = on_gpu(config, "on").bfloat16(), {}
    for step in ("dynamic", "static", "cuda_graph"):
        for _ in range(2):  # the first warms up
            began = time.perf_counter()
            tokens_of(decoder, [[1, 2, 3]], max_new_tokens=500, sampling=GREEDY, step=step)
            rates[step] = 500 / (time.perf_counter() - began)
    with capsys.disabled():
        print({step: f"{rate:.0f} tokens/s" for step, rate in rates.items()})
    assert rates["cuda_graph"] > 1.3 * rates["dynamic"]
