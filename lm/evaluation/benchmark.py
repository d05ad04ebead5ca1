"""Benchmarks: the accuracy of each task with its interval, and CORE, one number for many tasks.

An item goes through four functions, in `_outcomes`. For example, one with two answers, of which the first is right:

    render    "The sky is " + "deep blue"       "The sky is " + "deep red"      texts
    tokenize  eos  The  sky  is  deep  blue     eos  The  sky  is  deep  red    `Prompt`s: dclm_start 5, harness_start 4
    score                        -2.5  -0.5                        -2.5  -1.0   `Score`s, in nats
    decide    DCLM: mean from 5 on     -0.5                              -1.0   `Outcome`: the first answer has the
              harness: sum from 4 on   -3.0                              -3.5   larger value, so each of these rules
              per character        -3.0 / 9                          -3.5 / 8   is right

The outcomes of all items become the `TaskResult`.
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
from lm.evaluation.prompts import Prompt, chosen_items, render, tokenize
from lm.evaluation.scoring import Score, score
from lm.evaluation.statistics import Interval, centered, mean_interval, standard_error, wilson
from lm.evaluation.tasks import Item, Kind, Task
from lm.model.build import config_of

BATCH_TOKENS = 16_384
GROUP = 128  # items whose prompts are held in memory at once

Progress = Callable[[str, int, int], None]


class Outcome(NamedTuple):
    """What became of an item: for each rule, whether the answer that it chooses is right. See `TaskResult`."""

    right_dclm: bool
    log_likelihoods: tuple[float, ...]  # of each possible answer, summed, in nats
    nats: float  # negative log-likelihood of the right answer
    tokens: int  # of the right answer
    cut: bool  # a prompt was longer than the context and lost its beginning
    right_sum: bool | None = None  # these three are None for language modelling
    right_per_character: bool | None = None
    right_per_byte: bool | None = None


@dataclass(frozen=True)
class TaskResult:
    """The results of a task, by the names of the keys in JSON files. None: does not apply to the task's kind."""

    label: str
    kind: Kind
    num_fewshot: int  # examples before each question
    items: int  # that were asked
    # DCLM's rule, share of right answers: the answer with the smallest mean loss over its tokens; for language
    # modelling, every token of the continuation is the argmax.
    accuracy: float
    stderr: float  # of the accuracy
    interval: Interval  # its 95 % interval (Wilson)
    baseline: float  # expected accuracy of guessing
    centered: float  # (accuracy - baseline) / (1 - baseline)
    centered_interval: Interval  # its 95 % interval
    # The rules of lm-evaluation-harness: share of items where the right answer has the largest log-probability, summed
    # over its tokens. None for language modelling, where the harness has DCLM's rule.
    acc: float | None
    acc_norm: float | None  # the largest sum per character of the answer
    acc_bytes: float | None  # per UTF-8 byte
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
    """The outcomes of the items at `indices`, from texts to decisions, for GROUP items at a time."""
    context = config_of(decoder).max_position_embeddings
    for first in range(0, len(indices), GROUP):
        group = indices[first : first + GROUP]
        texts = [render(task, items, index) for index in group]
        prompts_of_items = tokenize(task.kind, texts, tokenizer, context, begin)
        prompts = [prompt for prompts_of_item in prompts_of_items for prompt in prompts_of_item]
        rows, starts = [prompt.ids for prompt in prompts], [prompt.start for prompt in prompts]
        scores = iter(score(decoder, rows, starts, batch_tokens))
        for index, prompts_of_item in zip(group, prompts_of_items, strict=True):
            yield decide(task.kind, items[index], prompts_of_item, [next(scores) for _ in prompts_of_item])
        if progress is not None:
            progress(task.label, group[-1] + 1, len(items))


def decide(kind: Kind, item: Item, prompts: Sequence[Prompt], scores: Sequence[Score]) -> Outcome:
    """Which rules choose the right answer of an item, from the prompt and the score of each answer."""
    means, sums = [], []
    for prompt, (log_probabilities, _) in zip(prompts, scores, strict=True):  # from the prompt's `start` on
        means.append(log_probabilities[prompt.dclm_start - prompt.start :].mean(dtype=float))
        sums.append(log_probabilities[prompt.harness_start - prompt.start :].sum(dtype=float).item())
    gold = 0 if kind == "language_modeling" else item["gold"]

    def is_right(values: Sequence[float] | np.ndarray) -> bool:  # whether the largest value is the right answer's
        return bool(np.argmax(values) == gold)

    if kind == "language_modeling":  # one answer, for which both starts are the same
        right_dclm, by_harness = bool(scores[0].argmax.all()), {}
    else:
        right_dclm = is_right(means)
        characters = [len(prompt.answer) for prompt in prompts]
        utf8_bytes = [len(prompt.answer.encode()) for prompt in prompts]
        by_harness = {
            "right_sum": is_right(sums),
            "right_per_character": is_right(np.divide(sums, characters)),
            "right_per_byte": is_right(np.divide(sums, utf8_bytes)),
        }
    return Outcome(
        right_dclm=right_dclm,
        log_likelihoods=tuple(sums),
        nats=-sums[gold],
        tokens=len(prompts[gold].ids) - prompts[gold].harness_start,
        cut=any(prompt.cut for prompt in prompts),
        **by_harness,
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


def _result(task: Task, outcomes: Sequence[Outcome]) -> TaskResult:
    count, right = len(outcomes), sum(outcome.right_dclm for outcome in outcomes)
    accuracy, interval, is_language = right / count, wilson(right, count), task.kind == "language_modeling"
    nats, tokens = sum(outcome.nats for outcome in outcomes), sum(outcome.tokens for outcome in outcomes)

    def share(name: str) -> float | None:
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
        acc=share("right_sum"),
        acc_norm=share("right_per_character"),
        acc_bytes=share("right_per_byte"),
        perplexity=perplexity(nats / tokens) if is_language else None,
        truncated=sum(outcome.cut for outcome in outcomes),
        outcomes=tuple(outcomes),
    )


def check_items(task: Task, max_items: int | None) -> None:
    """Raise RequestError if `max_items` is too few for the task's few-shot examples and a question."""
    if max_items is not None and max_items <= task.num_fewshot:
        raise RequestError(
            f"task {task.label!r}: max_items {max_items} must be at least {task.num_fewshot + 1}: a question "
            f"and its {task.num_fewshot} few-shot examples"
        )


def core(results: Sequence[TaskResult]) -> tuple[float, Interval] | None:
    """The mean of the centred accuracies (DCLM's CORE, if these are its 22 tasks), with its interval; None without any.

    The interval is propagated from the tasks' intervals, as if these were independent.
    """
    if not results:
        return None
    values = [result.centered for result in results]
    return sum(values) / len(values), mean_interval(values, [result.centered_interval for result in results])
