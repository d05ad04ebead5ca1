"""Rows of tokens in, the log-probability of each of their tokens out, many rows at once.

Rows of similar length are read together, filled up at their ends, where causal attention does not look. Logits are
computed for those tokens only that are asked for, and a part of them at a time: all of them would take more memory
than the model. (With FSDP2 all of a batch are computed, since weights are whole only inside of a forward pass.)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lm.errors import RequestError, RunError
from lm.model.decoder import Decoder, document_ids_from
from lm.model.mode import evaluating

LOGITS = 2**26  # that are held at once, 256 MiB


class Row(NamedTuple):
    """What is to be scored.

    Args:
        ids: `(n,)` whole numbers, n at most one more than the context.
        start: the first token to be predicted, at least 1.
    """

    ids: np.ndarray
    start: int


class Score(NamedTuple):
    """What the model says of the tokens of a row from its start on.

    Args:
        log_probabilities: `(n - start,)` fp32, nats.
        likeliest: `(n - start,)` bool, whether the token is the one that greedy decoding would write.
    """

    log_probabilities: np.ndarray
    likeliest: np.ndarray


def score(
    decoder: Decoder,
    rows: Sequence[Row],
    batch_tokens: int,
    *,
    documents_end: int | None = None,
    done: Callable[[float], None] | None = None,
) -> list[Score]:
    """Score rows.

    Args:
        decoder: on any device, in any precision; with FSDP2 all ranks score the same rows.
        rows: of any lengths.
        batch_tokens: the most tokens of a batch, padding included; one row at least is read at once.
        documents_end: the token that ends a document, where attention is to stay inside documents.
        done: called after each batch with the share of the rows that are scored.

    Returns:
        The score of each row, in order.

    Raises:
        RequestError: `batch_tokens` is below 1.
        RunError: a log-probability is not finite.
    """
    if batch_tokens < 1:
        raise RequestError(f"batch_tokens {batch_tokens} must be at least 1")
    scores: dict[int, Score] = {}
    # Blocks that are compiled for training's shapes run as they are written here.
    with evaluating(decoder), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for batch in _batches(rows, batch_tokens):
            found = _score(decoder, [rows[index] for index in batch], documents_end)
            scores.update(zip(batch, found, strict=True))
            if done is not None:
                done(len(scores) / len(rows))
    return [scores[index] for index in range(len(rows))]


def _batches(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of rows that are read together, the longest first: what does not fit into memory fails at once."""
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: (-len(rows[index].ids), index)):
        width = len(rows[batch[0]].ids if batch else rows[index].ids) - 1
        if batch and (len(batch) + 1) * width > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _score(decoder: Decoder, rows: Sequence[Row], documents_end: int | None) -> list[Score]:
    width = len(rows[0].ids)  # the longest
    tokens = np.zeros((len(rows), width), np.int64)  # (B, T + 1)
    asked = np.zeros((len(rows), width - 1), bool)  # (B, T) whose next token is to be scored
    for index, (ids, start) in enumerate(rows):
        tokens[index, : len(ids)] = ids
        asked[index, start - 1 : len(ids) - 1] = True
    device = decoder.embed_tokens.weight.device
    inputs, targets = torch.from_numpy(tokens[:, :-1]).to(device), torch.from_numpy(tokens[:, 1:][asked]).to(device)
    documents = None if documents_end is None else document_ids_from(inputs, documents_end)
    found = [
        (logits.log_softmax(-1).gather(-1, part[:, None])[:, 0], logits.argmax(-1) == part)
        for logits, part in _logits(decoder, inputs, torch.from_numpy(asked).to(device), documents, targets)
    ]
    log_probabilities, likeliest = (torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True))
    if not np.isfinite(log_probabilities).all():
        raise RunError("a log-probability is not finite: the weights are broken, or a number format overflowed")
    ends = np.cumsum(asked.sum(1))[:-1]
    return [Score(*pair) for pair in zip(np.split(log_probabilities, ends), np.split(likeliest, ends), strict=True)]


def _logits(
    decoder: Decoder, inputs: Tensor, asked: Tensor, documents: Tensor | None, targets: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits in fp32 of the tokens that are asked for, a part at a time, with the targets of that part.

    Args:
        inputs: `(B, T)`.
        asked: `(B, T)` bool, n of them.
        documents: `(B, T)` or none.
        targets: `(n,)`.
    """
    size = max(1, LOGITS // decoder.config.vocab_size)
    if isinstance(decoder, FSDPModule):  # its weights are whole inside of its forward pass only
        parts = decoder(inputs, document_ids=documents)[asked].split(size)  # (n, V)
        yield from zip((part.float() for part in parts), targets.split(size), strict=True)
        return
    hidden = decoder.hidden_states(inputs, documents)[asked]  # (n, C)
    weight = decoder.output_weight.float()  # (V, C)
    with torch.autocast(hidden.device.type, enabled=False):
        for part, target in zip(hidden.split(size), targets.split(size), strict=True):
            yield F.linear(part.float(), weight), target
