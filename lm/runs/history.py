"""A run over time: its curves and samples, the last values of its metrics, and how its time was used.

`runs/facts` has its current state. Nothing here imports torch or writes into the run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lm.runs.run import Run
from lm.system.files import read_lines

# ---- curves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """One curve: values that are not finite leave a gap."""

    name: str  # for the legend
    x: Sequence[float]  # ascending
    y: Sequence[float]


def curve(name: str, lines: list[dict[str, Any]], metric: str, x: str = "step") -> Series:
    """The curve of one metric, from the lines of `Run.metrics()`.

    `x` is `step` (optimizer steps), `tokens`, or `time`: hours since the first line.
    """
    points = [line for line in lines if metric in line and x in line]
    began = lines[0]["time"] if x == "time" and points else 0.0
    xs = [(line["time"] - began) / 3600 if x == "time" else line[x] for line in points]
    return Series(name, xs, [line[metric] for line in points])


def thin(series: Series, limit: int) -> Series:
    """Reduce a curve to at most `limit` points, means of neighbours; NaN where no neighbour is finite."""
    size = max(1, math.ceil(len(series.x) / limit))
    x, y = [], []
    for begin in range(0, len(series.x), size):
        pairs = list(zip(series.x[begin : begin + size], series.y[begin : begin + size], strict=True))
        finite = [pair for pair in pairs if math.isfinite(pair[1])] or [(pairs[0][0], math.nan)]
        x.append(fmean(step for step, _ in finite))
        y.append(fmean(value for _, value in finite))
    return Series(series.name, x, y)


def labels(runs: Sequence[Run]) -> list[str]:
    """The names of runs; their whole paths if several have the same name."""
    names = [run.path.resolve().name for run in runs]
    return [name if names.count(name) == 1 else str(run.path.resolve()) for name, run in zip(names, runs)]


# ---- samples ---------------------------------------------------------------------------------------------------------


def read_samples(run: Run) -> list[dict[str, Any]]:
    """The texts that a run generated from its prompts, by step: `step`, `tokens`, `prompt`, `text`.

    A resumed run generates the texts of later steps a second time; the later line counts.
    """
    samples: dict[tuple[int, str], dict[str, Any]] = {}
    for sample in read_lines(run.path / "samples.jsonl"):
        if isinstance(sample.get("step"), int) and {"prompt", "text"} <= sample.keys():
            samples[sample["step"], sample["prompt"]] = sample
    return sorted(samples.values(), key=lambda sample: sample["step"])


def spread_steps(samples: Sequence[dict[str, Any]], most: int) -> list[int]:
    """At most so many of the steps of samples, in order: the first, the last and others between them."""
    steps = sorted({sample["step"] for sample in samples})
    count = min(most, len(steps))
    return [steps[index * (len(steps) - 1) // max(1, count - 1)] for index in range(count)]


# ---- last values -----------------------------------------------------------------------------------------------------


def last_value(run: Run, metric: str) -> float | None:
    """The last value of a metric; None if there is none, or if the last validation, whose line is then empty, was not
    finite."""
    empty = {"step", "tokens", "time"} if metric.startswith("val/") else set()
    lines = [line for line in run.metrics() if metric in line or line.keys() == empty]
    return lines[-1].get(metric) if lines else None


# ---- where the time went ---------------------------------------------------------------------------------------------


def time_spent(lines: list[dict[str, Any]], tokens: int = 0) -> dict[str, float]:
    """Seconds of a run by use: `computing`, `waiting for data`, and `pauses`, such as validations and stops.

    `lines` are those of `Run.metrics()`. The logged speed leaves out pauses, so
    tokens / speed is the time of training. `tokens` is where a branch begins: the tokens of its trunk.
    """
    known = [line for line in lines if {"tokens", "time"} <= line.keys()]
    trained = [line for line in known if line.get("perf/tokens_per_second", 0) > 0]
    training, waiting = [], 0.0
    for line in trained:
        training.append((line["tokens"] - tokens) / line["perf/tokens_per_second"])
        waiting += training[-1] * line.get("perf/data_wait", 0.0)
        tokens = line["tokens"]
    elapsed = trained[-1]["time"] - trained[0]["time"] + training[0] if trained else 0.0
    spent = {"computing": sum(training) - waiting, "waiting for data": waiting}
    return {**spent, "pauses": max(0.0, elapsed - sum(training))}
