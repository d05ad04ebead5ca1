"""Test equipment: a program in a pseudo-terminal, where a test types and reads as a person does."""

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from pathlib import Path

import pyte
from forked import CAN_FORK, Fork
from trainings import PLACES


class Terminal:
    """`python COMMAND...` in a pseudo-terminal; `output` is all that it has written.

    Args:
        fork: for a `-m lm ...` that would import torch first: a process that has done so.
    """

    def __init__(
        self, folder: Path, *command: str, size: tuple[int, int] = (80, 24), fork: bool = False, **environment: str
    ) -> None:
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1", **environment}
        for name in {"COLUMNS", "LINES", "NO_COLOR"} & env.keys():
            del env[name]
        self._fork = None
        if fork and CAN_FORK:
            self.terminal, theirs = pty.openpty()
            self._fork = Fork(command[2:], folder, env, theirs)
            os.close(theirs)
            self.pid = self._fork.pid
        else:
            self.pid, self.terminal = pty.fork()
            if self.pid == 0:
                os.chdir(folder)
                os.execve(sys.executable, [sys.executable, *command], env)
        self.output, self._waited, self._closed = b"", 0, False
        self.resize(*size)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def read(self, seconds: float) -> None:
        """Add to `output` what comes next, if it comes in this time."""
        if select.select([self.terminal], [], [], seconds)[0]:
            try:
                self.output += os.read(self.terminal, 65536)
            except OSError:  # no process has it open any more
                self._closed = True

    def wait_for(self, words: str, seconds: float = 60) -> str:
        """What is written before the next place with some words."""
        deadline, wanted = time.monotonic() + seconds, words.encode()
        while (at := self.output.find(wanted, self._waited)) < 0:
            going = not self._closed and time.monotonic() < deadline
            assert going, self.output[self._waited :].decode(errors="replace")
            self.read(0.1)
        before, self._waited = self.output[self._waited : at], at + len(wanted)
        return before.decode(errors="replace").replace("\r\n", "\n")

    def rows(self) -> list[str]:
        """What a person sees of the output in a terminal of this size, with what has scrolled away above it."""
        height, width, *_ = struct.unpack("HHHH", fcntl.ioctl(self.terminal, termios.TIOCGWINSZ, bytes(8)))
        screen = pyte.HistoryScreen(width, height, history=10_000)
        pyte.ByteStream(screen).feed(self.output)
        above = ["".join(row[column].data for column in range(width)) for row in screen.history.top]
        return [row.rstrip() for row in (*above, *screen.display)]

    def end(self) -> int:
        """Its exit code, after all that it still writes."""
        deadline = time.monotonic() + 60
        while not self._closed and time.monotonic() < deadline:
            self.read(1)
        return self._fork.wait(60) if self._fork else os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def plain(text: str) -> str:
    """A text without colours and what moves the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
