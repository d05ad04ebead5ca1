"""`on_gpu.sh`: a part that hangs is cut, one that breaks stops no other, and what there is so far is packed."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import on_gpu
import on_gpu_page
import pytest
from on_gpu_parts import CAPS, PARTS, SCRIPTS, SMOKE
from trainings import lm, wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# The driver with parts of its own, on what it takes for a machine with a GPU.
DRIVER = """
import sys
sys.path.insert(0, {here!r})
import on_gpu
on_gpu.IMPORTS, on_gpu.find_device, on_gpu.PACKING = {imports}, lambda: "h100", 0
on_gpu.PARTS.clear()
on_gpu.PARTS.update({{name: on_gpu_parts.Part(part[0], "", part[1]) for name, part in {parts!r}.items()}})
on_gpu.SCRIPTS.update({{"1": [], "2": []}} | {scripts!r})
on_gpu.CAPS.update({caps!r})
sys.exit(on_gpu.main(sys.argv[1:]))
""".replace("import on_gpu\n", "import on_gpu, on_gpu_parts\n", 1)
PROGRAMS = {
    "good": "print('well')",
    "broken": "raise SystemExit(3)",
    "hang": """
import subprocess, time
print("begun", subprocess.Popen(["sleep", "100"]).pid, flush=True)
time.sleep(100)
""",
    "places": """
import os
first, unpacked, *_ = os.environ["PYTHONPATH"].split(":")
print(first, *os.listdir(unpacked))
""",
    "write": "import sys; from pathlib import Path; Path(sys.argv[2]).write_text(Path(sys.argv[1]).read_text())",
    # A training of 24 steps: one in `killed` hangs after step 11, and what resumes it goes on after step 8.
    "fit": """
import json, sys, time
from pathlib import Path
run = Path(sys.argv[2], "run")
first, last = (9, 24) if run.exists() else (1, 11 if "killed" in sys.argv[2] else 24)
run.mkdir(parents=True, exist_ok=True)
with open(run / "metrics.jsonl", "a") as file:
    for step in range(first, last + 1):
        print(json.dumps({"step": step, "train/loss": 9 / step, "val/loss": 1.5}), file=file)
(run / "last").touch()
time.sleep(100 if last == 11 else 0)
""",
}


@pytest.fixture
def begin(tmp_path):
    """Starts the driver with parts `name=(seconds, {command: line})`; results go to `out` in the test's folder."""
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(text)

    def start(*arguments, parts, scripts={}, caps={}, imports=(), **environment):
        parts = {
            name: (seconds, {command: line.replace("HERE", str(tmp_path)) for command, line in commands.items()})
            for name, (seconds, commands) in parts.items()
        }
        driver = DRIVER.format(here=str(HERE), imports=list(imports), parts=parts, scripts=scripts, caps=caps)
        (tmp_path / "driver.py").write_text(driver)
        return subprocess.Popen(
            [sys.executable, "driver.py", "-w", "wheels", "-o", "out", *arguments], cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": "", **environment},
        )  # fmt: skip

    return start


def one(name, seconds=60, line=None):
    """A part of one command, which runs one of `PROGRAMS`."""
    return {name: (seconds, {name: line or f"HERE/{name}.py"})}


def packed(folder):
    """The files of the newest archive, by name without their folder."""
    archive = max((folder / "out").glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)
    with tarfile.open(archive) as files:
        members = [one for one in files if one.isfile()]
        return {Path(one.name).name: files.extractfile(one).read().decode(errors="replace") for one in members}


def found_and_page(files):
    """The JSON object, and the lines of the page."""
    (label,) = (Path(name).stem for name in files if name.endswith(".md"))
    return json.loads(files[f"{label}.json"]), files[f"{label}.md"].splitlines()


def is_alive(pid):
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[-1][0] != "Z"
    return False


def test_what_hangs_is_cut_and_what_breaks_stops_nothing_else(begin, tmp_path):
    """Neither a command of the same part, whose time is left, nor another part."""
    both = {"both": (60, {"hang": "HERE/hang.py", "after": "HERE/good.py"})}
    process = begin("both", "broken", "good", parts=both | one("broken") | one("good"), PART_SECONDS="6")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "hang: cut after 4 s: begun" in said and "broken: exit code 3" in said and "good: done" in said
    assert re.search(r"once more, what did not end well: \S+ -w wheels -o out both broken\n", said)
    files = packed(tmp_path)
    assert not is_alive(files["hang.log"].split()[1])
    found, page = found_and_page(files)
    assert found["parts"]["both"]["commands"]["after"]["ok"] and found["parts"]["both"]["seconds"] < 9
    assert found["parts"]["broken"]["commands"]["broken"]["exit"] == 3 and files["good.log"] == "well\n"
    assert any(line.startswith("| both | 60 | ") and "cut" in line for line in page)
    assert any(line.startswith("| good | 60 | ") and line.endswith(" | done |") for line in page)


def test_what_torchrun_starts_in_a_session_of_its_own_is_ended_too(tmp_path):
    code = "import subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    process.stdout.readline()
    [worker] = on_gpu.descendants(process.pid)
    on_gpu.kill(process)
    process.wait()
    wait_until(lambda: not is_alive(worker), seconds=10)


def test_script_2_begins_with_what_failed_in_script_1(begin, tmp_path):
    """Of tests those that failed; then what was not begun, as its time was over. Without results there is nothing."""
    assert on_gpu.failed_commands({}) == {}
    (tmp_path / "test_two.py").write_text("def test_good(): pass\ndef test_broken(): assert 0")
    test = "-m pytest HERE/test_two.py -o cache_dir={folder}/pytest-cache -c /dev/null"
    parts = one("good") | one("tests", 60, test) | one("late", 10_000, "HERE/good.py") | one("other", 5, "HERE/good.py")
    scripts = {"1": ["good", "tests", "late"], "2": ["other"]}
    options = {"parts": parts, "scripts": scripts, "caps": {"1": 300, "2": 8000}}
    said = begin("1", **options).communicate(timeout=60)[0]
    assert "next, within 30 seconds: tests/benchmarks/on_gpu.sh -w wheels -o out 2\n" in said
    assert "failed or not begun: tests, late\n" in said and "late: not begun, as " in said
    assert "1 failed, 1 passed" in found_and_page(packed(tmp_path))[0]["parts"]["tests"]["commands"]["tests"]["said"]
    said = begin("2", **options).communicate(timeout=60)[0]
    assert re.findall("^== (.*),", said, re.M) == ["tests", "late", "other"]
    files = packed(tmp_path)
    found, _ = found_and_page(files)
    assert "1 failed" in files["tests-again.log"] and "passed" not in files["tests-again.log"]
    assert list(found["parts"]) == ["good", "tests", "late", "other"] and found["parts"]["late"]["ok"]


STEP = {
    "tokens_per_second": 1e6, "ms_per_step": 400.0, "ms_per_micro_batch": 50.0, "accumulate": 8,
    "tokens_per_step": 400_000, "optimizer": {"ms_per_step": 20.0}, "mfu": 0.5, "peak_memory_bytes": 2**31,
    "predicted_memory_bytes": 2**30,
}  # fmt: skip


def test_the_page_has_the_figures_of_all_steps_beside_the_expected(begin, tmp_path):
    (tmp_path / "headline.json").write_text(json.dumps(STEP))
    (tmp_path / "fp8.json").write_text(json.dumps(STEP | {"ms_per_step": 382.0}))
    commands = {name: f"HERE/write.py HERE/{name}.json {{json}}" for name in ("headline", "fp8")}
    said = begin("steps", parts={"steps": (60, commands)}).communicate(timeout=60)[0]
    assert "| headline | 1,000,000 | 1,011,995 | 47.5 | 20.0 | 50.6% | 2.0 | 1.0 |\n" in said
    assert "| fp8 | 1,000,000 | 1,060,280 (+4.8%) | 45.2 | 20.0 |  |" in said
    assert "| expected on an H100, an estimate | 183,000 |" in said


def test_the_page_has_at_most_60_lines():
    """With every part run, every result there, and everything failed."""
    timed = {"forward": {"ours": {"seconds": 1.0, "of_copy_rate": 1.0}, "eager": {"seconds": 1.0}}}
    results = {"kernels": {"cases": {f"op {number}": timed for number in range(40)}}, "probe": {"products": "none"}}
    failed = {"exit": 1, "ok": False, "seconds": 1, "said": "x" * 200}
    parts = {
        name: {"expected_s": 1, "seconds": 1, "ok": False,
               "commands": {each: failed | {"result": results.get(each, STEP)} for each in part.commands}}
        for name, part in PARTS.items()
    }  # fmt: skip
    for name in ("profile", "peer"):
        del parts[name]["commands"][name]["result"]
    machine = {"gpu": "H100", "torch": "2", "python": "3", "cores": 16, "revision": None}
    page = on_gpu_page.page({"device": "h100", "date": "2026-01-01", "machine": machine, "parts": parts})
    assert len(page.splitlines()) == 60 and "more lines are left out; the JSON file has all)" in page
    assert "| kernels:fp16 | 1 | 1 | kernels-fp16: exit code 1" in page


def test_a_signal_ends_it_at_once_and_everything_so_far_is_packed(begin, tmp_path):
    process = begin("good", "hang", parts=one("good") | one("hang"))
    log, deadline = next_log(tmp_path, "hang.log", time.monotonic() + 30), time.monotonic() + 10
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=10)
    assert process.returncode == 130 and time.monotonic() < deadline
    files = packed(tmp_path)
    assert files["hang.log"] == log.read_text() and not is_alive(log.read_text().split()[1])
    found, page = found_and_page(files)
    assert found["parts"]["good"]["ok"] and found["parts"]["hang"]["said"] == "interrupted" in page[-1]


def next_log(folder, name, deadline):
    while time.monotonic() < deadline:
        for log in (folder / "out").glob(f"*/{name}"):
            if log.read_text().endswith("\n"):
                return log
        time.sleep(0.05)
    raise AssertionError(f"no {name}")


def test_of_the_wheels_only_what_is_missing_is_taken_and_the_project_is_on_the_path(begin, tmp_path):
    (tmp_path / "wheels").mkdir()
    for name in ("pytest", "nowhere_installed"):
        with zipfile.ZipFile(tmp_path / "wheels" / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    assert begin("places", parts=one("places"), imports=["nowhere_installed"]).wait(timeout=60) == 0
    assert packed(tmp_path)["places.log"].split() == [str(ROOT), "nowhere_installed"]


def test_a_missing_package_is_named_before_anything_runs(begin, tmp_path):
    process = begin("good", parts=one("good"), imports=["nowhere_installed"])
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and said.count("\n") == 1
    assert "No module named 'nowhere_installed'; put its wheel into wheels/ with 'pip download" in said
    assert not (tmp_path / "out").exists()


def test_trainings_that_tests_start_find_the_unpacked_packages_too():
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{HERE.parent}:/unpacked"}
    command = [sys.executable, "-c", "import trainings; print(trainings.PLACES)"]
    said = subprocess.check_output(command, text=True, env=environment)
    assert said.strip().split(":")[-1] == "/unpacked"


def test_a_training_is_killed_and_resumed_and_the_losses_are_really_compared(begin, tmp_path):
    run = "HERE/fit.py --trainer.default_root_dir {runs}/"
    lines = {"whole": f"{run}whole", "killed": f"{run}killed", "resumed": f"{run}killed"}
    assert begin("fit", parts={"fit": (20, lines)}).wait(timeout=60) == 0
    commands = found_and_page(packed(tmp_path))[0]["parts"]["fit"]["commands"]
    assert commands["killed"]["exit"] == -signal.SIGKILL and commands["resumed"]["result"]["val/loss"] == 1.5
    assert commands["same"]["said"] == "24 and 24 steps, losses at most 0.0 apart"
    for other in ({1: 2.0}, {1: 2.0, 2: 1.1}):
        assert not on_gpu.compare({1: 2.0, 2: 1.0}, other)["ok"]


@pytest.mark.parametrize("program", ["good", "hang"])
def test_a_training_that_does_not_reach_the_step_at_which_it_is_killed_is_no_success(begin, tmp_path, program):
    """It ends before, or hangs."""
    lines = {"whole": "HERE/good.py", "killed": f"HERE/{program}.py", "resumed": "HERE/good.py"}
    assert begin("fit", parts={"fit": (2, lines)}).wait(timeout=60) == 1
    commands = found_and_page(packed(tmp_path))[0]["parts"]["fit"]["commands"]
    assert not commands["killed"]["ok"] and commands["resumed"]["ok"]
    assert not commands["same"]["ok"] and commands["same"]["said"].startswith("0 and 0 steps")


@pytest.mark.slow
def test_the_process_that_waits_has_imported_everything_and_has_not_used_cuda(tmp_path):
    (tmp_path / "look.py").write_text(
        "import os, sys, torch\n"
        "print(sys.argv[1:], 'lm.cli.bench_step' in sys.modules, 'PYTORCH_ALLOC_CONF' in os.environ, __name__)\n"
        "print(torch.cuda.is_initialized(), 'torch._inductor.async_compile' in sys.modules)  # it looks at CUDA\n"
    )
    process = subprocess.Popen(
        [sys.executable, HERE / "preloaded.py", *on_gpu.IMPORTS], cwd=tmp_path, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert json.loads(process.stdout.readline()) == {"missing": None} and process.poll() is None  # it waits
    request = {"argv": ["-m", "look", "a", "-b"], "log": str(tmp_path / "log")}
    process.communicate(json.dumps(request) + "\n", timeout=60)
    assert process.returncode == 0
    assert (tmp_path / "log").read_text() == "['a', '-b'] True True __main__\nFalse False\n"


@pytest.mark.slow
def test_every_command_for_a_gpu_is_one_that_runs_there(tmp_path):
    """`lm plan` finds the trainings ready on an H100, but for data that is not made here; files of tests are there."""
    said = subprocess.check_output([HERE / "on_gpu.sh", "-n", "-p", sys.executable, *PARTS], text=True)
    commands = [shlex.split(line)[1:] for line in said.splitlines() if line.startswith(f"{sys.executable} ")]
    assert len(commands) == 1 + sum(len(part.commands) for part in PARTS.values())
    plans = set()
    for command in commands:
        pairs = list(zip(command, command[1:]))
        if command[1] == "pytest":
            valued = ("-o", "-m", "-k", "-n")
            alone = [value for option, value in pairs[2:] if value[0] != "-" and option not in valued]
            assert alone and all((ROOT / file).is_file() for file in alone), alone
        if "--config" in command:
            of_training = ("--config", "--data.", "--model.", "--trainer.")
            plans.add(tuple(text for pair in pairs if pair[0].startswith(of_training) for text in pair))
    assert len(plans) > 12
    for options in plans:
        found = json.loads(lm(tmp_path, "plan", *options, "--device", "h100", "--json", expect=None).stdout)
        errors = [one["what"] for one in found["findings"] if one["level"] == "error"]
        assert not [what for what in errors if "holds no manifest.json" not in what], options
        assert "steps" in found or errors, options


def test_the_names_that_choose_the_first_tests_are_names_of_tests():
    text = (ROOT / "tests/test_gpu.py").read_text()
    chosen = re.findall(r"\w+_\w+|documents", SMOKE)
    assert len(chosen) == 7 and all(re.search(rf"def test_\w*{words}", text) for words in chosen)


def test_the_parts_of_script_1_fit_its_time_and_script_2_says_that_its_do_not():
    one, two = (sum(PARTS[name].seconds for name in SCRIPTS[script]) for script in "12")
    assert one <= CAPS["1"] == 500 and two > CAPS["2"] == 140
    said = subprocess.check_output([HERE / "on_gpu.sh", "-n", "-p", sys.executable, "2"], text=True)
    assert said.startswith(f"# script 2: {two} s expected, 140 s at most\n")
    assert "take longer than that in all" in on_gpu.__doc__


@pytest.mark.parametrize("words, message", [
    (["profile", "kernel"], "no part kernel: 1 or 2, or one of probe"), (["3"], "no part 3: 1 or 2"),
    (["1", "2"], "give 1 or 2 alone"), (["2", "-p", "bash"], "give -p before what is to run"),
])  # fmt: skip
def test_a_wrong_request_is_refused_before_anything_runs(tmp_path, words, message):
    command = [HERE / "on_gpu.sh", "-p", sys.executable, "-o", "out", *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2 and message in ended.stderr
    assert ended.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU, and this is about small sizes")
def test_parts_run_whole_on_a_cpu(tmp_path):
    """In a copy of the project's files, as a rented machine gets it; a loaded machine may cut a part."""
    names = ["headline", "fit", "fsdp2"]
    listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(lambda name: (ROOT / name).exists(), listed.split("\0")[:-1]):
        (tmp_path / "lm" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "lm" / name, follow_symlinks=False)
    command = [tmp_path / "lm/tests/benchmarks/on_gpu.sh", "-p", sys.executable, "-o", "out", *names]
    subprocess.run(command, cwd=tmp_path, timeout=500)
    found, page = found_and_page(packed(tmp_path))
    assert len(page) <= 60 and list(found["parts"]) == names
    commands = {name: one for part in found["parts"].values() for name, one in part["commands"].items()}
    if any(one["exit"] == "cut" for one in commands.values()):
        pytest.skip("this machine is too slow for the time of a part")
    results = {name: one.get("result") for name, one in commands.items()}
    assert results["same"]["apart"] == 0 and results["headline"]["tokens_per_second"] and results["fsdp2"]["val/loss"]
