"""What a test file of a CUDA device imports, so that an error of the device fails one test and not all that follow."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def device_works():
    """End this process after an error of the device, which all later CUDA calls would report again.

    pytest-xdist then reports the test that ran as failed, and starts another process for the tests that are left.
    """
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)
