"""TensorBoard: one event file a process, the charts that belong together, and what a finished run was made with."""

import json
import math
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.summary import hparams

from lm.callbacks.event_writer import EventWriter, Summaries
from lm.callbacks.run_log import RunLog
from lm.checkpoint import step_of
from lm.documents import flatten
from lm.errors import GuardStop
from lm.runs import Run
from lm.trainer import Trainer

# The Custom Scalars tab: category -> chart -> its curves.
LAYOUT = {
    "loss": {
        "training and validation": ["Multiline", ["train/loss", "val/loss"]],
        "over tokens": ["Multiline", ["tokens/train_loss", "tokens/val_loss"]],
    },
    "optimization": {
        "learning rate": ["Multiline", ["optim/lr"]],
        "gradient norm": ["Multiline", ["optim/grad_norm"]],
    },
    "throughput": {
        "tokens a second": ["Multiline", ["perf/tokens_per_second"]],
        "MFU": ["Multiline", ["perf/mfu"]],
    },
}
OVER_TOKENS = {"train/loss": "tokens/train_loss", "val/loss": "tokens/val_loss"}
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
        logger.go_on_after(step_of(trainer.ckpt_path))

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
