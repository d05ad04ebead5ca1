"""TensorBoard with its histograms, and other loggers of Lightning, which are called in threads of their own."""

import logging
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from lm.errors import first_line
from lm.model.huggingface import to_huggingface
from lm.runs.run import Run
from lm.system.files import append_bytes
from lm.training.callback import Callback
from lm.training.lightning_patches import replace_event_file, wrap_methods
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)

# ---- calls that a training never waits for ---------------------------------------------------------------------------

CALLS = ("log_hyperparams", "log_metrics", "save", "finalize")  # methods that a training calls
LAST_WAIT = 10.0  # seconds that the end of a training waits for all calls


class CallThread:
    """Makes calls in a thread, in order; the process may end during a call.

    `failed` is called with the exception of a failed call; later calls are still made.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._calls: Queue[Callable[[], Any] | None] = Queue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], Any]) -> None:
        self._calls.put(call)

    def finish(self, seconds: float) -> bool:
        """Take no more calls, wait up to `seconds` for the pending ones, and return whether they are done."""
        self._calls.put(None)
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                self._failed(error)


class LoggerThread:
    """Makes the calls of a logger in a thread, in order.

    The methods of the logger itself are replaced, so that callbacks find the same logger in
    `trainer.loggers`. The first failure is logged, and ends the calls.
    """

    def __init__(self, logger: Logger) -> None:
        self.name = type(logger).__name__
        self._over = self._failed = False
        self._thread = CallThread(f"logger {self.name}", self._fail)
        wrap_methods(logger, CALLS, self._queued)

    def _queued(self, name: str, call: Callable[..., Any]) -> Callable[..., None]:
        def put(*args: Any, **kwargs: Any) -> None:
            if self._over:
                return
            self._thread.put(partial(self._make, call, *args, **kwargs))
            if name == "finalize":
                self._over = True
                if not self._thread.finish(LAST_WAIT):
                    self._warn(f"did not finish within {LAST_WAIT:g} s")

        return put

    def _make(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if not self._failed:
            call(*args, **kwargs)

    def _fail(self, error: Exception) -> None:
        self._warn(f"failed and gets no more metrics: {first_line(error)}")
        self._over = self._failed = True

    def _warn(self, problem: str) -> None:
        log.warning("logger %s %s; the training continues, and metrics.jsonl has all metrics", self.name, problem)


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


class EventFile(TensorBoardLogger):
    """TensorBoard's event file of a run, and no other file. Every event is on disk when a method returns.

    TensorBoard drops events later than `resumed_at` in earlier files of the folder (0 in a new run); None: it drops
    nothing.
    """

    def __init__(self, run: Run, resumed_at: int | None = None) -> None:
        purge = None if resumed_at is None else resumed_at + 1
        super().__init__(str(run.path.parent), run.path.name, version="", default_hp_metric=False, purge_step=purge)
        # On a full disk, nothing is written, and TensorBoard's writer does not stop for good.
        replace_event_file(self.experiment, lambda path: _TolerantFile(path, run))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write the values of a step as one event."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self.experiment.file_writer.add_summary(Summary(value=values), step)
        self.experiment.flush()

    def save(self) -> None:
        """Do nothing: Lightning would write hparams.yaml."""


class _TolerantFile:
    """The file below TensorBoard's writer, whose thread would end at the first write that raises."""

    def __init__(self, path: Path, run: Run) -> None:
        self._attempt = run.attempt
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, record: bytes) -> None:
        self._attempt("TensorBoard's event file", lambda: append_bytes(self._descriptor, record))

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        os.close(self._descriptor)


# ---- histograms ------------------------------------------------------------------------------------------------------

BUCKETS = 30  # number of buckets that TensorBoard draws


class Histograms(Callback):
    """Writes histograms of the decoder's weights to TensorBoard, under Hugging Face's names.

    They are computed on the device: `SummaryWriter.add_histogram` copies each weight to the host and takes a second for
    25 million of them. Shards of a weight are gathered, one weight at a time.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_train_batch_end(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
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
    """Compute a histogram for `SummaryWriter.add_histogram_raw`; None if a value is not finite."""
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
