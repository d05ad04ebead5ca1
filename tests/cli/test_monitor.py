"""`lm monitor` shows runs as they are, from their files alone, on any terminal."""

import json
import math
import os
import re
import shutil
import signal
import termios
import time
from pathlib import Path

import pytest
from processor_time import run_python
from rich.cells import cell_len
from rich.console import Console
from run_folders import write_live_run
from terminal import Terminal, plain
from trainings import lm, make_workplace, start, write_config

from lm.cli.monitor import page
from lm.runs.facts import LiveRun
from lm.runs.history import Series, thin
from lm.runs.run import Run


def watch(run: Run) -> LiveRun:
    watching = LiveRun(run)
    watching.refresh()
    return watching


def shown_on(watches: list[LiveRun], width: int, height: int) -> str:
    """The page on a terminal of this size."""
    with open(os.devnull, "w") as file:
        console = Console(width=width, height=height, file=file, force_terminal=True, record=True)
        console.print(page(watches, width, height), height=height)
    return console.export_text().removesuffix("\n")


def monitor(folder: Path, *arguments: str, expect: int = 0, **environment: str):
    return lm(folder, "monitor", *arguments, expect=expect, **environment)


# ---- the page --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def many(tmp_path_factory) -> list[LiveRun]:
    root = tmp_path_factory.mktemp("many") / "checkpoints"
    cases = [
        {"gpus": 8, "alerts": 12}, {"lines": 1}, {"lines": 0}, {"status": "finished"}, {"gpus": 1},
        {"age": 3600, "lines": 3}, {"status": "failed", "alerts": 1}, {"lines": 12, "gpus": 2},
    ]  # fmt: skip
    return [watch(write_live_run(root, f"a-rather-long-name-of-a-run-{i}", **case)) for i, case in enumerate(cases)]


SIZES = [(80, 24), (120, 40), (200, 60), (110, 14), (79, 10), (40, 12), (20, 6), (10, 3), (1, 1), (300, 5)]


@pytest.mark.parametrize("width, height", SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_page_never_exceeds_its_terminal(many, width, height, count):
    for first in range(0, len(many), count):
        lines = shown_on((many + many)[first : first + count], width, height).split("\n")
        assert len(lines) <= height and all(cell_len(line) <= width for line in lines)


def test_all_that_matters_is_on_the_smallest_terminal(many):
    shown = shown_on(many[:1], 80, 24)
    for words in (
        "a-rather-long-name-of-a-run-0  running", " 50%  step 2,000/4,000", "200K/400K tokens", "left", "loss 2.0400",
        "validation loss 2.1400", "best 2.1400 at step 2,000", "lr 1.00e-03", "gradient norm 1", "tokens/s 100K",
        "MFU (causal) 40.0%", "MFU (full) 42.0%", "8 GPUs 97% 71/140 GiB 61°C 5124/5600 W", "CPU 12% of 64 cores", "RAM 100/512 GiB",
        "process 3.0 GiB", "last step-00000100, ", "best step-00000100, ", "number 11", "step\n",
    ):  # fmt: skip
        assert words in shown, f"{words!r} is missing:\n{shown}"
    assert sum("⠀" < character < "⣿" for character in shown) > 50  # a curve
    assert "\x1b" not in shown and "what next" in shown  # what others wrote does nothing to the terminal


def test_a_wide_terminal_has_every_gpu(many):
    shown = shown_on(many[:1], 200, 60)
    assert all(f"GPU {index}" in shown for index in range(8))


def test_a_loss_that_is_no_number_and_the_reason_of_the_end_are_shown(tmp_path):
    run = write_live_run(tmp_path, "a")
    run.append("metrics.jsonl", {"step": 2010, "tokens": 1, "time": time.time(), "train/loss": math.nan})
    state = run.read("state.json")
    run.write_state({**state, "metrics": {"train/loss": math.nan, "optim/grad_norm": math.inf}})
    run.describe(status="stopped", reason="budget: 20.01 USD are spent")
    shown = shown_on([watch(run)], 120, 40)
    assert "nan" in shown and "inf" in shown and "stopped: budget: 20.01 USD are spent" in shown
    assert json.loads(monitor(tmp_path, "a", "--root", ".", "--json").stdout)["metrics"]["train/loss"] is None


# ---- reading ---------------------------------------------------------------------------------------------------------
def test_what_is_shown_is_what_run_metrics_says_across_resumes(tmp_path):
    """Whatever the looks fall between: lines beyond the checkpoint that was resumed from do not count."""
    run = write_live_run(tmp_path, "a", lines=50)
    watching = watch(run)
    for resumed, until in ((400, 900), (620, 700), (700, 1300)):
        run.append("metrics.jsonl", {"resumed_at": resumed})
        for step in range(resumed + 10, until + 1, 10):
            at = {"step": step, "tokens": 0, "time": time.time()}
            run.append("metrics.jsonl", at | {"train/loss": 1 + resumed / step})
            if step % 100 == 0:
                run.append("metrics.jsonl", at | {"val/loss": 3 + resumed / step})
            if step % 70 == 0:
                watching.refresh()
    watching.refresh()
    for watched in (watching, watch(run)):
        for name in ("train/loss", "val/loss"):
            steps, values = zip(*((line["step"], line[name]) for line in run.metrics() if name in line))
            curve = watched.curve(name)
            assert curve.x == list(steps) and curve.y == pytest.approx(values)
    best = min((line["val/loss"], line["step"]) for line in run.metrics() if "val/loss" in line)
    assert (watching.state["best_val_loss"], watching.state["best_val_step"]) == best


def test_a_line_that_is_half_written_is_no_error(tmp_path):
    run = write_live_run(tmp_path, "a", lines=3)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 40, "train/l')
        file.flush()
        watching = watch(run)
        assert watching.curve("train/loss").x == [10, 20, 30]
        file.write('oss": 2.5}\n[1]\nnull\n')
    (run.path / "heartbeat.json").write_text('{"time": 1')
    watching.refresh()
    assert watching.curve("train/loss").x == [10, 20, 30, 40]


def test_a_folder_that_vanishes_is_shown_as_gone_and_one_of_its_name_begins_anew(tmp_path):
    run = write_live_run(tmp_path, "a")
    watching = watch(run)
    shutil.rmtree(run.path)
    assert watching.refresh()["status"] == "gone" and "gone" in shown_on([watching], 80, 24)
    assert watching.state["step"] == 2000  # what was seen last
    write_live_run(tmp_path, "a", lines=5)
    assert watching.refresh()["status"] == "running" and len(watching.curve("train/loss").x) == 5
    shutil.rmtree(run.path)  # between two looks another run takes the name
    write_live_run(tmp_path, "a", lines=3).describe(started="later")
    assert watching.refresh()["best_val_loss"] is None and len(watching.curve("train/loss").x) == 3
    shutil.rmtree(run.path)
    assert "gone" in shown_on([watch(run)], 80, 24)  # never seen


def test_a_thin_curve_is_true():
    curve = Series("loss", range(1, 100_001), [math.nan if step == 7 else float(step) for step in range(1, 100_001)])
    thinned = thin(curve, 100)
    steps = thinned.x
    assert 50 <= len(steps) <= 100 and steps == pytest.approx(thinned.y) and steps == sorted(steps)
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) < 1.6 * steps[-1] / len(steps)
    assert len(thin(curve, 10).x) <= 10


# ---- the time that is left -------------------------------------------------------------------------------------------
def test_the_time_left_is_what_the_training_wrote_counted_down(tmp_path):
    run = write_live_run(tmp_path, "a")
    for eta, age, shown in ((100.0, 30.0, 70.0), (100.0, 130.0, 0.0), (100.0, -5000.0, 100.0), (None, 0.0, None)):
        run.write_state({**run.read("state.json"), "eta_seconds": eta, "time": time.time() - age})
        found = watch(run).state["eta_seconds"]
        assert found == shown if shown is None else found == pytest.approx(shown, abs=5)


# ---- the command -----------------------------------------------------------------------------------------------------
def test_json_tells_programs_how_a_run_stands(tmp_path):
    write_live_run(tmp_path / "checkpoints", "a", gpus=2, alerts=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*")}
    found = json.loads(monitor(tmp_path, "a", "--json").stdout)
    assert found["run"] == "a" and found["status"] == "running" and found["phase"] == "training"
    assert (found["step"], found["max_steps"], found["tokens"], found["max_tokens"]) == (2000, 4000, 200_000, 400_000)
    assert found["eta_seconds"] == pytest.approx(2000 * 0.5 + 20, abs=10)
    assert found["metrics"]["train/loss"] == 2.04 and found["best_val_loss"] == pytest.approx(2.14)
    assert found["machine"]["gpus"][1]["power_watts"] == 640.5
    assert found["checkpoint"]["name"] == "step-00000100" and found["checkpoint"]["step"] == 100
    assert 0 <= found["checkpoint"]["age_seconds"] < 300 and found["alerts"][0]["guard"] == "spike"
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*")}  # untouched


def test_which_run_is_meant(tmp_path):
    """By name or path; else the active ones; where none is active the newest; where there is none, that."""
    own = {"LM_REGISTRY": str(tmp_path / "runs.db")}
    assert "no run under" in monitor(tmp_path, "--json", expect=2, **own).stderr
    root = tmp_path / "checkpoints"
    write_live_run(root, "old", status="finished", age=9000)
    write_live_run(root, "dead", age=60)
    found = monitor(tmp_path, "--json", **own)
    assert json.loads(found.stdout)["run"] == "dead" and "nothing is running" in found.stderr
    write_live_run(root, "alive")
    assert json.loads(monitor(tmp_path, "--json", **own).stdout)["run"] == "alive"
    write_live_run(root, "kicking")
    assert [run["run"] for run in json.loads(monitor(tmp_path, "--json", **own).stdout)] == ["kicking", "alive"]
    both = json.loads(monitor(tmp_path, "old", "checkpoints/dead", "--json", **own).stdout)
    assert [(run["run"], run["status"]) for run in both] == [("old", "finished"), ("dead", "dead")]
    other = tmp_path / "other"  # a folder from which the registry alone knows the runs
    other.mkdir()
    lm(other, "runs", "rebuild", str(root), **own)
    found = monitor(other, "--json", **own)
    assert len(json.loads(found.stdout)) == 2 and f"nothing is running under checkpoints, but {root}" in found.stderr
    write_live_run(other / "checkpoints", "mine")
    assert json.loads(monitor(other, "--json", **own).stdout)["run"] == "mine"
    assert "no run 'kickin'" in monitor(tmp_path, "kickin", "--json", expect=2, **own).stderr


def test_a_pipe_gets_one_plain_page(tmp_path):
    write_live_run(tmp_path / "checkpoints", "a")
    for environment in ({}, {"PYTHONIOENCODING": "ascii"}, {"FORCE_COLOR": "1"}):
        shown = monitor(tmp_path, "a", **environment).stdout
        assert ("\x1b" in shown) == ("FORCE_COLOR" in environment)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
        assert shown.startswith("a  running") and "step 2,000/4,000" in shown


def test_it_starts_at_once_and_without_torch(here):
    write_live_run(here / "checkpoints", "a", lines=2000)
    code = "import sys; from lm.cli.command import main; assert main(['monitor', 'a']) == 0; "
    code += "assert not {'torch', 'lightning', 'pynvml', 'numpy'} & sys.modules.keys()"
    assert run_python(code)[1] < 1.0  # 0.3 s of CPU time on two idle cores


@pytest.mark.slow
def test_a_hundred_thousand_lines_are_no_reason_to_wait(tmp_path):
    run = write_live_run(tmp_path / "checkpoints", "a", lines=1)
    line = json.dumps({"step": 1, "tokens": 5, "time": 1.0, "train/loss": 2.5, **{f"perf/{i}": 0.1 for i in range(12)}})
    with open(run.path / "metrics.jsonl", "w") as file:
        for step in range(1, 100_001):
            file.write(line.replace('"step": 1,', f'"step": {step},') + "\n")
    watching, began = LiveRun(run), time.process_time()
    watching.refresh()
    assert time.process_time() - began < 5 and watching.curve("train/loss").x[-1] > 99_000
    began = time.process_time()
    watching.refresh()
    assert time.process_time() - began < 0.02


# ---- a terminal ------------------------------------------------------------------------------------------------------
@pytest.fixture
def workplace(tmp_path):
    write_live_run(tmp_path / "checkpoints", "a", gpus=2, alerts=2)
    return tmp_path


def on_terminal(folder: Path, *arguments: str, **environment: str) -> Terminal:
    return Terminal(folder, "-m", "lm", "monitor", *arguments, **environment)


@pytest.mark.parametrize("leave", ["\x03", "SIGTERM"])
def test_it_fills_the_terminal_survives_a_resize_and_leaves_it_as_it_was(workplace, leave):
    terminal = on_terminal(workplace, "a", "--interval", "60")  # a resize does not wait for the next look
    settings = termios.tcgetattr(terminal.terminal)
    shown = terminal.wait_for("Ctrl-C leaves")
    assert "\x1b[?1049h" in shown and "\x1b[?25l" in shown  # a screen of its own, without a cursor
    for width, height in ((200, 60), (40, 10), (120, 40)) if leave == "SIGTERM" else ((81, 24),):
        terminal.resize(width, height)
        lines = plain(terminal.wait_for("Ctrl-C leaves").rpartition("\x1b[H")[2]).split("\n")
        assert len(lines) == height and all(len(line) <= width for line in lines) and lines[0].startswith("a  running")
    if leave == "SIGTERM":
        os.kill(terminal.pid, signal.SIGTERM)
    else:
        terminal.type(leave)
    assert terminal.end() == 0
    assert terminal.output.rfind(b"\x1b[?25h") > terminal.output.rfind(b"\x1b[?25l")
    assert b"\x1b[?1049l" in terminal.output
    assert termios.tcgetattr(terminal.terminal)[3] == settings[3]  # echo and lines again


def test_a_run_that_begins_later_is_shown_too(workplace):
    terminal = on_terminal(workplace, "--interval", "0.1")
    terminal.wait_for("Ctrl-C leaves")
    write_live_run(workplace / "checkpoints", "later")
    terminal.wait_for("later")
    terminal.type("\x03")
    assert terminal.end() == 0


def test_a_dumb_terminal_gets_one_page(workplace):
    terminal = on_terminal(workplace, "a", TERM="dumb")
    assert terminal.end() == 0
    assert b"a  running" in terminal.output and b"\x1b" not in terminal.output


# ---- real trainings --------------------------------------------------------------------------------------------------
def test_a_training_is_running_until_it_is_killed_and_then_it_is_dead(tmp_path):
    """SIGKILL, as the system does it that runs out of memory: nobody writes a last word, and it is seen at once."""
    make_workplace(tmp_path)
    config = str(write_config(tmp_path, **{"trainer.max_steps": 100_000, "trainer.checkpoint_interval": 5}))
    training = start(tmp_path, "fit", "--config", config, "--run", "a")
    try:
        run, deadline = Run(tmp_path / "checkpoints" / "a"), time.monotonic() + 120
        while not (run.read("state.json").get("step", 0) > 20 and run.read("heartbeat.json")):
            assert time.monotonic() < deadline and training.poll() is None, training.stderr.read()
            time.sleep(0.2)
        found = json.loads(monitor(tmp_path, "--json").stdout)
        assert (found["run"], found["status"]) == ("a", "running") and found["step"] > 20 and found["eta_seconds"] > 0
        assert found["machine"]["process"]["memory_bytes"] > 50 * 2**20
        assert found["checkpoint"]["step"] >= 5 and found["metrics"]["train/loss"] > 0
    finally:
        training.kill()
        training.communicate()
    found = json.loads(monitor(tmp_path, "a", "--json").stdout)
    assert found["status"] == "dead" and found["eta_seconds"] is None and found["step"] > 20
