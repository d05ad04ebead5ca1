"""Test equipment that a config names: a training that waits for a file."""

import os
import time
from pathlib import Path

from recorder import AtMicroBatches

from lm.system.stop_signals import STOP


class WaitAt(AtMicroBatches):
    """Makes the file `waits` and continues once there is a file `go`.

    Args:
        micro_batch: before this one of the process.
        go: name of the file.
    """

    def __init__(self, micro_batch: int, go: str = "go") -> None:
        self.micro_batch, self.go = micro_batch, go

    def before_micro_batch(self, trainer, pl_module, index):
        if index == self.micro_batch:
            Path("waits").touch()
            while not Path(self.go).exists():
                time.sleep(0.05)


class HoldMachine(AtMicroBatches):
    """The ranks of one machine wait before an optimizer step for a signal, and leave their process id in a file.

    The file is `held-<step>-<local rank>`; where it is there already, the step is not waited for again. The name of a
    machine is in the environment variable MACHINE. A machine that is alone waits before any step until the other comes,
    as long as there is no file `alone`.

    Args:
        machines: optimizer step (1 is the first) -> machine.
    """

    def __init__(self, machines: dict[int, str]) -> None:
        self.machines = machines

    def before_micro_batch(self, trainer, pl_module, index):
        step = trainer.global_step + 1
        path = Path(f"held-{step}-{trainer.local_rank}")
        alone, may_be_alone = trainer.num_nodes == 1, Path("alone").exists()
        if self.machines.get(step) == os.environ["MACHINE"] and not path.exists() and alone == may_be_alone:
            path.with_suffix(".tmp").write_text(str(os.getpid()))
            path.with_suffix(".tmp").rename(path)
        elif not alone or may_be_alone:
            return
        while STOP.received is None:
            time.sleep(0.05)
