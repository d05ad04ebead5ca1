"""One process trains a run at a time, whatever is started, killed and started again."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from trainings import expected, lm, losses, start, write_config

from lm.errors import RequestError
from lm.runs import run as run_lock
from lm.runs.run import FILE, Holder, LocksMissing, Run, look
from lm.training.callbacks.run_folder import RunFolder

SLOW = [{"class_path": "recorder.Recorder"}, {"class_path": "waiting.WaitAt", "init_args": {"micro_batch": 10}}]
FIT = ("fit", "--config", "small.yaml", "--ckpt_path", "auto")


def waiting(folder, *arguments):
    """A fit that has come to its sixth step, with a checkpoint of the third, and waits there for the file `go`."""
    process = start(folder, *arguments)
    until = time.monotonic() + 120
    while not (folder / "waits").exists():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.05)
    return process


def end(process):
    process.kill()
    process.communicate()


@pytest.mark.fault(19)
def test_a_run_that_is_being_trained_is_refused_and_a_dead_ones_is_taken_over(workplace):
    """Refused are `auto`, a path into the run and its removal; it is told who trains it, who is not disturbed.
    After a SIGKILL the next command goes on at once, to the losses of a run that was never stopped."""
    write_config(workplace, **{"trainer.callbacks": SLOW})
    first = waiting(workplace, *FIT)
    run = Run(workplace / "checkpoints" / "small")
    try:
        before = (run.path / "run.json").read_bytes(), len(run.metrics())
        *_, newest = (path.name for path in run.steps().values())
        commands = [
            FIT, (*FIT[:3], "--ckpt_path", f"checkpoints/small/{newest}"), ("runs", "rm", "small", "--yes"),
        ]  # fmt: skip
        others = [start(workplace, *command) for command in commands]
        for command, other in zip(commands, others, strict=True):
            err = other.communicate(timeout=120)[1]
            assert other.returncode == 2 and f"process {first.pid} on " in err.splitlines()[-1], (command, err)
            assert "is being trained" in err.splitlines()[-1] and f"kill {first.pid}" in err
        assert ((run.path / "run.json").read_bytes(), len(run.metrics())) == before and run.status() == "running"
        assert [path.name for path in (workplace / "checkpoints").iterdir()] == ["small"]
    finally:
        end(first)
    assert run.status() == "dead"
    (workplace / "go").touch()
    lm(workplace, *FIT)
    assert run.status() == "finished" and losses(workplace) == expected(workplace)


@pytest.mark.fault(19)
def test_of_two_that_start_at_the_same_moment_one_trains(workplace):
    """Both find nothing to go on with, and later both find a dead run; in the end it is one run, bit for bit."""
    write_config(workplace, **{"trainer.callbacks": SLOW})
    run = Run(workplace / "checkpoints" / "small")
    for _ in range(2):  # from scratch, then from a checkpoint
        both = [start(workplace, *FIT) for _ in range(2)]
        try:
            until = time.monotonic() + 120
            while not any(process.poll() is not None for process in both):
                assert time.monotonic() < until
                time.sleep(0.05)
            loser, winner = sorted(both, key=lambda process: process.poll() is None)
            err = loser.communicate()[1]
            assert loser.returncode == 2 and f"process {winner.pid} on" in err.splitlines()[-1], err
            while not (workplace / "waits").exists():
                assert winner.poll() is None and time.monotonic() < until
                time.sleep(0.05)
        finally:
            [end(process) for process in both]
        (workplace / "waits").unlink()
        assert [path.name for path in (workplace / "checkpoints").iterdir()] == ["small"] and run.status() == "dead"
    (workplace / "go").touch()
    lm(workplace, *FIT)
    assert losses(workplace) == expected(workplace)


@pytest.mark.fault(19)
def test_without_a_checkpoint_to_go_on_from_the_same_name_is_another_run_and_auto_finds_it_again(workplace):
    """The second run of a name is gone on with as what it is, also the second time."""
    kill = {"class_path": "recorder.KillAt", "init_args": {"signal_name": "SIGTERM"}}
    callbacks = [[{"class_path": "recorder.Recorder"}, {**kill, "init_args": {**kill["init_args"], "micro_batch": at}}]
                 for at in (4, 12)]  # fmt: skip
    (workplace / "checkpoints").mkdir()
    older = Run.create("small", workplace / "checkpoints")
    older.describe(name="small", status="finished", entered=time.time() + 9e5, turn=1)  # by a clock that was wrong
    write_config(workplace, **{"trainer.callbacks": callbacks[0]})
    lm(workplace, *FIT[:3], expect=75)
    write_config(workplace, **{"trainer.callbacks": callbacks[1]})
    lm(workplace, *FIT, expect=75)
    write_config(workplace)
    lm(workplace, *FIT)
    assert Run(workplace / "checkpoints" / "small-2").status() == "finished" and list(older.steps()) == []
    assert losses(workplace) == expected(workplace)


# ---- the lock alone --------------------------------------------------------------------------------------------------

HOLD = """
import os, sys, time
from pathlib import Path
from lm.runs.run import hold
print(hold(Path(sys.argv[1])), flush=True)
if sys.argv[2:] == ["fork"] and os.fork() == 0:
    time.sleep(60)
time.sleep(60)
"""


def holding(folder, *arguments):
    """Another process that tries to hold the lock, and what it got."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *arguments], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("arguments", [(), ("fork",)])
def test_a_killed_process_holds_nothing_also_where_its_children_live_on(tmp_path, arguments):
    """Workers that read data are forked, and outlive a killed training by some seconds."""
    first, said = holding(tmp_path, *arguments)
    try:
        assert said == "None"
        holder, taken = look(tmp_path)
        assert taken and (holder.pid, holder.host) == (first.pid, os.uname().nodename)
        assert run_lock.hold(tmp_path) == holder and str(holder).startswith(f"process {first.pid} on ")
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert look(tmp_path) == (holder, False)
    assert run_lock.hold(tmp_path) is None and run_lock.hold(tmp_path) is None
    other, said = holding(tmp_path)
    end(other)
    assert f"process {os.getpid()}" in said or str(os.getpid()) in said
    assert look(tmp_path)[0].pid == os.getpid() and look(tmp_path)[1], "who looks does not let go"
    run_lock.release(tmp_path)
    assert not look(tmp_path)[1]


def test_a_number_that_another_process_has_by_now_is_no_sign_of_life(tmp_path):
    """This process has the number of the dead one, and its heartbeat is a moment old."""
    run = Run(tmp_path)
    run.describe(status="running", entered=time.time())
    beat = {"time": time.time(), "pid": os.getpid(), "host": os.uname().nodename}
    (tmp_path / "heartbeat.json").write_text(json.dumps(beat))
    assert run.status() == "running", "there is no lock to ask"
    (tmp_path / FILE).write_text(json.dumps({**beat, "since": time.time()}))
    assert run.status() == "dead"
    run.refuse_if_trained()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "x", "host": 3, "since": 1e99}', "\0" * 9000])
def test_a_lock_that_says_nothing_holds_all_the_same(tmp_path, content):
    """A full disk, or a kill just after it was taken."""
    process, _ = holding(tmp_path)
    try:
        (tmp_path / FILE).write_text(content)
        holder, taken = look(tmp_path)
        assert taken and "process" in str(holder)
        with pytest.raises(RequestError, match="is being trained by another process"):
            Run(tmp_path).hold()
    finally:
        end(process)


def test_where_there_are_no_locks_the_heartbeat_tells(tmp_path, monkeypatch):
    """As on a network disk that was mounted without them."""

    def missing(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "lockf", missing)
    monkeypatch.setattr(run_lock.fcntl, "fcntl", missing)
    with pytest.raises(LocksMissing):
        run_lock.hold(tmp_path)
    run = Run(tmp_path)
    run.hold()
    run.describe(status="running", entered=time.time())
    beat = {"time": time.time(), "pid": os.getppid(), "host": os.uname().nodename}
    (tmp_path / "heartbeat.json").write_text(json.dumps(beat))
    assert run.status() == "running"
    with pytest.raises(RequestError, match=f"is being trained by process {os.getppid()} on "):
        run.hold()
    (tmp_path / "heartbeat.json").write_text(json.dumps({**beat, "pid": 2**22 + 1}))
    assert run.status() == "dead"
    run.hold()


def test_a_holder_in_words():
    assert str(Holder(7, "here", 0.0)) == "process 7 on here since 1970-01-01 00:00:00Z"
    assert str(Holder(None, None, None)) == "another process"


def test_a_run_that_another_has_trained_since_it_was_looked_at_is_not_gone_on_with(tmp_path):
    """Or this process would go on from a checkpoint that is no longer the newest."""
    run = Run.create("small", tmp_path)
    run.describe(name="small", status="interrupted", entered=1.0, turn=1)
    run.refuse_if_trained()
    folder = RunFolder(run, "small", "")
    folder._refuse_moved_on(run)
    Run(run.path).describe(entered=2.0, turn=2)
    with pytest.raises(RequestError, match="another process has gone on with run .* the same command goes on"):
        folder._refuse_moved_on(run)
