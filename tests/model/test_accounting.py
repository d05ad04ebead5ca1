"""What a decoder costs is known from its config, and is what the built decoder really has and does."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder
from lm.model.estimates import describe_mfu, flops_per_token, parameters

BASE = DecoderConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
SHAPES = {
    "plain": BASE,
    "untied, grouped": replace(BASE, tie_word_embeddings=False, num_key_value_heads=1),
    "qk_norm, wide heads": replace(BASE, qk_norm=True, head_dim=32, num_key_value_heads=2),
    "50M": DecoderConfig(vocab_size=50257, hidden_size=768, num_hidden_layers=8, num_attention_heads=12,
                         num_key_value_heads=4, intermediate_size=2048),
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_counted_parameters_are_those_of_the_built_decoder(config):
    with torch.device("meta"):
        named = dict(Decoder(config).named_parameters())

    def held(*words):
        return sum(p.numel() for name, p in named.items() if any(word in name for word in words))

    counts = parameters(config)
    assert counts["total"] == sum(p.numel() for p in named.values())
    assert counts["embedding"] == held("embed_tokens")
    assert counts["attention"] == held("qkv_proj", "o_proj")
    assert counts["mlp"] == held("mlp.")
    assert counts["norms"] == held("norm")
    assert counts["lm_head"] == held("lm_head")
    assert counts["non_embedding"] == counts["total"] - counts["embedding"] - counts["lm_head"]


def test_a_known_size():
    """Llama with Qwen3-0.6B's shape: 596,049,920 parameters, 155,582,464 of them in the tied embedding."""
    counts = parameters(DecoderConfig(
        vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, intermediate_size=3072, qk_norm=True,
    ))
    assert (counts["total"], counts["embedding"]) == (596_049_920, 155_582_464)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_flops_are_those_that_torch_counts_in_a_training_step(config):
    """torch counts matmuls and the whole attention square; norms, which we count as parameters, are left out."""
    length = 32
    with torch.device("meta"):
        model = Decoder(replace(config, max_position_embeddings=length))
        ids = torch.zeros(2, length, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(ids, labels=ids).total.backward()
    ours = flops_per_token(config, length, full_attention=True) - 6 * parameters(config)["norms"]
    assert counter.get_total_flops() / ids.numel() == pytest.approx(ours, rel=1e-9)


def test_the_formula_on_paper():
    config = replace(BASE, num_hidden_layers=1, num_attention_heads=2, head_dim=8, num_key_value_heads=2)
    weights = 64 * 1000 + 4 * 64 * 16 + 3 * 64 * 96 + 3 * 64
    assert flops_per_token(config, 7) == 6 * weights + 12 * 16 * 4
    assert flops_per_token(replace(config, tie_word_embeddings=False), 7) == flops_per_token(config, 7)


def test_windows_count_what_their_tokens_see():
    config = replace(BASE, num_hidden_layers=3, window_pattern="SSL", sliding_window=3)
    full = replace(BASE, num_hidden_layers=3)
    seen = sum(min(t + 1, 3) for t in range(10)) / 10  # by a token, on average
    heads = 12 * config.num_attention_heads * config.head_dim
    assert flops_per_token(full, 10) - flops_per_token(config, 10) == pytest.approx(heads * 2 * (5.5 - seen))
    assert flops_per_token(config, 2) == pytest.approx(flops_per_token(full, 2))


def test_full_attention_counts_what_the_causal_mask_hides():
    """All positions, or all of a window, as nanochat's `estimate_flops` has it."""
    config = replace(BASE, num_hidden_layers=3, window_pattern="SSL", sliding_window=3)
    heads = 12 * config.num_attention_heads * config.head_dim
    seen = sum(min(t + 1, 3) for t in range(10)) / 10
    more = heads * (2 * (3 - seen) + 10 - 5.5)
    assert flops_per_token(config, 10, full_attention=True) == pytest.approx(flops_per_token(config, 10) + more)
    assert describe_mfu(0.44, 0.466).startswith("44.0% ") and "46.6%" in describe_mfu(0.44, 0.466)
    assert describe_mfu(None, None) == "unknown"


def test_an_open_vocabulary_is_refused():
    with pytest.raises(RequestError, match="vocab_size is not known"):
        flops_per_token(DecoderConfig(), 8)


def test_accounting_imports_no_torch():
    code = "import sys, lm.model.estimates; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
