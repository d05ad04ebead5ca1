"""`on_gpu.sh`: a part that hangs is cut, one that breaks holds no other back, and what there is so far is packed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from trainings import lm

SCRIPT = Path(__file__).with_name("on_gpu.sh")
# A Python that lacks nothing and sees no GPU. Kernels hang in it, peers break, a profile works, `lm` does nothing.
PYTHON = f"""#!/bin/sh
case "$*" in
    -c*) exit 0 ;;
    *bench_kernels*) echo begun; exec sleep 100 ;;
    *peers.py*) exit 3 ;;
    *bench_modes*) while [ "$1" != --output ]; do shift; done; cp "$HERE/modes.json" "$2" ;;
    *profile*) echo "PYTHONPATH=$PYTHONPATH"; ls "${{PYTHONPATH#*:}}" ;;
    "-m lm"*) exit 0 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def begin(tmp_path):
    """Starts the script with that Python; results go to `out` in the test's folder."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def start(*arguments, seconds=30):
        environment = {**os.environ, "PYTHONPATH": "", "PART_SECONDS": str(seconds), "HERE": str(tmp_path)}
        return subprocess.Popen(
            [SCRIPT, "-p", "./python", "-w", "wheels", "-o", "out", *arguments], cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip

    return start


def packed(folder):
    """The files of the only archive, by name without their folder."""
    (archive,) = (folder / "out").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        return {Path(one.name).name: files.extractfile(one).read().decode() for one in files if one.isfile()}


def test_a_part_that_hangs_is_cut_and_one_that_breaks_holds_no_other_back(begin, tmp_path):
    process = begin("kernels", "peers:lm:none,transformers", "profile", seconds=6)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "kernels-bf16: cut, the time of its part was over" in said and "peers-tiny: exit code 3" in said
    assert "--contenders lm:none transformers" in said
    assert re.search("kernels-bf16: cut.* after . s: begun\n", said) and "next: " not in said
    assert "once more, what did not end well: tests/benchmarks/on_gpu.sh kernels peers:lm:none,transformers\n" in said
    files = packed(tmp_path)
    assert {"machine.log", "kernels-bf16.log", "peers-tiny.log", "profile-tiny.log"} <= files.keys()
    (summary,) = (text for name, text in files.items() if name.startswith("summary"))
    assert len(summary.splitlines()) == 3 and "profile-tiny: done" in summary


def test_the_summary_has_the_figures_of_all_modes(begin, tmp_path):
    measured = {"tokens_per_second": 1e6, "ms_per_step": 4.0, "peak_memory_bytes": 2**31}
    modes = {"none": measured | {"mfu": None, "predicted_memory_bytes": 2**30}, "inductor": measured | {"mfu": 0.5},
             "none/on": {"unavailable": "no GPU"}}  # fmt: skip
    (tmp_path / "modes.json").write_text(json.dumps({"modes": modes}))
    said = begin("steps:tiny").communicate(timeout=60)[0]
    assert "steps-tiny-cpu none: 1,000,000 tokens/s, 4.0 ms a step, 2.0 GiB, 1.0 GiB expected\n" in said
    assert ", MFU 50.0%, " in said and "steps-tiny-cpu none/on: no GPU\n" in said and "once more" not in said


def test_a_signal_ends_it_at_once_and_everything_so_far_is_packed(begin, tmp_path):
    process = begin("profile", "kernels")
    log, deadline = next_log(tmp_path, "kernels-bf16.log", time.monotonic() + 30), time.monotonic() + 10
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=10)
    assert process.returncode == 130 and time.monotonic() < deadline and log.read_text() == "begun\n"
    assert {"profile-tiny.log", "kernels-bf16.log"} <= packed(tmp_path).keys()


def next_log(folder, name, deadline):
    while time.monotonic() < deadline:
        for log in (folder / "out").glob(f"*/{name}"):
            if log.read_text():
                return log
        time.sleep(0.05)
    raise AssertionError(f"no {name}")


def test_of_the_wheels_only_what_is_missing_is_taken_and_the_project_is_on_the_path(begin, tmp_path):
    (tmp_path / "wheels").mkdir()
    for name in ("pytest", "nowhere_installed"):
        with zipfile.ZipFile(tmp_path / "wheels" / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    assert begin("profile").wait(timeout=60) == 0
    path, *unpacked = packed(tmp_path)["profile-tiny.log"].splitlines()
    assert path.startswith(f"PYTHONPATH={SCRIPT.parents[2]}:") and unpacked == ["nowhere_installed"]


def test_trainings_that_tests_start_find_the_unpacked_packages_too():
    environment = {**os.environ, "PYTHONPATH": f"{SCRIPT.parents[2]}:{SCRIPT.parents[1]}:/unpacked"}
    said = subprocess.check_output([sys.executable, "-c", "import trainings; print(trainings.PLACES)"], text=True,
                                   env=environment)  # fmt: skip
    assert said.strip().split(":")[-1] == "/unpacked"


def test_the_losses_of_the_killed_training_are_really_compared(begin, tmp_path):
    assert begin("fit").wait(timeout=60) == 1
    files = packed(tmp_path)
    (summary,) = (text for name, text in files.items() if name.startswith("summary"))
    assert "fit-resumed: done" in summary and "fit-same: exit code 1" in summary
    assert "AssertionError: ([], [])" in files["fit-same.log"]


@pytest.mark.slow
def test_every_command_for_a_gpu_is_one_that_runs_there(tmp_path):
    """Trainings are those that `lm plan` finds ready on an H100, but for data that is not made here; tests are there."""
    said = subprocess.run(
        [SCRIPT, "-n", "-p", sys.executable, "all"], capture_output=True, text=True, check=True
    ).stdout
    commands = [shlex.split(line)[1:] for line in said.splitlines() if line.startswith(f"{sys.executable} -m ")]
    commands += [shlex.split(line)[1:] for line in said.splitlines() if line.startswith(f"{sys.executable} tests/")]
    plans = set()
    for command in commands:
        pairs = list(zip(command, command[1:]))
        if command[1] == "pytest":
            valued = ("-p", "-m", "-k", "-n", "--durations")
            alone = [value for option, value in pairs[2:] if value[0] != "-" and option not in valued]
            assert alone and all((SCRIPT.parents[2] / file).is_file() for file in alone), alone
        if "--config" in command:
            of_training = ("--config", "--data.", "--model.", "--trainer.")
            plans.add(tuple(text for pair in pairs if pair[0].startswith(of_training) for text in pair))
    assert len(plans) > 12
    for options in plans:
        found = json.loads(lm(tmp_path, "plan", *options, "--device", "h100", "--json", expect=None).stdout)
        errors = [one["what"] for one in found["findings"] if one["level"] == "error"]
        assert not [what for what in errors if "holds no manifest.json" not in what], options
        assert "steps" in found, errors


@pytest.mark.parametrize("part", ["kernel", "steps:pretrain-1b", "fit:again"])
def test_an_unknown_part_is_refused_before_anything_runs(begin, tmp_path, part):
    process = begin("profile", part)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and f"no part {part}: 1 to 5, or one of" in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()
