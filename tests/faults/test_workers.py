"""Loader processes that die or hang: named, waited for no longer than was asked, and nobody is left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from trainings import PLACES, expected, lm, losses, processes_of, trace, write_config

from lm.runs.run import Run

WORKERS = {"data.num_workers": 2, "data.timeout": 3.0}


def fit(folder, name, *callbacks, expect=0, **changes):
    named = [{"class_path": "recorder.Recorder"}, *callbacks]
    config = write_config(folder, name, **{**WORKERS, "trainer.callbacks": named, **changes})
    return lm(folder, "fit", "--config", str(config), "--ckpt_path", "auto", expect=expect)


def nobody_is_left(folder) -> bool:
    """Whether all processes of a training ended, soon after it did."""
    until = time.monotonic() + 30
    while processes_of(folder) and time.monotonic() < until:
        time.sleep(0.1)
    return processes_of(folder) == []


@pytest.mark.fault(17)
def test_a_loader_process_that_dies_or_hangs_is_named_and_the_run_goes_on(workplace):
    """SIGKILL to one, then SIGSTOP to one: exit 1 in one line, no process stays, and all losses are as ever."""
    run = Run(workplace / "checkpoints" / "small")
    for name, step, said in (
        ("SIGKILL", 0, "was killed by SIGKILL"), ("SIGSTOP", 5, "gave nothing for 8 seconds (see data.timeout), so"),
    ):  # fmt: skip
        breaker = {"class_path": "worker_breaker.SignalWorker", "init_args": dict(name=name, step=step)}
        done = fit(workplace, "small", breaker, expect=1)
        line = done.stderr.splitlines()[-1]
        assert line.startswith("lm fit: loader process 1 of 2 (pid ") and said in line and "auto" in line
        assert "Traceback" not in done.stderr and nobody_is_left(workplace)
        assert run.status() == "failed" and said in run.read("run.json")["reason"]
    fit(workplace, "small")
    assert losses(workplace) == expected(workplace) and run.status() == "finished"


@pytest.mark.fault(17)
def test_what_a_loader_process_cannot_read_is_told_as_if_there_were_none(workplace):
    """One line that names the file, and no traceback of another process."""
    [shard] = (workplace / "data/small/train").glob("*.parquet")
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    done = fit(workplace, "small", expect=1)
    assert done.stderr.splitlines()[-1].startswith("lm fit: shard data/small/train/00000.parquet, row group 0: ")
    assert "Traceback" not in done.stderr and nobody_is_left(workplace)


@pytest.mark.fault(17)
def test_loader_processes_leave_signals_to_the_training_and_end_with_it(workplace):
    """A signal to the whole group stops the run with a checkpoint; a training that is killed leaves nobody behind."""
    config = write_config(workplace, "small", **WORKERS)
    command = [sys.executable, "-m", "lm", "fit", "--config", str(config), "--ckpt_path", "auto"]
    env = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1"}
    for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 75), (signal.SIGKILL, -9), (None, 0)):
        done = len(trace(workplace)) if (workplace / "trace.jsonl").exists() else 0
        process = subprocess.Popen(
            command, cwd=workplace, env=env, text=True, stderr=subprocess.PIPE, start_new_session=True
        )
        until = time.monotonic() + 120
        while number and (not (workplace / "trace.jsonl").exists() or len(trace(workplace)) <= done):
            assert process.poll() is None and time.monotonic() < until, process.stderr.read()
            time.sleep(0.005)
        if number == signal.SIGKILL:
            process.kill()
        elif number:
            os.killpg(process.pid, number)
        err = process.communicate(timeout=120)[1]
        assert process.returncode == code, err
        assert nobody_is_left(workplace)
    assert losses(workplace) == expected(workplace)
