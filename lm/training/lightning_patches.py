"""Private names of Lightning, torch and TensorBoard that a training uses, and methods of theirs that it replaces.

Each has the reason why no public name does; a new version of a library is tried here first. Seen in Lightning 2.6.6,
torch 2.13 and TensorBoard 2.21. `kernels/torch_private` has the private names of torch that the model needs. A test
lets the others stand nowhere else.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as lightning
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lm.system.hardware import process_bytes
from lm.training.end_of_run import explaining_memory, explaining_resume

if TYPE_CHECKING:  # it takes a quarter of a second, which `lm plan` need not wait for
    from torch.utils.tensorboard import SummaryWriter


# ---- the Trainer and its loops ---------------------------------------------------------------------------------------


class FitLoop(_FitLoop):
    """A run whose last validation is still to come is not done, though all steps are taken."""

    @property
    def done(self) -> bool:
        return super().done and not self.trainer.run_state.pending_validation


class EpochLoop(_TrainingEpochLoop):
    """Validates after the steps that `Trainer.validates_after` names, and first of all where one is pending."""

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        self.restarting = False  # a checkpoint is never in the middle of a step or of a validation
        if self.trainer.run_state.pending_validation:
            self.trainer.validating = True
            self.val_loop.run()
            self.trainer.training = True

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return self.trainer.validates_after(self.global_step)


class PatchedTrainer(lightning.Trainer):
    """Lightning's Trainer with our loops, and with `training/end_of_run` around a fit."""

    memory_before: int | None = None  # bytes of this process when the training began

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Lightning would write what `self.log` is given by itself, and count other steps: `RunLog` does.
        self._logger_connector.log_metrics = lambda metrics, step=None: None
        self.fit_loop = FitLoop(self, max_epochs=-1)
        self.fit_loop.epoch_loop = EpochLoop(self, max_steps=1)

    def _fit_impl(self, *args: Any, **kwargs: Any) -> None:
        """All of a fit on this rank; callbacks' `on_exception` gets an error and cannot replace it by another."""
        with explaining_memory(self):
            super()._fit_impl(*args, **kwargs)

    def _run_stage(self) -> Any:
        """The training itself, or the evaluation, once model, data and callbacks are set up."""
        self.memory_before = process_bytes()
        with explaining_resume(self):
            return super()._run_stage()


def use_profiler(trainer: lightning.Trainer, profiler: Profiler) -> None:
    """Replace the profiler of a Trainer, which takes one only when it is made."""
    trainer.profiler = profiler


def around_fetches(trainer: lightning.Trainer, note: Callable[[], None]) -> None:
    """Call `note` before and after each fetch of a batch; Lightning reports fetches only to its profilers."""
    loop = trainer.fit_loop.epoch_loop
    before, after = loop._on_before_fetch, loop._on_after_fetch
    loop._on_before_fetch = lambda: [before(), note()]
    loop._on_after_fetch = lambda: [note(), after()]


def drop_sigterm_broadcast(trainer: lightning.Trainer) -> None:
    """Under DDP Lightning broadcasts a flag for its own SIGTERM handler in every step, also where that one is gone."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


# ---- the module ------------------------------------------------------------------------------------------------------


def attached_trainer(module: lightning.LightningModule) -> lightning.Trainer | None:
    """The Trainer of a module, or None; the public property `trainer` raises if there is none."""
    return module._trainer


def save_subclass_arguments(module: lightning.LightningModule, options: type) -> None:
    """Put the arguments that a subclass adds to those of a dataclass of options into `module.hparams`.

    Call it from an `__init__` that `arguments_from` decorates. Lightning reads the arguments from the frames of the
    constructors, innermost first: the decorator's is two above this one.
    """
    ignored = [option.name for option in fields(options)]
    module.save_hyperparameters(ignore=ignored, frame=sys._getframe(2), logger=False)


def drop_step_context(trainer: lightning.Trainer) -> None:
    """Run `training_step` outside of the precision's context: it is more than a forward pass, and enters it itself."""
    trainer.precision_plugin.train_step_context = nullcontext


def wrap_methods(target: Any, names: Iterable[str], wrap: Callable[[str, Callable], Callable]) -> None:
    """Replace methods of one object, which others keep and call, by what `wrap(name, method)` makes of them."""
    for name in names:
        setattr(target, name, wrap(name, getattr(target, name)))


# ---- ranks -----------------------------------------------------------------------------------------------------------


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of processes; strategies take no other."""

    def share_cores(self) -> None:
        _set_num_threads_if_needed(num_processes=self.num_processes)


class OwnLauncher:
    """A base of strategies, named first, that start processes by `launcher_class`; they take none as an argument."""

    launcher_class: type[ScriptLauncher]
    model: Any  # the module, sharded or in DDP
    lightning_module: Any  # a LanguageModule

    def _configure_launcher(self) -> None:
        self._launcher = self.launcher_class(self.cluster_environment, self.num_processes, self.num_nodes)


def set_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of all process groups from now on; torch's public API takes it only when a group is made."""
    for group in dist.distributed_c10d._world.pg_map:  # some are beside that of all ranks
        dist.distributed_c10d._set_pg_timeout(timeout, group)


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def replace_event_file(writer: "SummaryWriter", open_file: Callable[[Path], Any]) -> None:
    """Let a writer write its events to `open_file(path)`; TensorBoard's own file ends its thread at the first error."""
    assert writer.file_writer is not None
    events = writer.file_writer.event_writer
    events._async_writer._writer._writer = open_file(Path(events._file_name))
