"""When checkpoints are taken, which one is the best, and which are kept."""

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

from lm.checkpoint import point, remove
from lm.runs import Run
from lm.trainer import Trainer


class Checkpoints(ModelCheckpoint):
    """Keeps `last`, `best` and the newest `keep` checkpoints of a run.

    One checkpoint holds an optimizer step, never the middle of an accumulation, and where the step ends with a
    validation it is taken after that, so that a resume repeats and loses neither. ModelCheckpoint's own timing and
    linking are replaced: they save twice, mid-accumulation, and move links before the files are whole.

    Args:
        interval: optimizer steps between checkpoints.
        min_delta: how much lower `val/loss` must be to be a new best.
        keep: how many of the newest are kept beside the best.
    """

    FILE_EXTENSION = ""

    def __init__(self, interval: int, min_delta: float = 0.0, keep: int = 1) -> None:
        super().__init__(monitor="val/loss", save_top_k=0, enable_version_counter=False)
        self.interval = interval
        self.min_delta = min_delta
        self.keep = keep
        self.best_loss = float("inf")
        self.best_name: str | None = None
        self.saved_step = -1
        self.requested = False

    def request(self) -> None:
        """Have a checkpoint taken after this optimizer step; on every rank."""
        self.requested = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replaces ModelCheckpoint's choice of a folder: the run's is the one."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saved_step = trainer.global_step if trainer.ckpt_path else -1
        if not trainer.is_global_zero:
            return
        for debris in (*trainer.run.path.glob(".tmp-step-*"), *trainer.run.path.glob(".old-step-*")):
            shutil.rmtree(debris, ignore_errors=True)
        chosen = Path(trainer.ckpt_path).resolve() if trainer.ckpt_path else None
        if chosen and chosen.parent == trainer.run.path.resolve():
            # From here on this is where the run stands: a kill before its next checkpoint must not bring back the
            # later steps that were left behind.
            point(trainer.run.path / "last", chosen.name)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.step_taken(batch_idx)
        if step is not None and self._due(step) and not trainer.validates_after(step):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fitting:
            return
        loss = trainer.callback_metrics["val/loss"].item()
        if loss < self.best_loss - self.min_delta:
            self.best_loss, self.best_name = loss, self._name(trainer)
            self.best_model_path = str(trainer.run.path / self.best_name)
            self.best_model_score = trainer.callback_metrics["val/loss"].clone()
            self.save(trainer)
        elif self._due(trainer.global_step) or trainer.global_step >= trainer.max_steps:
            self.save(trainer)

    def _due(self, step: int) -> bool:
        return self.requested or step % self.interval == 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing: a pass over the data is no event here."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)
        trainer.checkpoint_io.drain()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Nothing is saved from a failure: a state that may be broken must not become `last`."""

    def save(self, trainer: Trainer) -> None:
        """Take a checkpoint of this optimizer step, unless there is one. Called on every rank."""
        self.requested = False
        if self.saved_step == trainer.global_step:
            return
        self.saved_step = trainer.global_step
        path = trainer.run.path / self._name(trainer)
        self.last_model_path = str(path)
        best = self.best_name
        step = trainer.global_step
        trainer.save_checkpoint(str(path), storage_options=lambda: self._move_links(trainer.run, step, path.name, best))

    def _move_links(self, run: Run, step: int, last: str, best: str | None) -> None:
        """After the write: point at what is whole now and drop what nothing needs, also what lies beyond this step
        because the run was gone on with from an earlier one."""
        point(run.path / "last", last)
        if best is not None and (run.path / best).exists():
            point(run.path / "best", best)
        steps = run.steps()
        newest = {path.name for path in [path for at, path in steps.items() if at <= step][-self.keep :]}
        for path in steps.values():
            if path.name not in newest | {last, best}:
                remove(path)

    @staticmethod
    def _name(trainer: Trainer) -> str:
        return f"step-{trainer.global_step:08d}"

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss, "best_name": self.best_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss, self.best_name = state_dict["best_loss"], state_dict["best_name"]
