"""Numbers about the text of opened shards: tokens without padding, and the bytes that a token stands for."""

import numpy as np

from lm.data.shards import Shards
from lm.data.tokenizer import Tokenizer

DECODED_TOKENS = 2**18  # decoded to measure the bytes of text that tokens stand for


def document_tokens(shards: Shards) -> int:
    """All tokens; of packed rows, without the first token of each row and without padding, as far as it is known."""
    tokens = shards.index.tokens
    if shards.packed is None:
        return tokens
    padding = sum(shard.padding or 0 for shard in shards.by_file.values())
    return tokens - tokens // (shards.packed.seq_len + 1) - padding


def padding_fraction(shards: Shards) -> float | None:
    """Padding as a fraction of the targets of packed rows; None if not known."""
    counts = [shard.padding for shard in shards.by_file.values() if shard.padding is not None]
    tokens = shards.index.tokens
    if shards.packed is None or len(counts) < len(shards.by_file) or not tokens:
        return None
    return sum(counts) / (tokens / (shards.packed.seq_len + 1) * shards.packed.seq_len)


def token_bytes(shards: Shards, tokenizer: Tokenizer) -> np.ndarray:
    """Average bytes of text that each token stands for in these shards: (V,) float64.

    `Tokenizer.token_bytes` times a factor, so that the sum over all tokens equals the bytes of the text for shards
    made by `lm data prepare`, and the bytes of decoded text, measured on some tokens, for others.
    """
    sizes = tokenizer.token_bytes().astype(np.float64)
    weights = [sum(shard.row_groups) for shard in shards.by_file.values()]
    ratios = [shard.text_ratio for shard in shards.by_file.values() if shard.text_ratio is not None]
    if len(ratios) == len(weights) and any(weights):
        return sizes * np.average(ratios, weights=weights)
    if tokenizer.byte_level:
        return sizes
    ids = shards.beginning()[:DECODED_TOKENS]
    return sizes * (tokenizer.text_bytes(ids) / max(1, sizes[ids].sum()))
