"""What an evaluation found, as a run keeps it: a line of `evaluations.jsonl`, metrics for curves, sentences for people.

`callbacks/evaluations` writes it while a run trains, `lm evaluate` afterwards; `Run.evaluations` reads it. Nothing here
imports torch, so that commands which only look at runs answer at once.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

Evaluation = dict[str, Any]
SHAPE = {  # what readers rely on
    "step": (int, None), "checkpoint": (str, None), "time": float, "core": (float, None),
    "core_interval": ([float], None), "settings": {},
    "tasks": {...: {"accuracy": float, "centered": float, "interval": [float], "baseline": float, "items": int,
                    "num_fewshot": int}},
    "texts": {...: {"bits_per_byte": (float, None), "loss": (float, None), "tokens": int}},
}  # fmt: skip


def record(
    step: int | None,
    checkpoint: str | None,
    tasks: Mapping[str, Mapping[str, Any]],
    core: tuple[float, tuple[float, float]] | None,
    texts: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> Evaluation:
    """What there is to keep of an evaluation, ready for JSON; `Run.evaluations` says what is in it.

    Args:
        step: the optimizer step that the model is of; None for a model of others.
        checkpoint: the name of its folder; None while a run trains.
        tasks: name -> the fields of its `TaskResult`.
        core: of these tasks, with its interval.
        texts: name of texts or shards -> the fields of its `CorpusResult`.
        settings: what was asked for.
    """
    return _finite({
        "step": step,
        "checkpoint": checkpoint,
        "time": time.time(),
        "tasks": tasks,
        "core": core[0] if core else None,
        "core_interval": core[1] if core else None,
        "texts": texts,
        "settings": settings,
    })


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def joined(evaluations: Sequence[Evaluation], step: int | None = None) -> Evaluation | None:
    """All that is known of one step's model as one evaluation.

    Of each task and text the result of the most items or tokens counts, the newest of several; the mean of centred
    accuracies is that of the evaluation of the most items.

    Args:
        evaluations: `Run.evaluations()`.
        step: whose; that of the newest evaluation if not given.

    Returns:
        None where there is none.
    """
    step = evaluations[-1]["step"] if step is None and evaluations else step
    of_step = [evaluation for evaluation in evaluations if evaluation["step"] == step]
    if not of_step:
        return None
    best: dict[str, dict[str, Any]] = {"tasks": {}, "texts": {}}
    for kind, size in (("tasks", "items"), ("texts", "tokens")):
        for name, result in ((name, result) for each in of_step for name, result in each[kind].items()):
            if name not in best[kind] or result[size] >= best[kind][name][size]:
                best[kind][name] = result
    largest = max(reversed(of_step), key=lambda each: sum(task["items"] for task in each["tasks"].values()))
    return {**of_step[-1], **best, "core": largest["core"], "core_interval": largest["core_interval"]}


def metrics(evaluation: Evaluation) -> dict[str, float]:
    """The numbers that make curves, by the names that they have in TensorBoard and `metrics.jsonl`."""
    found: dict[str, float] = {}
    for name, task in evaluation["tasks"].items():
        found[f"eval/{name}/accuracy"] = task["accuracy"]
        found[f"eval/{name}/centered"] = task["centered"]
    if evaluation["core"] is not None:
        found["eval/core"] = evaluation["core"]
    found |= {f"eval/{name}/bpb": texts["bits_per_byte"] for name, texts in evaluation["texts"].items()}
    return {name: value for name, value in found.items() if value is not None}


def sentences(evaluation: Evaluation | None) -> list[str]:
    """An evaluation in lines: when, the mean, and each task and text, with 95 % intervals."""
    if evaluation is None:
        return []
    lines = [f"step {evaluation['step']:,}" + core_sentence(evaluation)]
    for name, task in evaluation["tasks"].items():
        low, high = task["interval"]
        lines.append(
            f"{name}: {task['accuracy']:.1%} right ({low:.1%} to {high:.1%}), guessing {task['baseline']:.1%}, "
            f"centred {task['centered']:.3f}; {task['items']:,} items, {task['num_fewshot']} shots"
        )
    for name, texts in evaluation["texts"].items():
        bits = "" if texts["bits_per_byte"] is None else f"{texts['bits_per_byte']:.4f} bits a byte, "
        loss = "not finite" if texts["loss"] is None else f"{texts['loss']:.4f}"
        lines.append(f"{name}: {bits}loss {loss} over {texts['tokens']:,} tokens")
    return lines


def core_sentence(evaluation: Evaluation) -> str:
    """`, mean centred accuracy 0.0123 (-0.004 to 0.029)`; nothing where there is none."""
    if evaluation["core"] is None:
        return ""
    low, high = evaluation["core_interval"]
    return f", mean centred accuracy {evaluation['core']:.4f} ({low:.4f} to {high:.4f})"
