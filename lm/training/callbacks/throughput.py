"""Tokens a second and model FLOPs utilisation, time spent waiting for data, and why training is too slow."""

import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule

from lm.errors import RequestError
from lm.system.hardware import device_name, peak_flops
from lm.system.units import Count, format_count
from lm.training.callback import Callback
from lm.training.callbacks.guards import act, agree
from lm.training.callbacks.run_folder import Heartbeat
from lm.training.trainer import Trainer

# ---- throughput ------------------------------------------------------------------------------------------------------
# Tokens a second and model FLOPs utilisation, over the time that was spent training.


class Throughput(Callback):
    """Measures from one log line to the next; validations and other pauses are not counted as training."""

    def __init__(self) -> None:
        self._since = 0.0
        self._paused = 0.0
        self._validation_began = 0.0
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since, self._paused, self._step = time.monotonic(), 0.0, trainer.global_step
        peak = peak_flops(device_name(pl_module.device), str(trainer.precision))
        self._peak = peak * trainer.world_size if peak else None

    def on_pause(self, trainer: Trainer, seconds: float) -> None:
        """So many seconds were not training."""
        self._paused += seconds

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_began = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused += time.monotonic() - self._validation_began

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Over the steps since it was last asked. The loss was read before, so the device has caught up."""
        now = time.monotonic()
        seconds = now - self._since - self._paused
        tokens = (trainer.global_step - self._step) * trainer.steps.tokens_per_step
        self._since, self._paused, self._step = now, 0.0, trainer.global_step
        rate = tokens / seconds
        metrics = {"perf/tokens_per_second": rate}
        if self._peak:
            metrics["perf/mfu"] = rate * pl_module.flops_per_token / self._peak
        return metrics


# ---- data wait -------------------------------------------------------------------------------------------------------
# How much of the time a training waits for its data.


class DataWait(Callback):
    """Times every fetch of a batch, from one log line to the next; validations and other pauses are not counted.

    On a CUDA device it is the device that counts: a fetch that takes place while it still computes costs nothing. Two
    events around a fetch tell how long it had nothing to do, and they are read at the log line, so nothing waits.
    """

    def __init__(self) -> None:
        self._since = self._paused = self._validation_began = 0.0
        self._on_gpu = False
        self._began: Any = None  # the fetch that is under way: seconds, or a CUDA event
        self._fetches: list[tuple[Any, Any]] = []  # when each began and ended

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's loop calls these two just before and just after it asks the loader, for its profilers.
        loop = trainer.fit_loop.epoch_loop
        before, after = loop._on_before_fetch, loop._on_after_fetch

        def begin() -> None:
            before()
            self._began = self._mark()

        def end() -> None:
            self._fetches.append((self._began, self._mark()))
            after()

        loop._on_before_fetch, loop._on_after_fetch = begin, end
        self._on_gpu = pl_module.device.type == "cuda"
        self._since, self._paused = time.monotonic(), 0.0

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_pause(self, trainer: Trainer, seconds: float) -> None:
        """So many seconds were not training."""
        self._paused += seconds

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_began = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused += time.monotonic() - self._validation_began

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """The share of the time since it was last asked. The loss was read before, so the device has caught up."""
        now = time.monotonic()
        seconds = now - self._since - self._paused
        waited = sum(a.elapsed_time(b) / 1000 if self._on_gpu else b - a for a, b in self._fetches)
        self._since, self._paused = now, 0.0
        self._fetches.clear()
        return {"perf/data_wait": min(waited / seconds, 1.0)}


# ---- throughput floor ------------------------------------------------------------------------------------------------
# Training is slower than it should be: not only said, but why.
#
# Each cause is a function from what is known to a clause, or to None where it is not the cause.

WAITING = 0.1  # share of the time without data that is worth a word
BUSY = 0.25  # share of the cores that others may take


@dataclass
class ThroughputConfig:
    """How fast training must be.

    Args:
        floor: Tokens a second over all devices; none: not looked at.
        patience: Log lines in a row below the floor before something is done.
        action: What is done beside saying why: `warn` is nothing.
    """

    floor: Count | None = None
    patience: int = 3
    action: Literal["warn", "checkpoint", "stop"] = "warn"

    def __post_init__(self) -> None:
        if self.floor is not None and self.floor < 1:
            raise RequestError(f"guards.throughput.floor {self.floor} must be at least 1")
        if self.patience < 1:
            raise RequestError(f"guards.throughput.patience {self.patience} must be at least 1")


@dataclass
class Facts:
    """What is known of a slow stretch, on rank zero.

    Args:
        rate: tokens a second over all devices, in the newest log line.
        floor: what it should be.
        lines: log lines in a row below that.
        data_wait: share of the time spent waiting for data, of the newest log line; None: not measured.
        compilations: graphs that torch.compile made in these lines,
        reason: and why it made the newest of them, in its words.
        on_gpu: whether it is a CUDA device.
        attention: the kernels that do the attention, in words.
        kernels: what the other operations run on, in words.
        limits: what limits the clocks of the GPUs, in words.
        load: processes that wanted a core in the last minute, on average.
        own_load: how many of them were this training's.
        cores: that there are.
    """

    rate: float
    floor: float
    lines: int
    data_wait: float | None = None
    compilations: int = 0
    reason: str = ""
    on_gpu: bool = False
    attention: str = ""
    kernels: str = ""
    limits: list[str] = field(default_factory=list)
    load: float = 0.0
    own_load: float = 0.0
    cores: int = 1


def waiting_for_data(facts: Facts) -> str | None:
    if facts.data_wait is None or facts.data_wait < WAITING:
        return None
    return f"waiting for data {facts.data_wait:.0%} of the time; is the storage of the shards slow?"


def recompiling(facts: Facts) -> str | None:
    if not facts.compilations:
        return None
    why = f", the last time because {facts.reason}" if facts.reason else ""
    return f"torch.compile made {facts.compilations} new graphs in {_lines(facts)}{why}"


def slow_attention(facts: Facts) -> str | None:
    if not facts.on_gpu:
        return None
    if "masked" in facts.attention:
        return f"attention is by a mask, not by flash ({facts.attention}): flash needs bf16 or fp16 and no dropout"
    if facts.attention.startswith("efficient"):
        return f"attention is not by flash ({facts.attention}): precision 32-true rules it out"
    return None


def plain_kernels(facts: Facts) -> str | None:
    if not (facts.on_gpu and facts.kernels.startswith("plain")):
        return None
    return f"kernels are {facts.kernels}"


def limited_clocks(facts: Facts) -> str | None:
    return f"clocks are limited: {'; '.join(facts.limits)}" if facts.limits else None


def shared_machine(facts: Facts) -> str | None:
    others = facts.load - facts.own_load
    if facts.load <= facts.cores or others < BUSY * facts.cores:
        return None
    return f"others use this machine: load {facts.load:.1f} on {facts.cores} cores, {facts.own_load:.1f} of it ours"


def _lines(facts: Facts) -> str:
    return "a log line" if facts.lines == 1 else f"{facts.lines} log lines"


CAUSES = (waiting_for_data, recompiling, slow_attention, plain_kernels, limited_clocks, shared_machine)


def diagnose(facts: Facts) -> str:
    """One line: how slow, since when, and why."""
    found = [clause for cause in CAUSES if (clause := cause(facts))]
    slow = f"{format_count(facts.rate)} tokens/s, below {format_count(facts.floor)} for {_lines(facts)}: "
    if found:
        return slow + "; ".join(found)
    wait = "not measured" if facts.data_wait is None else f"{facts.data_wait:.1%}"
    return slow + (
        f"no cause found (data wait {wait}, no new graphs, attention {facts.attention}, kernels {facts.kernels}, "
        f"no limit of clocks seen, load {facts.load:.1f} on {facts.cores} cores, {facts.own_load:.1f} of it ours)"
    )


class ThroughputFloor(Callback):
    """Says why when training is below its floor for some log lines, and again only after it was above it.

    The first log line of a session is not judged: in it kernels are compiled and caches are cold.

    Args:
        config: the floor, and what is done.
    """

    def __init__(self, config: ThroughputConfig) -> None:
        self.config = config
        self._first = True
        self._below = 0  # log lines in a row
        self._graphs = 0  # when the first of them began
        self._clock = (0.0, 0.0)  # seconds, and seconds of all threads, at the newest line above the floor

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first, self._below = True, 0

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """Look at a log line; called on every rank."""
        rate = metrics.get("perf/tokens_per_second")
        if self.config.floor is None or rate is None:
            return
        line = self._diagnosis(trainer, pl_module, metrics) if trainer.is_global_zero else None
        line = agree(trainer, line)
        if line is not None:
            act(trainer, pl_module, "throughput", self.config.action, line, save=self.config.action == "stop")

    def _diagnosis(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> str | None:
        """What there is to say of this log line."""
        rate = metrics["perf/tokens_per_second"]
        if self._first or rate >= self.config.floor:
            self._first, self._below = False, 0
            self._graphs = graphs_compiled()[0]
            self._clock = (time.monotonic(), time.process_time())
            return None
        self._below += 1
        if self._below != self.config.patience:
            return None
        seconds, busy = time.monotonic() - self._clock[0], time.process_time() - self._clock[1]
        graphs, reason = graphs_compiled()
        return diagnose(Facts(
            rate=rate, floor=self.config.floor, lines=self._below, data_wait=metrics.get("perf/data_wait"),
            compilations=graphs - self._graphs, reason=reason, on_gpu=pl_module.device.type == "cuda",
            attention=pl_module.attention_kernels, kernels=pl_module.kernels_taken, limits=_limits(trainer),
            load=_load(), own_load=busy / seconds * trainer.num_devices, cores=os.cpu_count() or 1,
        ))  # fmt: skip


def graphs_compiled() -> tuple[int, str]:
    """How many graphs torch.compile has made in this process, and why it made the newest again, in its words."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # there only where something is compiled
    if dynamo is None:
        return 0, ""
    reasons = [str(reason) for failures in dynamo.guard_failures.values() for reason in failures[-1:]]
    newest = (reasons or [""])[-1].partition("\n")[0]
    return dynamo.counters["stats"]["unique_graphs"], newest.partition(": ")[2] or newest  # without graphs' numbers


def _limits(trainer: Trainer) -> list[str]:
    """What limits the clocks of the GPUs, by the newest heartbeat: `GPU 0: thermal`."""
    beats = [callback.latest for callback in trainer.callbacks if isinstance(callback, Heartbeat)]
    gpus = [gpu for beat in beats for gpu in beat.get("gpus") or []]
    return [f"GPU {gpu['index']}: {', '.join(gpu['clocks_limited_by'])}" for gpu in gpus if gpu["clocks_limited_by"]]


def _load() -> float:
    """Processes that wanted a core in the last minute, on average; 0 where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0
