"""Test equipment that a config names: a process that gets no more memory than so much beyond what it has."""

import re
import resource
from pathlib import Path

import torch
from lightning.pytorch import Callback


class Limit(Callback):
    """From the first step on the process may take so much more, as the system would refuse it (RLIMIT_DATA).

    Args:
        mebibytes: more.
    """

    def __init__(self, mebibytes: int) -> None:
        self.mebibytes = mebibytes

    def on_train_start(self, trainer, pl_module):
        taken = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
        most = taken + self.mebibytes * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


class LimitGPU(Callback):
    """The process may take so much of its GPU and no more.

    Args:
        mebibytes: in all.
    """

    def __init__(self, mebibytes: int) -> None:
        self.mebibytes = mebibytes

    def setup(self, trainer, pl_module, stage):
        device = trainer.strategy.root_device
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(self.mebibytes * 2**20 / total, device)
