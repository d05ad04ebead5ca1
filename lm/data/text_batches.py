"""Batches of texts, for `lm predict`: documents of files, divided into rows."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch

from lm.data.documents import read_documents
from lm.data.loader import Batch
from lm.data.tokenizer import Tokenizer


def text_batches(
    sources: list[str],
    tokenizer: Tokenizer,
    seq_len: int,
    micro_batch: int,
    rows: deque[tuple[str, int]],
    text_key: str,
) -> Iterator[Batch]:
    """Masked batches of documents, each divided into windows.

    A document begins with the end-of-text token as its first context, as in training, and each of its
    tokens is predicted once. `rows` receives the document's name and the first token of every row, in order, except
    the rows that pad the last batch.
    """

    def windows() -> Iterator[np.ndarray]:
        for name, text in read_documents(sources, text_key):
            ids = np.asarray([tokenizer.eos_id, *tokenizer.encode(text)], dtype=np.int32)
            for start in range(0, len(ids) - 1, seq_len):
                rows.append((name, start))
                yield ids[start : start + seq_len + 1]

    remaining = windows()
    while group := list(islice(remaining, micro_batch)):
        tokens = np.full((micro_batch, seq_len + 1), tokenizer.eos_id, dtype=np.int32)  # (B, T + 1)
        mask = np.zeros((micro_batch, seq_len), dtype=bool)  # (B, T)
        for index, row in enumerate(group):
            tokens[index, : len(row)] = row
            mask[index, : len(row) - 1] = True
        yield Batch(torch.from_numpy(tokens), mask=torch.from_numpy(mask))
