"""Bits per byte of texts: how well a model predicts text it was not trained on. Validations measure it on shards."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from lm.data.documents import read_documents
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError
from lm.evaluation.benchmark import BATCH_TOKENS
from lm.evaluation.metrics import perplexity
from lm.evaluation.scoring import score
from lm.evaluation.statistics import ratio_error
from lm.model.build import config_of
from lm.model.decoder import Decoder

GROUP = 16  # batches whose rows are held at once, to batch rows of similar length


@dataclass(frozen=True)
class CorpusResult:
    loss: float  # mean over all tokens, in nats
    perplexity: float  # exp(loss)
    bits_per_byte: float  # nats / UTF-8 bytes of the text / ln 2
    stderr: float  # standard error of `bits_per_byte` over documents
    loss_stderr: float  # standard error of `loss` over documents
    tokens: int  # predicted
    bytes: int  # predicted
    samples: int  # documents


def texts_bits_per_byte(
    decoder: Decoder,
    tokenizer: Tokenizer,
    inputs: Sequence[str],
    *,
    text_key: str = "text",
    seq_len: int | None = None,
    max_documents: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] | None = None,  # called with the number of tokens that are done
) -> CorpusResult:
    """Measure bits per byte of texts; each document begins after an end-of-text token, as in training.

    A window predicts `seq_len` tokens (default: the decoder's context). Windows do not overlap, so a window's first
    tokens have little context.
    """
    context = config_of(decoder).max_position_embeddings
    seq_len = min(seq_len or context, context)
    sizes: list[int] = []  # bytes of each document that has been read
    nats: list[float] = []
    tokens: list[int] = []

    def windows() -> Iterator[tuple[int, np.ndarray]]:  # the document's number, and a part of it
        for document, (_, text) in enumerate(islice(read_documents(inputs, text_key), max_documents)):
            sizes.append(len(text.encode()))
            nats.append(0.0)
            tokens.append(0)
            ids = np.array([tokenizer.eos_id, *tokenizer.encode(text)], np.int32)
            for start in range(0, len(ids) - 1, seq_len):
                yield document, ids[start : start + seq_len + 1]

    rows = windows()
    while group := list(islice(rows, GROUP * max(1, batch_tokens // seq_len))):
        scores = score(decoder, [row for _, row in group], [1] * len(group), batch_tokens)
        for (document, _), scored in zip(group, scores, strict=True):
            nats[document] -= scored.log_probabilities.sum(dtype=np.float64)
            tokens[document] += len(scored.log_probabilities)
        if progress is not None:
            progress(sum(tokens))
    if not any(tokens):
        raise RequestError(f"{', '.join(inputs)}: there is no text to predict")
    lost, predicted, read = np.array(nats), np.array(tokens), np.array(sizes)  # (documents,)
    loss = lost.sum() / predicted.sum()
    return CorpusResult(
        loss=float(loss),
        perplexity=perplexity(loss),
        bits_per_byte=float(lost.sum() / read.sum() / math.log(2)),
        stderr=ratio_error(lost, read) / math.log(2),
        loss_stderr=ratio_error(lost, predicted),
        tokens=int(predicted.sum()),
        bytes=int(read.sum()),
        samples=len(nats),
    )
