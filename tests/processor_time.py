"""Test equipment: what something costs in processor time, which other work on the machine does not lengthen."""

import resource
import subprocess
import sys


def run_python(code: str) -> tuple[subprocess.CompletedProcess, float]:
    """Run a program to its end, which must be a success; it, and its seconds on all cores."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
