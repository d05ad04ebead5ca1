"""Test equipment that a config names: something happens to the machine when a training has taken a step."""

import subprocess

from lightning.pytorch import Callback


class AtStep(Callback):
    """Runs a shell command.

    Args:
        step: the optimizer step after which.
        command: what.
    """

    def __init__(self, step: int, command: str) -> None:
        self.step, self.command = step, command

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            subprocess.run(self.command, shell=True, check=True)
