"""Whatever is wrong with the registry of runs, a training does not notice, and `lm runs rebuild` makes it anew."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import contextmanager

import pytest
from trainings import expected, lm, losses, write_config

pytestmark = pytest.mark.fault(20)

LOCK = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("CREATE TABLE runs (path TEXT PRIMARY KEY)")
database.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(path):
    """Another process keeps the file locked all the while."""
    holder = subprocess.Popen([sys.executable, "-c", LOCK, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"locked\n"
        yield "database is locked"
    finally:
        holder.communicate()


@contextmanager
def damaged(path):
    """It is no database."""
    path.write_bytes(b"\xff" * 20_000)
    yield "file is not a database"


@contextmanager
def silent(path):
    """A pipe lies in its place, whose other end nobody reads."""
    os.mkfifo(path)
    yield "was not updated"
    path.unlink()


def rebuilt(folder, registry):
    """What is known from another folder, after `lm runs rebuild`."""
    lm(folder, "runs", "rebuild", LM_REGISTRY=registry)
    (folder / "elsewhere").mkdir()
    (row,) = json.loads(lm(folder / "elsewhere", "runs", "ls", "--json", LM_REGISTRY=registry).stdout)
    return row


@pytest.mark.parametrize("fault", [locked, damaged, silent])
def test_a_training_does_not_notice(workplace, fault):
    """The losses are those of a training whose registry is in order; it says one line, and not a second one when it
    ends."""
    path = workplace / "registry" / "runs.db"
    path.parent.mkdir()
    with fault(path) as reason:
        fit = lm(workplace, "fit", "--config", str(write_config(workplace)), LM_REGISTRY=str(path))
    said = [line for line in fit.stderr.splitlines() if "the registry" in line]
    assert len(said) == 2 and reason in said[0] and "lm runs rebuild" in said[0]  # where it begins and where it ends
    assert losses(workplace) == expected(workplace)
    row = rebuilt(workplace, str(path))
    assert (row["name"], row["status"], row["step"]) == ("small", "finished", 12)


def test_on_a_read_only_disk(workplace, mounts):
    """As where a home is mounted read-only on the nodes of a cluster; an older version of the registry lies there."""
    mounts.run("mkdir", "home")
    with sqlite3.connect(workplace / "home" / "runs.db") as database:
        database.execute("CREATE TABLE runs (path TEXT PRIMARY KEY, name TEXT)")
    mounts.run("mount", "--bind", "home", "home")
    mounts.run("mount", "-o", "remount,ro,bind", "home")
    here = {"LM_REGISTRY": "home/runs.db"}
    fit = mounts.lm("fit", "--config", str(write_config(workplace)), **here)
    said = [line for line in fit.stderr.splitlines() if "the registry" in line]
    assert len(said) == 2 and "was not updated" in said[0], said
    assert losses(workplace) == expected(workplace)
    refused = mounts.lm("runs", "rebuild", expect=1, **here).stderr
    assert len(refused.splitlines()) == 1 and "cannot be written" in refused
    mounts.close()
    assert rebuilt(workplace, str(workplace / "home" / "runs.db"))["step"] == 12
