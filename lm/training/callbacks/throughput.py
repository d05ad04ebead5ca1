"""Tokens a second, model FLOPs utilisation, time spent waiting for data, and why training is too slow."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lm.kernels.torch_private import compiled_graphs
from lm.model.fused import is_fused
from lm.system.units import format_count
from lm.training.callback import Callback
from lm.training.callbacks.guards import act, from_rank_zero
from lm.training.callbacks.run_folder import Heartbeat
from lm.training.config import ThroughputConfig
from lm.training.lightning_patches import around_fetches
from lm.training.trainer import Trainer

# ---- measuring -------------------------------------------------------------------------------------------------------


class Throughput(Callback):
    """Measures from one log line to the next; pauses such as validations do not count as training.

    Every fetch of a batch is timed. On a CUDA device a fetch costs nothing while the device still computes: two events
    around the fetch give the time in which the device had no work, and they are read at the log line.
    """

    def __init__(self) -> None:
        self._since = self._paused = 0.0
        self._step = 0
        self._on_gpu = False
        self._fetch_began: Any = None  # seconds, or a CUDA event
        self._fetches: list[tuple[Any, Any]] = []  # when each began and ended

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak = trainer.device_peak and trainer.device_peak * trainer.world_size
        around_fetches(trainer, self._begin_fetch, self._end_fetch)
        self._on_gpu = pl_module.device.type == "cuda"
        self._since, self._paused, self._step = time.monotonic(), 0.0, trainer.global_step

    def _begin_fetch(self) -> None:
        self._fetch_began = self._now()

    def _end_fetch(self) -> None:
        self._fetches.append((self._fetch_began, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def on_pause(self, trainer: Trainer, seconds: float, kind: str) -> None:
        self._paused += seconds

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Of the steps since the last call. The loss was read before this, so the device has caught up."""
        now = time.monotonic()
        seconds = now - self._since - self._paused
        tokens = (trainer.global_step - self._step) * trainer.steps.tokens_per_step
        waited = sum(a.elapsed_time(b) / 1000 if self._on_gpu else b - a for a, b in self._fetches)
        self._since, self._paused, self._step = now, 0.0, trainer.global_step
        self._fetches.clear()
        rate = tokens / seconds
        metrics = {"perf/tokens_per_second": rate, "perf/data_wait": min(waited / seconds, 1.0)}
        if self._peak:
            metrics["perf/mfu"] = rate * pl_module.flops_per_token() / self._peak
            metrics["perf/mfu_full_attention"] = rate * pl_module.flops_per_token(full_attention=True) / self._peak
        return metrics


# ---- diagnosis -------------------------------------------------------------------------------------------------------

DATA_WAIT = 0.1  # part of the time without data from which on data is named as a cause


@dataclass
class Facts:
    """What is known of a slow training, on rank zero."""

    rate: float  # tokens a second over all devices, in the newest log line
    floor: float
    lines: int  # log lines in a row below the floor
    data_wait: float | None = None  # part of the time, in the newest log line
    compilations: int = 0  # graphs that torch.compile made in these lines
    reason: str = ""  # torch's, for making the newest of them
    on_gpu: bool = False
    attention: str = ""  # its kernels, in words
    masked: bool = False  # attention of some layer takes a dense mask
    full_precision: bool = False  # 32-true
    kernels: str = ""  # of the other operations, in words
    plain: bool = False  # these are PyTorch's
    limits: list[str] = field(default_factory=list)  # of the GPUs' clocks, in words


def causes(facts: Facts) -> list[str]:
    """A clause for every known cause of a low throughput."""
    found = []
    if facts.data_wait is not None and facts.data_wait >= DATA_WAIT:
        found.append(f"waiting for data {facts.data_wait:.0%} of the time; is the storage of the shards slow?")
    if facts.compilations:
        why = f", the last time because {facts.reason}" if facts.reason else ""
        found.append(f"torch.compile made {facts.compilations} new graphs in {_log_lines(facts)}{why}")
    if facts.on_gpu and facts.masked:
        found.append(f"attention is by a mask, not by flash ({facts.attention}): windows and documents need bf16 or "
                     "fp16, heads of at most 256, and no dropout")  # fmt: skip
    elif facts.on_gpu and facts.full_precision:
        found.append(f"attention is not by flash ({facts.attention}): precision 32-true rules it out")
    if facts.on_gpu and facts.plain:
        found.append(f"kernels are {facts.kernels}")
    if facts.limits:
        found.append(f"clocks are limited: {'; '.join(facts.limits)}")
    return found


def diagnose(facts: Facts) -> str:
    """One line: how slow, for how long, and why."""
    slow = f"{format_count(facts.rate)} tokens/s, below {format_count(facts.floor)} for {_log_lines(facts)}: "
    if found := causes(facts):
        return slow + "; ".join(found)
    wait = "not measured" if facts.data_wait is None else f"{facts.data_wait:.1%}"
    return slow + (
        f"no cause found (data wait {wait}, no new graphs, attention {facts.attention}, kernels {facts.kernels}, "
        "no limit of clocks seen)"
    )


def _log_lines(facts: Facts) -> str:
    return "a log line" if facts.lines == 1 else f"{facts.lines} log lines"


class ThroughputFloor(Callback):
    """Names the cause when training is below its floor for some log lines, and again only after it was above it.

    The first log line of a session is not judged: in it kernels are compiled and caches are cold.
    """

    def __init__(self, config: ThroughputConfig) -> None:
        self.config = config
        self._first = True
        self._below = 0  # log lines in a row
        self._graphs = 0  # when the first of them began

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first, self._below = True, 0

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        if self.config.floor is None or "perf/tokens_per_second" not in metrics:
            return
        line = self._diagnosis(trainer, pl_module, metrics) if trainer.is_global_zero else None
        line = from_rank_zero(trainer, line)
        if line is not None:
            action = self.config.action if trainer.global_step < trainer.max_steps else "warn"
            act(trainer, pl_module, "throughput", action, line, save=action == "stop")

    def _diagnosis(self, trainer: Trainer, module: LightningModule, metrics: dict[str, float]) -> str | None:
        """The diagnosis of this log line, if one is due."""
        rate = metrics["perf/tokens_per_second"]
        graphs, reason = compiled_graphs()
        if self._first or rate >= self.config.floor:
            self._first, self._below, self._graphs = False, 0, graphs
            return None
        self._below += 1
        if self._below != self.config.patience:
            return None
        return diagnose(Facts(
            rate=rate, floor=self.config.floor, lines=self._below, data_wait=metrics.get("perf/data_wait"),
            compilations=graphs - self._graphs, reason=reason, on_gpu=module.device.type == "cuda",
            attention=module.built.attention, masked="masked" in module.built.attention,
            full_precision=trainer.precision == "32-true", kernels=module.built.kernels,
            plain=not is_fused(module.decoder), limits=_clock_limits(trainer),
        ))  # fmt: skip


def _clock_limits(trainer: Trainer) -> list[str]:
    """What limits the clocks of the GPUs, by the newest heartbeat: `GPU 0: thermal`."""
    beats = [callback.latest for callback in trainer.callbacks if isinstance(callback, Heartbeat)]
    gpus = [gpu for beat in beats for gpu in beat.get("gpus") or []]
    return [f"GPU {gpu['index']}: {', '.join(gpu['clocks_limited_by'])}" for gpu in gpus if gpu["clocks_limited_by"]]
