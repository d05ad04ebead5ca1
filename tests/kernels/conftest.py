"""What all tests of kernels share: one thread, one seed, and the kernels on a CPU."""

import pytest
from emulation.emulator import emulated  # noqa: F401


@pytest.fixture(autouse=True)
def all_on_one_thread(one_thread):
    pass
