"""A progress bar, on a terminal only."""

import sys
from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lm.callbacks.run_log import RunLog, line
from lm.trainer import Trainer


class ProgressBar(Callback):
    """Shows the step, the newest figures and the time that is left; validations scroll by above it."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (trainer.is_global_zero and sys.stderr.isatty()):
            return
        self._progress = Progress(
            BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}"), console=Console(stderr=True),
        )  # fmt: skip
        self._task = self._progress.add_task("", total=trainer.max_steps, completed=trainer.global_step)
        self._progress.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.step_taken(batch_idx)
        if self._progress is not None and step is not None:
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
