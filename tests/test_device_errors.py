"""A device error ends the process it happened in, and no other test."""

import os
import subprocess
import sys
from pathlib import Path

# Of torch, which takes seconds to import, this is all that is needed.
TORCH = """
class cuda:
    def synchronize():
        if broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

broken = False
"""
TESTS = """
import torch
from device_errors import device_works

def test_breaks_the_device():
    torch.broken = True

def test_later():
    pass
"""


def test_the_tests_after_a_device_error_run_in_a_new_process(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "test_two.py").write_text(TESTS)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "-W", "ignore", "test_two.py"],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parent}"},
    )  # fmt: skip
    assert "1 failed, 2 passed" in ended.stdout, ended.stdout  # it passes, then the process ends
    assert "crashed while running 'test_two.py::test_breaks_the_device'" in ended.stdout
