"""What a run's files say: its curves, settings and samples, whether it ended as expected, where its time went, and how
it stands as it trains.

`lm runs`, `lm monitor` and the notebooks use it. Nothing here imports torch or writes into the run.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lm.errors import RequestError
from lm.runs.metrics import BY_SOURCE, METRICS, valid_metrics
from lm.runs.run import STEP, Run, is_alert
from lm.system.files import DAMAGE, flatten, nonnegative, parse_line, read_lines

# ---- curves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """One curve: values that are not finite leave a gap."""

    name: str  # for the legend
    x: Sequence[float]  # ascending
    y: Sequence[float]
    low: Sequence[float] = ()  # of a mean of several curves: the lowest and the highest of them
    high: Sequence[float] = ()


def curve(name: str, lines: list[dict[str, Any]], metric: str, x: str = "step", weight: float = 0.0) -> Series:
    """One metric of a run, by its name in TensorBoard.

    Args:
        lines: `Run.metrics()`.
        x: `step` (optimizer steps), `tokens`, `flops` where the lines have it, or `time`: hours since the run's first
            log line.
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


def thin(series: Series, most: int) -> Series:
    """A curve of at most `most` points, means of neighbours; NaN where none of them is finite."""
    size = max(1, math.ceil(len(series.x) / most))
    x, y = [], []
    for begin in range(0, len(series.x), size):
        pairs = list(zip(series.x[begin : begin + size], series.y[begin : begin + size], strict=True))
        finite = [pair for pair in pairs if math.isfinite(pair[1])] or [(pairs[0][0], math.nan)]
        x.append(fmean(step for step, _ in finite))
        y.append(fmean(value for _, value in finite))
    return Series(series.name, x, y)


# ---- settings --------------------------------------------------------------------------------------------------------


def differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys in which configs differ, with the value of each; None where it is not set."""
    flat = [flatten(config) for config in configs]
    keys = sorted(set().union(*flat) - {"run"})
    rows = {key: [one.get(key) for one in flat] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def trunk_metrics(run: Run) -> list[dict[str, Any]]:
    """The log lines of the run that a run has branched off, up to the step where it did; none of any other run."""
    origin = run.read("run.json").get("branch")
    if not origin:
        return []
    trunk = Run(origin["path"])  # it may be gone
    return [line for line in [*trunk_metrics(trunk), *trunk.metrics()] if line.get("step", 0) <= origin["step"]]


def labels(runs: Sequence[Run]) -> list[str]:
    """The names of runs; with their folders where several have the same name."""
    names = [run.path.resolve().name for run in runs]
    return [
        name if names.count(name) == 1 else str(Path(*run.path.resolve().parts[-3:]))
        for name, run in zip(names, runs, strict=True)
    ]


def beside(run: Run) -> list[Run]:
    """The two newest runs beside a run, in the same folder, that have log lines; the newest last."""
    others = [other for other in Run.all(run.path.resolve().parent) if other.path.resolve() != run.path.resolve()]
    return [other for other in others if (other.path / "metrics.jsonl").exists()][-2:]


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


# ---- acceptance ------------------------------------------------------------------------------------------------------


class Expectation(NamedTuple):
    """A metric's range, and its last value; None where it was never logged."""

    metric: str
    low: float
    high: float
    value: float | None

    @property
    def met(self) -> bool:
        return self.value is not None and self.low <= self.value <= self.high

    def __str__(self) -> str:
        value = "was never logged; expected" if self.value is None else (
            f"is {self.value:.4f}, {'within' if self.met else 'outside'} the expected range"
        )
        return f"{self.metric} {value} {self.low:g} to {self.high:g}"


def refuse_wrong_ranges(expect: dict[str, list[float]]) -> None:
    """Raise RequestError where a range is not a lowest and a highest value, or nothing logs such a metric."""
    aliases = {metric.alert: name for name, metric in METRICS.items() if metric.alert}
    for metric, given in expect.items():
        close = get_close_matches(metric, METRICS, 1, cutoff=0.8)  # callbacks may log metrics of other names
        known = metric in METRICS or metric.startswith(tuple(f"{name}/" for name in BY_SOURCE))
        if not known and ("/" not in metric or close):
            meant = aliases.get(metric) or next(iter(close or get_close_matches(metric, METRICS, 1)), "val/loss")
            raise RequestError(f"expect: nothing logs a metric {metric!r}; did you mean {meant!r}?")
        if len(given) != 2 or not given[0] <= given[1]:
            raise RequestError(f"expect: {metric} {given} is no range: give [LOWEST, HIGHEST]")


def expectations(run: Run) -> list[Expectation]:
    """What the config of a run expects, with the last value that was logged of each metric."""
    found = []
    for metric, (low, high) in (run.settings().get("expect") or {}).items():
        values = [line[metric] for line in run.metrics(metric) if not math.isnan(line[metric])]
        found.append(Expectation(metric, low, high, values[-1] if values else None))
    return found


def acceptance(found: list[Expectation]) -> dict[str, Any]:
    """Expectations as they are kept in `run.json`."""
    checks = [{**each._asdict(), "met": each.met} for each in found]
    return {"passed": all(each.met for each in found), "checks": checks}


# ---- where the time went ---------------------------------------------------------------------------------------------


def time_spent(lines: list[dict[str, Any]], step: float = math.inf) -> dict[str, float]:
    """Seconds of a run by their use: `computing`, `waiting for data`, and `pauses`, such as validations and stops.

    A line's speed is that of the time without pauses, so tokens over speed is the time of training.

    Args:
        lines: `Run.metrics()`.
        step: the last optimizer step to count.
    """
    known = [line for line in lines if {"tokens", "time"} <= line.keys() and line["step"] <= step]
    trained = [line for line in known if line.get("perf/tokens_per_second", 0) > 0]
    training, waiting, tokens = [], 0.0, 0
    for line in trained:
        training.append((line["tokens"] - tokens) / line["perf/tokens_per_second"])
        waiting += training[-1] * line.get("perf/data_wait", 0.0)
        tokens = line["tokens"]
    elapsed = trained[-1]["time"] - trained[0]["time"] + training[0] if trained else 0.0
    spent = {"computing": sum(training) - waiting, "waiting for data": waiting}
    return {**spent, "pauses": max(0.0, elapsed - sum(training))}


# ---- a run while it trains -------------------------------------------------------------------------------------------

POINTS = 1024  # of a curve
CURVES = ("train/loss", "val/loss", "optim/lr", "optim/grad_norm", "perf/tokens_per_second")
ALERTS = 20  # the newest, that are kept


class LiveRun:
    """A run that is being watched: every `refresh` reads only the lines that are new.

    Attributes:
        state: the result of the last `refresh`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.state: dict[str, Any] = {}
        self._forget(None)

    def _forget(self, started: str | None) -> None:
        self._started = started  # the run, among others of the same name
        self._lines: list[dict[str, float]] = []  # of metrics.jsonl as `Run.metrics` has them, with `CURVES` alone
        self._alerts: list[dict[str, Any]] = []
        self._read: dict[str, int] = {}  # file -> bytes of it that were read

    def curve(self, metric: str, most: int = POINTS) -> Series:
        """One of `CURVES`, in at most `most` points."""
        return thin(curve(METRICS[metric].label, self._lines, metric), most)

    def refresh(self) -> dict[str, Any]:
        """Read what is new in the run's files.

        Returns:
            The object that `lm monitor --json` prints. `status` is `Run.status()`, or `gone` where the folder has
            vanished; the rest is then that of the refresh before. Times are in seconds; None is not known.
        """
        run, now = self.run, time.time()
        if not run.path.is_dir():
            self._forget(None)
            self.state = {"run": run.name, "path": str(run.path), **self.state, "status": "gone"}
            return self.state
        facts, live, beat = run.read("run.json"), run.read("state.json"), run.read("heartbeat.json")
        if facts.get("started") != self._started:  # another run has the name now
            self._forget(facts.get("started"))
        self._read_metrics()
        self._alerts = [*self._alerts, *filter(is_alert, self._new_lines("alerts.jsonl"))][-ALERTS:]
        status = run.status()
        validations = [line for line in self._lines if "val/loss" in line and math.isfinite(line["val/loss"])]
        best, best_step = min(((line["val/loss"], line["step"]) for line in validations), default=(None, None))
        self.state = {
            "run": run.name,
            "path": str(run.path),
            "status": status,
            "reason": facts.get("reason"),
            "phase": live.get("phase") if status == "running" else None,
            "host": facts.get("host"),
            "device": facts.get("device"),
            "world_size": facts.get("world_size"),
            "step": live.get("step"),
            "max_steps": live.get("max_steps"),
            "tokens": live.get("tokens"),
            "max_tokens": live.get("max_tokens"),
            "eta_seconds": _eta(live, now) if status == "running" else None,
            "metrics": live.get("metrics", {}),
            "sources": _sources(facts, live),
            "best_val_loss": best,
            "best_val_step": best_step,
            "checkpoint": _checkpoint(run, "last", now),
            "best_checkpoint": _checkpoint(run, "best", now),
            "machine": beat.get("machine") or None,
            "heartbeat_age_seconds": _age(now, beat.get("time")),
            "logged_age_seconds": _age(now, live.get("time")),
            "started_age_seconds": _age(now, facts.get("entered")),
            "alerts": self._alerts,
        }
        return self.state

    def _read_metrics(self) -> None:
        for line in filter(None, map(valid_metrics, self._new_lines("metrics.jsonl"))):
            if "resumed_at" in line:
                self._lines = [before for before in self._lines if before["step"] <= line["resumed_at"]]
            else:
                self._lines.append({name: line[name] for name in ("step", *CURVES) if name in line})

    def _new_lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file that were not read before and are whole."""
        begin = self._read.get(name, 0)
        try:
            with open(self.run.path / name, "rb") as file:
                file.seek(begin)
                added = file.read()
        except OSError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._read[name] = begin + len(whole)
        return [parse_line(line) for line in whole.splitlines()]


def _age(now: float, then: Any) -> float | None:
    """Seconds from `then` to `now`; 0 where a clock that was set back says that `then` is still to come."""
    return None if nonnegative(then) is None else max(0.0, now - then)


def _eta(live: dict[str, Any], now: float) -> float | None:
    """Seconds until the run ends: what the training wrote in its last log line, counted down since."""
    seconds = live.get("eta_seconds")
    return None if seconds is None else max(0.0, seconds - (_age(now, live.get("time")) or 0.0))


def _sources(facts: dict[str, Any], live: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of each source of a mixture its `share` of the next samples, and those of `BY_SOURCE` that are known."""
    if "mixture" not in facts:
        return {}
    try:
        names, stretch, metrics = facts["mixture"]["sources"], facts["stretches"][-1], live.get("metrics", {})
        sample = stretch["sample"] + (live.get("step", 0) - stretch["step"]) * stretch["global_batch"]
        shares = [shares for start, shares in facts["mixture"]["phases"] if start <= max(0, sample)][-1]
        return {
            name: {"share": share / sum(shares)}
            | {metric: metrics[f"{metric}/{name}"] for metric in BY_SOURCE if f"{metric}/{name}" in metrics}
            for name, share in zip(names, shares, strict=True)
        }
    except DAMAGE:
        return {}


def _checkpoint(run: Run, link: str, now: float) -> dict[str, Any] | None:
    path = run.link(link)
    step = STEP.fullmatch(path.name) if path else None
    try:
        age = _age(now, path.stat().st_mtime) if step else None
        return {"name": path.name, "step": int(step[1]), "age_seconds": age} if step else None
    except OSError:  # it has been removed
        return None
