"""The prompts of a task's items, and the log-probabilities of their tokens, in batches.

Rows of similar length are batched, padded at the end, where causal attention does not look. Logits are
computed only for scored tokens, a part at a time: all of them would take more memory than the model.
(With FSDP2 all logits of a batch are computed, since weights are whole only inside a forward pass.)
"""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lm.data.tokenizer import Begin, Tokenizer
from lm.errors import RequestError, RunError
from lm.evaluation.tasks import COLUMNS, Item, Kind, Task
from lm.model.decoder import Decoder, config_of, evaluating

LOGITS = 2**26  # number held at once: 256 MiB
SHUFFLE_SEED = 1337  # to shuffle the items, so that the first of them are a random sample
EXAMPLES_SEED = 1234  # plus the number of an item: to draw its solved examples


# ---- scoring ---------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of tokens to score."""

    ids: np.ndarray  # (n,) whole numbers, n at most one more than the context
    start: int  # the first token to predict, at least 1


class Score(NamedTuple):
    """The scores of the tokens of a row, from `start` on."""

    log_probabilities: np.ndarray  # (n - start,) fp32, nats
    likeliest: np.ndarray  # (n - start,) bool, whether greedy decoding would choose the token


def score(decoder: Decoder, rows: Sequence[Row], batch_tokens: int) -> list[Score]:
    """Score rows of any lengths; returns a score per row, in order. With FSDP2, all ranks score the same rows.

    A batch has at most `batch_tokens`, padding included, and at least one row.
    """
    scores: dict[int, Score] = {}
    # Blocks compiled for the shapes of training run uncompiled here.
    with evaluating(decoder), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for batch in _batches(rows, batch_tokens):
            found = _score(decoder, [rows[index] for index in batch])
            scores.update(zip(batch, found, strict=True))
    return [scores[index] for index in range(len(rows))]


def _batches(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of the rows of each batch, the longest first: a batch that does not fit into memory fails at once."""
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: -len(rows[index].ids)):
        width = len(rows[batch[0]].ids if batch else rows[index].ids) - 1
        if batch and (len(batch) + 1) * width > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _score(decoder: Decoder, rows: Sequence[Row]) -> list[Score]:
    width = len(rows[0].ids)  # the longest
    tokens = np.zeros((len(rows), width), np.int64)  # (B, T + 1)
    asked = np.zeros((len(rows), width - 1), bool)  # (B, T) True where the next token is to be scored
    for index, (ids, start) in enumerate(rows):
        tokens[index, : len(ids)] = ids
        asked[index, start - 1 : len(ids) - 1] = True
    device = next(decoder.parameters()).device
    inputs, targets = torch.from_numpy(tokens[:, :-1]).to(device), torch.from_numpy(tokens[:, 1:][asked]).to(device)
    size = max(1, LOGITS // config_of(decoder).vocab_size)
    parts = _logits(decoder, inputs, torch.from_numpy(asked).to(device), size)
    found = [
        (logits.log_softmax(-1).gather(-1, part[:, None])[:, 0], logits.argmax(-1) == part)
        for logits, part in zip(parts, targets.split(size), strict=True)
    ]
    log_probabilities, likeliest = (torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True))
    if not np.isfinite(log_probabilities).all():
        raise RunError("a log-probability is not finite: the weights are broken, or a number format overflowed")
    ends = np.cumsum(asked.sum(1))[:-1]
    return [Score(*pair) for pair in zip(np.split(log_probabilities, ends), np.split(likeliest, ends), strict=True)]


def _logits(decoder: Decoder, inputs: Tensor, asked: Tensor, size: int) -> Iterator[Tensor]:
    """Logits in fp32 of the n tokens that `asked` marks, `size` at a time; inputs and `asked` are (B, T)."""
    # The weights of a sharded model are whole only inside its forward pass; a custom model has only a forward pass.
    if isinstance(decoder, FSDPModule) or not isinstance(decoder, Decoder):
        logits = decoder(inputs)[asked]  # (n, V)
        yield from (part.float() for part in logits.split(size))
        return
    hidden = decoder.hidden_states(inputs)[asked]  # (n, C)
    weight = decoder.output_weight.float()  # (V, C)
    with torch.autocast(hidden.device.type, enabled=False):
        for part in hidden.split(size):
            yield F.linear(part.float(), weight)


# ---- prompts ---------------------------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """A question with one of its answers."""

    ids: np.ndarray  # (n,) int32, at most one more than the context, since the last token is not an input
    # The first token that counts for DCLM's mean loss: the first in which the answers differ; for `schema` the first
    # of the ending that they share.
    start: int
    answer: int  # the first token of the answer, where lm-evaluation-harness begins to sum
    length: int  # characters of the answer, without the delimiter
    bytes: int  # the same in UTF-8
    cut: int  # number of tokens cut off at the beginning, to fit the context

    @property
    def first(self) -> int:
        """The first token to predict."""
        return min(self.start, self.answer)


def chosen_items(task: Task, max_items: int | None) -> list[Item]:
    """The first `max_items` items (default: all) in a fixed random order."""
    items = list(task.items)
    random.Random(SHUFFLE_SEED).shuffle(items)
    return items[:max_items]


def prompts(
    task: Task, items: Sequence[Item], indices: Sequence[int], tokenizer: Tokenizer, context: int, begin: Begin
) -> Iterator[list[Prompt]]:
    """The prompts of some items, one for each possible answer: solved examples, then the question with the answer.

    Texts are composed as in DCLM and nanochat, so that scores are comparable: solved examples are drawn by the
    item's number, and a blank line follows each.

    Only items at `indices` are written out; solved examples are drawn from all `items` (of `chosen_items`) but those
    that are the same. A prompt that is only an answer begins with `eos`, whatever `begin` says.
    """
    questions = [_question(task, items, index) for index in indices]
    # A blank at the end of the text before an answer belongs to the answer's first token.
    texts = [text for pairs in questions for before, answer in pairs for text in (before.rstrip(), before + answer)]
    encoded = iter(tokenizer.encode_batch(texts))
    for pairs in questions:
        befores, wholes = zip(*((next(encoded), next(encoded)) for _ in pairs))
        answers = [answer for _, answer in pairs]
        yield list(_prompts(task.kind, befores, wholes, answers, tokenizer.eos_id, context, begin))


def _question(task: Task, items: Sequence[Item], index: int) -> list[tuple[str, str]]:
    """For each possible answer of an item, the text before it and the answer."""
    delimiter = task.continuation_delimiter
    others = [other for other, item in enumerate(items) if item != items[index]] if task.num_fewshot else []
    if len(others) < task.num_fewshot:
        raise RequestError(f"task {task.label!r}: too few items differ from {str(items[index])[:50]}, {len(others)}, "
                           f"for {task.num_fewshot} solved ones before it; lower num_fewshot")  # fmt: skip
    drawn = [items[other] for other in random.Random(EXAMPLES_SEED + index).sample(others, task.num_fewshot)]
    solved = (_answers(task, item)[item["gold"] if "gold" in COLUMNS[task.kind] else 0] for item in drawn)
    examples = "".join(f"{before}{delimiter}{answer}\n\n" for before, answer in solved)
    return [(examples + before + delimiter, answer) for before, answer in _answers(task, items[index])]


def _answers(task: Task, item: Item) -> list[tuple[str, str]]:
    """The possible answers of an item, each with its question: (question, answer)."""
    if task.kind == "multiple_choice":
        return [(item["query"], choice) for choice in item["choices"]]
    if task.kind == "schema":
        return [(option, item["continuation"]) for option in item["context_options"]]
    return [(item["context"].strip(), item["continuation"])]


def _prompts(
    kind: Kind, befores: Sequence[list[int]], wholes: Sequence[list[int]], answers: Sequence[str], eos_id: int,
    context: int, begin: Begin,
) -> Iterator[Prompt]:  # fmt: skip
    """The prompts of an item, from the ids of the text before each answer and of that text with the answer."""
    shared_end = _shared([whole[::-1] for whole in wholes])
    for before, whole, answer in zip(befores, wholes, answers, strict=True):
        own = min(_shared([before, whole]), len(whole) - 1)  # a token across the border belongs to the answer
        if kind == "multiple_choice":
            start = min(_shared(wholes), min(map(len, wholes)) - 1)
        elif kind == "schema":
            start = min(len(whole) - shared_end, len(whole) - 1)
        else:
            start = own
        first = int(begin == "eos" or min(start, own) == 0)
        ids = [eos_id] * first + whole
        cut = max(0, len(ids) - context - 1)
        start, own = (max(1, place + first - cut) for place in (start, own))
        yield Prompt(np.array(ids[cut:], np.int32), start, own, len(answer), len(answer.encode()), cut)


def _shared(sequences: Sequence[Sequence[int]]) -> int:
    """Number of leading tokens that all sequences share."""
    differing = (place for place, tokens in enumerate(zip(*sequences)) if len(set(tokens)) > 1)
    return next(differing, min(map(len, sequences)))
