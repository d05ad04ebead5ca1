"""Runs that nobody watches: the program at their end, checkpoints that are kept, what they must reach, tags."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_folders import write_run
from trainings import HERE, PLACES, lm, start, wait_until, write_config

from lm.cli.ladder_report import last_losses
from lm.errors import RequestError
from lm.runs.expectations import acceptance, check_ranges, expectations
from lm.runs.run import Run
from lm.training.config import RunOptions, TrainerConfig

LOOP = HERE.parent / "configs" / "launch" / "until_done.sh"
BIN = Path(sys.executable).parent  # of the `python` that the loop calls
KEEP = """#!/bin/sh
cat > "$1"
echo heard
"""


@pytest.fixture(scope="module")
def workplace(workplace):
    (workplace / "keep.sh").write_text(KEEP)
    (workplace / "keep.sh").chmod(0o755)
    return workplace


def configured(workplace, name, **changes):
    """A config whose program writes what it hears to `NAME.json`; its command line."""
    write_config(workplace, name, **{"on_event": ["./keep.sh", f"{name}.json"], **changes})
    return "fit", "--config", f"{name}.yaml"


def heard(workplace, name):
    return json.loads((workplace / f"{name}.json").read_text())


def test_a_finished_run_is_announced_and_judged(workplace):
    ranges = {"train/loss": [0, 9], "val/loss": [0, 0.5], "own/nothing": [0, 1]}  # the last may be a callback's
    done = lm(workplace, *configured(workplace, "all", expect=ranges, tags=["first", "small"], note="why [not]"))
    facts = heard(workplace, "all")
    assert (facts["event"], facts["exit_code"], facts["step"], facts["tags"]) == ("finished", 0, 12, ["first", "small"])
    assert facts["checkpoint"].endswith("step-00000012") and facts["acceptance"]["passed"] is False
    assert "heard" in done.stderr and "heard" not in done.stdout
    assert "not passed: " in done.stderr
    assert "own/nothing was never logged, or was not finite at the end; expected 0 to 1" in done.stderr
    judged = json.loads(lm(workplace, "runs", "check", "all", "--json", expect=1).stdout)
    met = {check["metric"]: check["met"] for check in judged["checks"]}
    assert met == {"train/loss": True, "val/loss": False, "own/nothing": False} and judged["status"] == "finished"
    page = lm(workplace, "runs", "show", "all").stdout
    assert "why [not]" in page and "tags: first, small" in page and "outside the expected range 0 to 0.5" in page
    assert "all" in lm(workplace, "runs", "ls", "--tag", "small").stdout
    assert "no run has the tag large" in lm(workplace, "runs", "ls", "--tag", "large").stdout


def test_a_last_validation_that_was_not_finite_passes_nothing(tmp_path):
    """It leaves a line without metrics, and the one before it is not the last."""
    run = write_run(tmp_path, lines=[{"step": 5, "val/loss": 2.0, "val/bpb": 1.0}, {"step": 9, "train/loss": 2.0},
                                     {"step": 10}], changes={"expect": {"val/loss": [0, 9]}})  # fmt: skip
    [found] = expectations(run)
    assert not found.met and "val/loss was never logged, or was not finite at the end" in str(found)
    assert last_losses(run) == {} and "NaN" not in json.dumps(acceptance([found]))


def test_an_interrupted_run_is_announced_with_the_command_that_resumes_it(workplace):
    """Its name may be of any alphabet."""
    command = configured(workplace, "cut", **{"trainer.max_steps": 2000})
    process = start(workplace, *command, "--run", "日本-ünï")
    run = Run(workplace / "checkpoints" / "日本-ünï")
    wait_until(lambda: run.metrics("train/loss"), process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    facts = heard(workplace, "cut")
    assert process.returncode == 75 and (facts["event"], facts["exit_code"]) == ("interrupted", 75)
    assert facts["resume"][1:4] == ["-m", "lm", "fit"] and not run.is_locked()
    lm(workplace, *facts["resume"][3:], "--trainer.max_steps", str(facts["step"] + 1))
    assert heard(workplace, "cut")["event"] == "finished" and run.status() == "finished"


def test_a_guard_is_announced_and_no_shell_reads_the_program(workplace):
    stop = {"guards.alerts": {"step > 1": "stop"}, "on_event": ["./keep.sh", "$(touch found);shell.json"]}
    lm(workplace, *configured(workplace, "guarded", **stop), expect=3)
    facts = heard(workplace, "$(touch found);shell")
    assert (facts["event"], facts["exit_code"]) == ("stopped", 3) and not (workplace / "found").exists()


def test_a_program_that_fails_changes_nothing(workplace):
    done = lm(workplace, *configured(workplace, "false", on_event=["false"], **{"trainer.max_steps": 4}))
    assert "on_event: false ended with exit code 1" in done.stderr


def test_every_so_many_steps_one_is_kept_for_good(workplace):
    changes = {"trainer.keep_every": 3, "trainer.checkpoint_interval": 2, "trainer.max_steps": 10, "on_event": []}
    lm(workplace, *configured(workplace, "kept", **changes, **{"trainer.val_interval": 10}))
    assert list(Run(workplace / "checkpoints" / "kept").steps()) == [3, 6, 9, 10]
    changes |= {"trainer.keep_every": None, "trainer.max_steps": 12}  # which a resume without the option keeps too
    from_six = ["--ckpt_path", "checkpoints/kept/step-00000006"]  # also those that it leaves behind
    lm(workplace, *configured(workplace, "kept", **changes), *from_six)
    assert list(Run(workplace / "checkpoints" / "kept").steps()) == [3, 6, 9, 12]
    with pytest.raises(RequestError, match="trainer.keep_every 0 must be at least 1"):
        TrainerConfig(keep_every=0)


@pytest.mark.parametrize(("metric", "given", "cure"), [
    *[("val/loss", given, "give [LOWEST, HIGHEST]") for given in ([3, 2], [1], [1, 2, 3])],
    ("loss", [1, 2], "did you mean 'train/loss'?"), ("val/lss", [1, 2], "'val/loss'"), ("bpb", [1, 2], "'val/bpb'"),
])  # fmt: skip
def test_what_cannot_be_expected_is_refused(metric, given, cure):
    with pytest.raises(RequestError) as refused:
        RunOptions(expect={metric: given})
    assert cure in str(refused.value)
    check_ranges({name: [1, 2] for name in ("val/loss", "train/loss/web", "val/bpb/a")})  # those of sources too


@pytest.mark.slow
def test_the_loop_runs_again_until_the_run_is_over(workplace):
    """A training that is killed and one that is interrupted are resumed; a signal to the loop ends both."""
    name, run = "looped", Run(workplace / "checkpoints" / "looped")
    configured(workplace, name, on_event=[], **{"trainer.max_steps": 4000, "trainer.checkpoint_interval": 5})
    loop = subprocess.Popen(
        [str(LOOP), f"{name}.yaml"], cwd=workplace, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": PLACES, "PATH": f"{BIN}:{os.environ['PATH']}", "LM_PAUSE": "0"},
    )  # fmt: skip
    ended = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        while run.read("heartbeat.json").get("pid") in (None, *ended) or not run.steps() or not run.is_locked():
            time.sleep(0.1)
        time.sleep(0.5)
        ended.append(run.read("heartbeat.json")["pid"])
        os.kill(ended[-1], number)
    while run.read("heartbeat.json").get("pid") in ended or not run.is_locked():
        time.sleep(0.1)
    time.sleep(1)
    loop.send_signal(signal.SIGTERM)
    _, errors = loop.communicate(timeout=60)
    assert loop.returncode == 75 and run.status() == "interrupted" and not run.is_locked()
    assert errors.count("training resumes in 0 s") == 2 and "exit code 137" in errors and "exit code 75" in errors


@pytest.mark.parametrize("copied", ["folders", "nothing"])
def test_a_run_that_was_copied_without_its_links_is_used_and_resumed(workplace, tmp_path, copied):
    """`cp -rL` and `scp -r` make folders of the links, others leave them out."""
    command = configured(workplace, "original", on_event=[], **{"trainer.max_steps": 8, "trainer.keep_checkpoints": 3})
    if not (workplace / "checkpoints" / "original").exists():
        lm(workplace, *command)
    original, run = Run(workplace / "checkpoints" / "original"), Run(workplace / "checkpoints" / f"copy-{copied}")
    shutil.copytree(original.path, run.path, symlinks=copied == "nothing")
    for name in ("best", "last"):
        if copied == "nothing":
            (run.path / name).unlink()
        assert run.link(name).name == original.link(name).name
    assert "val/loss" in lm(workplace, "validate", "--run", run.name, "--ckpt_path", "best").stdout
    config = ["--config", f"checkpoints/{run.name}/config.yaml", "--run", run.name, "--trainer.max_steps", "10"]
    (run.path / "run.json").write_text((run.path / "run.json").read_text().replace('"original"', f'"{run.name}"'))
    lm(workplace, "fit", *config, "--ckpt_path", "auto")
    assert run.link("last").name == "step-00000010" and all((run.path / name).is_symlink() for name in ("best", "last"))


def test_a_run_that_failed_does_not_pass_though_its_newest_metrics_do(workplace):
    command = configured(workplace, "early", on_event=[], expect={"val/loss": [0, 9]}, **{"trainer.val_interval": 2})
    failing = [{"class_path": "recorder.Failing"}]
    lm(workplace, *command, "--trainer.max_steps", "2", "--model.schedule.warmup_steps", "0")
    assert "within the expected range 0 to 9" in lm(workplace, "runs", "check", "early").stdout
    path = Run(workplace / "checkpoints" / "early")
    lm(workplace, *command, "--ckpt_path", "auto", "--trainer.callbacks", json.dumps(failing), expect=1)
    said = lm(workplace, "runs", "check", "early", expect=1)
    assert path.status() == "failed" and "it is failed, not finished" in said.stderr
