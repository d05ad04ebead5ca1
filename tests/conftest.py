"""No test writes to the user's own registry of runs, and what tests start can be interrupted."""

import os
import signal
import tempfile

import pytest
from trainings import make_workplace

pytest_plugins = ["fault_report"]

registry = tempfile.TemporaryDirectory(prefix="lm-registry-", ignore_cleanup_errors=True)  # removed at the end
os.environ["LM_REGISTRY"] = os.path.join(registry.name, "runs.db")
if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores, whose threads would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# In the background of a shell SIGINT is ignored, and SIGHUP under nohup, and so they would be by every process that a
# test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def one_thread():
    """One thread of PyTorch, and one seed: the same numbers in every run of a test."""
    import torch  # here, as many tests need none of it

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with texts, in which all tests of a file train; the first of them prepares the data."""
    return make_workplace(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """As `workplace`, with the data in `data/small`."""
    return make_workplace(tmp_path_factory.mktemp("prepared"), "data/small")
