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
ENDING = 2.0  # seconds that the watchdog gives to the last words of a run


class StopSignals:
    """The signals that this process received, and what happens then.

    Attributes:
        received: the first signal.
        noted: a training is under way that looks at `received` by itself; else a signal raises `Interrupted`.
        late: half of the time after a signal is over, and the training has not come to an end.
        saving: a checkpoint is being taken, which may take longer than there is time.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.noted = False
        self.late = False
        self.saving = False
        self._in_time = threading.Event()  # the watchdog has nothing more to wait for

    def catch(self) -> None:
        """Install the handlers; later calls take back what others have put in their place."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored: it runs under nohup
                signal.signal(number, self._handle)

    def note(self, within: float = 0.0, end: Callable[[], None] | None = None) -> None:
        """From here on a signal is noted, and raises nothing at once.

        Args:
            within: seconds from a signal to `disarm`; a thread ends the process with 75 when they are over, whatever
                the main thread does. 0: there is no such limit.
            end: called by that thread just before, with a second or two for it.
        """
        self.noted, self.late, self._in_time = True, False, threading.Event()
        if within:
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written to by C, also while Python cannot run
            if self.received is not None:
                os.write(writer, bytes([self.received]))
            arguments = (reader, within, self._in_time, end)
            threading.Thread(target=self._watch, args=arguments, name="stop-watchdog", daemon=True).start()

    def disarm(self) -> None:
        """The run is about to end by itself, and is not ended any more, however long its last checkpoint takes."""
        self._in_time.set()

    def over(self) -> None:
        """The exit code is known, and no signal is to change it. While Python ends it gives those that it handles their
        default back, which kills; those that are ignored stay so. Ctrl-C may still end an end that hangs."""
        self.disarm()
        for number in SIGNALS:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.received = signal.Signals(number)
        if not self.noted and os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
            # The other ranks end with this one.
            raise Interrupted(f"{self.received.name}: ended before the first step; the same command starts again")

    def _watch(self, reader: int, within: float, in_time: threading.Event, end: Callable[[], None] | None) -> None:
        """Wait for a signal, then for `in_time`; end the process if that does not come."""
        while not (numbers := set(os.read(reader, 64)) & set(SIGNALS)):  # a byte a signal, of all that have a handler
            pass
        self.late = not in_time.wait(within / 2)
        while not in_time.wait(within / 2) and self.saving:
            pass
        if in_time.is_set():
            return
        self.received = self.received or signal.Signals(numbers.pop())  # the main thread may not have run since
        # `end` writes files and may wait for a lock that the main thread holds.
        last = threading.Timer(ENDING, os._exit, (Interrupted.exit_code,))
        last.daemon = True
        last.start()
        try:
            if end is not None:
                end()
        finally:
            os._exit(Interrupted.exit_code)


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
