"""The log-probabilities of the tokens of rows, in batches.

Rows of similar length are batched, padded at the end, where causal attention does not look. Logits are
computed only for scored tokens, a part at a time: all of them would take more memory than the model.
(With FSDP2 all logits of a batch are computed, since weights are complete only inside a forward pass.)
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lm.errors import RunError
from lm.model.build import config_of
from lm.model.decoder import Decoder, evaluating

LOGITS = 2**26  # number held at once: 256 MiB


class Score(NamedTuple):
    """The scores of the tokens of a row of n, from its `start` on."""

    log_probabilities: np.ndarray  # (n - start,) fp32, nats
    is_greedy: np.ndarray  # (n - start,) bool, whether greedy decoding would choose the token


def score(decoder: nn.Module, rows: Sequence[np.ndarray], starts: Sequence[int], batch_tokens: int) -> list[Score]:
    """Score rows of any lengths; returns a score per row, in order. With FSDP2, all ranks score the same rows.

    Args:
        rows: token ids, `(n,)` integers each, n at most one more than the context.
        starts: the first token of each row to score, at least 1.
        batch_tokens: the most tokens of a batch, padding included; a batch has at least one row.
    """
    scores: dict[int, Score] = {}
    # Blocks compiled for the shapes of training run uncompiled here.
    with evaluating(decoder), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for batch in _batches(rows, batch_tokens):
            scores_of_batch = _score(decoder, [rows[index] for index in batch], [starts[index] for index in batch])
            scores.update(zip(batch, scores_of_batch, strict=True))
    return [scores[index] for index in range(len(rows))]


def _batches(rows: Sequence[np.ndarray], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of the rows of each batch, the longest first: a batch that does not fit into memory fails at once."""
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: -len(rows[index])):
        width = len(rows[batch[0]] if batch else rows[index]) - 1
        if batch and (len(batch) + 1) * width > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _score(decoder: nn.Module, rows: Sequence[np.ndarray], starts: Sequence[int]) -> list[Score]:
    width = len(rows[0])  # the longest
    tokens = np.zeros((len(rows), width), np.int64)  # (B, T + 1)
    mask = np.zeros((len(rows), width - 1), bool)  # (B, T) True where the next token is to be scored
    for index, (ids, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[index, : len(ids)] = ids
        mask[index, start - 1 : len(ids) - 1] = True
    device = next(decoder.parameters()).device
    inputs, targets = torch.from_numpy(tokens[:, :-1]).to(device), torch.from_numpy(tokens[:, 1:][mask]).to(device)
    size = max(1, LOGITS // config_of(decoder).vocab_size)
    parts_of_logits = _logits(decoder, inputs, torch.from_numpy(mask).to(device), size)
    log_probabilities, is_greedy = [], []
    for logits, part in zip(parts_of_logits, targets.split(size), strict=True):  # (size, V), (size,)
        log_probabilities.append(logits.log_softmax(-1).gather(-1, part[:, None])[:, 0])
        is_greedy.append(logits.argmax(-1) == part)
    values, greedy = torch.cat(log_probabilities).cpu().numpy(), torch.cat(is_greedy).cpu().numpy()
    if not np.isfinite(values).all():
        raise RunError("a log-probability is not finite: the weights are broken, or their dtype overflowed")
    ends = np.cumsum(mask.sum(1))[:-1]
    return [Score(*pair) for pair in zip(np.split(values, ends), np.split(greedy, ends), strict=True)]  # of each row


def _logits(decoder: nn.Module, inputs: Tensor, mask: Tensor, size: int) -> Iterator[Tensor]:
    """Logits in fp32 of the n tokens that `mask` marks, `size` at a time; inputs and `mask` are (B, T)."""
    # The weights of a sharded model are complete only inside its forward pass; a custom model has only a forward pass.
    if isinstance(decoder, FSDPModule) or not isinstance(decoder, Decoder):
        logits = decoder(inputs)[mask]  # (n, V)
        yield from (part.float() for part in logits.split(size))
        return
    hidden = decoder.hidden_states(inputs)[mask]  # (n, C)
    weight = decoder.output_weight.float()  # (V, C)
    with torch.autocast(hidden.device.type, enabled=False):
        for part in hidden.split(size):
            yield F.linear(part.float(), weight)
