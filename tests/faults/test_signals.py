"""A signal ends a training with a checkpoint of all that was done, whatever it is at; the next command resumes."""

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import termios
import time
from contextlib import closing
from pathlib import Path

import pytest
from trainings import (
    PLACES,
    RECORDER,
    equipment,
    expected,
    fit,
    lm,
    losses,
    make_workplace,
    processes_of,
    start,
    trace,
    validations,
    wait_until,
    write_config,
)  # fmt: skip

from lm.runs.run import Run

AUTO = ("--ckpt_path", "auto")


def kill_at(signal_name, **moment):
    return equipment("recorder.KillAt", signal_name=signal_name, **moment)


def interrupted(folder, name, *callbacks, environment={}, **changes):
    """A fit that a signal ends with exit code 75; returns the run and what it said."""
    config = write_config(folder, name, **{"trainer.callbacks": [RECORDER, *callbacks], **changes})
    result = lm(folder, "fit", "--config", str(config), *AUTO, expect=75, **environment)
    run = Run(folder / "checkpoints" / name)
    assert run.read("run.json")["status"] == run.read("state.json")["status"] == "interrupted"
    with closing(sqlite3.connect(os.environ["LM_REGISTRY"])) as registry:
        found = registry.execute("SELECT status FROM runs WHERE path = ?", (str(run.path.resolve()),))
        assert found.fetchall() == [("interrupted",)]
    assert "Traceback" not in result.stderr
    return run, result.stderr


def resume(folder, name, **changes):
    """The same command without what had interrupted it."""
    _, run = fit(folder, name, *AUTO, **changes)
    assert run.status() == "finished"
    return run


@pytest.fixture
def straight(uninterrupted):
    """The run that was never stopped."""
    return Run(uninterrupted / "checkpoints" / "small")


def as_in_a_straight_run(folder, run, straight):
    return losses(folder) == expected(folder) and validations(run) == validations(straight)


@pytest.mark.fault(6)
@pytest.mark.fault(7)
def test_the_step_is_finished_and_saved_and_none_is_trained_on_twice(straight, workplace):
    """One run, stopped again and again; in its last save there is nothing left to stop, and it ends as any other."""
    for kill, step in (
        (dict(signal_name="SIGINT", micro_batch=0), 1),
        (dict(signal_name="SIGTERM", save=True, step=3), None),  # a step or two later, while that is being written
        (dict(signal_name="SIGHUP", micro_batch=10), 6),
        (dict(signal_name="SIGINT", micro_batch=13, group=True), 7),  # a Ctrl-C reaches the whole group of processes
        (dict(signal_name="SIGUSR1", micro_batch=15), 8),  # which is validated
    ):
        run, said = interrupted(workplace, "stopped", kill_at(**kill))
        assert step in (None, list(run.steps())[-1]) and f"{kill['signal_name']}: stopped after step" in said
        assert not processes_of(workplace, patience=10)
    assert re.search("stopped .*interrupted", lm(workplace, "runs", "ls").stdout)
    last = kill_at("SIGTERM", save=True, step=12)
    resume(workplace, "stopped", **{"trainer.callbacks": [RECORDER, last], "trainer.stop_within": 0.1})
    assert as_in_a_straight_run(workplace, run, straight) and len(trace(workplace)) == 24


@pytest.mark.fault(6)
def test_a_validation_ends_at_its_next_batch_and_is_made_up_for(straight, workplace):
    """On a machine that is taken away there is no time for the rest of it; its loss, and which checkpoint is the best,
    are those of a run that was never stopped. So it is for the one after the last step."""
    for step in (4, 12):
        kill = kill_at("SIGTERM", validation=1, step=step)
        run, said = interrupted(workplace, "validating", kill, equipment("interruptions.Validations"))
        assert f"stopped after step {step} with a checkpoint, before its validation was done" in said
        assert list(run.steps())[-1] == step and step not in validations(run)
        assert (workplace / "validations.jsonl").read_text().splitlines()[-1] == f"[{step}, 0]"
    resume(workplace, "validating")
    assert as_in_a_straight_run(workplace, run, straight) and len(trace(workplace)) == 24
    assert run.link("best").name == straight.link("best").name and list(run.steps()) == list(straight.steps())
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (run.link("last") / file).read_bytes() == (straight.link("last") / file).read_bytes()


@pytest.mark.fault(6)
def test_a_wait_for_data_or_for_a_micro_batch_is_ended(straight, workplace):
    """Before the first step, in the middle of a step, and between two: the newest checkpoint is where it resumes.

    Lightning asks for the next batch while it still holds one.
    """
    for what, first, step, saved in (
        ("interruptions.Stall", dict(step=0), 0, []), ("waiting.WaitAt", dict(micro_batch=11, go="never"), 5, [4]),
        ("interruptions.Stall", dict(step=7), 10, [9]),
    ):  # fmt: skip
        changes = {"trainer.callbacks": [RECORDER, equipment(what, **first)], "trainer.stop_within": 1}
        config = str(write_config(workplace, "stuck", **changes))
        process = start(workplace, "fit", "--config", config, *AUTO)
        run = Run(workplace / "checkpoints" / "stuck")
        wait_until(lambda: run.status() == "running" and run.read("state.json").get("step", 0) >= step, process)
        time.sleep(0.5)
        process.terminate()
        began = time.monotonic()
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 75 and time.monotonic() - began < 30, said
        assert f"SIGTERM: ended {'without a checkpoint' if saved else 'before the first step'}" in said
        assert ("resumes it from step" if saved else "starts again") in said
        assert run.status() == run.read("state.json")["status"] == "interrupted" and list(run.steps())[-1:] == saved
    resume(workplace, "stuck")
    assert as_in_a_straight_run(workplace, run, straight)


@pytest.mark.fault(6)
def test_a_step_of_slow_micro_batches_is_dropped_and_trained_again(workplace):
    """The checkpoint is that of the step before; what the dropped one drew of random numbers is drawn again."""
    single = {"data.micro_batch_size": 1}  # 8 micro-batches of 0.4 seconds, and half of 4 seconds until it is dropped
    _, run = fit(workplace, "whole", **single)
    whole = losses(workplace), validations(run)
    slow = equipment("interruptions.SlowSteps", seconds=0.4, step=6)
    kill = kill_at("SIGTERM", micro_batch=40)
    run, said = interrupted(workplace, "dropped", slow, kill, **single, **{"trainer.stop_within": 4})
    assert "stopped after step 5 with a checkpoint; the next one was not done within 2 s" in said
    assert list(run.steps())[-1] == 5
    resume(workplace, "dropped", **single)
    assert (losses(workplace), validations(run)) == whole


@pytest.mark.fault(6)
def test_samples_that_do_not_end_are_ended_and_come_again(straight, workplace):
    samples = {"samples.prompts": ["Chapter"], "samples.max_new_tokens": 4}
    kill = kill_at("SIGTERM", hook="on_validation_end", step=8)
    late = {"trainer.stop_within": 1, **samples}
    run, said = interrupted(workplace, "sampling", kill, equipment("interruptions.EndlessSamples", step=8), **late)
    assert "the validation after step 8 was not done within 1 s" in said and list(run.steps())[-1] == 6
    resume(workplace, "sampling", **samples)
    assert as_in_a_straight_run(workplace, run, straight)
    written = [json.loads(line)["step"] for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert written == [4, 8, 12]


@pytest.mark.fault(6)
@pytest.mark.parametrize("mode, stop_within, steps", [("triton_free", 0, [1]), ("inductor", 1, [])])
def test_a_compilation_is_waited_for_or_ended(workplace, mode, stop_within, steps):
    """The first micro-batch is compiled, which takes a while: then its step is saved, or there is none to save."""
    name = f"compiled-{stop_within}"
    compiled = {"model.compile": mode, "trainer.stop_within": stop_within}
    run, said = interrupted(
        workplace, name, kill_at("SIGTERM", micro_batch=0), **compiled,
        environment={"TORCHINDUCTOR_CACHE_DIR": str(workplace / "inductor")},
    )  # fmt: skip
    assert list(run.steps()) == steps
    assert ("stopped after step 1" if steps else "step 1 was not done within 1 s") in said
    assert not processes_of(workplace, patience=10)


@pytest.mark.fault(6)
def test_before_the_first_step_it_ends_at_once_and_the_same_command_starts_again(workplace):
    """While Python imports what it needs, and when the run has its folder already: it resumes in the same one."""
    config = str(write_config(workplace, "early", **{"trainer.callbacks": [RECORDER]}))
    process = start(workplace, "fit", "--config", config, *AUTO, fresh=True)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    process.terminate()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 75 and "lm fit: SIGTERM: ended before the first step" in said
    run, said = interrupted(workplace, "early", kill_at("SIGTERM", hook="on_train_start"))
    assert "ended before the first step" in said and not run.steps()
    resume(workplace, "early")
    assert losses(workplace) == expected(workplace) and not (workplace / "checkpoints" / "early-2").exists()


@pytest.mark.fault(6)
def test_while_the_data_is_prepared_it_ends_at_once(tmp_path):
    """Nobody is left working on it, and the next command makes the data and trains."""
    workplace = make_workplace(tmp_path / "workplace")
    (workplace / "texts" / "long.txt").write_text("All of it again, and again. " * 1_000_000)
    config = str(write_config(workplace, "slow", **{"trainer.max_steps": 1, "model.schedule.warmup_steps": 0}))
    process = start(workplace, "fit", "--config", config)
    wait_until((workplace / "data").exists, process)
    process.terminate()
    said = process.communicate(timeout=240)[1]
    assert process.returncode == 75 and "ended before the first step" in said and "Traceback" not in said
    assert not processes_of(workplace, patience=10) and not (workplace / "checkpoints").exists()
    (workplace / "texts" / "long.txt").unlink()
    lm(workplace, "fit", "--config", config)


@pytest.mark.fault(7)
def test_a_second_interrupt_ends_it_at_once(workplace):
    """In a step that would take an hour; the steps before it are there."""
    slow = {"trainer.callbacks": [RECORDER, equipment("interruptions.SlowSteps", seconds=3600)]}
    config = write_config(workplace, "impatient", **slow)
    process = start(workplace, "fit", "--config", str(config))
    wait_until((workplace / "slow-steps").exists, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.wait(timeout=60) == 130 and time.monotonic() - began < 30
    said = process.communicate()[1]
    assert "SIGINT: stopping after this step; Ctrl-C again to end now" in said and "Traceback" not in said
    resume(workplace, "impatient")
    assert losses(workplace) == expected(workplace)


@pytest.mark.fault(6)
@pytest.mark.fault(7)
def test_two_ranks_end_a_validation_and_a_step_together(workplace):
    """A signal reaches the second one alone, in a validation; then, as a Ctrl-C, both, in a step."""
    short = {"trainer.max_steps": 6, "model.decoder.dropout": 0.0}
    _, whole = fit(workplace, "one", **short)
    two = {"trainer.devices": 2, "data.micro_batch_size": 2, **short}
    run, said = interrupted(workplace, "both", kill_at("SIGTERM", validation=1, rank=1), **two)
    assert "a signal on another rank: stopped after step 4" in said and list(run.steps())[-1] == 4
    run, said = interrupted(workplace, "both", kill_at("SIGINT", micro_batch=9, rank=0, group=True), **two)
    assert list(run.steps())[-1] == 5 and not processes_of(workplace, patience=10)
    resume(workplace, "both", **two)
    assert validations(run) == pytest.approx(validations(whole), rel=2e-5)


@pytest.mark.fault(6)
def test_a_closed_terminal_ends_it_like_any_signal(workplace):
    """An ssh session that breaks off: SIGHUP, and nothing can be said any more."""
    slow = {"trainer.max_steps": 1000, "trainer.callbacks": [equipment("interruptions.SlowSteps", seconds=0.05)]}
    config = write_config(workplace, "hung-up", **slow)
    terminal, its_other_end = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "lm", "fit", "--config", str(config)], cwd=workplace, env=environment,
        stdin=its_other_end, stdout=its_other_end, stderr=its_other_end, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(its_other_end)
    run = Run(workplace / "checkpoints" / "hung-up")
    os.set_blocking(terminal, False)
    while run.read("state.json").get("step", 0) < 2:
        time.sleep(0.1)
        assert process.poll() is None
        try:
            os.read(terminal, 65536)
        except BlockingIOError:
            pass
    os.close(terminal)
    assert process.wait(timeout=60) == 75 and run.status() == "interrupted"
    assert list(run.steps())[-1] == run.read("run.json")["step"]


@pytest.mark.fault(7)
def test_a_ctrl_c_that_ends_the_pipe_too_is_saved_from(workplace):
    """`lm fit 2>&1 | tee log`: the reader is gone first."""
    slow = {"trainer.max_steps": 1000, "trainer.callbacks": [equipment("interruptions.SlowSteps", seconds=0.05)]}
    process = start(workplace, "fit", "--config", str(write_config(workplace, "piped", **slow)))
    run = Run(workplace / "checkpoints" / "piped")
    wait_until(lambda: run.read("state.json").get("step", 0) >= 2, process)
    process.stderr.close()
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 75 and run.status() == "interrupted"


ENDING = """
import os, sys, time

class Slow:  # goes when Python has given the signals their default back
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"ending\\n")
        sleep(1)

slow = Slow()
sys.argv = ["lm", "fit", "--config", "nowhere.yaml"]
from lm.__main__ import main
main()
"""


@pytest.mark.fault(6)
def test_the_exit_code_stays_when_the_work_is_over(tmp_path):
    """A signal that comes while Python clears up is too late to change what was reported."""
    command = [sys.executable, "-c", ENDING]
    env = {**os.environ, "PYTHONPATH": PLACES}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == b"ending\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 2


@pytest.mark.fault(6)
def test_the_command_that_resumes_is_whole_and_works_also_for_a_run_whose_name_got_a_number(workplace):
    """And the command that began both says what it has found. A name with a blank is quoted."""
    endless = {"trainer.max_steps": 10**6, "trainer.callbacks": None, "trainer.default_root_dir": "my runs"}
    config = write_config(workplace, "mine", **endless).name
    for name in ("mine", "mine-2"):
        process = start(workplace, "fit", "--config", config)
        run = Run(workplace / "my runs" / name)
        wait_until(lambda run=run: run.read("state.json").get("step"), process)
        process.terminate()
        said = process.communicate(timeout=60)[1].splitlines()
        assert process.returncode == 75, said
    command = re.search("`(.*)` resumes it$", said[-1])[1].split(" -m lm ")[1]
    assert command == "fit --config 'my runs/mine-2/config.yaml' --ckpt_path auto"
    first = Run(workplace / "my runs" / "mine")
    assert said[0].startswith(f"found run my runs/mine, interrupted at step {list(first.steps())[-1]:,}: `")
    assert "fit --config 'my runs/mine/config.yaml' --ckpt_path auto` resumes it, and this" in said[0]

    step = list(run.steps())[-1]
    resumed = lm(workplace, *shlex.split(command), "--trainer.max_steps", str(step + 1)).stderr
    assert f"resumed from my runs/mine-2/step-{step:08}, after step {step:,} of" in resumed
    assert run.status() == "finished" and first.status() == "interrupted"
    assert not (workplace / "my runs" / "mine-3").exists()
