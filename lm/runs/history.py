"""What a run's files say of its past: metrics while they are written, curves, settings, samples, time spent.

`lm monitor`, `lm runs` and the notebooks read it. Nothing here imports torch or writes into the run.
"""

import json
import logging
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lm.runs.run import ALERT_SHAPE, STEP, Run, valid_metrics
from lm.system.files import fits, flatten, nonnegative, parse_json
from lm.system.units import format_count

# ---- metrics ---------------------------------------------------------------------------------------------------------


class Metric(NamedTuple):
    """How a logged metric is shown, wherever it is."""

    label: str
    unit: str = ""  # of an axis
    form: str = "{:.4g}"  # of a value
    short: str = ""  # where there is little space; else the label
    alert: str = ""  # its name in the conditions of alerts
    chart: tuple[str, str] | None = None  # category and name of its chart in TensorBoard

    def shown(self, value: float) -> str:
        """A value for people."""
        return format_count(value) if self.form == "count" else self.form.format(value)


NATS = "nats a token"
LOSSES, OPTIMIZATION, THROUGHPUT = ("loss", "training and validation"), "optimization", "throughput"
METRICS = {  # every metric of metrics.jsonl and TensorBoard, but those of the tasks of an evaluation
    "train/loss": Metric("loss", NATS, "{:.4f}", alert="loss", chart=LOSSES),
    "train/max_loss": Metric("highest loss of a step", NATS, "{:.4f}", alert="max_loss"),
    "train/perplexity": Metric("training perplexity", form="{:.2f}", alert="perplexity"),
    "optim/lr": Metric("learning rate", "", "{:.2e}", "lr", "lr", (OPTIMIZATION, "learning rate")),
    "optim/grad_norm": Metric(
        "gradient norm", "L2 norm before clipping", "{:.3g}", alert="grad_norm", chart=(OPTIMIZATION, "gradient norm")
    ),
    "optim/param_norm": Metric("parameter norm", "L2 norm", alert="param_norm"),
    "val/loss": Metric("validation loss", NATS, "{:.4f}", alert="val_loss", chart=LOSSES),
    "val/perplexity": Metric("validation perplexity", form="{:.2f}", short="perplexity", alert="val_perplexity"),
    "val/bpb": Metric("validation bits per byte", "bits a byte", "{:.4f}", "bits per byte", "val_bpb"),
    "eval/core": Metric("mean centred accuracy", form="{:.4f}", alert="core"),
    "perf/tokens_per_second": Metric(
        "tokens a second", "tokens a second", "count", "tokens/s", "tokens_per_second", (THROUGHPUT, "tokens a second")
    ),
    "perf/mfu": Metric("MFU", "share of the peak", "{:.1%}", alert="mfu", chart=(THROUGHPUT, "MFU")),
    "perf/data_wait": Metric("waiting for data", "share of the time", "{:.1%}", alert="data_wait"),
    "perf/gpu_load": Metric("GPU load", "percent", alert="gpu_load"),
    "perf/gpu_temperature": Metric("GPU temperature", "degrees Celsius", alert="gpu_temperature"),
    "perf/gpu_power": Metric("GPU power", "watts", alert="gpu_power"),
    "perf/cpu_load": Metric("CPU load", "percent", alert="cpu_load"),
    "mem/process_gib": Metric("memory of the process", "GiB", alert="process_gib"),
    "mem/gpu_gib": Metric("memory of the fullest GPU", "GiB", alert="gpu_gib"),
    "mem/cuda_peak_gib": Metric("peak memory of tensors", "GiB", alert="cuda_peak_gib"),
    "data/tokens": Metric("tokens", "tokens", "count", alert="tokens"),
    "data/skipped_samples": Metric("skipped samples", "samples", "{:,.0f}"),
    "data/injected": Metric("injected samples", form="{:.0f}"),
}


# ---- watch -----------------------------------------------------------------------------------------------------------
# What a run's files say of it, again and again: each look reads only what was added since the one before.
#
# `monitor` asks, `dashboard` draws. Nothing here writes into the run.

BLOCK = 2**25  # bytes of a file that one look reads at most
PARSED = 4000  # lines of a block that are parsed, if there are more; those of validations and of resumes all are
RECENT = 256  # lines at the end of a block that are parsed in any case
POINTS = 1024  # of a curve
CURVES = ("train/loss", "val/loss", "optim/lr", "optim/grad_norm", "perf/tokens_per_second")
ALERTS = 20  # the newest, that are kept


class LiveRun:
    """One run that is being watched.

    Attributes:
        curves: by the name of the metric.
        state: what the last look found.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.state: dict[str, Any] = {}
        self._metrics = Lines(run.path / "metrics.jsonl")
        self._alert_lines = Lines(run.path / "alerts.jsonl")
        self._forget()

    def _forget(self) -> None:
        self.curves = {name: Curve() for name in CURVES}
        self._validations: list[tuple[int, float]] = []
        self._alerts: deque[dict[str, Any]] = deque(maxlen=ALERTS)
        self._pace = Pace()

    @property
    def behind(self) -> bool:
        """Whether there is more to read than the last look took."""
        return self._metrics.behind or self._alert_lines.behind

    def look(self) -> dict[str, Any]:
        """How the run stands.

        Returns:
            For programs, see `lm monitor --json`: `status` is `Run.status()`, or `gone` where the folder has vanished;
            the rest is then what was seen last. Times are in seconds, what is not known is None.
        """
        run, now = self.run, time.time()
        if not run.path.is_dir():
            self.state = {"run": run.name, "path": str(run.path), **self.state, "status": "gone"}
            return self.state
        self._read()
        facts, live, beat = run.read("run.json"), run.read("state.json"), run.read("heartbeat.json")
        step, last = live.get("step"), live.get("max_steps")
        status = run.status()
        finite = [(loss, step) for step, loss in self._validations if math.isfinite(loss)]
        best, best_step = min(finite, default=(None, None))
        self.state = {
            "run": run.name,
            "path": str(run.path),
            "status": status,
            "reason": facts.get("reason"),
            "phase": live.get("phase") if status == "running" else None,
            "host": facts.get("host"),
            "device": facts.get("device"),
            "world_size": facts.get("world_size"),
            "step": step,
            "max_steps": last,
            "tokens": live.get("tokens"),
            "max_tokens": live.get("max_tokens"),
            "eta_seconds": self._pace.eta(step, last, now) if status == "running" and last else None,
            "metrics": live.get("metrics") or {},
            "best_val_loss": best,
            "best_val_step": best_step,
            "checkpoint": _checkpoint(run, "last", now),
            "best_checkpoint": _checkpoint(run, "best", now),
            "machine": beat.get("machine") or None,
            "heartbeat_age_seconds": _age(now, beat.get("time")),
            "logged_age_seconds": _age(now, live.get("time")),
            "started_age_seconds": _age(now, facts.get("entered")),
            "alerts": list(self._alerts),
        }
        return self.state

    def _read(self) -> None:
        if self._metrics.replaced():
            self._forget()
            self._alert_lines.rewind()
        lines = worth_parsing(self._metrics.read())
        for entry in filter(None, (valid_metrics(parse(line)) for line in lines)):
            if "resumed_at" in entry:
                self._go_back(entry["resumed_at"])
            else:
                self._add(entry)
        self._alerts.extend(alert for line in self._alert_lines.read() if fits(alert := parse(line), ALERT_SHAPE))

    def _add(self, entry: dict[str, Any]) -> None:
        step = entry["step"]
        for name, curve in self.curves.items():
            if name in entry:
                curve.add(step, entry[name])
        if "val/loss" in entry:
            self._validations.append((step, entry["val/loss"]))
        self._pace.add(step, entry.get("time", 0.0), "train/loss" not in entry)

    def _go_back(self, step: int) -> None:
        """As `Run.metrics` does: what lies beyond the checkpoint that was resumed from does not count."""
        for curve in self.curves.values():
            curve.cut(step)
        self._validations = [(at, loss) for at, loss in self._validations if at <= step]
        self._pace.restart()


def _age(now: float, then: Any) -> float | None:
    """Seconds; 0 of what is to come, by a clock that was set back."""
    return None if nonnegative(then) is None else max(0.0, now - then)


def _checkpoint(run: Run, link: str, now: float) -> dict[str, Any] | None:
    path = run.link(link)
    step = STEP.fullmatch(path.name) if path else None
    try:
        age = _age(now, path.stat().st_mtime) if step else None
        return {"name": path.name, "step": int(step[1]), "age_seconds": age} if step else None
    except OSError:  # removed in between
        return None


# ---- files that grow -------------------------------------------------------------------------------------------------


class Lines:
    """The lines of a file that grows, each once and only when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.behind = False
        self.rewind()

    def rewind(self) -> None:
        """Begin at the beginning again."""
        self._offset, self._inode, self._half = 0, None, b""

    def replaced(self) -> bool:
        """Whether this is another file than the one that was read, or a shorter one; it then is read anew."""
        try:
            facts = os.stat(self.path)
        except OSError:
            return False
        other = self._inode not in (None, facts.st_ino) or facts.st_size < self._offset
        if other:
            self.rewind()
        self._inode = facts.st_ino
        return other

    def read(self) -> list[bytes]:
        """The lines that were added, from at most `BLOCK` bytes; none where there is no file."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                block = file.read(BLOCK)
        except OSError:
            block = b""
        self.behind = len(block) == BLOCK
        self._offset += len(block)
        *lines, self._half = (self._half + block).split(b"\n")
        return lines


def worth_parsing(lines: list[bytes]) -> list[bytes]:
    """All lines; of very many, some: evenly spread ones, the last ones, and those that tell what no neighbour does."""
    stride = len(lines) // PARSED + 1
    if stride == 1:
        return lines
    end = len(lines) - RECENT
    return [
        line for index, line in enumerate(lines)
        if index % stride == 0 or index >= end or b'"val/loss"' in line or b'"resumed_at"' in line
    ]  # fmt: skip


def parse(line: bytes) -> dict[str, Any]:
    """A line's object; empty where a kill cut it short."""
    try:
        entry = parse_json(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


# ---- what they add up to ---------------------------------------------------------------------------------------------


class Curve:
    """Means of a metric over stretches of equally many steps, few enough to draw however long the run is."""

    def __init__(self, points: int = POINTS) -> None:
        self._most = points
        self._span = 1  # steps of a stretch
        self._stretches: list[list[float]] = []  # number of the stretch; sums of steps and values, how many they are

    def add(self, step: int, value: float) -> None:
        """One more value; steps ascend."""
        self._put([step // self._span, step, value, 1] if math.isfinite(value) else [step // self._span, 0.0, 0.0, 0])
        self._merge()

    def _merge(self) -> None:
        while len(self._stretches) > self._most:
            self._span *= 2
            stretches, self._stretches = self._stretches, []
            for stretch, *sums in stretches:
                self._put([stretch // 2, *sums])

    def _put(self, stretch: list[float]) -> None:
        if self._stretches and self._stretches[-1][0] == stretch[0]:
            self._stretches[-1][1:] = [a + b for a, b in zip(self._stretches[-1][1:], stretch[1:], strict=True)]
        else:
            self._stretches.append(stretch)

    def cut(self, step: int) -> None:
        """Forget what came after a step, to the precision of a stretch."""
        while self._stretches and self._stretches[-1][0] * self._span > step:
            self._stretches.pop()

    def points(self, most: int | None = None) -> tuple[list[float], list[float]]:
        """Steps and values, at most so many; a value that is not a number where there was none in a stretch."""
        if most and len(self._stretches) > most:
            fewer = Curve(most)
            fewer._span, fewer._stretches = self._span, [list(stretch) for stretch in self._stretches]
            fewer._merge()
            return fewer.points()
        steps = [steps / count if count else number * self._span for number, steps, _, count in self._stretches]
        return steps, [values / count if count else math.nan for _, _, values, count in self._stretches]


class Pace:
    """How long steps and validations take, by the newest ones; a median, so that a hiccup does not move it.

    The first log line begins the first interval: what it took to start and to compile is in none.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=50)  # seconds a step
        self._validations: deque[float] = deque(maxlen=10)  # seconds
        self._validated: deque[int] = deque(maxlen=2)  # steps
        self._before: tuple[int, float] | None = None  # step and time of the line before
        self._between = 0  # steps between two log lines

    def restart(self) -> None:
        """The run is gone on with, perhaps elsewhere: what was measured before does not count."""
        self._steps.clear()
        self._validations.clear()
        self._before = None

    def add(self, step: int, at: float, validation: bool) -> None:
        """A log line, written at a time, after its step or, if it is a validation's, after that."""
        if validation:
            self._validated.append(step)
        if self._before is not None:
            steps, seconds = step - self._before[0], at - self._before[1]
            if validation and (self._steps or steps == 0):
                training = steps * statistics.median(self._steps) if steps else 0.0
                self._validations.append(max(0.0, seconds - training))
            elif not validation and steps > 0:
                self._steps.append(seconds / steps)
                self._between = steps
        self._before = (step, at)

    def eta(self, step: int, last: int, now: float) -> float | None:
        """Seconds until the last step is done and validated; None before two log lines were written."""
        if not self._steps or self._before is None:
            return None
        pace = statistics.median(self._steps)
        left = (last - step) * pace
        if self._validations:
            every = self._validated[-1] - (self._validated[0] if len(self._validated) > 1 else 0)
            coming = math.ceil(last / every) - step // every if every > 0 else 0
            left += coming * statistics.median(self._validations)
        since = min(max(0.0, now - self._before[1]), self._between * pace, left)  # it counts down until the next line
        return left - since if step < last else 0.0


# ---- curves ----------------------------------------------------------------------------------------------------------
# Curves of a run: what its log lines have of a metric, what TensorBoard's event files have, and whether they agree.


@dataclass(frozen=True)
class Series:
    """One curve: values that are not finite leave a gap.

    Args:
        name: what the legend says.
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
    """The exponential moving average with the bias of its beginning taken out, as TensorBoard's slider has it.

    Args:
        values: one curve; what is not finite passes through and is not averaged.
        weight: of what was before, 0 (nothing is smoothed) to below 1.
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


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


class Agreement(NamedTuple):
    """How a metric's log lines and its points in TensorBoard compare.

    Args:
        metric: its name in both.
        points: steps that are in both.
        only_in_lines: steps that `metrics.jsonl` alone has.
        only_in_events: steps that the event files alone have.
        largest_difference: of two values of a step, relative to the larger; event files hold single precision, which
            is 6e-8 at most.
    """

    metric: str
    points: int
    only_in_lines: int
    only_in_events: int
    largest_difference: float

    @property
    def agrees(self) -> bool:
        """Whether both have the same steps, and the same values but for rounding."""
        return not self.only_in_lines and not self.only_in_events and self.largest_difference < 1e-6


def event_curves(run: Run) -> dict[str, Series]:
    """Every scalar of a run's TensorBoard files over steps, by tag, as TensorBoard itself would show it."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(run.path), size_guidance={SCALARS: 0})  # 0: all of them
    logger = logging.getLogger("tensorboard")
    told = logger.level
    logger.setLevel(logging.ERROR)  # it warns of every resume, which is nothing to worry about
    try:
        events.Reload()
    finally:
        logger.setLevel(told)
    points = {tag: events.Scalars(tag) for tag in events.Tags()[SCALARS]}
    return {tag: Series(tag, [one.step for one in ones], [one.value for one in ones]) for tag, ones in points.items()}


def compare_with_events(run: Run) -> list[Agreement]:
    """Every metric of `metrics.jsonl` beside its points in TensorBoard, by name."""
    lines, events = run.metrics(), event_curves(run)
    metrics = sorted({name for line in lines for name in line if "/" in name})
    return [_agreement(metric, curve(metric, lines, metric), events.get(metric)) for metric in metrics]


def _agreement(metric: str, logged: Series, shown: Series | None) -> Agreement:
    ours = dict(zip(logged.x, logged.y, strict=True))
    theirs = {} if shown is None else dict(zip(shown.x, shown.y, strict=True))
    both = ours.keys() & theirs.keys()
    apart = [abs(ours[step] - theirs[step]) / max(abs(ours[step]), abs(theirs[step]), 1e-30) for step in both]
    return Agreement(metric, len(both), len(ours) - len(both), len(theirs) - len(both), max(apart, default=0.0))


# ---- settings --------------------------------------------------------------------------------------------------------
# What runs were made with, and in what they differ.


def differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys in which configs differ, with the value of each; None where it is not set."""
    flat = [flatten(config) for config in configs]
    keys = sorted(set().union(*flat) - {"run"})
    values = {key: [one.get(key) for one in flat] for key in keys}
    return {key: those for key, those in values.items() if any(value != those[0] for value in those)}


def labels(runs: Sequence[Run]) -> list[str]:
    """The runs' names; with the folders that they lie in where one name stands for several."""
    names = [run.path.resolve().name for run in runs]
    return [
        name if names.count(name) == 1 else str(Path(*run.path.resolve().parts[-3:]))
        for name, run in zip(names, runs, strict=True)
    ]


def beside(run: Run, most: int = 2) -> list[Run]:
    """Other runs of the same folder that have log lines, the newest last.

    Args:
        most: of them, the newest.
    """
    others = [other for other in Run.all(run.path.resolve().parent) if other.path.resolve() != run.path.resolve()]
    return [other for other in others if (other.path / "metrics.jsonl").exists()][-most:] if most else []


# ---- samples ---------------------------------------------------------------------------------------------------------
# What a run wrote from its prompts while it was trained.


def read_samples(run: Run) -> list[dict[str, Any]]:
    """The lines of `samples.jsonl` by step: `step`, `tokens`, `prompt`, `text`.

    A run that went on from a checkpoint wrote the samples of later steps again; the later line counts.
    """
    try:
        lines = (run.path / "samples.jsonl").read_bytes().split(b"\n")
    except OSError:
        return []
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines:
        try:
            sample = json.loads(line)
        except ValueError:  # a line that a kill cut short
            continue
        found[sample["step"], sample["prompt"]] = sample
    return sorted(found.values(), key=lambda sample: sample["step"])


def spread(steps: list[int], most: int) -> list[int]:
    """At most so many of ascending steps, evenly spread; the last is among them, and the first where there is room."""
    if len(steps) <= most:
        return steps
    if most == 1:
        return steps[-1:]
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


# ---- throughput ------------------------------------------------------------------------------------------------------
# Where the time of a run went, from one log line to the next: computing, waiting for data, and pauses.

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
