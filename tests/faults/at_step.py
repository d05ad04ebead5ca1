"""Test equipment that a config names: something happens to the machine when a training has taken a step."""

import subprocess
import time

from lightning.pytorch import Callback

from lm.errors import RunError
from lm.training import checkpoint_io


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


class FailingWrite(Callback):
    """The checkpoint of a step cannot be written, which is known after some seconds.

    Args:
        step: the optimizer step that it is of.
        seconds: how long the write takes.
    """

    def __init__(self, step: int, seconds: float) -> None:
        self.name, self.seconds, self.write = f"step-{step:08d}", seconds, checkpoint_io.write_folder

    def on_train_start(self, trainer, pl_module):
        checkpoint_io.write_folder = self._fail

    def _fail(self, folder, content):
        if folder.name != self.name:
            return self.write(folder, content)
        time.sleep(self.seconds)
        raise RunError(f"could not write the checkpoint {folder}")
