"""From an item of a task to its prompts: few-shot examples, the question, and one of its answers, as token ids.

Texts are composed as in DCLM and nanochat, so that scores are comparable. Next, `evaluation/scoring` computes the
log-probabilities of their tokens, and `evaluation/benchmark` scores the answers.
"""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lm.data.tokenizer import Begin, Tokenizer
from lm.errors import RequestError
from lm.evaluation.tasks import Item, Kind, Task

SHUFFLE_SEED = 1337  # to shuffle the items, so that the first of them are a random sample
EXAMPLES_SEED = 1234  # plus the number of an item: to draw its few-shot examples


class Prompt(NamedTuple):
    """A question with one of its answers."""

    ids: np.ndarray  # (n,) int32, at most one more than the context, since the last token is not an input
    # The first token that counts for DCLM's mean loss: the first in which the answers differ; for `schema` the first
    # of the ending that they share.
    compared: int
    answer: int  # the first token of the answer, where lm-evaluation-harness begins to sum
    characters: int  # of the answer, without the delimiter
    bytes: int  # the same in UTF-8
    cut: int  # number of tokens cut off at the beginning, to fit the context

    @property
    def start(self) -> int:
        """The first token to predict."""
        return min(self.compared, self.answer)


def chosen_items(task: Task, max_items: int | None) -> list[Item]:
    """The first `max_items` items (default: all) in a fixed random order."""
    items = list(task.items)
    random.Random(SHUFFLE_SEED).shuffle(items)
    return items[:max_items]


def prompts(
    task: Task, items: Sequence[Item], indices: Sequence[int], tokenizer: Tokenizer, context: int, begin: Begin
) -> Iterator[list[Prompt]]:
    """The prompts of the items at `indices`, one for each possible answer.

    Few-shot examples are drawn by the item's number from all `items` (of `chosen_items`) but those that are the same,
    and a blank line follows each. A prompt that is only an answer begins with `eos`, whatever `begin` says.
    """
    pairs_of_items = [_question(task, items, index) for index in indices]
    # A blank at the end of the text before an answer belongs to the answer's first token.
    texts = [
        text for pairs in pairs_of_items for before, answer in pairs for text in (before.rstrip(), before + answer)
    ]
    encoded = iter(tokenizer.encode_batch(texts))
    for pairs in pairs_of_items:
        befores, sequences = zip(*((next(encoded), next(encoded)) for _ in pairs))
        # A token across the border belongs to the answer.
        starts = [_shared([before, ids]) for before, ids in zip(befores, sequences, strict=True)]
        compared = _compared(task.kind, sequences, starts)
        yield [
            _prompt(*parts, tokenizer.eos_id, context, begin)
            for parts in zip(sequences, compared, starts, (answer for _, answer in pairs), strict=True)
        ]


def _question(task: Task, items: Sequence[Item], index: int) -> list[tuple[str, str]]:
    """For each possible answer of an item, the text before it and the answer."""
    delimiter, examples = task.continuation_delimiter, ""
    if task.num_fewshot:
        others = [item for item in items if item != items[index]]
        if len(others) < task.num_fewshot:
            raise RequestError(
                f"task {task.label!r}: only {len(others)} items differ from {str(items[index])[:50]}, and it has "
                f"{task.num_fewshot} few-shot examples; lower num_fewshot"
            )
        for item in random.Random(EXAMPLES_SEED + index).sample(others, task.num_fewshot):
            question, answer = _answers(task, item)[0 if task.kind == "language_modeling" else item["gold"]]
            examples += f"{question}{delimiter}{answer}\n\n"
    return [(examples + question + delimiter, answer) for question, answer in _answers(task, items[index])]


def _answers(task: Task, item: Item) -> list[tuple[str, str]]:
    """The possible answers of an item, each with its question: (question, answer)."""
    if task.kind == "multiple_choice":
        return [(item["query"], choice) for choice in item["choices"]]
    if task.kind == "schema":
        return [(option, item["continuation"]) for option in item["context_options"]]
    return [(item["context"].strip(), item["continuation"])]


def _compared(kind: Kind, sequences: Sequence[list[int]], starts: Sequence[int]) -> Sequence[int]:
    """`Prompt.compared` of each sequence of ids; `starts` are the places of the answers."""
    if kind == "multiple_choice":
        return [min(_shared(sequences), min(map(len, sequences)) - 1)] * len(sequences)
    if kind == "schema":
        shared_end = _shared([ids[::-1] for ids in sequences])
        return [len(ids) - shared_end for ids in sequences]
    return starts


def _prompt(ids: list[int], compared: int, answer: int, text: str, eos_id: int, context: int, begin: Begin) -> Prompt:
    compared, answer = min(compared, len(ids) - 1), min(answer, len(ids) - 1)  # at least one token counts
    if begin == "eos" or min(compared, answer) == 0:
        ids, compared, answer = [eos_id, *ids], compared + 1, answer + 1
    cut = max(0, len(ids) - context - 1)
    places = max(1, compared - cut), max(1, answer - cut)
    return Prompt(np.array(ids[cut:], np.int32), *places, len(text), len(text.encode()), cut)


def _shared(sequences: Sequence[Sequence[int]]) -> int:
    """Number of leading tokens that all sequences share."""
    differing = (place for place, tokens in enumerate(zip(*sequences)) if len(set(tokens)) > 1)
    return next(differing, min(map(len, sequences)))
