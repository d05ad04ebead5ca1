"""What a decoder costs, from its config alone: nothing is built, and torch is not imported.

`lm plan` and the throughput callback read it; every formula names its source.
"""

from lm.errors import RequestError
from lm.model.config import DecoderConfig


def parameters(config: DecoderConfig) -> dict[str, int]:
    """Parameters by part.

    Returns:
        `embedding`, `attention`, `mlp`, `norms`, `lm_head` (0 where it is tied), their sum `total`, and
        `non_embedding`, which is what the blocks and the last norm hold.

    Raises:
        RequestError: where the vocabulary is still open.
    """
    if config.vocab_size is None:
        raise RequestError("vocab_size is not known: set it, or take it from a tokenizer before counting parameters")
    width, layers = config.hidden_size, config.num_hidden_layers
    heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    table = config.vocab_size * width
    parts = {
        "embedding": table,
        "attention": layers * width * (heads + 2 * kv_heads + heads),  # queries, keys and values, output
        "mlp": layers * 3 * width * config.intermediate_size,  # gate, up, down
        "norms": layers * (2 * width + 2 * config.head_dim * config.qk_norm) + width,
        "lm_head": 0 if config.tie_word_embeddings else table,
    }
    return {
        **parts,
        "total": sum(parts.values()),
        "non_embedding": parts["attention"] + parts["mlp"] + parts["norms"],
    }


def flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """Floating-point operations of training on one token, forward and backward.

    `6 x parameters`: each weight multiplies and adds once in the forward pass and twice in the backward pass (Kaplan
    et al., 2020, arXiv:2001.08361, section 2.1). The input embedding is looked up, so it does not count; the output
    matrix is multiplied, so it does, tied or not.
    `12 x layers x heads x head_dim x mean attended length`: queries with keys and weights with values, 2 operations
    each, times 3 for forward and backward (Chowdhery et al., 2022, arXiv:2204.02311, appendix B), but with the
    positions a causal token really attends to in place of all `seq_len`: `(seq_len + 1) / 2` on average, and with a
    window of `w` tokens `w - w * (w - 1) / (2 * seq_len)`.

    A document mask is not accounted for: the positions that it hides count as attended.
    """
    counts = parameters(config)
    output = config.vocab_size * config.hidden_size
    windows = [min(window or seq_len, seq_len) for window in config.windows]
    attended = sum(window - window * (window - 1) / (2 * seq_len) for window in windows)  # over all layers
    return 6 * (counts["non_embedding"] + output) + 12 * config.num_attention_heads * config.head_dim * attended
