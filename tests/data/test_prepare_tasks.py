"""`lm data prepare --task I/N`: machines that share a folder make what one process makes, however often they are killed."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from shard_files import write_jsonl
from test_prepare import PLACES, digests, make_texts

from lm.cli.command import main

# The command line, with work for many tasks out of little text.
COMMAND = """
import sys
from lm.data import encode
encode.MIN_UNIT_BYTES, encode.SMALL_WORK = 4096, 0
from lm.cli.command import main
sys.exit(main(sys.argv[1:]))
"""
TASKS = 7


OPTIONS = "--input in --output out --vocab_size 300 --val_fraction 0.1 --shard_tokens 20000 --workers 1".split()


def start(folder, *more):
    command = [sys.executable, "-c", COMMAND, "data", "prepare", *OPTIONS, *more]
    environment = {**os.environ, "PYTHONPATH": PLACES}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


def run(folder, *more):
    """The exit code, and what is said."""
    process = start(folder, *more)
    said = process.communicate()[1]
    return process.returncode, said


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Some text, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("source")
    for i in range(9):
        write_jsonl(folder / f"in/{i:02}.jsonl", make_texts(300, seed=i) + make_texts(20, seed=0))
    assert run(folder)[0] == 0
    return folder, digests(folder / "out")


def run_tasks(folder, draw, killed):
    """All tasks at once in any order; some are killed at a random moment and started again."""
    order = draw.sample(range(TASKS), TASKS)
    processes = {task: start(folder, "--task", f"{task}/{TASKS}") for task in order}
    time.sleep(draw.uniform(0.5, 2.5))
    for task in order[:killed]:
        processes[task].send_signal(signal.SIGKILL)
        processes[task].communicate()
        processes[task] = start(folder, "--task", f"{task}/{TASKS}")
    said = {}
    for task, process in processes.items():
        said[task] = process.communicate()[1]
        assert process.returncode == 0, said[task]
    return said


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_tasks_make_what_one_process_makes(seed, source, tmp_path):
    folder, expected = source
    (tmp_path / "in").symlink_to(folder / "in")
    draw = random.Random(seed)
    code, said = run(tmp_path, "--task", "0/7")
    assert code == 2 and "run the same with --plan_only first" in said
    assert run(tmp_path, "--plan_only")[0] == 0
    said = run_tasks(tmp_path, draw, killed=3)
    assert any("run every task once more, to write the shards" in line for line in said.values())
    said = run_tasks(tmp_path, draw, killed=3)
    assert any("run the same without --task" in line for line in said.values())
    assert not (tmp_path / "out/manifest.json").exists()
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/*.parquet")}
    assert len(written) > 5
    code, said = run(tmp_path)
    assert code == 0, said
    assert digests(tmp_path / "out") == expected
    assert {path: path.stat().st_mtime_ns for path in written} == written  # the last command writes no shard again
    assert "nothing is left to do" in run(tmp_path, "--task", "3/7")[1]


@pytest.mark.parametrize("task", ["7/7", "1", "a/b", "-1/3", "1/0"])
def test_a_task_that_is_none_is_refused(task, here, capsys):
    write_jsonl(here / "a.jsonl", make_texts(5))
    assert main(["data", "prepare", "--input", "a.jsonl", "--output", "out", f"--task={task}"]) == 2
    assert "is not a task and the number of tasks, such as 0/4" in capsys.readouterr().err
    assert not (here / "out").exists()
