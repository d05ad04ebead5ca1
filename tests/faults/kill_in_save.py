"""Test equipment that a config names: ends the process in the middle of a checkpoint's writing."""

import os
import signal
import sys
import threading
from fnmatch import fnmatch

from lightning.pytorch import Callback


class KillInSave(Callback):
    """SIGKILL before an operation on files of the thread that writes checkpoints.

    Args:
        event: Python's name for it in the audit of what a process does, such as os.rename.
        path: pattern of the path that it is about to touch.
        time: the n-th time.
    """

    def __init__(self, event: str, path: str, time: int = 1) -> None:
        self.event, self.path, self.left = event, path, time

    def on_train_start(self, trainer, pl_module):
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if event != self.event or not threading.current_thread().name.startswith("checkpoint"):
            return
        if fnmatch(os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else "", self.path):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
