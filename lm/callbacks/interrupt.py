"""Ends a run between two optimizer steps: for a signal with exit code 75, for a guard with 3."""

import os
import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule

from lm.errors import Interrupted
from lm.trainer import Trainer

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupt(Callback):
    """Ends a run at the next optimizer step after a signal reached any rank, with a checkpoint, or after a guard asked
    for it, with one if it is wanted. A second SIGINT ends it at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._ranks: dist.ProcessGroup | None = None  # to agree on the CPU, where no GPU is waited for

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning registers its own handlers just before this; they would exit 0 and save nothing. Under DDP it also
        # broadcasts a flag every micro-batch for them, a synchronisation that nobody needs any more.
        self._install()
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self._ranks = dist.new_group(backend="gloo") if trainer.world_size > 1 else None

    def _install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            os._exit(128 + number)
        self.received = number

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.step_taken(batch_idx)
        without_saving = trainer.stop is not None and not trainer.checkpoint_callback.requested
        if step is not None and (without_saving or not trainer.validates_after(step)):
            self._stop_if_asked(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fitting:
            self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: Trainer) -> None:
        asked = self._any_rank_asked()
        if trainer.global_step >= trainer.max_steps or not (asked or trainer.stop):
            return  # the run goes on, or is over anyway
        if trainer.checkpoint_callback.requested or trainer.stop is None:
            trainer.checkpoint_callback.save(trainer)
            trainer.checkpoint_io.drain()
        trainer.strategy.barrier()  # whoever watches the processes may kill all when the first one ends
        if trainer.stop is not None:
            raise trainer.stop
        name = signal.Signals(self.received).name if self.received else "a signal on another rank"
        raise Interrupted(
            f"{name}: stopped after step {trainer.global_step} with a checkpoint; "
            "the same command with `--ckpt_path auto` goes on"
        )

    def _any_rank_asked(self) -> bool:
        asked = torch.tensor(int(self.received is not None))
        if self._ranks is not None:
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._ranks)
        return bool(asked)
