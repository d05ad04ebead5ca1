"""`lm profile`: where the time of a training step goes.

`Parts` follows Lightning's spans through a fit of `cli/bench`, and gives each moment to one part of the step. `Trace`
traces a few more steps with torch's profiler.
"""

import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.profiler
from jsonargparse import Namespace
from lightning.pytorch.profilers import Profiler
from rich.console import Console
from rich.table import Column, Table
from torch.autograd.profiler import record_function

from lm.cli.bench import WARMUP, describe_training, fit_briefly, print_heading, synchronize
from lm.cli.config import config_parser
from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.system.units import Count, format_count
from lm.training.callbacks.checkpoints import Checkpoints
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

TRACE_WARMUP, TRACED = 1, 3  # optimizer steps: the first one under torch's profiler is slower
OPERATORS = 10
VALIDATED = 8  # optimizer steps' worth of tokens that are validated on at most
# The last part of a span's name -> the part of a step. Spans nest: `training_step` is a whole optimizer step, with the
# micro-batches in it. A span that is not here belongs to the part around it. Outside of all spans is the rest: the
# loop's own work.
SPANS = {
    "train_dataloader_next": "data",
    "batch_to_device": "data",
    "training_step": "optimizer",
    "forward_backward": "forward",
    "manual_backward": "backward",
}
TITLES = {
    "data": "waiting for data", "forward": "forward pass", "backward": "backward pass",
    "optimizer": "clipping and optimizer", "logging": "log lines and other callbacks",
    "checkpoint": "waiting for checkpoints", "validation": "validation", "rest": "the rest of the loop",
}  # fmt: skip
RANGE = "lm."  # begins the names of the parts in a trace
FORMULAS = {
    "parts": "mean over the middle half, by time, of the steps that no log line and no checkpoint follows, plus "
    "each_ms / interval_steps",
    "each_ms": "median over the steps where it happens, less that mean",
    "validation": "each_ms / interval_steps; of its batches some were run, and their time scaled to all",
    "ms_per_step": "the same of whole steps, by the clock",
    "share": "of the sum of all parts",
    "mean_ms_per_step": "of all timed steps as they were, with the log lines and checkpoints among them",
    "undisturbed_ms_per_step": "median of whole steps where the device is waited for only at their ends",
}


@dataclass
class ProfileOptions:
    """The options of `lm profile` beside those of a training.

    Args:
        steps: Optimizer steps that are timed; at least 6.
        trace: Trace a few more steps to this file, such as trace.json or trace.json.gz, for https://ui.perfetto.dev or
            chrome://tracing, and list the most expensive operators.
        json: Print one JSON object instead of tables.
    """

    steps: Count = Count(30)
    trace: str | None = None
    json: bool = False


def profile(arguments: list[str]) -> None:
    """Say where the time of a training step goes: `lm profile --config X [--steps N] [--trace FILE] [--json]`.

    It trains on the config's data or, where that is not made yet, on random tokens.

    Args:
        arguments: what stands after `lm profile`.

    Raises:
        RequestError: the config or the command line is wrong.
        RunError: a signal came before the end.
    """
    config = config_parser("lm profile", ProfileOptions).read(arguments)
    if config.steps < 6:
        raise RequestError(f"--steps {config.steps} must be at least 6")
    found = measure_parts(config)
    if config.json:
        print(json.dumps(found))
    else:
        show_parts(found)


def measure_parts(config: Namespace) -> dict[str, Any]:
    """Train for some steps and report the parts of a step.

    Args:
        config: as `ConfigParser.read` gives it, with `steps` and `trace`.

    Raises:
        RequestError: the config is wrong.
        RunError: a signal came before the end.
    """
    first = WARMUP + config.steps // 3  # steps whose parts are not timed
    trace = Trace(config.trace, first + config.steps) if config.trace else None
    last = 1 + (trace.last if trace else first + config.steps)
    parts = Parts(first, lambda step: trace.at_step(step, parts) if trace else None)
    own_data = config.data.path is None or (Path(config.data.path) / "manifest.json").exists()
    intervals = {
        "logging": config.trainer.log_interval, "checkpoint": config.trainer.checkpoint_interval,
        "validation": config.trainer.val_interval,
    }  # fmt: skip
    wanted, config.data.val_tokens = config.data.val_tokens, _val_tokens(config.data)
    trainer = fit_briefly(
        config, last, own_data=own_data, watch=parts.watch, profiler=parts,
        val_interval=last,  # the last step has the one validation and is not among the timed ones
        log_interval=min(config.trainer.log_interval, config.steps // 3),
        checkpoint_interval=min(config.trainer.checkpoint_interval, config.steps // 3),
    )  # fmt: skip
    timed = parts.steps[first : first + config.steps]
    unseen = _unseen(trainer.datamodule, wanted, config.data.val_tokens)
    return {
        **describe_training(config, trainer),
        "data": "the config's" if own_data else "random tokens, as the config's is not made yet",
        "steps": config.steps,
        **account(timed, parts.steps[-1], unseen, intervals, trainer.log_interval),
        "undisturbed_ms_per_step": statistics.median(times.whole for times in parts.steps[WARMUP:first]) * 1e3,
        "trace": config.trace,
        "operators": trace.operators if trace else None,
        "formulas": FORMULAS,
    }


def _val_tokens(data: Namespace) -> int:
    """Tokens of the one validation."""
    most = VALIDATED * (data.global_batch_tokens or data.micro_batch_size * data.seq_len)
    return min(data.val_tokens or most, most)


def _unseen(data: DataModule, wanted: int | None, validated: int) -> float:
    """How many times as many tokens the validations of a training have."""
    if not data.has_validation:
        return 0.0
    there = int(data.shards["val"].windows(data.seq_len).sum()) * data.seq_len
    return min(wanted or there, there) / min(validated, there)


# ---- parts of a step -------------------------------------------------------------------------------------------------


class Label(NamedTuple):
    """The part of a step that a moment was spent on."""

    part: str
    callback: str | None = None  # whose hook it was


REST = Label("rest")
SAVING = Label("checkpoint")


class StepTimes(NamedTuple):
    """Where the time of one optimizer step went, with all that followed before the next one."""

    step: int
    seconds: dict[Label, float]  # each moment once
    whole: float  # seconds on the clock, from one end of a step to the next

    def part(self, part: str) -> float:
        """Seconds of one part, the hooks of all callbacks together."""
        return sum(seconds for label, seconds in self.seconds.items() if label.part == part)

    @property
    def saved(self) -> bool:
        """Whether it was followed by a checkpoint."""
        return SAVING in self.seconds


class Parts(Profiler):
    """Follows Lightning's spans and adds up seconds by part, step by step.

    The device is waited for wherever one part ends and another begins. Otherwise its work would count in the part that
    happens to wait for it.

    Args:
        borders_from: the optimizer step after which that is so; up to there it is waited for at the ends of steps.
        at_step: called with each optimizer step when it has ended, between two steps.

    Attributes:
        steps: the finished steps, in order.
        tracing: whether the parts are marked for a running torch profiler.
    """

    def __init__(self, borders_from: int, at_step: Callable[[int], None]) -> None:
        super().__init__()
        self.steps: list[StepTimes] = []
        self.tracing = False
        self._borders_from = borders_from
        self._at_step = at_step
        self._spans: list[tuple[Label | None, record_function | None]] = []  # those that are open, outermost first
        self._now: Label | None = None  # None: in no span
        self._since = self._step_since = time.perf_counter()
        self._seconds: dict[Label, float] = defaultdict(float)

    def watch(self, trainer: Trainer, module: LanguageModule) -> None:
        """Follow this fit; the forward and the backward pass become spans too, as Lightning knows the step only."""
        self._trainer = trainer
        for name in ("forward_backward", "manual_backward"):
            setattr(module, name, self._as_span(name, getattr(module, name)))

    def _as_span(self, name: str, method: Callable) -> Callable:
        def call(*args: Any) -> Any:
            with self.profile(name):
                return method(*args)

        return call

    def start(self, action_name: str) -> None:
        """A span begins."""
        hook = action_name.rpartition(".")[2]
        if hook in ("train_dataloader_next", "on_train_epoch_end"):
            self._end_step()
        label = self._label(action_name, hook)
        mark = None
        if self.tracing and label not in (None, self._now):
            mark = record_function(RANGE + label.part)
            mark.__enter__()
        self._spans.append((label, mark))
        self._enter(label)

    def stop(self, action_name: str) -> None:
        """The innermost span ends."""
        _, mark = self._spans.pop()
        self._enter(self._spans[-1][0] if self._spans else None)
        if mark is not None:
            mark.__exit__(None, None, None)

    def _label(self, action: str, hook: str) -> Label | None:
        """The part that a span inside the innermost open one belongs to."""
        around = self._now
        if hook == "save_checkpoint":
            return SAVING
        if around is not None and (around == SAVING or around.callback):
            return around
        name = re.match(r"\[Callback\](\w+)", action)
        if name and name[1] == Checkpoints.__name__:
            return Label("checkpoint", name[1])
        if self._trainer.validating:
            return Label("validation", name[1] if name else None)
        if name:
            return Label("logging", name[1])
        return Label(SPANS[hook]) if hook in SPANS else around

    def _enter(self, label: Label | None) -> None:
        """Count the time since the last border, and spend what comes on `label`."""
        if label == self._now:
            return
        if self._step > self._borders_from:
            synchronize(self._trainer.strategy.root_device)
        now = time.perf_counter()
        spent = self._now or (Label("validation") if self._trainer.validating else REST)
        self._seconds[spent] += now - self._since
        self._since, self._now = now, label

    @property
    def _step(self) -> int:
        """The optimizer step that is under way."""
        return len(self.steps) + 1

    def _end_step(self) -> None:
        if self._trainer.global_step < self._step:
            return
        synchronize(self._trainer.strategy.root_device)
        now = time.perf_counter()
        self._seconds[self._now or REST] += now - self._since
        self.steps.append(StepTimes(self._step, dict(self._seconds), now - self._step_since))
        self._seconds.clear()
        self._at_step(len(self.steps))
        self._since = self._step_since = time.perf_counter()


class Trace:
    """Traces a few steps with torch's profiler.

    Args:
        path: file of the trace; one that ends in `.gz` is compressed.
        begin: the optimizer step after which the profiler runs.

    Attributes:
        operators: the most expensive ones, `name`, `calls_per_step`, `ms_per_step` and `share` of all.
        last: the optimizer step that has to be taken.

    Raises:
        RequestError: the file's folder is not there.
    """

    def __init__(self, path: str, begin: int) -> None:
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir() or self.path.is_dir():
            raise RequestError(f"--trace {path}: give a file in a folder that is there")
        self.operators: list[dict[str, Any]] = []
        self._begin, self.last = begin, begin + TRACE_WARMUP + TRACED
        self._profiler: torch.profiler.profile | None = None

    def at_step(self, step: int, parts: Parts) -> None:
        """Start, count and stop; called between two steps."""
        if step == self._begin:
            plan = torch.profiler.schedule(wait=0, warmup=TRACE_WARMUP, active=TRACED, repeat=1)
            self._profiler = torch.profiler.profile(schedule=plan, on_trace_ready=self._keep)
            self._profiler.start()
            parts.tracing = True
        elif self._profiler is not None:
            self._profiler.step()
            if step == self.last:
                parts.tracing = False
                self._profiler.stop()
                self._profiler = None

    def _keep(self, profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(self.path))
        entries = [entry for entry in profiler.key_averages() if not entry.is_user_annotation]
        entries = [entry for entry in entries if not entry.key.startswith((RANGE, "ProfilerStep"))]
        on_device = any(entry.self_device_time_total for entry in entries)
        if on_device:  # the operators alone: the kernels that they started have entries of their own, too
            entries = [entry for entry in entries if entry.device_type.name == "CPU"]
        cost = {id(entry): entry.self_device_time_total if on_device else entry.self_cpu_time_total
                for entry in entries}  # microseconds without those of the operators inside
        whole = sum(cost.values())
        for entry in sorted(entries, key=lambda entry: -cost[id(entry)])[:OPERATORS]:
            self.operators.append({
                "name": entry.key, "calls_per_step": entry.count / TRACED,
                "ms_per_step": cost[id(entry)] / 1e3 / TRACED, "share": cost[id(entry)] / whole,
            })  # fmt: skip


# ---- report ----------------------------------------------------------------------------------------------------------


def account(
    timed: list[StepTimes], validated: StepTimes, unseen: float, intervals: dict[str, int], log_interval: int
) -> dict[str, Any]:
    """The parts of a step, in milliseconds, as `FORMULAS` says.

    Args:
        timed: steps that no validation follows.
        validated: one that a validation follows, if there is validation data.
        unseen: how many times as long the batches of a whole validation take.
        intervals: optimizer steps between the log lines (`logging`), checkpoints and validations of the config.
        log_interval: and between the log lines among the timed steps.
    """
    happens: dict[str, Callable[[StepTimes], bool]] = {
        "logging": lambda times: times.step % log_interval == 0,
        "checkpoint": lambda times: times.saved,
    }
    usual = timed
    for event in happens.values():
        usual = [times for times in usual if not event(times)] or usual  # or it follows every step
    # Not medians: those of the parts would not add up to that of the whole.
    quarter = len(usual) // 4
    middle = sorted(usual, key=lambda times: times.whole)[quarter : len(usual) - quarter]
    parts = {part: {"ms_per_step": _mean_ms(times.part(part) for times in middle)} for part in TITLES}
    whole = _mean_ms(times.whole for times in middle)
    extra = {}  # milliseconds each time
    for part, event in happens.items():
        times_of_event = [times.part(part) * 1e3 for times in timed if event(times)]
        extra[part] = statistics.median(times_of_event) - parts[part]["ms_per_step"] if times_of_event else 0.0
    extra["validation"] = sum(seconds * (1 if label.callback else unseen) * 1e3
                              for label, seconds in validated.seconds.items() if label.part == "validation")
    for part, each in extra.items():
        parts[part] |= {"each_ms": each, "interval_steps": intervals[part]}
        parts[part]["ms_per_step"] += each / intervals[part]
        whole += each / intervals[part]
    total = sum(part["ms_per_step"] for part in parts.values())
    for part in parts.values():
        part["share"] = part["ms_per_step"] / total
    return {
        "ms_per_step": whole, "sum_ms": total, "mean_ms_per_step": _mean_ms(times.whole for times in timed),
        "parts": parts, "callbacks": _callbacks(timed),
    }  # fmt: skip


def _callbacks(timed: list[StepTimes]) -> dict[str, float]:
    """Mean milliseconds a step of each callback's hooks, the slowest first."""
    names = {label.callback for times in timed for label in times.seconds if label.part == "logging"}
    mean = {name: _mean_ms(times.seconds.get(Label("logging", name), 0.0) for times in timed) for name in names}
    return dict(sorted(mean.items(), key=lambda item: -item[1]))


def _mean_ms(seconds: Iterable[float]) -> float:
    """The mean of times in seconds, in milliseconds."""
    return statistics.mean(seconds) * 1e3


def show_parts(found: dict[str, Any]) -> None:
    """Print the report as tables."""
    console = Console(highlight=False)
    print_heading(console, found)
    console.print(f"data: {found['data']}")
    table = Table("part of a step", "ms", "share", "each time", "every")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, part in found["parts"].items():
        title = TITLES[name]
        if found["cuda_graphs"] and name == "forward":
            title = "forward and backward pass, replayed"
        each = f"{part['each_ms']:.1f} ms" if part.get("each_ms") else ""
        every = f"{part['interval_steps']} steps" if part.get("each_ms") else ""
        table.add_row(title, f"{part['ms_per_step']:.2f}", f"{part['share']:.1%}", each, every)
    table.add_section()
    table.add_row("all of them", f"{found['sum_ms']:.2f}", "100.0%")
    console.print(table)
    rate = found["tokens_per_step"] / found["ms_per_step"] * 1e3
    slowest = ", ".join(f"{name} {ms:.2f} ms" for name, ms in list(found["callbacks"].items())[:3])
    console.print(f"a step by the clock: {found['ms_per_step']:.2f} ms, {format_count(rate)} tokens/s")
    console.print(f"the slowest callbacks, a step: {slowest}")
    if found["operators"]:
        _show_operators(console, found)
    if found["accelerator"] == "cpu":
        console.print("other work on this CPU changes the milliseconds; the shares are more reliable")
    else:
        console.print(
            "the parts were timed one after the other, with the device waited for in between; without that a step "
            f"takes {found['undisturbed_ms_per_step']:.2f} ms"
        )


def _show_operators(console: Console, found: dict[str, Any]) -> None:
    where = "on the CPU" if found["accelerator"] == "cpu" else "on the device"
    table = Table(Column("operator", overflow="fold"), "calls a step", "ms a step", f"share {where}")
    for column in table.columns[1:]:
        column.justify = "right"
    for operator in found["operators"]:
        table.add_row(operator["name"], f"{operator['calls_per_step']:.0f}", f"{operator['ms_per_step']:.2f}",
                      f"{operator['share']:.1%}")  # fmt: skip
    console.print(table)
    console.print(f"trace: {found['trace']}, for https://ui.perfetto.dev or chrome://tracing")
