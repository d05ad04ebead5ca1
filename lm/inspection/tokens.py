"""The tokens of shards: how often each occurs, and how long the documents are in tokens and in bytes."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lm.data.shards import Shards
from lm.data.tokenizer import Tokenizer


class Documents(NamedTuple):
    """The sizes of the documents of a text, in order.

    Args:
        tokens: (D,) of each document, with the one that ends it.
        bytes: (D,) of UTF-8.
    """

    tokens: np.ndarray
    bytes: np.ndarray

    @property
    def bytes_per_token(self) -> float:
        """Of all documents together; NaN where there are none."""
        total = self.tokens.sum()
        return float(self.bytes.sum() / total) if total else float("nan")


def read_tokens(shards: Shards, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
    """Tokens from one place to another of all shards laid end to end, in pieces; no other block is read.

    Args:
        start: the first token.
        stop: the one after the last; the end if not given.

    Yields:
        (n,) uint16 or uint32.
    """
    stop = shards.tokens if stop is None else min(stop, shards.tokens)
    first = 0
    for index, block in enumerate(shards.blocks):
        if first < stop and first + block.tokens > start:
            yield shards.read(index)[max(0, start - first) : stop - first]
        first += block.tokens


def count_tokens(shards: Shards, vocab_size: int, start: int = 0, stop: int | None = None) -> np.ndarray:
    """How often each token occurs between two places, see `read_tokens`.

    Returns:
        (vocab_size,) int64.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens in read_tokens(shards, start, stop):
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def count_parts(shards: Shards, vocab_size: int, parts: int, most: int) -> np.ndarray:
    """How often each token occurs in equal parts of the shards, in the order in which they lie.

    Args:
        parts: how many.
        most: tokens to read of each, from its beginning.

    Returns:
        (parts, vocab_size) int64.
    """
    edges = [shards.tokens * part // parts for part in range(parts + 1)]
    return np.stack([
        count_tokens(shards, vocab_size, start, min(stop, start + most))
        for start, stop in zip(edges, edges[1:], strict=False)
    ])  # fmt: skip


def measure_documents(shards: Shards, tokenizer: Tokenizer, stop: int | None = None) -> Documents:
    """The sizes of documents; a last one that does not end is left out.

    Args:
        shards: laid end to end; a document may go on in the next.
        tokenizer: that they were made with; its end-of-text token ends a document.
        stop: the first token that is not looked at; all are, if not given.
    """
    sizes = tokenizer.token_bytes()
    found_tokens, found_bytes = [], []
    open_tokens = open_bytes = 0  # of the document that goes on from the piece before
    for tokens in read_tokens(shards, 0, stop):
        ends = np.flatnonzero(tokens == tokenizer.eos_id) + 1
        upto = np.concatenate([[0], np.cumsum(sizes[tokens], dtype=np.int64)])  # bytes before each token
        edges = np.concatenate([[0], ends])
        of_tokens, of_bytes = np.diff(edges), np.diff(upto[edges])
        if len(ends):
            of_tokens[0] += open_tokens
            of_bytes[0] += open_bytes
            open_tokens = open_bytes = 0
        open_tokens += len(tokens) - int(edges[-1])
        open_bytes += int(upto[-1] - upto[edges[-1]])
        found_tokens.append(of_tokens)
        found_bytes.append(of_bytes)
    nothing = [np.zeros(0, dtype=np.int64)]
    return Documents(np.concatenate(found_tokens or nothing), np.concatenate(found_bytes or nothing))
