"""Where a training is logged: TensorBoard, `metrics.jsonl`, `state.json`, log lines, a progress bar, histograms."""

import itertools
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard import FileWriter, SummaryWriter
from torch.utils.tensorboard.summary import hparams

from lm.errors import GuardStop
from lm.model.huggingface import to_huggingface
from lm.runs.metrics import METRICS
from lm.runs.run import Run
from lm.system.files import append, flatten
from lm.system.process import steady_time
from lm.system.units import format_count
from lm.training.callback import Callback, call_hook
from lm.training.trainer import Trainer

# ---- run log ---------------------------------------------------------------------------------------------------------
# Where a run is written down: TensorBoard, `metrics.jsonl`, `state.json`, and a line for the person watching.

lines = logging.getLogger("lm.lines")  # the command line shows them where there is no progress bar


class RunLog(Callback):
    """Writes every metric once, under the optimizer step that it belongs to.

    The metrics are those of the module's `logged_metrics` and of every callback's, and every callback's `on_metrics`
    gets them, on every rank. A value that is not finite is not written, because JSON has no notation for it.

    Args:
        interval: optimizer steps between log lines.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.latest: dict[str, Any] = {}
        self._began = (0.0, 0)
        self._settled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = (time.monotonic(), trainer.global_step)
        self.write_state(trainer, "running")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step % self.interval and step != trainer.max_steps:
            return
        metrics = pl_module.logged_metrics()
        for more in call_hook(trainer, "logged_metrics", pl_module):
            metrics |= more
        self.tell(trainer, pl_module, metrics)
        if not self._settled:  # what the first steps took says nothing of the rest: compilation, a cold cache
            self._began, self._settled = (time.monotonic(), step), True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fitting:
            self.write_state(trainer, "running", phase="validating")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fitting:
            names = ("val/loss", "val/perplexity", "val/bpb")
            self.tell(trainer, pl_module, {name: trainer.callback_metrics[name].item() for name in names})

    def tell(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """Write a line of metrics of this step, and tell it to the callbacks; to be called on every rank.

        Args:
            metrics: by name, all of one kind: of a validation, of an evaluation, or of training.
        """
        if trainer.is_global_zero:
            self._write(trainer, metrics)
        call_hook(trainer, "on_metrics", pl_module, metrics)

    def _write(self, trainer: Trainer, told: dict[str, float]) -> None:
        metrics = {name: value for name, value in told.items() if math.isfinite(value)}
        step = trainer.global_step
        tokens = trainer.tokens_seen
        for logger in trainer.loggers:
            logger.log_metrics({**metrics, "data/tokens": tokens}, step=step)
        trainer.run.append_metrics({"step": step, "tokens": tokens, "time": steady_time(), **metrics})
        kinds = {_kind(name) for name in told}
        others = {name: value for name, value in self.latest.items() if _kind(name) not in kinds}
        self.latest = others | metrics  # what the newest line of its kind does not have is not known any more
        self.write_state(trainer, "running")
        lines.info(line(step, trainer.max_steps, metrics))

    def write_state(self, trainer: Trainer, status: str, phase: str = "training") -> None:
        """Replace `state.json`; `phase` is what the run is at: `training`, `validating` or `evaluating`."""
        if not trainer.is_global_zero:
            return
        step, (since, first) = trainer.global_step, self._began
        seconds_a_step = (time.monotonic() - since) / (step - first) if step > first else None
        trainer.run.write_state({
            "run": trainer.run.name,
            "status": status,
            "phase": phase,
            "step": step,
            "max_steps": trainer.max_steps,
            "tokens": trainer.tokens_seen,
            "max_tokens": trainer.max_steps * trainer.steps.tokens_per_step,
            "metrics": self.latest,
            "eta_seconds": (trainer.max_steps - step) * seconds_a_step if seconds_a_step else None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
        })


def _kind(name: str) -> str:
    """Which lines a metric stands in: those of validations, of evaluations, or all others."""
    group = name.split("/")[0]
    return group if group in ("val", "eval") else "train"


LINE = ("train/loss", "optim/lr", "optim/grad_norm", "val/loss", "val/perplexity", "val/bpb", "eval/core", "perf/mfu")


def line(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    """A log line for people."""
    parts = [
        f"{metric.short or metric.label} {metric.shown(metrics[name])}"
        for name, metric in METRICS.items() if name in LINE and name in metrics
    ]  # fmt: skip
    if "eval/core" not in metrics:
        accuracies = {name: value for name, value in metrics.items() if name.endswith("/accuracy")}
        short = {name.removeprefix("eval/").removesuffix("/accuracy"): value for name, value in accuracies.items()}
        parts += [f"{name} {value:.1%}" for name, value in short.items()]
    if "perf/tokens_per_second" in metrics:
        parts.append(f"{format_count(metrics['perf/tokens_per_second'])} tokens/s")
    return f"step {step}/{max_steps}  " + "  ".join(parts)


# ---- progress --------------------------------------------------------------------------------------------------------
# A progress bar, on a terminal only.


class ProgressBar(Callback):
    """Shows the step, the newest figures and the time that is left; validations scroll by above it."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (trainer.is_global_zero and sys.stderr.isatty()):
            return
        self._progress = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn("steps, elapsed"), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), TextColumn("{task.description}"), console=Console(stderr=True),
        )  # fmt: skip
        self._task = self._progress.add_task("", total=trainer.max_steps, completed=trainer.global_step)
        self._progress.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._progress is not None:
            shown = ("train/loss", "perf/tokens_per_second", "perf/mfu")
            newest = {name: value for name, value in self._metrics(trainer).items() if name in shown}
            text = line(step, trainer.max_steps, newest).partition("  ")[2]
            self._progress.update(self._task, completed=step, description=text)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._progress is not None:
            newest = {name: value for name, value in self._metrics(trainer).items() if name.startswith("val/")}
            with suppress(OSError):  # the terminal was closed, and there is a checkpoint to take
                self._progress.console.print(line(trainer.global_step, trainer.max_steps, newest), highlight=False)

    def _metrics(self, trainer: Trainer) -> dict[str, Any]:
        return next(callback.latest for callback in trainer.callbacks if isinstance(callback, RunLog))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            with suppress(OSError):  # the terminal was closed
                self._progress.stop()
            self._progress = None


# ---- event writer ----------------------------------------------------------------------------------------------------
# Writes TensorBoard's events, so that a disk that is full or gone costs a training its curves and nothing else.
#
# TensorBoard's own writer has a thread that ends at the first failure, with a traceback, and every write after it
# raises. Here an event is written at once, whole or not at all, and the next one is tried again. There are a few a log
# line.

_files = itertools.count()  # of this process, for their names


class EventWriter:
    """One event file, with the methods of tensorboard's `EventFileWriter`.

    Args:
        folder: where it goes, under a name that TensorBoard knows.
        attempt: calls a function that may raise an OSError, see `lm.system.files.Attempts`.
    """

    def __init__(self, folder: Path, attempt: Callable[[str, Callable[[], Any]], bool]) -> None:
        self._folder = folder
        self._attempt = attempt
        self._descriptor: int | None = None
        self._records = RecordWriter(self)

    def get_logdir(self) -> str:
        """The folder, as torch asks for it."""
        return str(self._folder)

    def add_event(self, event: Event) -> None:
        """Write an event."""
        self._attempt("TensorBoard's event file", lambda: self._add(event))

    def _add(self, event: Event) -> None:
        if self._descriptor is None:
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
            self._descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if os.fstat(self._descriptor).st_size == 0:
            self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._records.write(event.SerializeToString())

    def write(self, record: bytes) -> None:
        """Put a whole record, as `RecordWriter` makes them, into the file."""
        append(self._descriptor, record)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """End the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _Files(FileWriter):
    def __init__(self, events: EventWriter) -> None:
        self.event_writer = events


class Summaries(SummaryWriter):
    """torch's SummaryWriter, which makes events of values, texts and histograms, on top of an `EventWriter`."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        super().__init__(log_dir=events.get_logdir())

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is None:
            self.file_writer = _Files(self._events)
            self.all_writers = {self.get_logdir(): self.file_writer}
        return self.file_writer


# ---- curves ----------------------------------------------------------------------------------------------------------
# TensorBoard: one event file a process, the charts that belong together, and what a finished run was made with.

OVER_TOKENS = {"train/loss": "tokens/train_loss", "val/loss": "tokens/val_loss"}
# The Custom Scalars tab: category -> chart -> its curves.
LAYOUT: dict[str, dict[str, list]] = {"loss": {"over tokens": ["Multiline", list(OVER_TOKENS.values())]}}
for _name, _metric in METRICS.items():
    if _metric.chart is not None:
        _category, _chart = _metric.chart
        LAYOUT.setdefault(_category, {}).setdefault(_chart, ["Multiline", []])[1].append(_name)
REPLAYED = 1000  # points; TensorBoard shows no more of a curve
RESULTS = ("val/best_loss", "val/bpb", "train/loss", "perf/tokens_per_second")  # the columns of the HParams tab


class EventFile(TensorBoardLogger):
    """TensorBoard's event file of a run and nothing beside it.

    Args:
        run: whose folder it goes to.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(str(run.path.parent), name=run.path.name, version="", default_hp_metric=False)
        self._run = run

    @property
    def experiment(self) -> Summaries:
        """What takes values, texts and histograms."""
        if self._experiment is None:
            self._experiment = Summaries(EventWriter(self._run.path, self._run.attempt))
        return self._experiment

    def go_on_after(self, step: int) -> None:
        """Begin a stretch of training: what this folder's files have of later steps is to be forgotten.

        TensorBoard goes by x, and tokens are beyond every step, so the losses over tokens are written once more.

        Args:
            step: the newest optimizer step that counts; 0 in a new run.
        """
        start = SessionLog(status=SessionLog.START)  # the first one too, or TensorBoard takes the second for the first
        self.experiment.file_writer.add_event(Event(step=step + 1, session_log=start))
        lines = [line for line in self._run.metrics() if OVER_TOKENS.keys() & line.keys()]
        stride = math.ceil(len(lines) / REPLAYED)
        for index, line in enumerate(lines):
            if "val/loss" in line or index % stride == 0:
                self._write_over_tokens(line, line["tokens"], line["time"])

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """All values of a step in one event, and the losses once more with tokens for x."""
        self._write(metrics, step)
        if "data/tokens" in metrics:
            self._write_over_tokens(metrics, metrics["data/tokens"])

    def log_run(self, parameters: dict[str, Any], metrics: dict[str, float], finished: bool) -> None:
        """A row of the HParams tab; the metrics' values are those of the curves of the same names, at their ends."""
        experiment, start, end = hparams(parameters, metrics)
        for summary in (experiment, start, *([end] if finished else [])):
            self.experiment.file_writer.add_summary(summary)

    def _write_over_tokens(self, metrics: dict[str, float], tokens: int, time: float | None = None) -> None:
        self._write({tag: metrics[name] for name, tag in OVER_TOKENS.items() if name in metrics}, tokens, time)

    def _write(self, metrics: dict[str, float], step: int | None, time: float | None = None) -> None:
        if metrics:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
            self.experiment.file_writer.add_summary(Summary(value=values), step, time)

    def save(self) -> None:
        """Nothing: no event is held back, and there are no other files."""


class Curves(Callback):
    """Opens the event file when a fit starts, and says at its end what the run was made with and how good it got.

    The hyper-parameters come at the end because TensorBoard keeps the first that it reads in a folder, and a run that
    is interrupted may go on with others.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        run = trainer.run
        logger = EventFile(run)
        trainer.loggers = [logger]
        logger.experiment.add_custom_scalars(LAYOUT)
        logger.go_on_after(trainer.start.step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(trainer, finished=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, GuardStop) and trainer.fitting:
            self._close(trainer, finished=False)

    def _close(self, trainer: Trainer, finished: bool) -> None:
        if not (trainer.is_global_zero and trainer.loggers):
            return
        logger: EventFile = trainer.logger
        latest = next(callback.latest for callback in trainer.callbacks if isinstance(callback, RunLog))
        best = trainer.checkpoint_callback.best_loss
        if math.isfinite(best):
            logger.log_metrics({"val/best_loss": best}, trainer.global_step)
            latest = {**latest, "val/best_loss": best}
        logger.log_run(_parameters(trainer.run), {name: latest[name] for name in RESULTS if name in latest}, finished)


def _parameters(run: Run) -> dict[str, Any]:
    """The resolved config under dotted names, in what the HParams tab can show: numbers and texts."""
    config = flatten(run.settings())
    plain = {name: value for name, value in config.items() if value is not None and name != "run"}
    return {
        name: value if isinstance(value, int | float | str) and not isinstance(value, bool) else json.dumps(value)
        for name, value in plain.items()
    }


# ---- histograms ------------------------------------------------------------------------------------------------------
# How the weights are distributed: a histogram of every matrix and norm, now and then, for TensorBoard.

BUCKETS = 30  # what TensorBoard draws


class Histograms(Callback):
    """Writes histograms of the decoder's weights under Hugging Face's names.

    They are counted where the weights are; only the counts travel. Shards of a weight are gathered, one weight at a
    time.

    Args:
        interval: optimizer steps between them.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step % self.interval:
            return
        counted: dict[str, Tensor] = {}
        for name, parameter in pl_module.decoder.named_parameters():
            weight = parameter.detach()
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # on every rank
            if trainer.is_global_zero:
                parts = to_huggingface({name: weight}, pl_module.config)
                counted |= {part: count(values) for part, values in parts.items()}
        if counted:
            write(trainer.logger.experiment, counted, step)


def count(values: Tensor) -> Tensor:
    """A histogram of buckets of equal width between the smallest and the largest value.

    Args:
        values: any shape.

    Returns:
        (5 + BUCKETS,) fp64, on the same device: minimum, maximum, number, sum, sum of squares, and the counts.
    """
    flat = values.flatten().float()
    low, high = flat.aminmax()
    width = ((high - low) / BUCKETS).clamp(min=1e-30)
    # Clamped as integers: what is not finite has no bucket, and must not have one beyond the last.
    bucket = ((flat - low) / width).to(torch.uint8).clamp_(max=BUCKETS - 1)
    counts = torch.bincount(bucket, minlength=BUCKETS)
    number = torch.full_like(low, flat.numel(), dtype=torch.float64)
    sums = flat.sum(dtype=torch.float64), flat.square().sum(dtype=torch.float64)
    return torch.cat([torch.stack([low.double(), high.double(), number, *sums]), counts.double()])


def write(experiment: Any, counted: dict[str, Tensor], step: int) -> None:
    """Add histograms to an event file; a weight that is not finite everywhere has none.

    Args:
        experiment: a SummaryWriter.
        counted: what `count` returned, by name.
        step: the optimizer step.
    """
    rows = torch.stack(list(counted.values())).cpu()  # (weights, 5 + BUCKETS); the one wait for the device
    for name, row in zip(counted, rows, strict=True):
        low, high, number, total, squares = row[:5].tolist()
        if not row.isfinite().all():
            continue
        limits = torch.linspace(low, high, BUCKETS + 1, dtype=torch.float64)[1:]
        experiment.add_histogram_raw(
            f"weights/{name}", min=low, max=high, num=int(number), sum=total, sum_squares=squares,
            bucket_limits=limits.tolist(), bucket_counts=row[5:].tolist(), global_step=step,
        )
