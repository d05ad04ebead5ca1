"""Logging of a training: `metrics.jsonl`, `state.json`, log lines, throughput, the time left, a progress bar."""

import logging
import math
import os
import socket
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from lm.runs.metrics import METRICS
from lm.system.process import steady_time
from lm.system.units import format_count, format_duration
from lm.training.callback import Callback, call_hook
from lm.training.callbacks.tensorboard import EventFile
from lm.training.lightning_patches import around_fetches
from lm.training.module import LanguageModule
from lm.training.pace import validations_left
from lm.training.trainer import Trainer

# ---- log lines -------------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)
lines = logging.getLogger("lm.lines")  # the command line shows them if there is no progress bar


class RunLog(Callback):
    """Writes every metric once, at its optimizer step.

    The metrics are those of `logged_metrics` of the module and of every callback, and what a custom callback or module
    passed to Lightning's `log`; `on_metrics` of every callback receives them, on every rank. Non-finite values are
    not written, because JSON cannot represent them.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._validation_began = 0.0
        self._before: dict[str, Any] = {}  # values passed to Lightning's `log` before the validation
        self._compiling: float | None = None  # time since which it has been compiling

    def on_fit_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.is_global_zero:
            trainer.log_to(EventFile(trainer.run, resumed_at=trainer.run_state.start.step))
            for logger in trainer.own_loggers:
                from lm.training.callbacks.call_thread import LoggerThread

                LoggerThread(logger)
                logger.log_hyperparams({"run": trainer.run.name, **trainer.run.settings()})

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self._compiles = pl_module.options.compile != "none"
        self._early = trainer.global_step + EARLY_STEPS
        write_state(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
        if self._compiles:
            self._compiles, self._compiling = False, time.monotonic()
            log.info("compiling with %s in the first step, which may take minutes", pl_module.options.compile)
            write_state(trainer, "compiling")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
        step = trainer.global_step
        if self._compiling is not None:
            log.info("compiled: the first step took %s", format_duration(time.monotonic() - self._compiling))
            self._compiling = None
            write_state(trainer)
        if step <= self._early:
            trainer.run_state.pace.add_line(step, time.monotonic())
            write_state(trainer)
        if step % self.interval and step != trainer.max_steps:
            return
        metrics = pl_module.logged_metrics()
        validated = trainer.run_state.validated
        from_module = {name: value for name, value in trainer.logged_metrics.items() if name not in validated}
        for numbers in call_hook(trainer, "logged_metrics", pl_module):
            for name, value in numbers.items():  # perhaps a tensor; a callback replaces no metric that is there
                metrics.setdefault(name, value if isinstance(value, int) else float(value))
        log_metrics(trainer, pl_module, {name: value.item() for name, value in from_module.items()} | metrics)

    def on_validation_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.fitting:
            self._validation_began = time.monotonic()
            self._before = dict(trainer.logged_metrics)
            write_state(trainer, "validating")

    def on_validation_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.fitting:
            call_hook(trainer, "on_pause", time.monotonic() - self._validation_began, "validation")
            metrics = {name: value for name, value in trainer.callback_metrics.items() if _kind(name) == "val"}
            logged = trainer.logged_metrics.items()
            changed = {name: value for name, value in logged if value is not self._before.get(name)}
            trainer.run_state.validated |= changed.keys()
            log_metrics(trainer, pl_module, {name: value.item() for name, value in (changed | metrics).items()})

    def on_pause(self, trainer: Trainer, seconds: float, kind: str) -> None:
        trainer.run_state.pace.add_pause(trainer.global_step, seconds, kind)


def log_metrics(trainer: Trainer, pl_module: LanguageModule, metrics: dict[str, float]) -> None:
    """Write metrics of this optimizer step, and pass them to `on_metrics` of every callback; call it on every rank.

    All of them are of one kind: of a validation, of an evaluation, or of training.
    """
    if trainer.is_global_zero:
        _write(trainer, metrics)
    call_hook(trainer, "on_metrics", pl_module, metrics)


def _write(trainer: Trainer, logged: dict[str, float]) -> None:
    state, metrics = trainer.run_state, {name: value for name, value in logged.items() if math.isfinite(value)}
    step, tokens = trainer.global_step, trainer.tokens_seen
    for logger in trainer.loggers:
        logger.log_metrics({**metrics, "data/tokens": tokens}, step=step)
    for logger in trainer.own_loggers:
        logger.save()  # as Lightning does at each of its log steps; some loggers write nothing before
    of_line = dict(zip(OF_EVERY_LINE, (step, tokens, steady_time())))
    trainer.run.append("metrics.jsonl", of_line | metrics | of_line)
    kinds = {_kind(name, state.validated) for name in logged}
    others = {name: value for name, value in state.latest.items() if _kind(name, state.validated) not in kinds}
    state.latest = others | metrics  # a metric that is not in its newest line is no longer known
    if "train" in kinds:
        state.pace.add_line(step, time.monotonic())
    write_state(trainer)
    # A validation scrolls by above a progress bar.
    (log if "val" in kinds else lines).info(format_line(step, trainer.max_steps, metrics))


def write_state(trainer: Trainer, phase: str = "training") -> None:
    """Replace `state.json`; `phase` is `compiling`, `training`, `validating` or `evaluating`."""
    if not trainer.is_global_zero:
        return
    trainer.run.write_state(
        {
            "run": trainer.run.name,
            "status": "running",
            "phase": phase,
            "step": trainer.global_step,
            "max_steps": trainer.max_steps,
            "tokens": trainer.tokens_seen,
            "max_tokens": trainer.steps.tokens(trainer.max_steps),
            "metrics": trainer.run_state.latest,
            "eta_seconds": seconds_left(trainer),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
        }
    )


def seconds_left(trainer: Trainer) -> float | None:
    """Seconds until the last step is done; None if not known yet."""
    return trainer.run_state.pace.rest(*remaining(trainer))


def _kind(name: str, validated: Collection[str] = ()) -> str:
    """The kind of log line that a metric belongs to: `val`, `eval`, or otherwise `train`."""
    group = "val" if name in validated else name.split("/")[0]
    return group if group in ("val", "eval") else "train"


EARLY_STEPS = 3  # of a session; their times are known before there are log lines
OF_EVERY_LINE = ("step", "tokens", "time")  # of `metrics.jsonl`; no metric may replace them
LINE_METRICS = (
    "train/loss", "optim/lr", "optim/grad_norm", "val/loss", "val/perplexity", "val/bpb", "eval/core",
    "perf/mfu", "perf/mfu_full_attention",
)  # fmt: skip


def format_line(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    parts = [
        f"{metric.short or metric.label} {metric.shown(metrics[name])}"
        for name, metric in METRICS.items()
        if name in LINE_METRICS and name in metrics
    ]
    parts += [
        f"{name.removeprefix(loss)} {value:.4f}"
        for loss in ("train/loss/", "val/loss/")
        for name, value in metrics.items()
        if name.startswith(loss)
    ]  # of each source of a mixture
    if "eval/core" not in metrics:
        parts += [
            f"{name.removeprefix('eval/').removesuffix('/accuracy')} {value:.1%}"
            for name, value in metrics.items()
            if name.endswith("/accuracy")
        ]
    if "perf/tokens_per_second" in metrics:
        parts.append(f"{format_count(metrics['perf/tokens_per_second'])} tokens/s")
    return f"step {step}/{max_steps}  " + "  ".join(parts)


# ---- speed and time left ---------------------------------------------------------------------------------------------


class Throughput(Callback):
    """Measures throughput between log lines; pauses such as validations do not count as training.

    Every fetch of a batch is timed. On a CUDA device a fetch costs nothing while the device still computes: two events
    around the fetch give the time in which the device was idle, and are read at the log line.
    """

    def __init__(self) -> None:
        self._since = self._paused = 0.0
        self._step = 0
        self._on_gpu = False
        self._times: list[Any] = []  # start and end of each fetch, in seconds or as CUDA events

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self._peak = trainer.device_peak and trainer.device_peak * trainer.world_size
        around_fetches(trainer, self._note_time)
        self._on_gpu = pl_module.device.type == "cuda"
        self._since, self._paused, self._step = time.monotonic(), 0.0, trainer.global_step

    def _note_time(self) -> None:
        self._times.append(torch.cuda.Event(enable_timing=True) if self._on_gpu else time.monotonic())
        if self._on_gpu:
            self._times[-1].record()

    def on_pause(self, trainer: Trainer, seconds: float, kind: str) -> None:
        self._paused += seconds

    def logged_metrics(self, trainer: Trainer, pl_module: LanguageModule) -> dict[str, Any]:
        """Throughput of the steps since the last call. The loss was read before, so the device is synchronized."""
        now = time.monotonic()
        seconds = now - self._since - self._paused
        tokens = trainer.steps.tokens(trainer.global_step) - trainer.steps.tokens(self._step)
        fetches = zip(self._times[::2], self._times[1::2])
        waited = sum(a.elapsed_time(b) / 1000 if self._on_gpu else b - a for a, b in fetches)
        self._since, self._paused, self._step = now, 0.0, trainer.global_step
        self._times.clear()
        rate = tokens / seconds
        metrics = {"perf/tokens_per_second": rate, "perf/data_wait": min(waited / seconds, 1.0)}
        if self._peak:
            metrics["perf/mfu"] = rate * pl_module.flops_per_token() / self._peak
            metrics["perf/mfu_full_attention"] = rate * pl_module.flops_per_token(full_attention=True) / self._peak
        return metrics


def remaining(trainer: Trainer) -> tuple[int, int]:
    step, end = trainer.global_step, trainer.max_steps
    validations = validations_left(step, end, trainer.options.val_interval) if trainer.datamodule.has_validation else 0
    return end - step, validations


# ---- progress bar ----------------------------------------------------------------------------------------------------


class ProgressBar(Callback):
    """Shows the step, the time left and the newest metrics in a terminal."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if not (trainer.is_global_zero and sys.stderr.isatty()):
            return
        self._progress = Progress(  # the terminal wraps the lines above it, so that a command can be copied
            BarColumn(None, table_column=Column(max_width=40)),
            TextColumn("{task.completed}/{task.total} steps{task.description}", markup=False),
            console=Console(stderr=True, soft_wrap=True),
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("", total=trainer.max_steps, completed=trainer.global_step)
        self._progress.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
        step = trainer.global_step
        if self._progress is not None:
            shown = ("train/loss", "perf/tokens_per_second", "perf/mfu", "perf/mfu_full_attention")
            newest = {name: value for name, value in trainer.run_state.latest.items() if name in shown}
            seconds = seconds_left(trainer)
            left = f"  {format_duration(seconds)} left" if seconds else ""
            metrics = format_line(step, trainer.max_steps, newest).partition("  ")[2]
            self._progress.update(self._task, completed=step, description=f"{left}  {metrics}")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self._progress is not None:
            with suppress(OSError):  # the terminal was closed
                self._progress.stop()
            self._progress = None

    on_exception = on_train_end
    on_cut_off = on_train_end
