"""Items as rows of tokens: solved examples first, then the question with each of its possible answers.

After `tasks`, before `scoring`. Texts are put together as DCLM and nanochat do, so that scores can be compared: solved
examples are drawn by the item's number, and a blank line stands after each.
"""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lm.data.tokenizer import Begin, Tokenizer
from lm.evaluation.tasks import Item, Task

SHUFFLE_SEED = 1337  # of the items, so that the first of them are as good as any
EXAMPLES_SEED = 1234  # plus the number of the item: of its solved examples


class Prompt(NamedTuple):
    """A question with one of its answers.

    Args:
        ids: `(n,)` int32, at most one more than the context, since the last one is not read.
        start: the first token whose loss counts for DCLM's mean: the first in which the answers differ, for `schema`
            the first of the end that they share.
        answer: the first token of the answer; what lm-evaluation-harness sums from.
        length: characters of the answer, without the delimiter.
        bytes: the same in UTF-8.
        cut: tokens that it lost at its beginning, because it is longer than the context.
    """

    ids: np.ndarray
    start: int
    answer: int
    length: int
    bytes: int
    cut: int


def chosen_items(task: Task, max_items: int | None) -> list[Item]:
    """The items that are asked, in their order: shuffled, always in the same way, and at most so many."""
    items = list(task.items)
    random.Random(SHUFFLE_SEED).shuffle(items)
    return items[:max_items]


def prompts(
    task: Task, items: Sequence[Item], indices: Sequence[int], tokenizer: Tokenizer, context: int, begin: Begin
) -> Iterator[list[Prompt]]:
    """The prompts of some items, one for each possible answer.

    Args:
        task: what they are of.
        items: those that are asked, from `chosen_items`; solved examples are drawn from them too.
        indices: which of them to write out.
        tokenizer: of the model.
        context: the most tokens that the model reads at once.
        begin: `eos` or `nothing`; a prompt whose answer is all there is begins with `eos` anyway.
    """
    pieces = [_pieces(task, items, index) for index in indices]
    texts = [text for questions, _ in pieces for question in questions for text in question]
    encoded = iter(tokenizer.encode_batch(texts))
    for questions, answers in pieces:
        pairs = [(next(encoded), next(encoded)) for _ in questions]
        yield list(_rows(task, pairs, answers, tokenizer.eos_id, context, begin))


def _pieces(task: Task, items: Sequence[Item], index: int) -> tuple[list[tuple[str, str]], list[str]]:
    """For each possible answer what stands before it and the whole, and the answers themselves."""
    item, delimiter = items[index], task.continuation_delimiter
    examples = "".join(_solved(task, example) + "\n\n" for example in _examples(items, index, task.num_fewshot))
    if task.kind == "multiple_choice":
        contexts, answers = [item["query"]] * len(item["choices"]), item["choices"]
    elif task.kind == "schema":
        contexts, answers = item["context_options"], [item["continuation"]] * len(item["context_options"])
    else:
        contexts, answers = [item["context"].strip()], [item["continuation"]]
    before = [examples + context + delimiter for context in contexts]
    # A blank at the end of what stands before belongs to the answer's first token.
    return [(text.rstrip(), text + answer) for text, answer in zip(before, answers, strict=True)], answers


def _examples(items: Sequence[Item], index: int, count: int) -> list[Item]:
    """Solved examples for an item: other items, drawn by its number."""
    others = [other for other in range(len(items)) if other != index] if count else []
    return [items[other] for other in random.Random(EXAMPLES_SEED + index).sample(others, count)]


def _solved(task: Task, item: Item) -> str:
    """An item with its right answer."""
    if task.kind == "multiple_choice":
        return item["query"] + task.continuation_delimiter + item["choices"][item["gold"]]
    if task.kind == "schema":
        return item["context_options"][item["gold"]] + task.continuation_delimiter + item["continuation"]
    return item["context"].strip() + task.continuation_delimiter + item["continuation"]


def _rows(
    task: Task, pairs: list[tuple[list[int], list[int]]], answers: list[str], eos_id: int, context: int, begin: Begin
) -> Iterator[Prompt]:
    """Args:
    pairs: for each possible answer the ids of what stands before it, and of the whole.
    """
    wholes = [whole for _, whole in pairs]
    shortest = min(map(len, wholes))
    shared_end = min(_shared([whole[::-1] for whole in wholes]), shortest)
    for (before, whole), answer in zip(pairs, answers, strict=True):
        own = min(_shared([before, whole]), len(whole) - 1)  # a token across the border belongs to the answer
        if task.kind == "multiple_choice":
            start = min(_shared(wholes), shortest - 1)
        elif task.kind == "schema":
            start = min(len(whole) - shared_end, len(whole) - 1)
        else:
            start = own
        first = int(begin == "eos" or min(start, own) == 0)
        ids = [eos_id] * first + whole
        cut = max(0, len(ids) - context - 1)
        start, own = (max(1, place + first - cut) for place in (start, own))
        yield Prompt(np.array(ids[cut:], np.int32), start, own, len(answer), len(answer.encode()), cut)


def _shared(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all sequences begin with."""
    shortest = min(sequences, key=len)
    for place, token in enumerate(shortest):
        if any(sequence[place] != token for sequence in sequences):
            return place
    return len(shortest)
