"""Logging of a training: TensorBoard, `metrics.jsonl`, `state.json`, log lines, the time left, a progress bar."""

import logging
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback as LightningCallback
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from lm.errors import RunError
from lm.model.huggingface import to_huggingface
from lm.runs.metrics import METRICS
from lm.runs.run import Run
from lm.system.arguments import shown
from lm.system.files import append_bytes
from lm.system.process import steady_time
from lm.system.units import format_count, format_duration
from lm.training.callback import Callback, call_hook
from lm.training.callbacks.loggers import LoggerThread
from lm.training.lightning_patches import replace_event_file
from lm.training.trainer import Trainer

if TYPE_CHECKING:  # it takes a quarter of a second, which `lm plan` need not wait for
    from torch.utils.tensorboard import SummaryWriter

# ---- log lines -------------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)
lines = logging.getLogger("lm.lines")  # the command line shows them where there is no progress bar


class RunLog(Callback):
    """Writes every metric once, under the optimizer step that it belongs to.

    The metrics are those of `logged_metrics` of the module and of every callback, and what a custom callback or module
    gave to Lightning's `log`; `on_metrics` of every callback gets them, on every rank. A value that is not finite is
    not written, because JSON has no notation for it.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.latest: dict[str, Any] = {}  # the newest value of each metric
        self.pace = StepTimeEstimator()
        self._validation_began = 0.0
        self._before: dict[str, Any] = {}  # what Lightning's `log` was given before the validation
        self._of_validations: set[str] = set()  # names that it was given in validations
        self._compiling: float | None = None  # since when

    @classmethod
    def of(cls, trainer: Trainer) -> "RunLog":
        """The one of this trainer."""
        return next(callback for callback in trainer.callbacks if isinstance(callback, cls))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            trainer.log_to(EventFile(trainer.run, resumed_at=trainer.run_state.start.step))
            trainer.logger.experiment.add_custom_scalars(LAYOUT)
            for logger in trainer.own_loggers:
                LoggerThread(logger)
                logger.log_hyperparams({"run": trainer.run.name, **trainer.run.settings()})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._compiles = pl_module.options.compile != "none"
        self.write_state(trainer, "running")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """torch compiles in the first step."""
        if self._compiles:
            self._compiles, self._compiling = False, time.monotonic()
            log.info("compiling with %s in the first step, which may take minutes", pl_module.options.compile)
            self.write_state(trainer, "running", phase="compiling")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if self._compiling is not None:
            log.info("compiled: the first step took %s", format_duration(time.monotonic() - self._compiling))
            self._compiling = None
            self.write_state(trainer, "running")
        if step % self.interval and step != trainer.max_steps:
            return
        metrics = pl_module.logged_metrics()
        for callback in trainer.callbacks:
            if hasattr(callback, "logged_metrics"):
                found = metrics_of_callback(callback, callback.logged_metrics(trainer, pl_module))
                if taken := found.keys() & {*metrics, *OF_EVERY_LINE}:
                    name = type(callback).__name__
                    raise RunError(f"{name}.logged_metrics returned {min(taken)!r}, and the log line has a metric of "
                                   f"that name: call it '{name.lower()}/...'")  # fmt: skip
                metrics |= found
        own = {name: value for name, value in trainer.logged_metrics.items() if name not in self._of_validations}
        self.log_metrics(trainer, pl_module, _numbers(own) | metrics)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fitting:
            self._validation_began = time.monotonic()
            self._before = dict(trainer.logged_metrics)
            self.write_state(trainer, "running", phase="validating")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fitting:
            call_hook(trainer, "on_pause", time.monotonic() - self._validation_began, "validation")
            metrics = {name: value for name, value in trainer.callback_metrics.items() if _kind(name) == "val"}
            own = {name: value for name, value in trainer.logged_metrics.items() if value is not self._before.get(name)}
            self._of_validations |= own.keys()
            self.log_metrics(trainer, pl_module, _numbers(own | metrics))

    def on_pause(self, trainer: Trainer, seconds: float, kind: str) -> None:
        self.pace.add_pause(trainer.global_step, seconds, kind)

    def log_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """Write metrics of this optimizer step, and hand them to `on_metrics` of every callback; call it on every rank.

        All of them are of one kind: of a validation, of an evaluation, or of training.
        """
        if trainer.is_global_zero:
            self._write(trainer, metrics)
        call_hook(trainer, "on_metrics", pl_module, metrics)

    def _write(self, trainer: Trainer, logged: dict[str, float]) -> None:
        metrics = {name: value for name, value in logged.items() if math.isfinite(value)}
        step, tokens = trainer.global_step, trainer.tokens_seen
        for logger in trainer.loggers:
            logger.log_metrics({**metrics, "data/tokens": tokens}, step=step)
        for logger in trainer.own_loggers:
            logger.save()  # which Lightning does at each of its log steps; some write nothing before
        of_line = zip(OF_EVERY_LINE, (step, tokens, steady_time()))
        trainer.run.append_metrics(dict(of_line) | {k: v for k, v in metrics.items() if k not in OF_EVERY_LINE})
        kinds = {self._kind(name) for name in logged}
        others = {name: value for name, value in self.latest.items() if self._kind(name) not in kinds}
        self.latest = others | metrics  # a metric that its newest line does not have is not known any more
        if "train" in kinds:
            self.pace.add_line(step, time.monotonic())
        self.write_state(trainer, "running")
        lines.info(format_line(step, trainer.max_steps, metrics))

    def _kind(self, name: str) -> str:
        return "val" if name in self._of_validations else _kind(name)

    def eta(self, trainer: Trainer) -> float | None:
        """Seconds until the last step is done; None where it is not known yet."""
        return self.pace.rest(*remaining(trainer))

    def write_state(self, trainer: Trainer, status: str, phase: str = "training") -> None:
        """Replace `state.json`; `phase` is `compiling`, `training`, `validating` or `evaluating`."""
        if not trainer.is_global_zero:
            return
        trainer.run.write_state({
            "run": trainer.run.name,
            "status": status,
            "phase": phase,
            "step": trainer.global_step,
            "max_steps": trainer.max_steps,
            "tokens": trainer.tokens_seen,
            "max_tokens": trainer.steps.tokens(trainer.max_steps),
            "metrics": self.latest,
            "eta_seconds": self.eta(trainer),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
        })


def _numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in metrics.items()}


def metrics_of_callback(callback: LightningCallback, metrics: Any) -> dict[str, float]:
    """What `logged_metrics` of a callback returned, as plain numbers."""
    returned = f"{type(callback).__name__}.logged_metrics returned"
    if not isinstance(metrics, Mapping):
        raise RunError(f"{returned} a {type(metrics).__name__}: it returns a dictionary of numbers by name")
    numbers = {name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
               for name, value in metrics.items()}  # fmt: skip
    for name, value in numbers.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            raise RunError(f"{returned} {shown(value)} for {name!r}: a metric is a number")
    return {name: value if isinstance(value, int) else float(value) for name, value in numbers.items()}


def _kind(name: str) -> str:
    """Which lines a metric is in: `val`, `eval`, or `train` for all others."""
    group = name.split("/")[0]
    return group if group in ("val", "eval") else "train"


OF_EVERY_LINE = ("step", "tokens", "time")  # of `metrics.jsonl`; no metric may replace them
LINE_METRICS = (
    "train/loss", "optim/lr", "optim/grad_norm", "val/loss", "val/perplexity", "val/bpb", "eval/core",
    "perf/mfu", "perf/mfu_full_attention",
)  # fmt: skip


def format_line(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    """A log line for people."""
    parts = [
        f"{metric.short or metric.label} {metric.shown(metrics[name])}"
        for name, metric in METRICS.items() if name in LINE_METRICS and name in metrics
    ]  # fmt: skip
    parts += [f"{name.removeprefix(loss)} {value:.4f}" for loss in ("train/loss/", "val/loss/")
              for name, value in metrics.items() if name.startswith(loss)]  # of each source of a mixture
    if "eval/core" not in metrics:
        parts += [f"{name.removeprefix('eval/').removesuffix('/accuracy')} {value:.1%}"
                  for name, value in metrics.items() if name.endswith("/accuracy")]  # fmt: skip
    if "perf/tokens_per_second" in metrics:
        parts.append(f"{format_count(metrics['perf/tokens_per_second'])} tokens/s")
    return f"step {step}/{max_steps}  " + "  ".join(parts)


# ---- time left -------------------------------------------------------------------------------------------------------

KEPT_LINES = 100  # of the newest, that a pace is the median of


class StepTimeEstimator:
    """How long the steps of a training take, and its rest: one estimate for log lines, progress bar and budget.

    A step counts as the median over log lines, a validation as the median of all, so that one slow part does not
    count. The line in which a session starts is left out. Other pauses, such as evaluations, count by the step: those
    after the first over the steps since then.
    """

    def __init__(self) -> None:
        self.steps: deque[float] = deque(maxlen=KEPT_LINES)  # seconds a step, of each log line
        self.validations: deque[float] = deque(maxlen=KEPT_LINES)  # seconds
        self.pauses: deque[tuple[int, float]] = deque(maxlen=KEPT_LINES)  # after which step, and seconds
        self.newest_step = -1  # of a log line
        self._newest_time = self._paused = 0.0  # of that line, and seconds of pauses since then

    def add_line(self, step: int, now: float) -> tuple[float, int] | None:
        """Count a log line of training; returns the seconds and steps since the one before, if there is one."""
        interval = (now - self._newest_time, step - self.newest_step) if self.newest_step >= 0 else None
        if interval and interval[1]:
            self.steps.append((interval[0] - self._paused) / interval[1])
        self.newest_step, self._newest_time, self._paused = step, now, 0.0
        return interval

    def add_pause(self, step: int, seconds: float, kind: str) -> None:
        """Count a pause after a step, as callbacks' `on_pause` have it."""
        self._paused += seconds
        if kind == "validation":
            self.validations.append(seconds)
        else:
            self.pauses.append((step, seconds))

    def rest(self, steps: int, validations: int) -> float | None:
        """Seconds that so many steps and validations will take; None before two log lines."""
        if not self.steps:
            return None
        seconds = steps * median(self.steps) + validations * median(self.validations or [0.0])
        if self.pauses and (since := self.pauses[-1][0] - self.pauses[0][0]):
            seconds += steps * sum(pause for step, pause in self.pauses if step > self.pauses[0][0]) / since
        return seconds


def remaining(trainer: Trainer) -> tuple[int, int]:
    """Optimizer steps and validations that are still to come."""
    step, end = trainer.global_step, trainer.max_steps
    validations = validations_left(step, end, trainer.val_interval) if trainer.datamodule.has_validation else 0
    return end - step, validations


def validations_left(step: int, max_steps: int, interval: int) -> int:
    """Validations after a step: one every `interval` steps, and one after the last step."""
    return max_steps // interval - step // interval + (max_steps % interval > 0)


# ---- progress bar ----------------------------------------------------------------------------------------------------


class ProgressBar(Callback):
    """On a terminal: the step, the time that is left and the newest metrics; validations scroll by above it."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (trainer.is_global_zero and sys.stderr.isatty()):
            return
        self._progress = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn("steps, elapsed"), TimeElapsedColumn(),
            TextColumn("{task.description}"), console=Console(stderr=True),
        )  # fmt: skip
        self._task = self._progress.add_task("", total=trainer.max_steps, completed=trainer.global_step)
        self._progress.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if self._progress is not None:
            log = RunLog.of(trainer)
            shown = ("train/loss", "perf/tokens_per_second", "perf/mfu", "perf/mfu_full_attention")
            newest = {name: value for name, value in log.latest.items() if name in shown}
            text = format_line(step, trainer.max_steps, newest).partition("  ")[2]
            if (seconds := log.eta(trainer)) is not None:
                text = f"{format_duration(seconds)} left  {text}"
            self._progress.update(self._task, completed=step, description=text)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._progress is not None:
            newest = {name: value for name, value in RunLog.of(trainer).latest.items() if name.startswith("val/")}
            with suppress(OSError):  # the terminal was closed, and there is a checkpoint to take
                text = format_line(trainer.global_step, trainer.max_steps, newest)
                self._progress.console.print(text, highlight=False)

    def on_train_end(self, *args: Any) -> None:
        if self._progress is not None:
            with suppress(OSError):  # the terminal was closed
                self._progress.stop()
            self._progress = None

    on_exception = on_train_end


# ---- TensorBoard -----------------------------------------------------------------------------------------------------

LAYOUT: dict[str, dict[str, list]] = {}  # the Custom Scalars tab: category -> chart -> its curves
for _name, _metric in METRICS.items():
    if _metric.chart is not None:
        _category, _chart = _metric.chart
        LAYOUT.setdefault(_category, {}).setdefault(_chart, ["Multiline", []])[1].append(_name)


class EventFile(TensorBoardLogger):
    """TensorBoard's event file of a run, and nothing beside it. Every event is on the disk when a method returns.

    TensorBoard forgets what earlier files of the folder have of steps later than `resumed_at`, which is 0 in a new run;
    nothing where that is None.
    """

    def __init__(self, run: Run, resumed_at: int | None = None) -> None:
        purge = None if resumed_at is None else resumed_at + 1
        super().__init__(str(run.path.parent), run.path.name, version="", default_hp_metric=False, purge_step=purge)
        self._run = run
        self._opened = False

    @property
    def experiment(self) -> "SummaryWriter":
        """torch's SummaryWriter, which writes nothing where the disk is full instead of failing from then on."""
        if not self._opened:
            # Files are read in the order of their names, which begin with the second: not that of an earlier session.
            names = (path.name.split(".")[3:4] for path in self._run.path.glob("events.out.tfevents.*"))
            taken = {int(second) for [second] in names if second.isdigit()}
            while int(time.time()) in taken:
                time.sleep(0.05)
            replace_event_file(super().experiment, lambda path: _TolerantFile(path, self._run))
            self._opened = True
        return super().experiment

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write the values of a step as one event."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self.experiment.file_writer.add_summary(Summary(value=values), step)
        self.experiment.flush()

    def save(self) -> None:
        """Nothing: Lightning would write hparams.yaml."""


class _TolerantFile:
    """The file below TensorBoard's writer, whose thread ends for good at the first write that raises."""

    def __init__(self, path: Path, run: Run) -> None:
        self._attempt = run.attempt
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, record: bytes) -> None:
        self._attempt("TensorBoard's event file", lambda: append_bytes(self._descriptor, record))

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        os.close(self._descriptor)


# ---- histograms ------------------------------------------------------------------------------------------------------

BUCKETS = 30  # that TensorBoard draws


class Histograms(Callback):
    """Writes histograms of the decoder's weights to TensorBoard, under Hugging Face's names.

    They are counted on the device: `SummaryWriter.add_histogram` copies every weight to the host and takes a second for
    25 million of them. Shards of a weight are gathered, one weight at a time.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step % self.interval:
            return
        for name, parameter in pl_module.decoder.named_parameters():
            weight = parameter.detach()
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # on every rank
            if not trainer.is_global_zero:
                continue
            parts = to_huggingface({name: weight}, pl_module.config) if pl_module.builtin else {name: weight}
            for part, values in parts.items():
                if (histogram := count_values(values)) is not None:
                    writer = trainer.logger.experiment
                    writer.add_histogram_raw(f"weights/{part}", **histogram, global_step=trainer.global_step)


def count_values(values: Tensor) -> dict[str, Any] | None:
    """A histogram as `SummaryWriter.add_histogram_raw` takes it; None where a value is not finite."""
    flat = values.flatten().float()
    low, high = (bound.item() for bound in flat.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    width = max((high - low) / BUCKETS, 1e-30)
    counts = torch.bincount(((flat - low) / width).to(torch.uint8).clamp_(max=BUCKETS - 1), minlength=BUCKETS)
    return {
        "min": low, "max": high, "num": flat.numel(), "sum": flat.sum(dtype=torch.float64).item(),
        "sum_squares": flat.square().sum(dtype=torch.float64).item(), "bucket_counts": counts.tolist(),
        "bucket_limits": torch.linspace(low, high, BUCKETS + 1, dtype=torch.float64)[1:].tolist(),
    }  # fmt: skip
