"""A run's past, read from its files: curves, the settings it was made with, its samples, and where its time went.

`lm runs`, `lm monitor` and the notebooks use it. Nothing here imports torch or writes into the run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lm.runs.run import Run
from lm.system.files import flatten, read_lines

# ---- curves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """One curve: values that are not finite leave a gap.

    Args:
        name: for the legend.
        x: ascending.
        y: of the same length.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]


def curve(name: str, lines: list[dict[str, Any]], metric: str, x: str = "step", weight: float = 0.0) -> Series:
    """One metric of a run.

    Args:
        name: of the curve.
        lines: `Run.metrics()`.
        metric: by its name in TensorBoard.
        x: `step` (optimizer steps), `tokens`, or `time`, which is hours since the run's first log line.
        weight: smooth with it, see `smooth`.
    """
    points = [line for line in lines if metric in line and x in line]
    began = lines[0]["time"] if x == "time" and points else 0.0
    xs = [(line["time"] - began) / 3600 if x == "time" else line[x] for line in points]
    return Series(name, xs, smooth([line[metric] for line in points], weight))


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """The exponential moving average without the bias of its beginning, as TensorBoard's slider computes it.

    Args:
        values: one curve; values that are not finite pass through and are not averaged.
        weight: of the earlier values, from 0 (nothing is smoothed) to below 1.
    """
    smoothed, mean, total = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean = weight * mean + (1 - weight) * value
            total = weight * total + (1 - weight)
            smoothed.append(mean / total)
        else:
            smoothed.append(value)
    return smoothed


# ---- settings --------------------------------------------------------------------------------------------------------


def differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys in which configs differ, with the value of each; None where it is not set."""
    flat = [flatten(config) for config in configs]
    keys = sorted(set().union(*flat) - {"run"})
    rows = {key: [one.get(key) for one in flat] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def labels(runs: Sequence[Run]) -> list[str]:
    """The names of runs; with their folders where several have the same name."""
    names = [run.path.resolve().name for run in runs]
    return [
        name if names.count(name) == 1 else str(Path(*run.path.resolve().parts[-3:]))
        for name, run in zip(names, runs, strict=True)
    ]


def beside(run: Run, most: int = 2) -> list[Run]:
    """The newest runs beside a run, in the same folder, that have log lines; the newest last.

    Args:
        most: how many.
    """
    others = [other for other in Run.all(run.path.resolve().parent) if other.path.resolve() != run.path.resolve()]
    return [other for other in others if (other.path / "metrics.jsonl").exists()][-most:] if most else []


# ---- samples ---------------------------------------------------------------------------------------------------------


def read_samples(run: Run) -> list[dict[str, Any]]:
    """The texts that a run generated from its prompts, by step: `step`, `tokens`, `prompt`, `text`.

    A resumed run generates the texts of later steps a second time; the later line counts.
    """
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for sample in read_lines(run.path / "samples.jsonl"):
        if isinstance(sample.get("step"), int) and {"prompt", "text"} <= sample.keys():
            found[sample["step"], sample["prompt"]] = sample
    return sorted(found.values(), key=lambda sample: sample["step"])


def spread(steps: list[int], most: int) -> list[int]:
    """At most `most` of ascending steps, evenly spread; with the last one, and with the first one if `most` > 1."""
    if len(steps) <= most:
        return steps
    if most == 1:
        return steps[-1:]
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


# ---- where the time went ---------------------------------------------------------------------------------------------

PAUSES = {"val/": "validation", "eval/": "evaluation"}  # prefix of a line's metrics -> the pause that it ends
SHORTEST = 1e-3  # seconds; a shorter rest is the writing of the line


class Pause(NamedTuple):
    """Time in which a run did not train.

    Args:
        began: seconds since the run began to train, by its log lines.
        seconds: how long.
        kind: `validation`, `evaluation`, or `other` (samples being generated, a run that was stopped).
    """

    began: float
    seconds: float
    kind: str


class Interval(NamedTuple):
    """From one log line of training to the next.

    Args:
        step: optimizer step of the line that ends it.
        began, ended: seconds since the run began to train.
        tokens: trained on.
        tokens_per_second: over the time spent training.
        waiting: the fraction of that time in which training waited for data; None where it was not logged.
        training: seconds spent training.
        pauses: in order; with `training` they are the whole interval.
    """

    step: int
    began: float
    ended: float
    tokens: int
    tokens_per_second: float
    waiting: float | None
    training: float
    pauses: list[Pause]


def intervals(lines: list[dict[str, Any]]) -> list[Interval]:
    """Divide a run's time by its log lines.

    A line's speed is that of the time without pauses, so the rest of the time between two lines was pauses: validations
    and evaluations up to their own lines, and other things after these.

    Args:
        lines: `Run.metrics()`.

    Returns:
        One for each line with a speed, in order.
    """
    found: list[Interval] = []
    last = {"step": 0, "tokens": 0, "time": 0.0}  # line of training
    origin = 0.0
    between: list[dict[str, Any]] = []  # lines of validations and evaluations since then
    for line in lines:
        if "perf/tokens_per_second" not in line:
            between.append(line)
            continue
        tokens = line["tokens"] - last["tokens"]
        training = tokens / line["perf/tokens_per_second"]
        if not found:
            origin = last["time"] = line["time"] - training
        began, ended = last["time"] - origin, line["time"] - origin
        training = min(training, ended - began)
        a_step = training / max(1, line["step"] - last["step"])
        ends = [(one["step"] - last["step"], one["time"] - origin, _kind(one)) for one in between]
        pauses = _pauses(began, ended - began - training, a_step, ends)
        rate, waiting = line["perf/tokens_per_second"], line.get("perf/data_wait")
        found.append(Interval(line["step"], began, ended, tokens, rate, waiting, training, pauses))
        last, between = line, []
    return found


def time_spent(found: list[Interval]) -> dict[str, float]:
    """Seconds of a run by their use: `computing`, `waiting for data`, and pauses by kind."""
    waiting = sum((one.waiting or 0.0) * one.training for one in found)
    spent = {"computing": sum(one.training for one in found) - waiting, "waiting for data": waiting}
    for pause in (pause for one in found for pause in one.pauses):
        name = f"pause: {pause.kind}"
        spent[name] = spent.get(name, 0.0) + pause.seconds
    return spent


def _pauses(now: float, left: float, a_step: float, ends: list[tuple[int, float, str]]) -> list[Pause]:
    """The pauses of an interval.

    Args:
        now: when it began.
        left: seconds of pauses in it.
        a_step: seconds of training a step.
        ends: of each pause that has a line: steps taken before it, when it ended, and its kind.
    """
    pauses, taken = [], 0
    for steps, ended, kind in ends:
        now += a_step * (steps - taken)
        seconds = min(max(0.0, ended - now), left)
        pauses.append(Pause(now, seconds, kind))
        now, left, taken = now + seconds, left - seconds, steps
    if left > SHORTEST:
        pauses.append(Pause(now, left, "other"))
    return pauses


def _kind(line: dict[str, Any]) -> str:
    return next((kind for prefix, kind in PAUSES.items() if any(key.startswith(prefix) for key in line)), "other")
