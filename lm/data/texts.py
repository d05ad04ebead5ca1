"""Texts as masked batches, for `lm predict`."""

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from lm.data.batch import Batch
from lm.data.sources import read_documents
from lm.data.tokenizer import Tokenizer


class Texts:
    """Cuts every document into windows and fills them up into batches.

    A document begins with the end-of-text token as its first context, as it does in training, and every one of its
    tokens is predicted once.

    Args:
        sources: files, folders or URLs, as `lm data prepare --input` takes them.
        seq_len: predicted tokens of a row.
        micro_batch: rows of a batch.
        rows: gets the name and first token index of every row, in order.
    """

    def __init__(
        self, sources: list[str], tokenizer: Tokenizer, *, seq_len: int, micro_batch: int, rows: deque[tuple[str, int]]
    ) -> None:
        self.sources = sources
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.micro_batch = micro_batch
        self.rows = rows

    def __iter__(self) -> Iterator[Batch]:
        pending: list[np.ndarray] = []
        for name, text in read_documents(self.sources):
            ids = np.asarray([self.tokenizer.eos_id, *self.tokenizer.encode(text)], dtype=np.int32)
            for start in range(0, len(ids) - 1, self.seq_len):
                self.rows.append((name, start))
                pending.append(ids[start : start + self.seq_len + 1])
                if len(pending) == self.micro_batch:
                    yield self._batch(pending)
                    pending = []
        if pending:
            yield self._batch(pending)

    def _batch(self, rows: list[np.ndarray]) -> Batch:
        tokens = np.full((self.micro_batch, self.seq_len + 1), self.tokenizer.eos_id, dtype=np.int32)  # (B, T + 1)
        mask = np.zeros((self.micro_batch, self.seq_len), dtype=bool)  # (B, T)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
            mask[index, : len(row) - 1] = True
        return Batch(torch.from_numpy(tokens), cursor=None, mask=torch.from_numpy(mask))
