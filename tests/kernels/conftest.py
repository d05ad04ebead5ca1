"""What all tests of kernels share: one thread, one seed, and the kernels on a CPU."""

import pytest
import torch
from emulation.emulator import emulated  # noqa: F401


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)
