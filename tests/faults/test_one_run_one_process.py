"""One process trains a run at a time, whatever is started, killed and started again."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from trainings import RECORDER, equipment, expected, lm, losses, start, wait_until, write_config

from lm.errors import RequestError
from lm.runs.run import LOCK, Run
from lm.training.callbacks.run_folder import check_not_resumed_elsewhere

SLOW = [RECORDER, equipment("waiting.WaitAt", micro_batch=10)]
FIT = ("fit", "--config", "small.yaml", "--ckpt_path", "auto")


def waiting(folder, *arguments):
    """A fit that has come to its sixth step, and waits there for the file `go`; its newest checkpoint is written.

    That is the one of the fourth step. Its writer, a thread, removes the one of the third when it is done.
    """
    process, run = start(folder, *arguments), Run(folder / "checkpoints" / "small")
    wait_until(lambda: (folder / "waits").exists() and list(run.steps()) == [4], process)
    return process


def end(process):
    process.kill()
    process.communicate()


@pytest.mark.fault(19)
def test_a_run_that_is_being_trained_is_refused_and_a_dead_ones_is_taken_over(workplace):
    """Refused are `auto` and a path into the run; the message names who trains it, who is not disturbed.
    After a SIGKILL the next command resumes at once, to the losses of a run that was never stopped."""
    write_config(workplace, **{"trainer.callbacks": SLOW})
    first = waiting(workplace, *FIT)
    run = Run(workplace / "checkpoints" / "small")
    try:
        before = (run.path / "run.json").read_bytes(), len(run.metrics())
        *_, newest = (path.name for path in run.steps().values())
        commands = [FIT, (*FIT[:3], "--ckpt_path", f"checkpoints/small/{newest}")]
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
    """Both find nothing to resume, and later both find a dead run; in the end it is one run, bit for bit."""
    write_config(workplace, **{"trainer.callbacks": SLOW})
    run = Run(workplace / "checkpoints" / "small")
    for _ in range(2):  # from scratch, then from a checkpoint
        both = [start(workplace, *FIT) for _ in range(2)]
        try:
            wait_until(lambda both=both: any(process.poll() is not None for process in both))
            loser, winner = sorted(both, key=lambda process: process.poll() is None)
            err = loser.communicate()[1]
            assert loser.returncode == 2 and f"process {winner.pid} on" in err.splitlines()[-1], err
            wait_until((workplace / "waits").exists, winner)
        finally:
            [end(process) for process in both]
        (workplace / "waits").unlink()
        assert [path.name for path in (workplace / "checkpoints").iterdir()] == ["small"] and run.status() == "dead"
    (workplace / "go").touch()
    lm(workplace, *FIT)
    assert losses(workplace) == expected(workplace)


@pytest.mark.fault(19)
def test_without_a_checkpoint_to_resume_from_the_same_name_is_another_run_and_auto_finds_it_again(workplace):
    """The second run of a name is resumed as what it is, also the second time."""
    (workplace / "checkpoints").mkdir()
    older = Run.create("small", workplace / "checkpoints")
    older.describe(name="small", status="finished", entered=time.time() + 9e5, turn=1)  # by a clock that was wrong
    for command, micro_batch in ((FIT[:3], 4), (FIT, 12)):
        stop = equipment("recorder.KillAt", signal_name="SIGTERM", micro_batch=micro_batch)
        write_config(workplace, **{"trainer.callbacks": [RECORDER, stop]})
        lm(workplace, *command, expect=75)
    write_config(workplace)
    lm(workplace, *FIT)
    assert Run(workplace / "checkpoints" / "small-2").status() == "finished" and list(older.steps()) == []
    assert losses(workplace) == expected(workplace)


# ---- the lock alone --------------------------------------------------------------------------------------------------
HOLD = """
import sys, time
from lm.runs.run import Run
try:
    Run(sys.argv[1]).hold()
    print("held", flush=True)
except Exception as error:
    print(error, flush=True)
time.sleep(60)
"""


def holding(folder):
    """Another process that tries to hold the lock, and what it says of it."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_a_killed_process_holds_nothing(tmp_path):
    run = Run(tmp_path)
    assert run.is_locked() is None, "there is no lock file yet"
    first, said = holding(tmp_path)
    try:
        assert said == "held" and run.is_locked()
        with pytest.raises(RequestError, match=f"trained by process {first.pid} on .*kill {first.pid}"):
            run.hold()
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert run.is_locked() is False
    run.hold(), Run(tmp_path).hold()
    other, said = holding(tmp_path)
    end(other)
    assert f"process {os.getpid()} on" in said and run.is_locked(), "a look does not release it"
    Run(tmp_path).release()
    assert run.is_locked() is False


def test_a_look_at_the_lock_does_not_keep_a_training_from_it(tmp_path):
    """`is_locked` has the lock for a moment; `hold` waits for longer than that."""
    (tmp_path / LOCK).touch()
    with open(tmp_path / LOCK, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.3, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        assert Run(tmp_path).is_locked() is False, "two looks at the same time"
        Run(tmp_path).hold()
    Run(tmp_path).release()


def test_a_number_that_another_process_has_by_now_is_no_sign_of_life(tmp_path):
    """This process has the number of the dead one, and its heartbeat is a moment old."""
    run = Run(tmp_path)
    run.describe(status="running", entered=time.time())
    run.write_heartbeat({})
    assert run.status() == "running", "there is no lock to ask"
    (tmp_path / LOCK).touch()
    assert run.status() == "dead"
    run.check_not_trained()


def test_a_lock_holds_also_where_its_holder_is_not_known(tmp_path):
    """A full disk, or a kill just after it was taken."""
    process, _ = holding(tmp_path)
    unknown = "is being trained by another process: wait for its end, or stop it, and"
    try:
        for content in ("{", "[1]", '{"pid": "x", "host": 3, "time": 1e99}'):
            (tmp_path / "heartbeat.json").write_text(content)
            with pytest.raises(RequestError, match=unknown):
                Run(tmp_path).hold()
    finally:
        end(process)


def test_where_there_are_no_locks_the_heartbeat_tells(tmp_path, monkeypatch):
    """As on a network disk that was mounted without them."""

    def missing(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", missing)
    run = Run(tmp_path)
    run.hold()
    run.describe(status="running", entered=time.time())
    beat = {"time": time.time(), "pid": os.getppid(), "host": os.uname().nodename}
    (tmp_path / "heartbeat.json").write_text(json.dumps(beat))
    assert run.is_locked() is None and run.status() == "running"
    next_beat = json.dumps({**beat, "time": time.time() + 5})
    threading.Timer(1.5, lambda: (tmp_path / "heartbeat.json").write_text(next_beat)).start()
    with pytest.raises(RequestError, match=f"is being trained by process {os.getppid()} on "):
        run.hold()
    (tmp_path / "heartbeat.json").write_text(json.dumps({**beat, "pid": 2**22 + 1}))
    assert run.status() == "dead"
    run.hold()


def test_a_run_that_another_has_trained_meanwhile_is_not_resumed(tmp_path):
    """Or this process would resume from a checkpoint that is no longer the newest."""
    run = Run.create("small", tmp_path)
    run.describe(name="small", status="interrupted", entered=1.0, turn=1)
    run.check_not_trained()
    check_not_resumed_elsewhere(run)
    Run(run.path).describe(entered=2.0, turn=2)
    with pytest.raises(RequestError, match="another process has resumed run .* the same command resumes"):
        check_not_resumed_elsewhere(run)
