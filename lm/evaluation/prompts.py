"""From an item of a task to its prompts: few-shot examples, the question, and one of its answers, as token ids.

Texts are composed as in DCLM and nanochat, so that scores are comparable. DCLM takes the mean over the tokens from
`dclm_start` on, lm-evaluation-harness the sum over those from `harness_start` on, where the answer begins:

    index               0    1    2    3     4    5
    multiple_choice     eos  The  sky  is    deep blue    dclm_start 5: the first token in which the answers differ
                        eos  The  sky  is    deep red     harness_start 4
    schema              eos  The  old  cup   was  full    dclm_start 3: the ending that the rows share
                        eos  The  new  cup   was  full    harness_start 5
    language_modeling   eos  The  sky  is    blue         dclm_start 4, the same as harness_start

Next, `evaluation/scoring` computes the log-probabilities of these tokens, and `evaluation/benchmark` decides.
"""

import random
from collections.abc import Sequence
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
    dclm_start: int
    harness_start: int
    answer: str  # without the delimiter; never empty, which `tasks` refuses
    cut: int  # number of tokens cut off at the beginning, to fit the context

    @property
    def start(self) -> int:
        """The first token to score."""
        return min(self.dclm_start, self.harness_start)


def chosen_items(task: Task, max_items: int | None) -> list[Item]:
    """The first `max_items` items (default: all) in a fixed random order."""
    items = list(task.items)
    random.Random(SHUFFLE_SEED).shuffle(items)
    return items[:max_items]


# ---- texts -----------------------------------------------------------------------------------------------------------


def render(task: Task, items: Sequence[Item], index: int) -> list[tuple[str, str]]:
    """For each possible answer of an item, the text before it and the answer.

    Few-shot examples are drawn by the item's number from all `items` (of `chosen_items`) but those that are the same,
    and a blank line follows each.
    """
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


# ---- token ids -------------------------------------------------------------------------------------------------------


def tokenize(
    kind: Kind, texts_of_items: Sequence[Sequence[tuple[str, str]]], tokenizer: Tokenizer, context: int, begin: Begin
) -> list[list[Prompt]]:
    """The prompts of items, one for each possible answer, of the texts that `render` makes of each item.

    A prompt that is only an answer begins with `eos`, whatever `begin` says.
    """
    texts = [pair for texts_of_item in texts_of_items for pair in texts_of_item]
    # A blank at the end of the text before an answer belongs to the answer's first token.
    befores = tokenizer.encode_batch([before.rstrip() for before, _ in texts])
    rows = tokenizer.encode_batch([before + answer for before, answer in texts])
    prompts: list[list[Prompt]] = []
    first = 0  # row of the item
    for texts_of_item in texts_of_items:
        prompts.append([])
        end = first + len(texts_of_item)
        starts = _starts(kind, befores[first:end], rows[first:end])
        for (_, answer), ids, (dclm_start, harness_start) in zip(texts_of_item, rows[first:end], starts, strict=True):
            # A token comes before the first one to score: `eos`, or in a row that is cut its new first token.
            if begin == "eos" or min(dclm_start, harness_start) == 0:
                ids, dclm_start, harness_start = [tokenizer.eos_id, *ids], dclm_start + 1, harness_start + 1
            cut = max(0, len(ids) - context - 1)
            dclm_start, harness_start = max(1, dclm_start - cut), max(1, harness_start - cut)
            prompts[-1].append(Prompt(np.array(ids[cut:], np.int32), dclm_start, harness_start, answer, cut))
        first = end
    return prompts


def _starts(kind: Kind, befores: list[list[int]], rows: list[list[int]]) -> list[tuple[int, int]]:
    """`dclm_start` and `harness_start` of each row of an item, from the ids before each answer and those with it.

    The last token of a row counts in any case, also where an answer is the beginning of another.
    """
    compared = [ids[:-1] for ids in rows]  # so no start is after the last token
    # A token across the border belongs to the answer.
    harness_starts = [_shared([before, ids]) for before, ids in zip(befores, compared, strict=True)]
    if kind == "multiple_choice":
        dclm_starts = [_shared(compared)] * len(rows)
    elif kind == "schema":
        ending = max(1, _shared([ids[::-1] for ids in rows]))  # tokens at the end that all rows share
        dclm_starts = [len(ids) - ending for ids in rows]
    else:
        dclm_starts = harness_starts
    return list(zip(dclm_starts, harness_starts, strict=True))


def _shared(sequences: Sequence[Sequence[int]]) -> int:
    """Number of leading tokens that all sequences share."""
    for place, tokens in enumerate(zip(*sequences)):
        if len(set(tokens)) > 1:
            return place
    return min(map(len, sequences))
