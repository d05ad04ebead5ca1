"""Test equipment: file systems that only the trainings of one test see."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked import CAN_FORK, MOUNTS_OF
from trainings import PLACES, lm


class Mounts:
    """File systems that only the trainings of one test see: a process that holds a namespace, entered by others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        holder = ["unshare", "--map-root-user", "--mount", "sh", "-c", "echo there && exec sleep 1000"]
        self.holder = subprocess.Popen(holder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self.holder.stdout.readline() != "there\n":
            pytest.skip(f"file systems cannot be mounted here: {self.holder.communicate()[1]}")

    def run(self, *command: str, expect: int = 0, **environment: str) -> subprocess.CompletedProcess:
        enter = ["nsenter", f"--target={self.holder.pid}", "--user", "--mount", "--preserve-credentials",
                 "sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *command]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1", **environment}
        done = subprocess.run(enter, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def lm(self, *arguments: str, expect: int = 0, **environment: str) -> subprocess.CompletedProcess:
        """As `trainings.lm`."""
        if CAN_FORK:
            entered = {MOUNTS_OF: str(self.holder.pid), **environment}
            done = lm(self.folder, *arguments, expect=expect, **entered)
        else:
            done = self.run(sys.executable, "-m", "lm", *arguments, expect=expect, **environment)
        assert "Traceback" not in done.stderr
        return done

    def at(self, path: str) -> Path:
        """A path of theirs, to be looked at from outside."""
        return Path(f"/proc/{self.holder.pid}/root") / (self.folder / path).relative_to("/")

    def close(self) -> None:
        self.holder.kill()
        self.holder.communicate()
