"""Test equipment that a config names: sends signals to the loader processes of a training."""

import multiprocessing
import os
import signal

from lightning.pytorch import Callback


class SignalWorker(Callback):
    """Sends a signal to the first loader process when the training begins an optimizer step (0 is the first)."""

    def __init__(self, name: str, step: int) -> None:
        self.number, self.step = getattr(signal, name), step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            workers = sorted(multiprocessing.active_children(), key=lambda process: process.name)
            os.kill(workers[0].pid, self.number)
