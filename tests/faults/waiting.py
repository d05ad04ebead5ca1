"""Test equipment that a config names: a training that waits for a file."""

import time
from pathlib import Path

from recorder import AtMicroBatches


class WaitAt(AtMicroBatches):
    """Makes the file `waits` and continues once there is a file `go`.

    Args:
        micro_batch: before this one of the process.
    """

    def __init__(self, micro_batch: int) -> None:
        self.micro_batch = micro_batch

    def before_micro_batch(self, trainer, pl_module, index):
        if index == self.micro_batch:
            Path("waits").touch()
            while not Path("go").exists():
                time.sleep(0.05)
