"""TensorBoard's event file of a run."""

import os
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger

from lm.runs.run import Run
from lm.system.files import append_bytes
from lm.training.lightning_patches import replace_event_file


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
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

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
