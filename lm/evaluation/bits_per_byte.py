"""Bits per byte of texts and of shards: how well a model predicts data that it has not seen."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from lm.data.loader import Windows
from lm.data.parquet import COLUMN
from lm.data.shards import Shards
from lm.data.text_files import read_documents
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError
from lm.evaluation.benchmark import BATCH_TOKENS
from lm.evaluation.scoring import Row, score
from lm.evaluation.statistics import perplexity, ratio_error
from lm.model.custom import config_of
from lm.model.decoder import Decoder

GROUP = 16  # batches whose rows are held at once, to read those of similar length together

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class CorpusResult:
    """How well a corpus is predicted."""

    loss: float  # mean over all tokens, in nats
    perplexity: float  # its exponential
    # Nats over the UTF-8 bytes of the text, over ln 2. Shards have no text: there it is what `Shards.token_bytes` says,
    # and special tokens are left out above and below.
    bits_per_byte: float
    stderr: float  # standard error of `bits_per_byte` over samples
    loss_stderr: float  # that of `loss`
    tokens: int  # predicted
    bytes: int  # predicted
    samples: int  # documents of texts, windows of shards


class Window(NamedTuple):
    """A part of a sample."""

    sample: int  # its number; parts of one sample follow each other
    row: Row
    counted: np.ndarray | None = None  # (n,) bool, the predictions that count; all of them without it


def texts_bits_per_byte(
    decoder: Decoder,
    tokenizer: Tokenizer,
    inputs: Sequence[str],
    *,
    seq_len: int | None = None,
    max_documents: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> CorpusResult:
    """Measure texts; each document begins after an end-of-text token, as in training.

    A window predicts `seq_len` tokens, the decoder's context if not given. Windows do not overlap, so a window's first
    tokens have little before them.
    """
    seq_len = _seq_len(decoder, seq_len)
    sizes: list[int] = []  # bytes of each document, from its text

    def windows() -> Iterator[Window]:
        for sample, (_, text) in enumerate(islice(read_documents(inputs), max_documents)):
            sizes.append(len(text.encode()))
            ids = np.array([tokenizer.eos_id, *tokenizer.encode(text)], np.int32)
            for start in range(0, len(ids) - 1, seq_len):
                yield Window(sample, Row(ids[start : start + seq_len + 1], 1))

    sums = _measure(decoder, windows(), tokenizer.token_bytes(), batch_tokens, seq_len, progress=progress)
    if not len(sums):
        raise RequestError(f"{', '.join(inputs)}: there is no text to predict")
    nats, tokens, _, _ = sums.T
    return _result(nats, tokens, nats, np.array(sizes[: len(nats)]))


def shards_bits_per_byte(
    decoder: Decoder,
    tokenizer: Tokenizer,
    source: str | Sequence[str],
    *,
    column: str = COLUMN,
    seq_len: int | None = None,
    max_windows: int | None = None,
    document_mask: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> CorpusResult:
    """Measure the windows of shards of token ids, as a validation does. Other arguments are those for texts.

    `source` is as for `data.val`, and `document_mask` keeps attention inside a document, as `model.document_mask` does.
    """
    seq_len = _seq_len(decoder, seq_len)
    shards = Shards.open(source, column, tokenizer.vocab_size, tokenizer.sha256)
    shards.require_windows(seq_len, max_windows)
    batches = Windows(shards, seq_len=seq_len, micro_batch=1, limit=max_windows)
    windows = (
        Window(sample, Row(batch.tokens[0].numpy(), 1), None if batch.mask is None else batch.mask[0].numpy())
        for sample, batch in enumerate(batches)
    )
    return _result(*_measure(
        decoder, windows, shards.token_bytes(tokenizer), batch_tokens, seq_len,
        documents_end=tokenizer.eos_id if document_mask else None, total=batches.total * seq_len, progress=progress,
    ).T)  # fmt: skip


def _seq_len(decoder: Decoder, wanted: int | None) -> int:
    context = config_of(decoder).max_position_embeddings
    return min(wanted or context, context)


def _measure(
    decoder: Decoder, windows: Iterator[Window], token_bytes: np.ndarray, batch_tokens: int, seq_len: int, *,
    documents_end: int | None = None, total: int | None = None, progress: Progress | None = None,
) -> np.ndarray:  # fmt: skip
    """Sums of each sample, `(samples, 4)`: nats, tokens, nats of tokens that stand for text, and their bytes."""
    samples: list[np.ndarray] = []
    done = 0  # tokens
    while group := list(islice(windows, GROUP * max(1, batch_tokens // seq_len))):
        scores = score(decoder, [window.row for window in group], batch_tokens, documents_end=documents_end)
        for (sample, row, counted), scored in zip(group, scores, strict=True):
            nats, sizes = -scored.log_probabilities.astype(np.float64), token_bytes[row.ids[row.start :]]  # (n,) each
            done += len(nats)
            if counted is not None:
                nats, sizes = nats[counted], sizes[counted]
            while len(samples) <= sample:
                samples.append(np.zeros(4))
            samples[sample] += nats.sum(), len(nats), nats[sizes > 0].sum(), sizes.sum()
        if progress is not None:
            progress(done, total)
    return np.array(samples)


def _result(nats: np.ndarray, tokens: np.ndarray, text_nats: np.ndarray, text_bytes: np.ndarray) -> CorpusResult:
    """The means of sums of samples, `(samples,)` each."""
    loss, size = nats.sum() / tokens.sum(), text_bytes.sum()
    return CorpusResult(
        loss=float(loss),
        perplexity=perplexity(loss),
        bits_per_byte=float(text_nats.sum() / size / math.log(2)) if size else math.nan,
        stderr=ratio_error(text_nats, text_bytes) / math.log(2) if size else math.nan,
        loss_stderr=ratio_error(nats, tokens),
        tokens=int(tokens.sum()),
        bytes=round(size),
        samples=len(nats),
    )
