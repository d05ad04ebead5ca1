"""This process: the signals that end a training, its clock, its exit, how it was started, and text for its terminal.

Nothing here imports torch, so signals are caught before the seconds that importing torch takes.
"""

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from lm import __version__
from lm.errors import Interrupted

# ---- stop signals ----------------------------------------------------------------------------------------------------
# The signals that end a training: at once before its first step, and then between two steps.
#
# Importing this imports no torch: the signals are caught before that, which takes seconds.

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class GivenUp(BaseException):
    """Raised in the middle of what took too long after a signal. No handler of errors is to take it for one."""


def never() -> bool:
    """Nothing may be given up."""
    return False


class StopSignals:
    """What this process was told.

    Attributes:
        received: the first signal.
        noted: a training is under way that looks at `received` by itself; else a signal raises `Interrupted`.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.noted = False
        self._repeatable: Callable[[], bool] = never
        self._patience = 0.0

    def catch(self) -> None:
        """Install the handlers; later calls take back what others have put in their place."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored: it runs under nohup
                signal.signal(number, self._handle)

    def note(self, patience: float = 0.0, repeatable: Callable[[], bool] = never) -> None:
        """From here on a signal is noted, and raises nothing at once.

        Args:
            patience: seconds from a signal on, after which `GivenUp` is raised; 0: never.
            repeatable: whether that may be done at this moment; asked once a second.
        """
        self.noted, self._patience, self._repeatable = True, patience, repeatable
        if patience:
            signal.signal(signal.SIGALRM, self._give_up)
        if self.received is not None:
            self._be_patient()

    def over(self) -> None:
        """The exit code is known, and no signal is to change it. While Python ends it gives those that it handles their
        default back, which kills; those that are ignored stay so. Ctrl-C may still end an end that hangs."""
        for number in SIGNALS:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)

    def forget_patience(self) -> None:
        """Nothing is given up any more. An alarm that went off while Python ends would kill the process."""
        self._repeatable = never  # or what is asked would keep the whole training in memory
        if self._patience:  # else the alarm, if there is one, is somebody else's
            self._patience = 0.0
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.received = signal.Signals(number)
        if self.noted:
            self._be_patient()
        elif os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":  # the other ranks end with this one
            raise Interrupted(f"{self.received.name}: ended before the first step; the same command starts again")

    def _be_patient(self) -> None:
        if self._patience:
            signal.setitimer(signal.ITIMER_REAL, self._patience, 1.0)

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        if self._repeatable():
            self.forget_patience()
            raise GivenUp


STOP = StopSignals()  # signals are told to a process


# ---- leaving ---------------------------------------------------------------------------------------------------------
# How a process ends though a thread of it is in a call that does not return.
#
# A read from an object store that does not answer cannot be interrupted, and pyarrow waits for all of them when the
# interpreter goes. Importing this imports neither.

GRACE = 2.0  # seconds that such calls have at the end
_calls: set[threading.Thread] = set()


def may_hang(thread: threading.Thread) -> None:
    """Note a thread that is about to make such a call, and is no other thread's to wait for."""
    _calls.difference_update([call for call in list(_calls) if call.ident is not None and not call.is_alive()])
    _calls.add(thread)


def leave(code: int) -> None:
    """Exit with this code, without what is still in a call after a moment."""
    end = time.monotonic() + GRACE
    for thread in list(_calls):
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))
    if not any(thread.is_alive() for thread in list(_calls)):
        sys.exit(code)
    waits = getattr(sys.modules.get("pyarrow.fs"), "ensure_s3_finalized", None)  # not in every build of pyarrow
    if waits is not None:
        atexit.unregister(waits)
    atexit._run_exitfuncs()
    with suppress(OSError):  # nobody may be reading any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


# ---- steady clock ----------------------------------------------------------------------------------------------------
# Dates that never go back and never leap, for what a training writes down: curves over time must be read as they were.
#
# Whether another machine's sign of life is fresh is another matter: that is told by the wall clock.


def now() -> float:
    """Seconds since 1970: what the wall clock said when this process asked first, and what has gone by since then,
    however the wall clock is set in between."""
    return _offset() + time.monotonic()


@cache
def _offset() -> float:
    return time.time() - time.monotonic()


# ---- run facts -------------------------------------------------------------------------------------------------------
# Where and how a run was started.


def run_facts() -> dict[str, Any]:
    """What `run.json` records of where and how a run was started: versions, command, host, git revision."""
    from importlib.metadata import version

    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
        revision = git.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        revision = ""
    packages = ("torch", "lightning", "torchmetrics", "safetensors", "tokenizers", "pyarrow", "numpy")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "entered": time.time(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "versions": {"lm": __version__, **{name: version(name) for name in packages}},
        "git": revision or None,
    }


def seconds_since_process_start() -> float:
    """How long this process has been there; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from the third on, proc(5)
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine's
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


# ---- terminal --------------------------------------------------------------------------------------------------------
# What may be shown on a terminal: text of files and models cannot move its cursor, change its colours or its title.

# Control signs as pictures of themselves; line ends and tabs stay.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(range(127, 160), "␦")


def harmless(text: str) -> str:
    """The text with pictures in the place of control signs."""
    return text.translate(PICTURES)


class HarmlessFormatter(logging.Formatter):
    """A log line as it is, but for control signs."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))
