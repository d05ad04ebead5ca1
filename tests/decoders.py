"""Test equipment: small decoders of every kind that there is."""

import json
from dataclasses import replace

import torch
from safetensors.torch import save_file

from lm.inference.generation import generate
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder
from lm.model.huggingface import config_json, generation_config_json, to_huggingface

SMALL = DecoderConfig(
    vocab_size=101, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=80,
    max_position_embeddings=64, rms_norm_eps=1e-4, rope_theta=5000.0, initializer_range=0.2,
)  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}  # fmt: skip
QWEN2 = replace(SMALL, attention_bias=True, tie_word_embeddings=False)
SHAPES = {
    "llama, tied": SMALL,
    "llama, untied, grouped heads": replace(SMALL, num_key_value_heads=2, tie_word_embeddings=False),
    "llama, one kv head, wide heads": replace(SMALL, num_key_value_heads=1, head_dim=32, rope_scaling=LINEAR),
    "qwen3, untied": replace(SMALL, qk_norm=True, tie_word_embeddings=False, rope_scaling=LLAMA3),
    "qwen3, tied, grouped wide heads": replace(SMALL, qk_norm=True, num_key_value_heads=2, head_dim=32),
    "qwen3, windows": replace(SMALL, qk_norm=True, num_hidden_layers=4, window_pattern="SSL", sliding_window=5),
    "qwen2, grouped heads": replace(QWEN2, num_key_value_heads=2),
    "qwen2, windows": replace(QWEN2, window_pattern="LS", sliding_window=7),
    "ministral, windows": replace(SMALL, window_pattern="SL", sliding_window=9, num_key_value_heads=2),
}


def trained_like(config: DecoderConfig) -> Decoder:
    """A decoder whose norms are not all one, so that swapping or dropping one would show."""
    torch.manual_seed(0)
    model = Decoder(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def continued(tokenizer, prompt, tokens):
    """The text that tokens add to a prompt, up to the end of the document."""
    if tokenizer.eos_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_id)]
    return tokenizer.decode(prompt + tokens)[len(tokenizer.decode(prompt)) :]


def write_huggingface(model: Decoder, path):
    """A model folder as Hugging Face's libraries write it; returns the path."""
    weights = to_huggingface(model.state_dict(), model.config)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config_json(model.config, 7, "float32")))
    (path / "generation_config.json").write_text(json.dumps(generation_config_json(7)))
    return path


def written_by(decoder, prompts, *arguments, **options) -> list[tuple[list[int], str]]:
    """What `generate` writes after each prompt: the tokens, without one that ends a document, and why it ended."""
    tokens, reasons = [[] for _ in prompts], ["" for _ in prompts]
    for new in generate(decoder, prompts, *arguments, **options):
        tokens[new.row] += [] if new.reason == "eos" else [new.token]
        reasons[new.row] = new.reason
    return list(zip(tokens, reasons, strict=True))
