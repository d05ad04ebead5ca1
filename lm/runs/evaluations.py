"""The evaluations of a run's model on tasks and texts, the lines of `evaluations.jsonl`.

`training/callbacks/evaluation` writes them while a run trains, `lm evaluate` afterwards; `Run.evaluations` reads.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lm.system.parsing import DAMAGE_ERRORS, finite_or_none

Evaluation = dict[str, Any]


def evaluation_record(
    step: int | None,
    checkpoint: str | None,
    tasks: Mapping[str, Mapping[str, Any]],
    core: tuple[float, tuple[float, float]] | None,
    texts: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> Evaluation:
    """Make the line of `evaluations.jsonl` for an evaluation; `Run.evaluations` describes its content.

    The step is None for a model that no run trained, the checkpoint's name while a run trains. Tasks are the fields of
    `TaskResult` by name, texts those of `CorpusResult`; core is the mean centred accuracy with its interval.
    """
    mean, interval = core or (None, None)
    record = {"step": step, "checkpoint": checkpoint, "time": time.time(), "tasks": tasks}
    return finite_or_none(record | {"core": mean, "core_interval": interval, "texts": texts, "settings": settings})


def is_evaluation(line: Evaluation) -> bool:
    """Whether a line has everything that the functions below use: a damaged line may still be valid JSON."""
    try:
        evaluation_metrics(line)
        return bool(describe_evaluation(merge_evaluations([line])))
    except DAMAGE_ERRORS:
        return False


def merge_evaluations(evaluations: Sequence[Evaluation], step: int | None = None) -> Evaluation | None:
    """Merge all evaluations of the model at `step` (default: of the newest evaluation); None if there is none.

    For each task and text, take the result with the most items or tokens, and the newest of equals; the mean centred
    accuracy is that of the evaluation with the most items.
    """
    step = evaluations[-1]["step"] if step is None and evaluations else step
    of_step = [evaluation for evaluation in evaluations if evaluation["step"] == step]
    if not of_step:
        return None
    best: dict[str, dict[str, Any]] = {"tasks": {}, "texts": {}}
    for kind, size in (("tasks", "items"), ("texts", "tokens")):
        for each in of_step:
            for name, result in each[kind].items():
                if name not in best[kind] or result[size] >= best[kind][name][size]:
                    best[kind][name] = result
    largest = max(reversed(of_step), key=lambda each: sum(task["items"] for task in each["tasks"].values()))
    return {**of_step[-1], **best, "core": largest["core"], "core_interval": largest["core_interval"]}


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """The numbers that are plotted as curves, by their names in TensorBoard and `metrics.jsonl`."""
    metrics: dict[str, float] = {}
    for name, task in evaluation["tasks"].items():
        metrics[f"eval/{name}/accuracy"] = task["accuracy"]
        metrics[f"eval/{name}/centered"] = task["centered"]
    if evaluation["core"] is not None:
        metrics["eval/core"] = evaluation["core"]
    metrics |= {f"eval/{name}/bpb": texts["bits_per_byte"] for name, texts in evaluation["texts"].items()}
    return {name: value for name, value in metrics.items() if value is not None}


def describe_evaluation(evaluation: Evaluation | None) -> list[str]:
    """An evaluation in lines: its step, the mean, and each task and text, with 95 % intervals."""
    if evaluation is None:
        return []
    step = "" if evaluation["step"] is None else f"step {evaluation['step']:,}"
    head = (step + core_sentence(evaluation)).removeprefix(", ")
    return [head, *(f"{name}: {text}" for name, text in evaluation_rows(evaluation).items())]


def evaluation_rows(evaluation: Evaluation) -> dict[str, str]:
    rows = {}
    for name, task in evaluation["tasks"].items():
        low, high = task["interval"]
        rows[name] = (
            f"{task['accuracy']:.1%} right ({low:.1%} to {high:.1%}), guessing {task['baseline']:.1%}, "
            f"centred {task['centered']:.3f}; {task['items']:,} items, {task['num_fewshot']} shots"
        )
    for name, texts in evaluation["texts"].items():
        around = f" ± {1.96 * texts['stderr']:.4f}" if texts.get("stderr") else ""
        bits = "" if texts["bits_per_byte"] is None else f"{texts['bits_per_byte']:.4f}{around} bits per byte, "
        loss = "not finite" if texts["loss"] is None else f"{texts['loss']:.4f}"
        rows[name] = f"{bits}loss {loss} over {texts['tokens']:,} tokens"
    return rows


def core_sentence(evaluation: Evaluation) -> str:
    """`, mean centred accuracy 0.0123 (-0.004 to 0.029)`; empty where there is no mean."""
    if evaluation["core"] is None:
        return ""
    low, high = evaluation["core_interval"]
    return f", mean centred accuracy {evaluation['core']:.4f} ({low:.4f} to {high:.4f})"
