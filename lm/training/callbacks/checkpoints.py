"""When checkpoints are saved, which one is the best, and which ones are kept."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lm.errors import RequestError, RunError
from lm.runs.checkpoint import link_to
from lm.runs.run import Run, how_to_resume
from lm.runs.trainer_json import read_document
from lm.system.files import remove_folder, stated_digest
from lm.system.stop_signals import STOP
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer


class Checkpoints(ModelCheckpoint):
    """Saves checkpoints `step-00000100` between two optimizer steps, and removes those that are no longer needed.

    A checkpoint is saved after a step, or after its validation if one is due, at most once:

        every `interval` steps, every `keep_every` steps, and when another callback requests one
        after the validation with the lowest loss so far
        at the end of the run

    Then these are kept, and the others removed:

        the newest `keep`
        one every `keep_every` steps, permanently
        those to which the links `last` and `best` point
        the newest one that a rollback may return to

    Loggers and users of Lightning look for a ModelCheckpoint with `monitor`, `best_model_path`, `best_model_score` and
    `last_model_path`. Its own hooks save twice where a validation follows a step, and move links before the files are
    complete, so they are replaced.
    """

    FILE_EXTENSION = ""

    def __init__(self, interval: int, keep: int = 1, keep_every: int | None = None) -> None:
        super().__init__(monitor="val/loss", save_top_k=0, enable_version_counter=False)
        self.interval, self.keep, self.keep_every = interval, keep, keep_every
        self.requested = False  # save after this step
        self.saved_step: int | None = None  # the newest that was saved, or passed over by `skip`; None: save this one
        self.best_loss = float("inf")  # of the validations so far
        self.best_name: str | None = None  # its checkpoint
        self.permanent: set[str] = set()  # checkpoints that are never removed, by the `keep_every` of their time
        self.stale: set[str] = set()  # checkpoints later than the one that the run was resumed from
        self._rollback_step = 0  # the newest step that a rollback may return to

    def request(self) -> None:
        """Request a checkpoint after this optimizer step; call it on every rank."""
        self.requested = True

    def skip(self, step: int) -> None:
        self.saved_step = step

    def keep_for_rollback(self, step: int) -> None:
        """Keep the newest checkpoint at or before this step, until the next call."""
        self._rollback_step = step

    # ---- when ---------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
        check_writable(trainer)
        if not trainer.validates_after(trainer.global_step) and self._is_due(trainer.global_step):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if not trainer.fitting:
            return
        if trainer.run_state.pending_validation:
            # The run was resumed from a checkpoint that was saved before its validation. That has run now: the
            # checkpoint of this step is to be saved again, with its result.
            trainer.run_state.pending_validation, self.saved_step = False, None
        loss = trainer.callback_metrics["val/loss"]
        is_best = loss.item() < self.best_loss
        if is_best:
            self.best_loss, self.best_name = loss.item(), checkpoint_name(trainer)
            self.best_model_score = loss
        if is_best or self._is_due(trainer.global_step) or trainer.global_step >= trainer.max_steps:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self.save(trainer)
        trainer.checkpoint_io.drain()

    def _is_due(self, step: int) -> bool:
        return self.requested or step % self.interval == 0 or self._becomes_permanent(step)

    def _becomes_permanent(self, step: int) -> bool:
        return self.keep_every is not None and step % self.keep_every == 0

    # ---- how ----------------------------------------------------------------------------------------------------

    def save(self, trainer: Trainer) -> None:
        """Save a checkpoint of this optimizer step, unless there is one; call it on every rank."""
        self.requested = False
        if self.saved_step == trainer.global_step:
            return
        self.saved_step = trainer.global_step
        run, path = trainer.run, trainer.run.path / checkpoint_name(trainer)
        self._set_paths(run, path)
        self.stale.discard(path.name)
        if self._becomes_permanent(self.saved_step):
            self.permanent.add(path.name)
        step, best, rollback_step = self.saved_step, self.best_name, self._rollback_step
        protected, stale = {path.name, best, *self.permanent}, set(self.stale)  # copies, for the thread that writes

        def link_and_prune() -> None:  # once the checkpoint is complete
            link_to(path, best)
            remove_unneeded(run, step, self.keep, rollback_step, protected, stale)

        STOP.saving = True  # `stop_within` waits until the tensors are copied
        try:
            trainer.save_checkpoint(str(path), storage_options=link_and_prune)  # `FolderCheckpointIO` calls it
        finally:
            STOP.saving = False

    def _set_paths(self, run: Run, last: Path | None) -> None:
        self.last_model_path = "" if last is None else str(last)
        self.best_model_path = "" if self.best_name is None else str(run.path / self.best_name)

    # ---- resume -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss, "best_name": self.best_name}  # `read_progress` looks for `best_name`

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss, self.best_name = state_dict["best_loss"], state_dict["best_name"]
        self.best_model_score = torch.tensor(self.best_loss)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LanguageModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept_for_good"] = checkpoint_name(trainer) in self.permanent  # read by `is_permanent`

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        """Mark later checkpoints than the one that is resumed as stale, so that a resume after a kill skips them."""
        self.saved_step = trainer.global_step if trainer.ckpt_path else None
        if not trainer.is_global_zero:
            return
        run, resumed = trainer.run, Path(trainer.ckpt_path).resolve() if trainer.ckpt_path else None
        try:
            run.remove_half_written()
            paths = run.steps()
            stale = [path for step, path in paths.items() if step > trainer.global_step]
            self.stale = {path.name for path in stale}
            self.permanent = {path.name for path in paths.values() if is_permanent(path)}
            run.describe(left_behind=[stated_digest(path / "trainer.json") for path in stale])
            self._set_paths(run, resumed)
            if resumed and resumed.parent == run.path.resolve():
                link_to(run.path / resumed.name, self.best_name)
        except OSError as error:
            raise RunError(f"cannot write to the run folder {run.path}: {error.strerror or error}") from error

    # ---- hooks of ModelCheckpoint that do nothing here ----------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        """The run's folder is the folder."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        """A run has no epochs."""

    def on_exception(self, trainer: Trainer, pl_module: LanguageModule, exception: BaseException) -> None:
        """A state that may be broken must not become `last`."""


def checkpoint_name(trainer: Trainer) -> str:
    return f"step-{trainer.global_step:08d}"


def remove_unneeded(
    run: Run, newest: int, keep: int, rollback_step: int, protected: Collection[str | None], stale: Collection[str]
) -> None:
    """Remove checkpoints but for the `keep` newest, the newest that a rollback may return to, and those protected."""
    paths = run.steps()
    valid = [step for step, path in paths.items() if step <= newest and path.name not in stale]
    needed = [*valid[-keep:], *[step for step in valid if step <= rollback_step][-1:]]
    for step, path in paths.items():
        if step not in needed and path.name not in protected:
            remove_folder(path)


def is_permanent(checkpoint: Path) -> bool:
    """Whether `trainer.keep_every` kept this checkpoint when it was saved."""
    try:
        return bool(read_document(checkpoint).get("kept_for_good"))
    except RequestError:  # damaged
        return False


def check_writable(trainer: Trainer) -> None:
    """End a run soon after its checkpoints can no longer be written."""
    trainer.checkpoint_io.raise_failures()
    if not trainer.is_global_zero:  # another machine need not have the folder
        return
    try:
        os.stat(trainer.run.path)
    except FileNotFoundError as error:
        raise RunError(
            f"the run folder {trainer.run.path} is gone, seen after step {trainer.global_step}: no checkpoint can be "
            f"written; put it back, and {how_to_resume(trainer.run)}"
        ) from error
    except OSError:  # a network disk may be unavailable for a moment
        pass
