"""Benchmarks: how many items of each task a model answers right, and CORE, one number for many tasks.

An item goes through four steps, in `evaluate_items`. For example, one with two answers, of which the first is right:

    render    "The sky is " + "deep blue"       "The sky is " + "deep red"      texts
    tokenize  eos  The  sky  is  deep  blue     eos  The  sky  is  deep  red    token ids, a row for each answer
    score                              -0.5                              -1.0   log-probabilities of tokens, in nats
    decide    mean               -0.5                              -1.0         the first is larger: right

This is DCLM's rule, which compares the mean from the first token on in which the answers differ. A second rule, that
of lm-evaluation-harness, differs in two steps: it compares the sum over all tokens of the answer, as it is, per
character of the answer, and per byte:

    score                        -2.5  -0.5                        -2.5  -1.0
    decide    sum                -3.0                              -3.5         right
              per character      -3.0 / 9                          -3.5 / 8     right

Each item is decided by both rules (`Outcome`); the outcomes of all items of a task become its `TaskResult`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch.distributed
from torch import nn

from lm.data.tokenizer import Begin, Tokenizer
from lm.errors import RequestError, RunError
from lm.evaluation.metrics import perplexity
from lm.evaluation.prompts import Prompt, chosen_items, render, tokenize
from lm.evaluation.scoring import Score, score
from lm.evaluation.statistics import Interval, centered, mean_interval, standard_error, wilson
from lm.evaluation.tasks import Item, Kind, Task
from lm.model.build import config_of

BATCH_TOKENS = 16_384
GROUP = 128  # items whose prompts are held in memory at once

Progress = Callable[[str, int, int], None]


class Outcome(NamedTuple):
    """What became of an item: for each rule, whether the answer that it chooses is right; and counts."""

    right_dclm: bool  # it chooses the largest mean; in language modelling, right if each token is the argmax
    log_likelihoods: tuple[float, ...]  # of each possible answer, summed, in nats
    nats: float  # negative log-likelihood of the right answer
    tokens: int  # of the right answer
    cut: bool  # a prompt was longer than the context and lost its beginning
    # The harness chooses the largest sum. None for language modelling, where it has DCLM's rule.
    right_harness_sum: bool | None = None
    right_harness_per_character: bool | None = None  # the largest sum per character of the answer
    right_harness_per_byte: bool | None = None  # per UTF-8 byte


# ---- an item, from its texts to the decision -------------------------------------------------------------------------


def evaluate_items(
    decoder: nn.Module,
    tokenizer: Tokenizer,
    task: Task,
    items: Sequence[Item],
    indices: Sequence[int],
    batch_tokens: int,
    begin: Begin,
) -> list[Outcome]:
    """The outcomes of the items at `indices`. A step takes all of these items, so that their rows share batches."""
    context = config_of(decoder).max_position_embeddings
    prompts = [tokenize(task.kind, render(task, items, index), tokenizer, context, begin) for index in indices]
    rows = [prompt for prompts_of_item in prompts for prompt in prompts_of_item]
    scores = iter(score(decoder, [row.ids for row in rows], [row.start for row in rows], batch_tokens))
    outcomes = []
    for index, prompts_of_item in zip(indices, prompts, strict=True):
        scores_of_item = list(islice(scores, len(prompts_of_item)))
        outcomes.append(decide(task.kind, items[index], prompts_of_item, scores_of_item))
    return outcomes


def decide(kind: Kind, item: Item, prompts: Sequence[Prompt], scores: Sequence[Score]) -> Outcome:
    """Which rules choose the right answer of an item, from the prompt and the score of each answer."""
    gold = 0 if kind == "language_modeling" else item["gold"]

    def is_right(values: Sequence[float] | np.ndarray) -> bool:  # whether the largest value is the right answer's
        return bool(np.argmax(values) == gold)

    # DCLM's rule: the largest mean; or the one continuation, if greedy decoding gives it
    means = []
    for prompt, row in zip(prompts, scores, strict=True):
        means.append(row.log_probabilities[prompt.dclm_start - prompt.start :].mean(dtype=float))
    right_dclm = bool(scores[0].is_greedy.all()) if kind == "language_modeling" else is_right(means)

    # The rule of lm-evaluation-harness: the largest sum
    sums = []
    for prompt, row in zip(prompts, scores, strict=True):
        sums.append(row.log_probabilities[prompt.harness_start - prompt.start :].sum(dtype=float).item())
    outcome = Outcome(
        right_dclm=right_dclm,
        log_likelihoods=tuple(sums),
        nats=-sums[gold],
        tokens=len(prompts[gold].ids) - prompts[gold].harness_start,
        cut=any(prompt.cut for prompt in prompts),
    )
    if kind == "language_modeling":
        return outcome
    characters = [len(prompt.answer) for prompt in prompts]
    utf8_bytes = [len(prompt.answer.encode()) for prompt in prompts]
    return outcome._replace(
        right_harness_sum=is_right(sums),
        right_harness_per_character=is_right(np.divide(sums, characters)),
        right_harness_per_byte=is_right(np.divide(sums, utf8_bytes)),
    )


# ---- tasks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskResult:
    """The results of a task, by the names of the keys in JSON files. None: does not apply to the task's kind."""

    label: str
    kind: Kind
    num_fewshot: int  # examples before each question
    items: int  # that were asked
    accuracy: float  # fraction of the items that are `right_dclm`
    stderr: float  # of the accuracy
    interval: Interval  # its 95 % interval (Wilson)
    baseline: float  # expected accuracy of guessing
    centered: float  # (accuracy - baseline) / (1 - baseline)
    centered_interval: Interval  # its 95 % interval
    acc: float | None  # fraction that is `right_harness_sum`; the harness has these three names
    acc_norm: float | None  # `right_harness_per_character`
    acc_bytes: float | None  # `right_harness_per_byte`
    perplexity: float | None  # over the tokens of continuations; only for language modelling
    truncated: int  # items with a prompt longer than the context, which lost its beginning
    outcomes: tuple[Outcome, ...] = field(repr=False)  # in the order of the items

    def as_dict(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "outcomes"}


def evaluate(
    decoder: nn.Module,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    *,
    batch_tokens: int = BATCH_TOKENS,
    max_items: int | None = None,
    begin: Begin = "eos",
    rank_and_world: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> list[TaskResult]:
    """Evaluate a model on every item of every task; returns a result per task, in order.

    The decoder is in evaluation mode and without gradients, and no random numbers are drawn, so that this may be
    called between two training steps, under their autocast.

    Args:
        batch_tokens: the most tokens of a batch, padding included; results do not depend on it.
        max_items: the most items of a task, always the same ones.
        begin: what a sequence begins with: `eos`, as every document does in training, or `nothing`, like
            lm-evaluation-harness for a tokenizer without a beginning-of-sequence token.
        rank_and_world: do every `world`-th item here, and gather the outcomes of all ranks; all get the same results.
            Not if ranks share one model (FSDP2): all of them must then evaluate all items, in step.
        progress: called with a task's label, the number of items done, and the number of its items.
    """
    rank, world = rank_and_world

    def outcomes_here(task: Task, items: Sequence[Item]) -> Iterator[Outcome]:
        indices = range(rank, len(items), world)
        for first in range(0, len(indices), GROUP):
            group = indices[first : first + GROUP]
            yield from evaluate_items(decoder, tokenizer, task, items, group, batch_tokens, begin)
            if progress is not None:
                progress(task.label, group[-1] + 1, len(items))

    for task in tasks:
        check_items(task, max_items)
    results = []
    for task in tasks:
        outcomes = outcomes_here(task, chosen_items(task, max_items))
        results.append(_result(task, _gather_outcomes(outcomes, world)))
    return results


def _gather_outcomes(outcomes: Iterator[Outcome], world: int) -> list[Outcome]:
    """The outcomes of all ranks in the order of the items; if one rank fails, all of them raise an error."""
    if world == 1:
        return list(outcomes)
    of_rank: list[Outcome] | None = None
    try:
        of_rank = list(outcomes)
    finally:
        gathered: list[Any] = [None] * world
        torch.distributed.all_gather_object(gathered, of_rank)
    if None in gathered:
        raise RunError(f"the evaluation failed on rank {gathered.index(None)}")
    count = sum(map(len, gathered))
    return [gathered[index % world][index // world] for index in range(count)]


def _result(task: Task, outcomes: Sequence[Outcome]) -> TaskResult:
    count, right_dclm = len(outcomes), sum(outcome.right_dclm for outcome in outcomes)
    dclm_accuracy, interval = right_dclm / count, wilson(right_dclm, count)
    is_language = task.kind == "language_modeling"
    nats, tokens = sum(outcome.nats for outcome in outcomes), sum(outcome.tokens for outcome in outcomes)

    def fraction_right(rule: str) -> float | None:
        return None if is_language else sum(getattr(outcome, rule) for outcome in outcomes) / count

    return TaskResult(
        label=task.label,
        kind=task.kind,
        num_fewshot=task.num_fewshot,
        items=count,
        accuracy=dclm_accuracy,
        stderr=standard_error(right_dclm, count),
        interval=interval,
        baseline=task.baseline,
        centered=centered(dclm_accuracy, task.baseline),
        centered_interval=Interval(*(centered(edge, task.baseline) for edge in interval)),
        acc=fraction_right("right_harness_sum"),
        acc_norm=fraction_right("right_harness_per_character"),
        acc_bytes=fraction_right("right_harness_per_byte"),
        perplexity=perplexity(nats / tokens) if is_language else None,
        truncated=sum(outcome.cut for outcome in outcomes),
        outcomes=tuple(outcomes),
    )


def check_items(task: Task, max_items: int | None) -> None:
    """Raise RequestError if a task has too few items for its few-shot examples and a question."""
    items = len(chosen_items(task, max_items))
    if items <= task.num_fewshot:
        raise RequestError(
            f"task {task.label!r}: {items} items are too few for {task.num_fewshot} few-shot examples and a question; "
            "lower num_fewshot, or raise max_items"
        )


def core(results: Sequence[TaskResult]) -> tuple[float, Interval] | None:
    """The mean of the centred accuracies (DCLM's CORE, if these are its 22 tasks), with its interval; None without any.

    The interval is propagated from the tasks' intervals, as if these were independent.
    """
    if not results:
        return None
    values = [result.centered for result in results]
    return sum(values) / len(values), mean_interval(values, [result.centered_interval for result in results])
