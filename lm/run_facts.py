"""Where and how a run was started."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lm import __version__


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
