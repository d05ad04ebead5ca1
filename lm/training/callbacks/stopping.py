"""Ends of a run before its last step: by a signal, a guard, or early stopping."""

import sys
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping

from lm.errors import Interrupted
from lm.runs.run import how_to_resume
from lm.system.stop_signals import STOP
from lm.system.units import plural
from lm.training.callback import Callback, call_hook
from lm.training.config import EarlyStoppingConfig
from lm.training.end_of_run import end_run
from lm.training.lightning_patches import drop_sigterm_broadcast
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer


class Interrupt(Callback, Checkpoint):
    """Ends a run with a checkpoint after a signal on any rank, or at the request of a guard.

    It ends after the optimizer step, or at the next batch of a validation, which is repeated first when the run is
    resumed. On a single device, `trainer.stop_within` limits the time for this.

    It is a Checkpoint because Lightning calls Checkpoints last, in order, and it must follow `Checkpoints`.
    """

    def __init__(self) -> None:
        # To exchange a flag on the CPU, without a GPU synchronization.
        self._ranks: dist.ProcessGroup | int | None = None

    def setup(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        if stage == "fit":
            STOP.catch()

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        # Lightning registers its own handlers just before this; they would exit 0 and save nothing.
        drop_sigterm_broadcast(trainer)
        waits = timedelta(seconds=trainer.options.rank_timeout)
        self._ranks = dist.new_group(backend="gloo", timeout=waits) if trainer.world_size > 1 else None
        alone = trainer.world_size == 1  # ranks may be waiting for each other, which rank_timeout limits
        STOP.arm(trainer.options.stop_within if alone else 0.0, partial(self._end_now, trainer))
        STOP.catch()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
        without_saving = trainer.run_state.stop is not None and not trainer.checkpoint_callback.requested
        if without_saving or not trainer.validates_after(trainer.global_step):
            self._stop_if_asked(trainer)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
        if trainer.fitting and self._any_rank_asked():
            trainer.run_state.pending_validation = True
            end_run(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        ends_anyway = trainer.should_stop and trainer.run_state.stop is None
        if trainer.fitting and not ends_anyway:
            self._stop_if_asked(trainer)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        STOP.disarm()

    on_exception = on_train_end

    def _stop_if_asked(self, trainer: Trainer) -> None:
        stop_requested = self._any_rank_asked()
        if trainer.run_state.stop is None and trainer.global_step >= trainer.max_steps:
            STOP.disarm()  # nothing is left to interrupt
        elif stop_requested or trainer.run_state.stop is not None:
            end_run(trainer)

    def _end_now(self, trainer: Trainer) -> None:
        """Called by the watchdog's thread just before it ends the process."""
        step, saved = trainer.global_step, trainer.run.steps()
        what = f"the validation after step {step}" if trainer.validating else f"step {step + 1}"
        newest = f" from step {max(saved)}" if saved else " from its first step"
        assert STOP.received is not None
        error = Interrupted(
            f"{STOP.received.name}: ended without a checkpoint, because {what} was not done within "
            f"{trainer.options.stop_within:g} s (trainer.stop_within); {how_to_resume(trainer.run)}{newest}"
        )
        call_hook(trainer, "on_cut_off", error)
        print(f"lm fit: {error}", file=sys.stderr, flush=True)

    def _any_rank_asked(self) -> bool:
        signalled = torch.tensor(int(STOP.received is not None))
        if self._ranks is not None:
            dist.all_reduce(signalled, dist.ReduceOp.MAX, group=self._ranks)
        return bool(signalled)


class EarlyStopping(LightningEarlyStopping):
    """Lightning's EarlyStopping, which remembers that it stopped a run; on a resume the config sets `patience`."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        super().__init__("val/loss", config.min_delta, config.patience, check_on_train_epoch_end=False)

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if self.wait_count >= self.patience:
            trainer.should_stop = True  # killed between its last checkpoint and its end

    def on_validation_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self.wait_count >= self.patience:
            below = f"by more than {abs(self.min_delta):g} below" if self.min_delta else "below"
            self.stopping_reason_message = (
                f"the validation loss has not fallen {below} {self.best_score:.4f} in "
                f"{plural(self.patience, 'validation')}"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
