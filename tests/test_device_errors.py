"""A device error ends the process it happened in, and no other test: see `device_works` in `test_gpu.py`."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import torch
from test_gpu import device_works

def test_breaks_the_device():
    def synchronize():
        raise RuntimeError("CUDA error: device-side assert triggered")
    torch.cuda.synchronize = synchronize

def test_later():
    torch.cuda.synchronize = lambda: None
"""


def test_the_tests_after_a_device_error_run_in_a_new_process(tmp_path):
    (tmp_path / "test_two.py").write_text(TESTS)
    here = Path(__file__).parent
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "-W", "ignore", "test_two.py"],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": f"{here}:{here.parent}"},
    )  # fmt: skip
    assert "1 failed, 2 passed" in ended.stdout, ended.stdout  # it passes, then the process ends
    assert "crashed while running 'test_two.py::test_breaks_the_device'" in ended.stdout
