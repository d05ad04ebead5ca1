"""From an item of a task to its prompts: few-shot examples, the question, and one of its answers, as token ids.

Texts are composed as in DCLM and nanochat, so that scores are comparable. Each possible answer of an item makes a row
of tokens. DCLM's rule scores the tokens from `dclm_start` on:

    index               0    1    2    3     4    5
    multiple_choice     eos  The  sky  is    deep blue    dclm_start 5: the first token in which the answers differ
                        eos  The  sky  is    deep red
    schema              eos  The  old  cup   was  full    dclm_start 3: the ending that the rows share
                        eos  The  new  cup   was  full
    language_modeling   eos  The  sky  is    blue         dclm_start 4: the answer

A second rule, that of lm-evaluation-harness, always scores the answer, which begins at `harness_start`: "deep blue" at
4, "full" at 5, "blue" at 4.

Next, `evaluation/scoring` computes the log-probabilities of these tokens, and `evaluation/benchmark` decides.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lm.data.tokenizer import Begin, Tokenizer
from lm.evaluation.tasks import Item, Kind, Task

SHUFFLE_SEED = 1337  # to shuffle the items, so that the first of them are a random sample
EXAMPLES_SEED = 1234  # plus the number of an item: to draw its few-shot examples


class Prompt(NamedTuple):
    """A question with one of its answers."""

    ids: np.ndarray  # (n,) int32, at most one more than the context, since the last token is not an input
    dclm_start: int  # the first token that DCLM's rule scores
    harness_start: int  # the first token that the rule of lm-evaluation-harness scores
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
    kind: Kind, texts: Sequence[tuple[str, str]], tokenizer: Tokenizer, context: int, begin: Begin
) -> list[Prompt]:
    """The prompts of an item, one for each possible answer, of the texts that `render` makes of it.

    What does not fit into the context is cut off at the beginning. A prompt that is only an answer begins with `eos`,
    whatever `begin` says.
    """
    # A blank at the end of the text before an answer belongs to the answer's first token.
    befores = tokenizer.encode_batch([before.rstrip() for before, _ in texts])
    rows = tokenizer.encode_batch([before + answer for before, answer in texts])
    # A token across the border belongs to the answer.
    harness_starts = [_shared([before, ids[:-1]]) for before, ids in zip(befores, rows, strict=True)]
    dclm_starts = harness_starts if kind == "language_modeling" else _dclm_starts(kind, rows)
    prompts = []
    for ids, dclm_start, harness_start, (_, answer) in zip(rows, dclm_starts, harness_starts, texts, strict=True):
        # A token comes before the first one to score: `eos`, or in a row that is cut its new first token.
        if begin == "eos" or min(dclm_start, harness_start) == 0:
            ids, dclm_start, harness_start = [tokenizer.eos_id, *ids], dclm_start + 1, harness_start + 1
        cut = max(0, len(ids) - (context + 1))
        starts = max(1, dclm_start - cut), max(1, harness_start - cut)
        prompts.append(Prompt(np.array(ids[cut:], np.int32), *starts, answer, cut))
    return prompts


def _dclm_starts(kind: Kind, rows: list[list[int]]) -> list[int]:
    """`dclm_start` of each row of an item that has several."""
    # The last token is scored in any case, also where an answer is the beginning of another.
    if kind == "multiple_choice":
        return [_shared([ids[:-1] for ids in rows])] * len(rows)
    ending = max(1, _shared([ids[::-1] for ids in rows]))  # tokens at the end that all rows share
    return [len(ids) - ending for ids in rows]


def _shared(sequences: Sequence[Sequence[int]]) -> int:
    """Number of leading tokens that all sequences share."""
    for place, tokens in enumerate(zip(*sequences)):
        if len(set(tokens)) > 1:
            return place
    return min(map(len, sequences))
