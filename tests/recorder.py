"""Test equipment that a config names: writes down what a training saw, and kills it at a given moment."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback


class AtMicroBatches(Callback):
    """Has `before_micro_batch` and `after_micro_batch` called around the forward pass of each, in training."""

    micro = -1  # the newest of the step

    def on_train_start(self, trainer, pl_module):
        losses = pl_module.losses

        def watched(micro_batch):
            if not (pl_module.training and torch.is_grad_enabled()):
                return losses(micro_batch)
            self.micro += 1
            index = trainer.global_step * trainer.steps.accumulate + self.micro  # counted over the run
            self.before_micro_batch(trainer, pl_module, index)
            found = losses(micro_batch)
            self.after_micro_batch(trainer, micro_batch, found)
            return found

        pl_module.losses = watched

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.micro, self.batch = -1, batch

    def before_micro_batch(self, trainer, pl_module, index):
        pass

    def after_micro_batch(self, trainer, micro_batch, found):
        pass


class Recorder(AtMicroBatches):
    """Appends a line a micro-batch to `trace.jsonl`, on disk before anything can kill the process."""

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self.turn = trainer.run.read("run.json").get("turn") if trainer.run else None  # the session's number
        name = "trace.jsonl" if trainer.world_size == 1 else f"trace-{trainer.global_rank}.jsonl"
        self.file = open(name, "a+", buffering=1)  # a line is one write
        self.file.seek(0)
        whole = self.file.read().rpartition("\n")[0]
        self.file.truncate(len(whole) + bool(whole))  # a kill may cut a write where a page of memory ends

    def after_micro_batch(self, trainer, micro_batch, found):
        entry = {
            "step": trainer.global_step + 1,
            "micro": self.micro,
            "samples": [self.batch.consumed - trainer.datamodule.global_batch, self.batch.consumed],
            "tokens": micro_batch.tokens.to(int).flatten().tolist(),
            "loss": (found[0] / found[1].numel()).item().hex(),
            "rank": trainer.global_rank,
            "ranks": trainer.world_size,
            "turn": self.turn,
        }
        self.file.write(json.dumps(entry) + "\n")


class KillAt(AtMicroBatches):
    """Sends this process a signal.

    Args:
        signal_name: such as SIGKILL.
        micro_batch: when the training begins this micro-batch of this process, counted over the run; or
        validation: when this batch of a validation begins; or
        save: when a checkpoint is being written.
        hook: when Lightning calls this hook of callbacks.
        step: only after this optimizer step, where it is given.
        rank: only in this one of the processes of a node, where it is given.
        group: the whole process group, as a Ctrl-C does; it becomes one of its own, with all that it starts.
    """

    def __init__(
        self, signal_name: str, micro_batch: int = -1, validation: int = -1, save: bool = False, hook: str = "",
        step: int | None = None, rank: int | None = None, group: bool = False,
    ) -> None:  # fmt: skip
        self.number = getattr(signal, signal_name)
        self.micro_batch, self.validation, self.save = micro_batch, validation, save
        self.step, self.rank, self.group = step, rank, group
        if group and "LOCAL_RANK" not in os.environ:
            os.setpgid(0, 0)
        if hook:
            setattr(self, hook, self._at_hook)

    def _kill(self) -> None:
        if self.rank not in (None, int(os.environ.get("LOCAL_RANK", 0))):
            return
        if self.group:
            os.killpg(0, self.number)
        else:
            os.kill(os.getpid(), self.number)

    def _at_hook(self, trainer, *args, **kwargs) -> None:
        if self.step in (None, trainer.global_step):
            self._kill()

    def before_micro_batch(self, trainer, pl_module, index):
        if index == self.micro_batch:
            self._kill()

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == self.validation and self.step in (None, trainer.global_step):
            self._kill()

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if self.save and self.step in (None, trainer.global_step):
            threading.Thread(target=self._kill_in_write, args=(trainer.run.path,), daemon=True).start()

    def _kill_in_write(self, run: Path) -> None:
        while not list(run.glob(".tmp-step-*")):
            time.sleep(1e-4)
        self._kill()


class Failing(Callback):
    """Raises an error that nobody foresaw, on one rank."""

    def __init__(self, rank: int = 0):
        self.rank = rank

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_rank == self.rank:
            raise ZeroDivisionError("on purpose")
