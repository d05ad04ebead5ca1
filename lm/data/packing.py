"""Rows of whole documents: which documents share a row, so that no document is cut that fits one.

`data/encode` writes a shard in this way where `lm data prepare --packing whole` asks for it. A row predicts `seq_len`
tokens and has one more before them, as the context of the first: the end-of-text token, or, where a row continues a
document that is longer than a row, the token before. Documents are put into rows by best-fit decreasing: the longest
first, each into the row with the least space that is left for it. A row is padded with end-of-text tokens; they follow
one that ends a document, and no document is empty, so `PackedRows.targets` can tell padding from the ends.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np


class Packing(NamedTuple):
    """Spans of tokens in the order of their rows, and in the order in which they stand in a row."""

    starts: np.ndarray  # (spans,) int64, the first token of each
    stops: np.ndarray  # (spans,) int64, the token after its last
    rows: np.ndarray  # (spans,) int64, from 0, the row of each; every row has at least one


def pack_documents(begins: np.ndarray, ends: np.ndarray, seq_len: int) -> Packing:
    """Put documents into rows that predict `seq_len` tokens each.

    A document of more than `seq_len` tokens begins a row of its own and fills as many as it can; what is left of it
    begins the row after these. Rows are ordered by the first token of the documents in them, so that long and short
    documents stay as mixed as they were. `begins` and `ends`, (documents,) int64, are the first token of each document,
    increasing, and the token after its last.
    """
    lengths = ends - begins
    long = lengths > seq_len
    full = np.where(long, lengths // seq_len, 0)  # rows that a document fills
    first = np.repeat(np.cumsum(full) - full, full)
    starts = np.repeat(begins, full) + (np.arange(full.sum()) - first) * seq_len  # of the full rows
    remainder = lengths - full * seq_len  # what is left to be put into rows
    begins, stops, long = (part[remainder > 0] for part in (ends - remainder, ends, long))
    rows = len(starts) + _best_fit(stops - begins, long, seq_len)
    starts, stops = np.concatenate([starts, begins]), np.concatenate([starts + seq_len, stops])
    continues = np.concatenate([np.zeros(len(starts) - len(long), bool), long])
    rows = np.concatenate([np.arange(len(starts) - len(long)), rows])
    firsts = np.full(rows.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(firsts, rows, starts)
    firsts[rows[continues]] = starts[continues]
    rows = np.argsort(np.argsort(firsts))[rows]
    order = np.lexsort((starts, ~continues, rows))
    return Packing(starts[order], stops[order], rows[order])


def _best_fit(lengths: np.ndarray, alone: np.ndarray, seq_len: int) -> np.ndarray:
    """The row of each span of 1 to `seq_len` tokens: (spans,) int64. No two of those that are `alone` share a row."""
    rows, count = np.empty(len(lengths), np.int64), 0
    open_rows: dict[int, list[int]] = defaultdict(list)  # space that is left -> rows
    spaces = 0  # bit s is set where a row with the space s is open
    for span in np.lexsort((-lengths, ~alone)).tolist():
        length = int(lengths[span])
        fitting = 0 if alone[span] else spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1  # the least that is enough
            row = open_rows[space].pop()
            spaces ^= 0 if open_rows[space] else 1 << space
        else:
            space, row, count = seq_len, count, count + 1
        rows[span] = row
        if space > length:
            open_rows[space - length].append(row)
            spaces |= 1 << (space - length)
    return rows
