"""Saves that are killed, run out of disk, or find their folder read-only or gone: what was whole stays whole."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
import trainings
from trainings import RECORDER, equipment, expected, losses, trace, write_config

from lm.runs.run import Run
from lm.runs.trainer_json import find_damage

AUTO = ("--ckpt_path", "auto")
ELSEWHERE = Path("/dev/shm")  # a file system of its own


def fit(folder, name, *arguments, **options):
    """`lm fit --ckpt_path auto` of the run `name`, with equipment; returns how it ended, and the first step it took."""
    before = len(trace(folder)) if (folder / "trace.jsonl").exists() else 0
    done, _ = trainings.fit(folder, name, *AUTO, *arguments, **options)
    steps = [entry["step"] for entry in trace(folder)[before:]] if (folder / "trace.jsonl").exists() else []
    return done, steps[0] if steps else None


def kill(event, path, time=1):
    return equipment("kill_in_save.KillInSave", event=event, path=path, time=time)


# Checkpoints follow steps 3, 6, 9, 12 and the validations of 4, 8, 12, each of them a new best.
KILLS = [  # each with the step that the killed session begins with
    (1, kill("open", "*/.tmp-step-00000003-*/trainer.json")),  # half written
    (1, kill("os.rename", "*/.tmp-step-00000004-*")),  # whole, and not yet under its name
    (4, kill("os.rename", "*/.last-*", time=2)),  # under its name, and not yet the last
    (7, kill("os.rmdir", "*.dead-step-*")),  # while an old one is removed
]


@pytest.mark.fault(2)
def test_a_kill_in_any_part_of_a_save_loses_nothing_that_was_whole(workplace):
    """The runs are on another file system than temporary files and the rest, behind a link; one run, killed in each
    part of a save in turn, resumes from the newest checkpoint that had its name."""
    if not ELSEWHERE.is_dir() or os.stat(ELSEWHERE).st_dev == os.stat(workplace).st_dev:
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir=ELSEWHERE) as there:
        (workplace / "checkpoints").symlink_to(there)
        for begins, killer in KILLS:
            _, first = fit(workplace, "cut", callbacks=[killer], expect=-signal.SIGKILL,
                           environment={"TMPDIR": str(workplace)})  # fmt: skip
            assert first == begins
        _, first = fit(workplace, "cut")
        assert first == 9 and losses(workplace) == expected(workplace)
        run = Run(workplace / "checkpoints" / "cut")
        assert list(run.steps()) == [12] and run.link("last").name == run.link("best").name == "step-00000012"
        assert not list(run.path.glob(".*")) and not (workplace / "checkpoints" / "cut-2").exists()


# ---- the disk --------------------------------------------------------------------------------------------------------
def at_step(step, command):
    return equipment("at_step.AtStep", step=step, command=command)


def configured(folder, name, *callbacks):
    return str(write_config(folder, name, **{"trainer.callbacks": [RECORDER, *callbacks]}))


def end_of(done):
    """The line that says why a fit ended."""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("lm fit:")]
    return line


@pytest.mark.fault(3)
@pytest.mark.parametrize("filled", ["by its checkpoints", "by somebody else"])
def test_a_full_disk_ends_it_with_one_line_and_keeps_the_checkpoint_before(workplace, mounts, filled):
    """A tmpfs with space for one checkpoint, or one that another program fills to the last byte after step 4. Whoever
    plans or starts a run there is told where that can be known, and has to insist."""
    small = filled == "by its checkpoints"
    mounts.run("mkdir", "checkpoints")
    mounts.run("mount", "-t", "tmpfs", "-o", f"size={'500k' if small else '20m'}", "tmpfs", "checkpoints")
    fill = at_step(4, "sleep 1; cat /dev/zero > checkpoints/filler 2>/dev/null; true")
    config = configured(workplace, "full", *([] if small else [fill]))
    needs = "checkpoints of 232 KiB need 696 KiB at once"
    if small:
        assert f"{needs}, and 500 KiB are free" in mounts.lm("plan", "--config", config, expect=2).stdout
        mounts.lm("fit", "--config", config, expect=2)
    done = mounts.lm("fit", "--config", config, *(["--force"] if small else []), expect=1)
    end = end_of(done)
    assert (needs in done.stderr) == small and "could not write the checkpoint checkpoints/full/step-0000000" in end
    assert "No space left on device, " in end and "make room" in end
    run = Run(mounts.at("checkpoints/full"))
    (kept,) = run.steps().values()
    assert find_damage(kept) is None and kept.name == os.readlink(run.path / "last")
    assert not list(run.path.glob(".*-step-*"))
    mounts.run(*(["mount", "-o", "remount,size=9m", "checkpoints"] if small else ["rm", "checkpoints/filler"]))
    mounts.lm("fit", "--config", configured(workplace, "full"), *AUTO)
    assert losses(workplace) == expected(workplace) and run.read("run.json")["status"] == "finished"


READ_ONLY = "mount --bind checkpoints checkpoints && mount -o remount,bind,ro checkpoints"


@pytest.mark.fault(4)
def test_a_folder_that_became_read_only_ends_it_with_the_next_checkpoint(workplace, mounts):
    """And is refused at once where it is so from the beginning, also to a run that would resume."""
    first = configured(workplace, "small", at_step(4, "sleep 1;" + READ_ONLY))
    end = end_of(mounts.lm("fit", "--config", first, expect=1))
    assert "could not write the checkpoint checkpoints/small/step-00000004: Read-only file system" in end
    fit = ("fit", "--config", configured(workplace, "small"))
    again = mounts.lm(*fit, *AUTO, expect=1).stderr
    assert "checkpoints/small" in again.splitlines()[-1] and "Read-only file system" in again.splitlines()[-1]
    new = mounts.lm(*fit, expect=2).stderr
    assert new.splitlines()[-1] == "lm fit: cannot make the run folder checkpoints/small-2: Read-only file system"
    mounts.run("umount", "checkpoints")
    mounts.lm(*fit, *AUTO)
    assert losses(workplace) == expected(workplace)


@pytest.mark.fault(4)
def test_a_folder_that_vanished_ends_it_with_the_next_step(workplace):
    """Nothing is made in its place, and what is put back resumes."""
    done, _ = fit(workplace, "small", callbacks=[at_step(5, "sleep 1; mv checkpoints/small away")], expect=1)
    assert "the run folder checkpoints/small is gone" in end_of(done) and "Traceback" not in done.stderr
    assert trace(workplace)[-1]["step"] in (5, 6) and not list((workplace / "checkpoints").iterdir())
    (workplace / "away").rename(workplace / "checkpoints" / "small")
    _, first = fit(workplace, "small")
    assert first == 5 and losses(workplace) == expected(workplace)
