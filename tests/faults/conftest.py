"""Every fault is met by a real `lm fit` of a very small model in a process of its own."""

import shutil

import pytest
from mounts import Mounts
from trainings import lm, make_workplace, write_config


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """A folder where `small` was trained without a stop: prepared data, its run, `expected.jsonl` with its losses."""
    folder = make_workplace(tmp_path_factory.mktemp("uninterrupted"))
    lm(folder, "fit", "--config", str(write_config(folder)))
    (folder / "trace.jsonl").rename(folder / "expected.jsonl")
    return folder


@pytest.fixture
def workplace(uninterrupted, tmp_path):
    """A fresh copy of the texts, the prepared data and the expected losses, for one test to break."""
    shutil.copytree(uninterrupted, tmp_path / "workplace", symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
    return tmp_path / "workplace"


@pytest.fixture
def mounts(workplace):
    """File systems that only the trainings in `workplace` see."""
    mounts = Mounts(workplace)
    yield mounts
    mounts.close()
