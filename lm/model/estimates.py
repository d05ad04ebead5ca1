"""Parameters, FLOPs and checkpoint size of a decoder, from its config: nothing is built, and torch is not imported.

`lm plan` and the throughput callback use them; every formula names its source. `model/memory` has the memory of a step.
"""

from typing import NamedTuple

from lm.errors import RequestError
from lm.model.config import DecoderConfig


def parameters(config: DecoderConfig) -> dict[str, int]:
    """Parameters by part, their sum `total`, and `non_embedding`, the sum over the blocks and the last norm."""
    if config.vocab_size is None:
        raise RequestError("vocab_size is not known: set it, or take it from a tokenizer before counting parameters")
    width, layers = config.hidden_size, config.num_hidden_layers
    heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    biases = (heads + 2 * kv_heads) * config.attention_bias
    table = config.vocab_size * width
    parts = {
        "embedding": table,
        "attention": layers * width * (heads + 2 * kv_heads + heads),  # queries, keys and values, output
        "mlp": layers * 3 * width * config.intermediate_size,  # gate, up, down
        "norms": layers * (2 * width + 2 * config.head_dim * config.qk_norm + biases) + width,  # all vectors
        "lm_head": 0 if config.tie_word_embeddings else table,
    }
    return {**parts, "total": sum(parts.values()), "non_embedding": parts["attention"] + parts["mlp"] + parts["norms"]}


def flops_per_token(config: DecoderConfig, seq_len: int, full_attention: bool = False) -> float:
    """Floating-point operations of training on one token, forward and backward.

    `6 x parameters`: each weight multiplies and adds once in the forward pass and twice in the backward pass (Kaplan
    et al., 2020, arXiv:2001.08361, section 2.1). The input embedding is looked up, so it does not count; the output
    matrix is multiplied, so it does, tied or not.
    `12 x layers x heads x head_dim x mean attended length`: queries with keys and weights with values, 2 FLOPs
    each, times 3 for forward and backward (Chowdhery et al., 2022, arXiv:2204.02311, appendix B), but counting only the
    positions that a causal token attends to instead of all `seq_len`: `(seq_len + 1) / 2` on average, and with a
    window of `w` tokens `w - w * (w - 1) / (2 * seq_len)`.

    A document mask is ignored: the positions that it hides count as attended.

    With `full_attention` each token counts as attending to all `seq_len` positions, including those the causal mask
    hides, or to all of a window, as in that appendix and nanochat's `estimate_flops`. MFU is then higher.
    """
    counts = parameters(config)
    output = config.vocab_size * config.hidden_size
    windows = [min(window or seq_len, seq_len) for window in config.windows]
    hidden = 0 if full_attention else sum(window * (window - 1) / (2 * seq_len) for window in windows)  # causal mask
    attended = sum(windows) - hidden  # over all layers
    return 6 * (counts["non_embedding"] + output) + 12 * config.num_attention_heads * config.head_dim * attended


def block_flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """`flops_per_token` of the blocks alone, without the output matrix."""
    return flops_per_token(config, seq_len) - 6 * config.vocab_size * config.hidden_size


def recomputed_flops_per_token(config: DecoderConfig, seq_len: int, checkpointing: str) -> float:
    """FLOPs per token that `model.activation_checkpointing` repeats, which MFU does not count: a third of those of the
    blocks (their forward pass), or the forward pass of the MLPs."""
    if checkpointing == "block":
        return block_flops_per_token(config, seq_len) / 3
    return 2 * parameters(config)["mlp"] if checkpointing == "selective" else 0.0


def describe_mfu(mfu: float | None, full: float | None) -> str:
    """Describe the MFU: counting causal attention as attended, and with `full_attention`, as some projects do."""
    if mfu is None or full is None:
        return "unknown"
    return f"{mfu:.1%} by what attention attends to; {full:.1%} by its full length, as nanochat and PaLM count"


class OptimizerState(NamedTuple):
    """Number of values that an optimizer keeps per parameter; AdamW has two running means."""

    hidden: int = 2  # for parameters of the matrices in the blocks; 2 for all others
    divided: bool = False  # whether `hidden` is divided over the ranks, also with DDP


ADAMW = OptimizerState()


def checkpoint_bytes(config: DecoderConfig, master_item: int = 4, state: OptimizerState = ADAMW) -> int:
    """Bytes of a checkpoint folder: weights and optimizer state."""
    counts = parameters(config)
    return (counts["total"] + state_values(counts, state)) * master_item


def state_values(counts: dict[str, int], state: OptimizerState, owners: int = 1) -> int:
    """How many values an optimizer keeps on a device, where `owners` devices divide what can be divided."""
    hidden = counts["attention"] + counts["mlp"]
    return state.hidden * hidden // owners + 2 * (counts["total"] - hidden)
