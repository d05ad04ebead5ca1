"""Shards that break while they are trained on: named, and the run resumes bit for bit."""

import shutil
import time

import pytest
import trainings
from trainings import expected, losses

# Fifty shards of five samples each, and a buffer that holds six of them: shards are read all along.
MANY = {
    "data.path": "data/many", "data.shuffle_buffer": 1200,
    "data.prepare": {"input": ["texts"], "tokenizer": "char", "val_fraction": 0.2, "shard_tokens": 150},
}  # fmt: skip
SHARDS = "data/many/train"


def fit(folder, name, *callbacks, expect=0, **changes):
    """Train `name` or resume it; its losses are those in `trace.jsonl`."""
    changes = {**MANY, "trainer.callbacks": [{"class_path": "recorder.Recorder"}, *callbacks], **changes}
    return trainings.fit(folder, name, "--ckpt_path", "auto", expect=expect, **changes)


def wreck(step, how):
    return {"class_path": "shard_breaker.BreakShards", "init_args": {"step": step, "how": how, "folder": SHARDS}}


def keep(folder, name):
    """Put the trace aside."""
    (folder / "trace.jsonl").rename(folder / f"{name}.jsonl")


@pytest.fixture(scope="module")
def place(uninterrupted, tmp_path_factory):
    """A folder where `straight` was trained on shards that stayed whole."""
    place = tmp_path_factory.mktemp("damage")
    shutil.copytree(uninterrupted / "texts", place / "texts")
    fit(place, "straight")
    keep(place, "expected")
    shutil.copytree(place / SHARDS, place / "whole")
    return place


def put_back(folder):
    shutil.rmtree(folder / SHARDS)
    shutil.copytree(folder / "whole", folder / SHARDS)


@pytest.fixture
def folder(place):
    """The same folder, whose shards one test may break."""
    yield place
    put_back(place)
    for path in place.glob("trace*.jsonl"):
        path.unlink()


@pytest.mark.fault(10)
def test_a_shard_that_breaks_in_a_run_is_named_and_the_run_resumes_once_it_is_whole(folder):
    """A flipped byte, a cut file, a deleted one, one after the other in one run: exit 1 in one line each time."""
    for step, how, said in ((0, "flip", "cannot be decoded"), (4, "cut", "cannot be decoded"),
                            (7, "delete", "cannot be read")):  # fmt: skip
        done, run = fit(folder, "broken", wreck(step, how), expect=1)
        line = done.stderr.splitlines()[-1]
        assert line.startswith(f"lm fit: shard {SHARDS}/000") and ", row group 0: " in line and said in line
        assert run.status() == "failed" and "row group 0" in run.read("run.json")["reason"]
        put_back(folder)
    _, run = fit(folder, "broken")
    assert losses(folder) == expected(folder) and run.status() == "finished"


@pytest.mark.fault(17)
def test_a_file_system_that_does_not_answer_is_named_after_a_bounded_wait(folder):
    """A read that never returns: exit 1 soon, and the process does end."""
    done, run = fit(folder, "hanging", wreck(1, "hang"), expect=1, **{"data.timeout": 3.0})
    ended = time.time()
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"lm fit: shard {SHARDS}/000") and "not read after 3 seconds (data.timeout)" in line
    assert ended - (folder / "trace.jsonl").stat().st_mtime < 40 and "Traceback" not in done.stderr
    assert run.status() == "failed"
    put_back(folder)
    fit(folder, "hanging")
    assert losses(folder) == expected(folder)
