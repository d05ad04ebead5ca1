"""Benchmarks: the accuracy of each task with its interval, and CORE, one number for many tasks.

An item becomes prompts (`evaluation/prompts`), a prompt log-probabilities (`evaluation/scoring`), these one `Scored`
for each answer, and the answers the item's `Outcome`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch.distributed
from torch import nn

from lm.data.tokenizer import Begin, Tokenizer
from lm.errors import RequestError, RunError
from lm.evaluation.metrics import perplexity
from lm.evaluation.prompts import Prompt, chosen_items, prompts
from lm.evaluation.scoring import Row, Score, score
from lm.evaluation.statistics import Interval, centered, mean_interval, standard_error, wilson
from lm.evaluation.tasks import Item, Kind, Task
from lm.model.decoder import config_of

BATCH_TOKENS = 16_384
GROUP = 128  # items whose prompts are held in memory at once

Progress = Callable[[str, int, int], None]


class Scored(NamedTuple):
    """An answer of an item, scored."""

    prompt: Prompt
    mean: float  # log-probability of a token, where the answers are compared, in nats
    log_likelihood: float  # sum over the tokens of the answer, in nats
    tokens: int  # of the answer
    argmax: bool  # whether greedy decoding would choose every token


class Outcome(NamedTuple):
    """What became of an item."""

    right: bool  # by the rule of the task's kind
    log_likelihoods: tuple[float, ...]  # of each possible answer, summed, in nats
    acc: bool | None  # whether the answer with the largest sum is right; None for language modelling
    acc_norm: bool | None  # the same for the largest sum per character
    acc_bytes: bool | None  # the same for the largest sum per UTF-8 byte
    nats: float  # negative log-likelihood of the right answer
    tokens: int  # of the right answer
    cut: bool  # a prompt was longer than the context and lost its beginning


@dataclass(frozen=True)
class TaskResult:
    """The results of a task. A field is None if it does not apply to the task's kind."""

    label: str
    kind: Kind
    num_fewshot: int  # examples before each question
    items: int  # that were asked
    # Share of right answers: the answer with the smallest mean loss over its tokens; for language modelling, every
    # token of the continuation is the argmax.
    accuracy: float
    stderr: float  # of the accuracy
    interval: Interval  # its 95 % interval (Wilson)
    baseline: float  # expected accuracy of guessing
    centered: float  # (accuracy - baseline) / (1 - baseline)
    centered_interval: Interval  # its 95 % interval
    # Share right by summed log-probability, per character and per UTF-8 byte of the answer: `acc`, `acc_norm` and
    # `acc_bytes` of lm-evaluation-harness. None for language modelling, whose `acc` is `accuracy`.
    acc: float | None
    acc_norm: float | None
    acc_bytes: float | None
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
    share: tuple[int, int] = (0, 1),
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
        share: `(rank, world)`: do every `world`-th item here, and gather the outcomes of all ranks; all get the same
            results. Not if ranks share one model (FSDP2): all of them must then evaluate all items, in step.
        progress: called with a task's label, the number of items done, and the number of its items.
    """
    for task in tasks:
        check_items(task, max_items)
    results, (rank, world) = [], share
    for task in tasks:
        items = chosen_items(task, max_items)
        indices = range(rank, len(items), world)
        outcomes = _outcomes(decoder, tokenizer, task, items, indices, batch_tokens, begin, progress)
        results.append(_result(task, _gather_outcomes(outcomes, world)))
    return results


def check_items(task: Task, max_items: int | None) -> None:
    """Raise RequestError if `max_items` is too few for the task's few-shot examples and a question."""
    if max_items is not None and max_items <= task.num_fewshot:
        raise RequestError(
            f"task {task.label!r}: max_items {max_items} must be at least {task.num_fewshot + 1}: a question "
            f"and its {task.num_fewshot} few-shot examples"
        )


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


def _outcomes(
    decoder: nn.Module,
    tokenizer: Tokenizer,
    task: Task,
    items: Sequence[Item],
    indices: Sequence[int],
    batch_tokens: int,
    begin: Begin,
    progress: Progress | None,
) -> Iterator[Outcome]:
    context = config_of(decoder).max_position_embeddings
    for first in range(0, len(indices), GROUP):
        group = indices[first : first + GROUP]
        prompts_of_items = list(prompts(task, items, group, tokenizer, context, begin))
        rows = [Row(prompt.ids, prompt.start) for answers in prompts_of_items for prompt in answers]
        scores = iter(score(decoder, rows, batch_tokens))
        for index, answers in zip(group, prompts_of_items, strict=True):
            yield _outcome(task, items[index], [_scored(prompt, next(scores)) for prompt in answers])
        if progress is not None:
            progress(task.label, group[-1] + 1, len(items))


def _scored(prompt: Prompt, score: Score) -> Scored:
    compared = score.log_probabilities[prompt.compared - prompt.start :]
    answer = score.log_probabilities[prompt.answer - prompt.start :]
    mean, log_likelihood = compared.mean(dtype=float), answer.sum(dtype=float).item()
    return Scored(prompt, mean, log_likelihood, len(answer), bool(score.argmax.all()))


def _outcome(task: Task, item: Item, answers: Sequence[Scored]) -> Outcome:
    sums, cut = tuple(answer.log_likelihood for answer in answers), any(answer.prompt.cut for answer in answers)
    if task.kind == "language_modeling":
        [answer] = answers
        return Outcome(answer.argmax, sums, None, None, None, -answer.log_likelihood, answer.tokens, cut)

    def is_right(values: Sequence[float]) -> bool:  # the answer with the largest of these values
        return bool(np.argmax(values) == item["gold"])

    gold = answers[item["gold"]]
    return Outcome(
        right=is_right([answer.mean for answer in answers]),
        log_likelihoods=sums,
        acc=is_right(sums),
        acc_norm=is_right([answer.log_likelihood / answer.prompt.characters for answer in answers]),
        acc_bytes=is_right([answer.log_likelihood / answer.prompt.bytes for answer in answers]),
        nats=-gold.log_likelihood,
        tokens=gold.tokens,
        cut=cut,
    )


def _result(task: Task, outcomes: Sequence[Outcome]) -> TaskResult:
    count, right = len(outcomes), sum(outcome.right for outcome in outcomes)
    accuracy, interval, is_language = right / count, wilson(right, count), task.kind == "language_modeling"
    nats, tokens = sum(outcome.nats for outcome in outcomes), sum(outcome.tokens for outcome in outcomes)

    def mean(name: str) -> float | None:
        return None if is_language else sum(getattr(outcome, name) for outcome in outcomes) / count

    return TaskResult(
        label=task.label,
        kind=task.kind,
        num_fewshot=task.num_fewshot,
        items=count,
        accuracy=accuracy,
        stderr=standard_error(right, count),
        interval=interval,
        baseline=task.baseline,
        centered=centered(accuracy, task.baseline),
        centered_interval=Interval(*(centered(edge, task.baseline) for edge in interval)),
        acc=mean("acc"),
        acc_norm=mean("acc_norm"),
        acc_bytes=mean("acc_bytes"),
        perplexity=perplexity(nats / tokens) if is_language else None,
        truncated=sum(outcome.cut for outcome in outcomes),
        outcomes=tuple(outcomes),
    )


def core(results: Sequence[TaskResult]) -> tuple[float, Interval] | None:
    """The mean of the centred accuracies (DCLM's CORE, if these are its 22 tasks), with its interval; None without any.

    The interval is propagated from the tasks' intervals, as if these were independent.
    """
    if not results:
        return None
    values = [result.centered for result in results]
    return sum(values) / len(values), mean_interval(values, [result.centered_interval for result in results])
