"""Where the time of a run went, from one log line to the next: computing, waiting for data, and pauses."""

from typing import Any, NamedTuple

PAUSES = {"val/": "validation", "eval/": "evaluation"}  # the lines that are written at the end of one
SHORTEST = 1e-3  # seconds; what is left below it is the writing of the line


class Pause(NamedTuple):
    """Time in which a run did not train.

    Args:
        began: seconds since the run began to train, as far as the log lines tell.
        seconds: how long.
        kind: `validation`, `evaluation`, or `other` (texts being written, a run that was stopped).
    """

    began: float
    seconds: float
    kind: str


class Interval(NamedTuple):
    """From one log line of training to the next.

    Args:
        step: optimizer step of the line that ends it.
        began, ended: seconds since the run began to train.
        tokens: that were trained on.
        tokens_per_second: over the time that was spent training.
        waiting: share of that time in which training waited for data; None where it was not logged.
        training: seconds that were spent training.
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

    The speed of a line is that of the time without pauses, so what is left between two lines was spent on something
    else: on validations and evaluations up to the lines that they end with, and on other things after these.

    Args:
        lines: `Run.metrics()`.

    Returns:
        One for each line that says how fast training was, in order.
    """
    found: list[Interval] = []
    last = {"step": 0, "tokens": 0, "time": 0.0}  # line of training
    origin = 0.0
    between: list[dict[str, Any]] = []  # validations and the like since then
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
    """Seconds of a run by what they were spent on: `computing`, `waiting for data`, and pauses by their kind."""
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
