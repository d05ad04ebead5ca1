"""This process: its exit, its clock, how it was started, and text that is safe to print. Nothing here imports torch."""

import atexit
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from lm import __version__

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


# ---- clock -----------------------------------------------------------------------------------------------------------


def steady_time() -> float:
    """Seconds since 1970 that never jump: the wall clock at the first call, plus the time that has passed since then.

    A training writes it into its log lines, so its curves over time stay readable when the wall clock is set. Whether
    another machine's heartbeat is fresh is a question for the wall clock.
    """
    return _offset() + time.monotonic()


@cache
def _offset() -> float:
    return time.time() - time.monotonic()


# ---- start of the process --------------------------------------------------------------------------------------------


def run_facts() -> dict[str, Any]:
    """Where and how a run was started, for `run.json`: versions, command, host, git revision."""
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
    """Age of this process; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from the third field of proc(5) on
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds after the boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


# ---- safe text -------------------------------------------------------------------------------------------------------

# Control characters as visible symbols; line ends and tabs stay.
SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(range(127, 160), "␦")


def harmless(text: str) -> str:
    """The text with a visible symbol for each control character, so it cannot move a terminal's cursor or set its title."""
    return text.translate(SYMBOLS)


class HarmlessFormatter(logging.Formatter):
    """Formats log records; a control character becomes a visible symbol."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))
