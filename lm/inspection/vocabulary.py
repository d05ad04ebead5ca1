"""How a text uses a vocabulary: the most frequent tokens, those that never occur, and which of them moved."""

from typing import NamedTuple

import numpy as np

from lm.data.tokenizer import Tokenizer
from lm.inspection.divergence import divergence_parts, jensen_shannon
from lm.inspection.html import visible

SHARES = (0.5, 0.9, 0.99)  # of a text, for which `measure_use` says how many tokens make it up


class TokenCount(NamedTuple):
    """A token, how often it occurs, and its share of the text."""

    id: int
    text: str
    count: int
    share: float


class VocabularyUse(NamedTuple):
    """How much of a vocabulary a text uses.

    Args:
        size: tokens of the vocabulary.
        unused: (n,) ids that never occur.
        needed: share of the text -> the fewest tokens that make it up, for each of `SHARES`.
        entropy: of the distribution of tokens, in nats a token: the loss of a model that knows it and no context.
    """

    size: int
    unused: np.ndarray
    needed: dict[float, int]
    entropy: float


class Moved(NamedTuple):
    """A token whose share of the text is another in another text.

    Args:
        id: of the token.
        text: that it stands for.
        before, after: its shares of the two texts.
        part: what it adds to their divergence, in bits.
    """

    id: int
    text: str
    before: float
    after: float
    part: float


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """What a token stands for, blanks and line ends to be seen; a part of a character as the vocabulary writes it."""
    text = tokenizer.decode([token])
    if "\ufffd" in text or not text:
        return tokenizer.backend.id_to_token(int(token)) or f"id {token}"
    return visible(text)


def most_frequent(counts: np.ndarray, tokenizer: Tokenizer, most: int = 30) -> list[TokenCount]:
    """The tokens that occur most often; of equal counts the lower id first.

    Args:
        counts: (V,) `count_tokens`.
        most: how many at most; tokens that do not occur are left out.
    """
    total = counts.sum()
    ids = np.argsort(-counts, kind="stable")[:most]
    return [
        TokenCount(int(i), token_text(tokenizer, i), int(counts[i]), float(counts[i] / total)) for i in ids if counts[i]
    ]


def measure_use(counts: np.ndarray) -> VocabularyUse:
    """How much of the vocabulary is used.

    Args:
        counts: (V,) `count_tokens`, of at least one token.
    """
    shares = np.sort(counts)[::-1] / counts.sum()
    covered = np.cumsum(shares)
    needed = {share: int(np.searchsorted(covered, share - 1e-12)) + 1 for share in SHARES}
    used = shares[shares > 0]
    return VocabularyUse(len(counts), np.flatnonzero(counts == 0), needed, float(-(used * np.log(used)).sum()))


def most_moved(before: np.ndarray, after: np.ndarray, tokenizer: Tokenizer, most: int = 15) -> list[Moved]:
    """The tokens that make up most of the divergence of two texts, the largest part first.

    Args:
        before, after: (V,) `count_tokens` of the two, by one tokenizer.
    """
    parts = divergence_parts(before, after)
    shares = before / before.sum(), after / after.sum()
    return [
        Moved(int(i), token_text(tokenizer, i), float(shares[0][i]), float(shares[1][i]), float(parts[i]))
        for i in np.argsort(-parts, kind="stable")[:most] if parts[i]
    ]  # fmt: skip


def divergence_by_chance(before: np.ndarray, after: np.ndarray, draws: int = 8, seed: int = 0) -> float:
    """The divergence of two texts that are alike: both are drawn, token by token, from what the two have together.

    Real texts of one kind are further apart, since a document keeps to its words; closer than this none can be told
    from the other.

    Args:
        before, after: (V,) counts of the two, whose totals are the lengths of the texts drawn.
        draws: pairs of texts to average over.
        seed: of the draws.

    Returns:
        The mean, in bits.
    """
    random = np.random.default_rng(seed)
    together = (before + after) / (before.sum() + after.sum())
    pairs = [random.multinomial([int(before.sum()), int(after.sum())], together) for _ in range(draws)]  # (2, V) each
    return float(np.mean([jensen_shannon(one, other) for one, other in pairs]))
