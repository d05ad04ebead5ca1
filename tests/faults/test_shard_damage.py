"""Shards that break while they are trained on: named, skipped only where asked, and the run resumes bit for bit."""

import json
import shutil
import time

import pytest
from shard_breaker import break_shard
from trainings import lm, losses, trace, write_config

from lm.runs.run import Run

# Fifty shards of five samples each, and a buffer that holds six of them: shards are read all along.
MANY = {
    "data.path": "data/many", "data.shuffle_buffer": 1200,
    "data.prepare": {"input": ["texts"], "tokenizer": "char", "val_fraction": 0.2, "shard_tokens": 150},
}  # fmt: skip
SHARDS = "data/many/train"


def fit(folder, name, *callbacks, expect=0, **changes):
    """Train `name` or resume it; its losses are those in `trace.jsonl`."""
    named = [{"class_path": "recorder.Recorder"}, *callbacks]
    config = write_config(folder, name, **{**MANY, "trainer.callbacks": named, **changes})
    done = lm(folder, "fit", "--config", str(config), "--ckpt_path", "auto", expect=expect)
    return done, Run(folder / "checkpoints" / name)


def keep(folder, name):
    """Put the trace aside."""
    (folder / "trace.jsonl").rename(folder / f"{name}.jsonl")


@pytest.fixture(scope="module")
def folder(uninterrupted, tmp_path_factory):
    """A folder where `straight` was trained on shards that stayed whole."""
    folder = tmp_path_factory.mktemp("damage")
    shutil.copytree(uninterrupted / "texts", folder / "texts")
    fit(folder, "straight")
    keep(folder, "straight")
    shutil.copytree(folder / SHARDS, folder / "whole")
    return folder


def straight(folder):
    """The losses of the run on shards that stayed whole."""
    return losses(folder, "straight.jsonl")


def put_back(folder):
    shutil.rmtree(folder / SHARDS)
    shutil.copytree(folder / "whole", folder / SHARDS)


def rows(folder, name):
    """Step -> its rows of tokens, in the order in which they were trained on."""
    found = {}
    for entry in map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines()):
        tokens = entry["tokens"]
        found.setdefault(entry["step"], []).extend(tokens[at : at + 33] for at in range(0, len(tokens), 33))
    return found


@pytest.mark.fault(10)
def test_a_shard_that_breaks_in_a_run_is_named_and_the_run_resumes_once_it_is_whole(folder):
    """A flipped byte, a cut file, a deleted one, one after the other in one run: exit 1 in one line each time."""
    try:
        for step, how, said in ((0, "flip", "cannot be decoded"), (4, "cut", "cannot be decoded"),
                                (7, "delete", "cannot be read")):  # fmt: skip
            wreck = {"class_path": "shard_breaker.BreakShards", "init_args": dict(step=step, how=how, folder=SHARDS)}
            done, run = fit(folder, "broken", wreck, expect=1)
            line = done.stderr.splitlines()[-1]
            assert line.startswith(f"lm fit: shard {SHARDS}/000") and ", row group 0: " in line and said in line
            assert run.status() == "failed" and "row group 0" in run.read("run.json")["reason"]
            put_back(folder)
        _, run = fit(folder, "broken")
        broken = losses(folder)
        (folder / "trace.jsonl").unlink()
    finally:
        put_back(folder)
    assert broken == straight(folder) and run.status() == "finished"


@pytest.mark.fault(10)
def test_a_damaged_shard_is_skipped_where_that_is_asked_for_and_counted(folder):
    """All other samples stay where they were; a kill, a resume and two ranks count the same and report it once."""
    skip = {"data.on_bad_shard": "skip", "guards.spike": None}
    try:
        for name in ("00003", "00017", "00031"):
            break_shard(folder / SHARDS / f"{name}.parquet", "flip")
        done, run = fit(folder, "skipping", **skip)
        expected, counts = losses(folder), {line["step"]: line["data/skipped_samples"] for line in run.metrics()
                                            if "data/skipped_samples" in line}  # fmt: skip
        keep(folder, "skipping")
        whole, found = rows(folder, "straight"), rows(folder, "skipping")
        left_out = [step for step in whole for was, now in zip(whole[step], found[step]) if now != was and not any(now)]
        same = sum(was == now for step in whole for was, now in zip(whole[step], found[step]))
        assert left_out and same + len(left_out) == 12 * 8  # every other sample is where it was
        assert counts == {step: sum(each <= step for each in left_out) for step in range(1, 13)}
        alerts = [alert["message"] for alert in run.alerts()]
        assert len(alerts) == len(set(alerts)) <= 3 and all("row group 0: cannot be decoded" in a for a in alerts)
        assert [alert["guard"] for alert in run.alerts()] == ["data"] * len(alerts) and alerts[0] in done.stderr

        kill = {"class_path": "recorder.KillAt", "init_args": dict(signal_name="SIGKILL", micro_batch=21)}
        fit(folder, "killed", kill, expect=-9, **skip)
        _, killed = fit(folder, "killed", **skip)
        assert losses(folder) == expected
        (folder / "trace.jsonl").unlink()
        divided = {"trainer.devices": 2, "data.micro_batch_size": 2}
        _, ranks = fit(folder, "ranks", **skip, **divided)
        for other in (killed, ranks):
            assert other.metrics()[-2]["data/skipped_samples"] == counts[12]
            messages = [alert["message"] for alert in other.alerts() if alert["guard"] == "data"]
            assert set(messages) == set(alerts) and (other is killed or len(messages) == len(alerts))
    finally:
        for path in folder.glob("trace*.jsonl"):
            path.unlink()
        put_back(folder)


@pytest.mark.fault(10)
def test_nothing_of_a_folder_that_is_gone_is_skipped(folder):
    """`skip` is for damage: a disk that is not there would otherwise be a training on nothing."""
    wreck = {"class_path": "shard_breaker.BreakShards", "init_args": dict(step=0, how="delete", folder=SHARDS)}
    try:
        done, _ = fit(folder, "gone", wreck, expect=1, **{"data.on_bad_shard": "skip"})
    finally:
        put_back(folder)
    assert "cannot be read" in done.stderr and trace(folder)
    (folder / "trace.jsonl").unlink()


@pytest.mark.fault(17)
def test_a_file_system_that_does_not_answer_is_named_after_a_bounded_wait(folder):
    """A read that never returns: exit 1 soon, and the process does end."""
    wreck = {"class_path": "shard_breaker.BreakShards", "init_args": dict(step=1, how="hang", folder=SHARDS)}
    try:
        done, run = fit(folder, "hanging", wreck, expect=1, **{"data.timeout": 3.0})
        ended = time.time()
    finally:
        put_back(folder)
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"lm fit: shard {SHARDS}/000") and "not read after 3 seconds (data.timeout)" in line
    assert ended - (folder / "trace.jsonl").stat().st_mtime < 40 and "Traceback" not in done.stderr
    assert run.status() == "failed"
    fit(folder, "hanging")
    assert losses(folder) == straight(folder)
    (folder / "trace.jsonl").unlink()
