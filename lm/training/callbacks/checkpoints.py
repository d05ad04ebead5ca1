"""When checkpoints are saved, which one is the best, and which ones are kept."""

import logging
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lm.errors import RequestError, RunError
from lm.model.estimates import checkpoint_bytes
from lm.runs.checkpoint import link_to
from lm.runs.disk_space import disk_space
from lm.runs.run import Run, how_to_resume
from lm.runs.trainer_json import read_document
from lm.system.files import remove_folder, remove_stale, stated_digest
from lm.system.stop_signals import STOP
from lm.training.checkpoint_content import checkpoint_tensors
from lm.training.module import LanguageModule
from lm.training.optim import state_size
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)

HALF_WRITTEN = re.compile(r"\.(last|best|\w+\.json|\w+\.yaml)[.-](\d+)")  # a file or link that was to replace another


class Checkpoints(ModelCheckpoint):
    """Keeps `last`, `best`, the newest `keep` checkpoints of a run, and one every `keep_every` steps.

    A checkpoint is saved between two optimizer steps, after the validation if there is one, so that a resume repeats
    and loses neither. ModelCheckpoint's own timing and linking are replaced: they save twice, and move links before the
    files are complete. Its attributes `best_model_path`, `best_model_score` and `last_model_path` are set as usual.
    """

    FILE_EXTENSION = ""

    def __init__(self, interval: int, keep: int = 1, keep_every: int | None = None) -> None:
        super().__init__(monitor="val/loss", save_top_k=0, enable_version_counter=False)
        self.interval, self.keep, self.keep_every = interval, keep, keep_every
        self.best_loss = float("inf")
        self.best_name: str | None = None
        self.saved_step = -1
        self.requested = False
        self.stale: set[str] = set()  # checkpoints later than the one that the run was resumed from
        self.permanent: set[str] = set()  # checkpoints that are never removed, by the `keep_every` of their time
        self._memory_is_reserved = False  # for the copies of the tensors
        self._rollback_step = 0  # the newest step that a rollback may return to

    def request(self) -> None:
        """Request a checkpoint after this optimizer step; call it on every rank."""
        self.requested = True

    def keep_for_rollback(self, step: int) -> None:
        """Keep the newest checkpoint at or before this step, until the next call."""
        self._rollback_step = step

    def setup(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        """Override ModelCheckpoint's choice of a folder."""

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self.saved_step = trainer.global_step if trainer.ckpt_path else -1
        # Several devices gather some of the tensors first.
        alone = isinstance(trainer.strategy, SingleDeviceStrategy)
        self._memory_is_reserved = not (alone and pl_module.device.type == "cuda")
        if not trainer.is_global_zero:
            return
        run, chosen = trainer.run, Path(trainer.ckpt_path).resolve() if trainer.ckpt_path else None
        try:
            remove_half_written(run)
            # Marked, so that a resume after a kill does not take them.
            steps = run.steps()
            stale = [path for step, path in steps.items() if step > self.saved_step]
            self.stale = {path.name for path in stale}
            self.permanent = {path.name for path in steps.values() if is_permanent(path)}
            run.describe(left_behind=[stated_digest(path / "trainer.json") for path in stale])
            self._set_paths(run, chosen)
            if chosen and chosen.parent == run.path.resolve():
                link_to(run.path / chosen.name, self.best_name)
        except OSError as error:
            raise RunError(f"cannot write to the run folder {run.path}: {error.strerror or error}") from error
        self._warn_of_full_disk(trainer, pl_module)

    def _warn_of_full_disk(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        item = next(pl_module.parameters()).element_size()
        size = checkpoint_bytes(pl_module.config, item, state_size(pl_module.options.optimizer))
        count = self.keep + (trainer.max_steps // self.keep_every if self.keep_every else 0)
        needed = disk_space(trainer.run.path, size, count, present=len(trainer.run.steps()))
        if not needed.suffices:
            log.warning("the disk of %s will be full: %s; make room", trainer.run.path, needed)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
        self._check_checkpoints_can_be_written(trainer)
        if not self._memory_is_reserved:
            self._memory_is_reserved = True
            trainer.checkpoint_io.reserve_host_memory(checkpoint_tensors(pl_module))
        if self._due(trainer.global_step) and not trainer.validates_after(trainer.global_step):
            self.save(trainer)

    @staticmethod
    def _check_checkpoints_can_be_written(trainer: Trainer) -> None:
        """End a training soon after its checkpoints can no longer be written."""
        trainer.checkpoint_io.raise_failures()
        if not trainer.is_global_zero:
            return
        try:
            os.stat(trainer.run.path)
        except FileNotFoundError as error:
            raise RunError(
                f"the run folder {trainer.run.path} is gone, seen after step {trainer.global_step}: no checkpoint can "
                f"be written; put it back, and {how_to_resume(trainer.run)}"
            ) from error
        except OSError:  # a network disk may be unavailable for a moment
            pass

    def on_validation_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if not trainer.fitting:
            return
        if trainer.run_state.pending_validation:  # the checkpoint of this step lacks it
            trainer.run_state.pending_validation, self.saved_step = False, -1
        loss = trainer.callback_metrics["val/loss"].item()
        if loss < self.best_loss:
            self.best_loss, self.best_name = loss, self._name(trainer)
            self.best_model_score = trainer.callback_metrics["val/loss"]
            self.save(trainer)
        elif self._due(trainer.global_step) or trainer.global_step >= trainer.max_steps:
            self.save(trainer)

    def _due(self, step: int) -> bool:
        return self.requested or step % self.interval == 0 or self._is_permanent(step)

    def _is_permanent(self, step: int) -> bool:
        return self.keep_every is not None and step % self.keep_every == 0

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LanguageModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept_for_good"] = self._name(trainer) in self.permanent  # even if it replaces one that was

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        """Do nothing: ModelCheckpoint would save."""

    def on_train_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self.save(trainer)
        trainer.checkpoint_io.drain()

    def on_exception(self, trainer: Trainer, pl_module: LanguageModule, exception: BaseException) -> None:
        """Do nothing: a state that may be broken must not become `last`."""

    def save(self, trainer: Trainer) -> None:
        """Save a checkpoint of this optimizer step, unless there is one; call it on every rank."""
        self.requested = False
        if self.saved_step == trainer.global_step:
            return
        self.saved_step = trainer.global_step
        path = trainer.run.path / self._name(trainer)
        self._set_paths(trainer.run, path)
        self.stale = self.stale - {path.name}  # a new set, as the writer may be iterating over the old one
        if self._is_permanent(self.saved_step):
            self.permanent = self.permanent | {path.name}
        after_write = partial(self._move_links, trainer.run, trainer.global_step, path.name, self.best_name)
        STOP.saving = True
        try:
            trainer.save_checkpoint(str(path), storage_options=after_write)
        finally:
            STOP.saving = False

    def _move_links(self, run: Run, step: int, last: str, best: str | None) -> None:
        """After a checkpoint is complete: move `last` and `best`, and remove checkpoints neither kept nor linked."""
        link_to(run.path / last, best)
        paths = run.steps()
        valid_steps = [saved for saved, path in paths.items() if saved <= step and path.name not in self.stale]
        for_rollback = [saved for saved in valid_steps if saved <= self._rollback_step]
        needed = {*valid_steps[-self.keep :], *for_rollback[-1:]}
        for saved, path in paths.items():
            if saved not in needed and path.name not in (last, best, *self.permanent):
                remove_folder(path)

    def _set_paths(self, run: Run, last: Path | None) -> None:
        self.last_model_path = "" if last is None else str(last)
        self.best_model_path = "" if self.best_name is None else str(run.path / self.best_name)

    @staticmethod
    def _name(trainer: Trainer) -> str:
        return f"step-{trainer.global_step:08d}"

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss, "best_name": self.best_name}  # `read_progress` looks for `best_name`

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss, self.best_name = state_dict["best_loss"], state_dict["best_name"]
        self.best_model_score = torch.tensor(self.best_loss)


def is_permanent(checkpoint: Path) -> bool:
    """Whether `trainer.keep_every` kept this checkpoint when it was saved."""
    try:
        return bool(read_document(checkpoint).get("kept_for_good"))
    except RequestError:  # damaged
        return False


def remove_half_written(run: Run) -> None:
    """Remove files, links and checkpoints that a killed session left incomplete."""
    remove_stale(run.path / "step-*")
    for path in run.path.iterdir():
        half = HALF_WRITTEN.fullmatch(path.name)
        if half and int(half[2]) != os.getpid():
            path.unlink(missing_ok=True)


def make_checkpoint_folders(trainer: Trainer, run: Run | None) -> None:
    """Make the folders of a user's ModelCheckpoints: in the run's folder, unless the config names others."""
    default = str(Path(trainer.default_root_dir, "checkpoints"))
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback is trainer.checkpoint_callback:
            continue
        if run is not None and callback.dirpath in (None, default):
            callback.dirpath = str(run.path / "checkpoints")
        if trainer.is_global_zero and callback.dirpath not in (None, default):
            Path(callback.dirpath).mkdir(parents=True, exist_ok=True)
