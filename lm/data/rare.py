"""The rarest tokens of a text, and samples drawn from them, for the drill of a loss spike."""

import numpy as np

from lm.data.shards import Shards

RARE_FRACTION = 0.01  # of the text, that the rarest tokens make up together
COUNTED = 4 * 2**20  # tokens of the text that are counted


def count_tokens(shards: Shards, vocab_size: int, stop: int) -> np.ndarray:
    """How often each token occurs among the first `stop` tokens: (V,) int64.

    Packed rows count without the first token of each, which is only context, and without padding.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for block in range(len(shards.index.blocks)):
        ids = shards.read(block)
        if shards.packed is not None:
            ids = ids[shards.packed.targets(ids)]
        counts += np.bincount(ids[:stop], minlength=vocab_size)
        stop = max(0, stop - len(ids))
        if not stop:
            break
    return counts


def rare_tokens(shards: Shards, vocab_size: int) -> np.ndarray:
    """The ids of the bottom 1 % of the unigram distribution of a text, the rarest first.

    The first 4 Mi tokens of the shards are counted. Tokens that occur are sorted by count, then by id, and chosen from
    the rarest on as long as they make up at most 1 % of the count together, at least one.
    """
    counts = count_tokens(shards, vocab_size, COUNTED)
    rarest = np.argsort(counts, kind="stable")
    rarest = rarest[counts[rarest] > 0]
    within = np.cumsum(counts[rarest]) <= RARE_FRACTION * counts.sum()
    return rarest[: max(1, int(within.sum()))]


def rare_rows(rare: np.ndarray, seed: int, step: int, samples: int, length: int) -> np.ndarray:
    """The samples of an injected step, (samples, length): drawn uniformly from rare tokens, by seed and step alone."""
    # numpy promises never to change the stream of a bit generator, but not what its Generator makes of it (NEP 19).
    drawn = np.random.Philox(key=np.array([seed % 2**64, step], dtype=np.uint64)).random_raw(samples * length)
    return rare[drawn % np.uint64(len(rare))].reshape(samples, length)
