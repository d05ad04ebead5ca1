"""Test equipment that a config names: a training that waits until it is told to go on."""

import time
from pathlib import Path

from lightning.pytorch import Callback


class WaitAt(Callback):
    """Makes the file `waits` and goes on once there is a file `go`.

    Args:
        micro_batch: before this one of the process.
    """

    def __init__(self, micro_batch: int) -> None:
        self.micro_batch = micro_batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.micro_batch:
            Path("waits").touch()
            while not Path("go").exists():
                time.sleep(0.05)
