"""A full disk costs a training the log of that time, and nothing else, until a checkpoint must be written."""

import json
import sys

import pytest
from mounts import Mounts
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainings import RECORDER, equipment, expected, losses, write_config

from lm.runs.run import Run
from lm.system.files import Attempts, append_line, read_lines, write_atomically

pytestmark = pytest.mark.fault(3)


@pytest.fixture
def full(tmp_path):
    """A function that runs Python in a folder on a file system of its own that has no byte left."""
    mounts = Mounts(tmp_path)
    mounts.run("mkdir", "disk")
    mounts.run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "disk")
    yield mounts
    mounts.close()


def test_a_disk_that_is_full_for_a_while_is_reported_once_and_the_training_continues(workplace, mounts):
    """From step 2 to step 7 no block can be had. What the curves and the log have of other steps is whole."""
    mounts.run("mkdir", "checkpoints")
    mounts.run("mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", "checkpoints")
    commands = {2: "cat /dev/zero > checkpoints/filler 2>/dev/null; true", 7: "rm checkpoints/filler"}
    callbacks = [RECORDER, *(equipment("at_step.AtStep", step=at, command=each) for at, each in commands.items())]
    changes = {"trainer.checkpoint_interval": 9, "trainer.val_interval": 12, "trainer.callbacks": callbacks}
    said = mounts.lm("fit", "--config", str(write_config(workplace, **changes))).stderr
    assert losses(workplace) == expected(workplace)
    missing = [line for line in said.splitlines() if "No space left on device" in line]
    assert len(missing) == 1 and "what the run logs is missing" in missing[0]
    assert len([line for line in said.splitlines() if "is written again" in line]) == 1

    run = Run(mounts.at("checkpoints/small"))
    text = (run.path / "metrics.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert text.endswith("\n") and {1, 8, 12} <= set(steps)
    assert run.read("run.json")["status"] == "finished" and run.read("state.json")["step"] == 12
    curves = EventAccumulator(str(run.path), size_guidance={"scalars": 0})
    curves.Reload()
    steps = {point.step for point in curves.Scalars("train/loss")}
    assert {1, 8, 12} <= steps
    assert "finished: all steps done" in (run.path / "log.txt").read_text()


def test_a_line_is_added_whole_or_not_at_all(full):
    """Lines of a kilobyte until the disk is full, and a file that cannot be replaced: nothing half is left."""
    code = """if True:
        from pathlib import Path
        from lm.system.files import append_line, read_lines, write_atomically
        path, other = Path("disk/lines"), Path("disk/other")
        write_atomically(other, "before")
        for number in range(1000):
            try:
                append_line(path, {"number": number, "text": "x" * 1000})
            except OSError as error:
                break
        size = path.stat().st_size
        try:
            write_atomically(other, "y" * 9000)
        except OSError:
            print("full")
        assert [line["number"] for line in read_lines(path)] == list(range(number)) and number > 10
        assert path.read_bytes().endswith(b"}\\n") and other.read_text() == "before"
        assert sorted(file.name for file in path.parent.iterdir()) == ["lines", "other"]
    """
    assert full.run(sys.executable, "-c", code).stdout == "full\n"


def test_a_line_that_a_kill_cut_short_is_ended_before_the_next(tmp_path):
    path = tmp_path / "lines"
    append_line(path, {"step": 1})
    path.write_bytes(path.read_bytes() + b'{"step": 2, "lo')
    append_line(path, {"step": 3})
    append_line(path, {"step": 4})
    path.write_bytes(path.read_bytes() + b'[1]\n\xff\n7\n{"step": NaN}')
    assert [line.get("step") for line in read_lines(path)][:3] == [1, 3, 4]
    write_atomically(path, "")
    assert list(read_lines(path)) == [] == list(read_lines(tmp_path / "none"))


def test_what_is_missing_is_said_once_until_all_is_written_again(caplog):
    attempt = Attempts()

    def fails():
        raise OSError(28, "No space left on device")

    for what, write in (("a", fails), ("b", fails), ("a", fails), ("a", str)):
        attempt(what, write)
    assert len(caplog.records) == 1 and "a cannot be written: No space left on device" in caplog.text
    attempt("b", str)
    assert len(caplog.records) == 2 and "written again" in caplog.text
    attempt("b", fails)
    assert len(caplog.records) == 3
