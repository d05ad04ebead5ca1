"""Kill a real training in any way and at any place: it goes on as if nothing had happened, bit for bit."""

import json
import os
import signal
import time

import pytest
from trainings import lm, losses, make_workplace, start, trace, write_config

from lm.runs import Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with one uninterrupted run, `small`, and its exact losses."""
    folder = make_workplace(tmp_path_factory.mktemp("resume"))
    lm(folder, "fit", "--config", str(write_config(folder)))
    (folder / "trace.jsonl").rename(folder / "expected.jsonl")
    return folder


def expected(folder):
    entries = [json.loads(line) for line in (folder / "expected.jsonl").read_text().splitlines()]
    return {(entry["step"], entry["micro"]): entry["loss"] for entry in entries}


def validations(folder, run):
    entries = Run(folder / "checkpoints" / run).metrics()
    return {entry["step"]: entry["val/loss"] for entry in entries if "val/loss" in entry}


def train_and_kill(folder, name, kills, **changes):
    """Fit `name`, killed once for each of `kills`, then to its end."""
    (folder / "trace.jsonl").unlink(missing_ok=True)
    for kill in [*kills, None]:
        callbacks = [{"class_path": "recorder.Recorder"}]
        if kill is not None:
            callbacks.append({"class_path": "recorder.KillAt", "init_args": kill})
        config = write_config(folder, name, **{"trainer.callbacks": callbacks, **changes})
        code = 0 if kill is None else 75 if kill["signal_name"] != "SIGKILL" else -signal.SIGKILL
        lm(folder, "fit", "--config", str(config), "--ckpt_path", "auto", expect=code)


# Micro-batches are counted from 0, two a step; checkpoints follow steps 3, 6, 9, 12 and new best validations (4, 8,
# 12).
KILLS = {
    "before-any-checkpoint": [dict(signal_name="SIGKILL", micro_batch=2)],
    "between-steps": [dict(signal_name="SIGKILL", micro_batch=14)],
    "mid-accumulation": [dict(signal_name="SIGKILL", micro_batch=15)],
    "right-after-a-checkpoint": [dict(signal_name="SIGKILL", micro_batch=6)],
    "at-a-validation": [dict(signal_name="SIGKILL", validation=1)],
    "in-a-save": [dict(signal_name="SIGKILL", save=True)],
    "twice": [dict(signal_name="SIGKILL", micro_batch=11), dict(signal_name="SIGKILL", micro_batch=17)],
    "term": [dict(signal_name="SIGTERM", micro_batch=9)],
    "term-at-a-validation": [dict(signal_name="SIGTERM", validation=0)],
    "usr1-before-a-validation": [dict(signal_name="SIGUSR1", micro_batch=7)],
    "int": [dict(signal_name="SIGINT", micro_batch=0)],
}


@pytest.mark.parametrize("name", KILLS)
def test_losses_and_validations_are_those_of_an_uninterrupted_run(workplace, name):
    train_and_kill(workplace, name, KILLS[name])
    assert losses(workplace) == expected(workplace)
    assert validations(workplace, name) == validations(workplace, "small")
    run = Run(workplace / "checkpoints" / name)
    assert run.read("run.json")["status"] == "finished" and list(run.steps())[-1] == 12
    assert not list(run.path.glob(".*")) and not (workplace / "checkpoints" / f"{name}-2").exists()


def test_nothing_is_trained_on_twice_after_a_graceful_stop(workplace):
    """SIGTERM loses no work: every micro-batch is trained on exactly once."""
    train_and_kill(workplace, "once", [dict(signal_name="SIGTERM", micro_batch=9)])
    entries = trace(workplace)
    assert len(entries) == len({(entry["step"], entry["micro"]) for entry in entries}) == 24


def test_epochs_do_not_matter(workplace):
    """The corpus has fewer samples than this run takes, so the kill is in a later epoch; a step's samples are new."""
    long = {"trainer.max_steps": 60, "trainer.val_interval": 60, "trainer.checkpoint_interval": 20}
    (workplace / "trace.jsonl").unlink(missing_ok=True)
    lm(workplace, "fit", "--config", str(write_config(workplace, "long", **long)))
    straight = losses(workplace)
    train_and_kill(workplace, "long-killed", [dict(signal_name="SIGKILL", micro_batch=101)], **long)
    assert losses(workplace) == straight and len(straight) == 120
    starts = [entry["samples"][0] for entry in trace(workplace) if entry["micro"] == 0]
    assert max(starts) * 33 > os.path.getsize(workplace / "data/small/train/00000.parquet")  # well past one epoch


@pytest.mark.parametrize(
    "change",
    [{"data.micro_batch_size": 1}, {"data.micro_batch_size": 2}, {"data.micro_batch_size": 8}, {"data.num_workers": 2}],
)
def test_another_division_goes_on_with_the_same_samples(workplace, change):
    """Stop, change the micro-batch or the loader processes, go on: each step still sees the same tokens."""
    name = "divided-" + "-".join(f"{key.split('.')[1]}-{value}" for key, value in change.items())
    (workplace / "trace.jsonl").unlink(missing_ok=True)
    lm(workplace, "fit", "--config", str(write_config(workplace, name, **{"trainer.max_steps": 5})))
    lm(workplace, "fit", "--config", str(write_config(workplace, name, **change)), "--ckpt_path", "auto")
    assert list(validations(workplace, name)) == [4, 5, 8, 12]

    def tokens_by_step(entries):
        steps = {}
        for entry in entries:
            steps.setdefault(entry["step"], []).extend(entry["tokens"])
        return steps

    straight = [json.loads(line) for line in (workplace / "expected.jsonl").read_text().splitlines()]
    assert tokens_by_step(trace(workplace)) == tokens_by_step(straight)


def test_any_kept_step_is_one_to_go_on_from(workplace):
    """`--trainer.keep_checkpoints` keeps more, and from each the losses are those that followed it."""
    config = str(write_config(workplace, "kept", **{"trainer.keep_checkpoints": 9}))
    lm(workplace, "fit", "--config", config)
    run = Run(workplace / "checkpoints" / "kept")
    assert {3, 6, 9, 12} <= run.steps().keys()
    (workplace / "trace.jsonl").unlink()
    killed = write_config(workplace, "kept", **{
        "trainer.keep_checkpoints": 9,
        "trainer.callbacks": [
            {"class_path": "recorder.Recorder"},
            {"class_path": "recorder.KillAt", "init_args": dict(signal_name="SIGKILL", micro_batch=15)},
        ],
    })  # fmt: skip
    step = "checkpoints/kept/step-00000003"
    lm(workplace, "fit", "--config", str(killed), "--ckpt_path", step, expect=-signal.SIGKILL)
    config = str(write_config(workplace, "kept", **{"trainer.keep_checkpoints": 9}))
    lm(workplace, "fit", "--config", config, "--ckpt_path", "auto")
    steps = {entry["step"] for entry in trace(workplace)}
    assert min(steps) == 4 and losses(workplace).items() <= expected(workplace).items() and max(steps) == 12
    assert not (workplace / "checkpoints" / "kept-2").exists()


def test_a_kill_before_the_next_checkpoint_does_not_bring_back_the_steps_left_behind(workplace):
    """Gone on with from step 6 of 12 and killed at once, `auto` goes on from step 6 again and not from 12."""
    config = str(write_config(workplace, "back", **{"trainer.keep_checkpoints": 9}))
    lm(workplace, "fit", "--config", config)
    (workplace / "trace.jsonl").unlink()
    killed = write_config(workplace, "back", **{
        "trainer.keep_checkpoints": 9,
        "trainer.callbacks": [{"class_path": "recorder.KillAt", "init_args": {"signal_name": "SIGKILL",
                                                                               "micro_batch": 13}}],
    })  # fmt: skip
    step = "checkpoints/back/step-00000006"
    lm(workplace, "fit", "--config", str(killed), "--ckpt_path", step, expect=-signal.SIGKILL)
    config = str(write_config(workplace, "back", **{"trainer.keep_checkpoints": 9}))
    lm(workplace, "fit", "--config", config, "--ckpt_path", "auto")
    assert losses(workplace) == {key: loss for key, loss in expected(workplace).items() if key[0] > 6}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_goes_on_exactly_too(workplace, precision):
    changes = {"trainer.precision": precision, "trainer.val_interval": 6}
    (workplace / "trace.jsonl").unlink(missing_ok=True)
    lm(workplace, "fit", "--config", str(write_config(workplace, precision, **changes)))
    straight = losses(workplace)
    train_and_kill(workplace, f"{precision}-killed", [dict(signal_name="SIGKILL", micro_batch=19)], **changes)
    assert losses(workplace) == straight


def test_a_second_interrupt_ends_it_at_once(workplace):
    config = write_config(workplace, "impatient", **{"trainer.max_steps": 100_000, "trainer.val_interval": 100_000})
    process = start(workplace, "fit", "--config", str(config))
    run = Run(workplace / "checkpoints" / "impatient")
    while not (run.path / "metrics.jsonl").exists():
        time.sleep(0.1)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.wait(timeout=60) in (75, 130) and time.monotonic() - began < 30
    process.communicate()


def test_early_stopping_stays_stopped_and_a_finished_run_stays_finished(workplace):
    changes = {"trainer.early_stopping": {"patience": 1, "min_delta": 10.0}, "trainer.max_steps": 40}
    config = str(write_config(workplace, "patient", **changes))
    lm(workplace, "fit", "--config", config)
    run = Run(workplace / "checkpoints" / "patient")
    assert run.read("run.json")["reason"] == "early stopping"
    stopped_at = run.read("run.json")["step"]
    assert stopped_at == 8  # the first validation is always a new best, the second gained less than min_delta
    again = lm(workplace, "fit", "--config", config, "--ckpt_path", "auto")
    assert "has finished" in again.stderr and run.read("run.json")["step"] == stopped_at


def test_a_changed_config_is_shown_and_a_lie_refused(workplace):
    config = str(write_config(workplace, "small", **{"model.optimizer.lr": 0.02}))
    shown = lm(workplace, "fit", "--config", config, "--ckpt_path", "last", "--trainer.max_steps", "13")
    assert "model.optimizer.lr: 0.01 -> 0.02" in shown.stderr
    entry = Run(workplace / "checkpoints" / "small").metrics()[-2]
    assert entry["step"] == 13 and entry["optim/lr"] > 0.0012  # the new learning rate is the one that is used
    another = ("--model.decoder.hidden_size", "64")
    refused = lm(workplace, "fit", "--config", config, "--ckpt_path", "last", *another, expect=2)
    assert "cannot go on with another model.decoder.hidden_size" in refused.stderr


def test_changed_shards_are_refused_with_the_difference(workplace):
    config = str(write_config(workplace, "moved", **{"trainer.max_steps": 3}))
    lm(workplace, "fit", "--config", config)
    run = Run(workplace / "checkpoints" / "moved")
    before = json.loads((run.path / "data.json").read_text())
    before["train"][0][1] += 1
    (run.path / "data.json").write_text(json.dumps(before))
    refused = lm(workplace, "fit", "--config", config, "--ckpt_path", "auto", "--trainer.max_steps", "6", expect=2)
    assert "00000.parquet had " in refused.stderr
