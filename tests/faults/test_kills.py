"""SIGKILL a real training at any place and any moment: it resumes as if nothing had happened, bit for bit."""

import os
import random
import signal
import time

import pytest
from trainings import RECORDER, equipment, expected, fit, losses, start, trace, validations, wait_until, write_config

from lm.runs.run import Run

SEEDS = range(int(os.environ.get("LM_FAULT_SEEDS", 2)))


AUTO = ("--ckpt_path", "auto")


def kill_at(**moment):
    return equipment("recorder.KillAt", signal_name="SIGKILL", **moment)


def train_and_kill(folder, name, kills, **changes):
    """Fit `name`, killed once for each of `kills`, then to its end."""
    (folder / "trace.jsonl").unlink(missing_ok=True)
    for kill in kills:
        fit(folder, name, *AUTO, callbacks=[kill_at(**kill)], expect=-signal.SIGKILL, **changes)
    return fit(folder, name, *AUTO, **changes)[1]


# Micro-batches are counted from 0, two a step; checkpoints follow steps 3, 6, 9, 12 and new best validations (4, 8,
# 12). Each run is killed several times, each time further on.
KILLS = {
    "steps": [
        dict(micro_batch=2),  # before there is any checkpoint
        dict(micro_batch=6),  # right after one
        dict(micro_batch=14),  # between two steps
        dict(micro_batch=15),  # in the middle of an accumulation
    ],
    "validations": [
        dict(validation=1, step=4),
        dict(hook="on_validation_epoch_end", step=4),  # after its batches
        dict(hook="on_train_batch_start", step=8),  # just after it
    ],
    "saves": [
        dict(save=True, step=3),
        dict(validation=1, step=12),  # the last validation
        dict(hook="on_validation_end", step=12),  # between the last step and its save
        dict(save=True, step=12),
        dict(hook="on_fit_end"),  # all is saved, and it is not written down yet that the run has finished
    ],
}


@pytest.mark.fault(15)
@pytest.mark.parametrize("name", KILLS)
def test_losses_and_validations_are_those_of_an_uninterrupted_run(uninterrupted, workplace, name):
    run = train_and_kill(workplace, name, KILLS[name])
    assert losses(workplace) == expected(workplace)
    assert run.status() == "finished" and run.read("run.json")["reason"] == "all steps done"
    small = Run(uninterrupted / "checkpoints" / "small")
    assert validations(run) == validations(small)
    assert run.link("best").name == small.link("best").name and list(run.steps()) == list(small.steps())
    assert not list(run.path.glob(".*")) and not (workplace / "checkpoints" / f"{name}-2").exists()


@pytest.mark.fault(1)
def test_kills_at_random_moments_change_nothing(workplace):
    """Several kills a run, from outside and at any moment after its first micro-batch; LM_FAULT_SEEDS sets how many."""
    changes, slow = {"trainer.max_steps": 30}, equipment("interruptions.SlowSteps", seconds=0.03)
    fit(workplace, "straight", **changes)
    straight, seen = losses(workplace), {entry["step"]: entry["samples"] for entry in trace(workplace)}
    for seed in SEEDS:
        moments = random.Random(seed)
        config = str(write_config(workplace, f"random-{seed}", **changes, **{"trainer.callbacks": [RECORDER, slow]}))
        (workplace / "trace.jsonl").unlink()
        for _ in range(2):
            before = len(trace(workplace)) if (workplace / "trace.jsonl").exists() else 0
            process = start(workplace, "fit", "--config", config, *AUTO)
            wait_until(lambda: (workplace / "trace.jsonl").exists() and len(trace(workplace)) > before, process)
            time.sleep(moments.uniform(0, 1.2))
            process.kill()
            process.communicate()
        _, run = fit(workplace, f"random-{seed}", *AUTO, **changes)
        assert losses(workplace) == straight, f"seed {seed}"
        assert {entry["step"]: entry["samples"] for entry in trace(workplace)} == seen, f"seed {seed}"
        assert run.read("run.json")["status"] == "finished"


@pytest.mark.fault(1)
def test_any_kept_step_is_one_to_resume_from(workplace):
    """`--trainer.keep_checkpoints` keeps more, from each the losses are those that followed it, and a kill before the
    next checkpoint does not bring back the steps that were left behind."""
    keep, step = {"trainer.keep_checkpoints": 9}, "checkpoints/kept/step-00000003"
    _, run = fit(workplace, "kept", **keep)
    assert {3, 6, 9, 12} <= run.steps().keys()
    for micro_batch, first in ((6, 4), (15, 4)):  # in the very next step; after the next checkpoints
        (workplace / "trace.jsonl").unlink(missing_ok=True)
        kill = kill_at(micro_batch=micro_batch)
        fit(workplace, "kept", "--ckpt_path", step, callbacks=[kill], expect=-signal.SIGKILL, **keep)
        fit(workplace, "kept", *AUTO, **keep)
        steps = {entry["step"] for entry in trace(workplace)}
        assert losses(workplace) == {key: loss for key, loss in expected(workplace).items() if key[0] >= first}
        assert (min(steps), max(steps)) == (first, 12) and run.status() == "finished"
    assert not (workplace / "checkpoints" / "kept-2").exists()


@pytest.mark.fault(15)
def test_early_stopping_stays_stopped_and_a_finished_run_stays_finished(workplace):
    """Also where it was killed after the validation that stopped it, before that was written down."""
    patience = {"trainer.early_stopping": {"patience": 1, "min_delta": 10.0}, "trainer.max_steps": 40}
    run = train_and_kill(workplace, "patient", [dict(hook="on_fit_end")], **patience)
    assert run.read("run.json")["reason"] == "early stopping"
    # The first validation is always progress, the second gained less than min_delta, and is the lowest all the same.
    assert run.read("run.json")["step"] == 8 and len(trace(workplace)) == 16
    lowest = min(run.metrics("val/loss"), key=lambda line: line["val/loss"])
    assert lowest["step"] == 8 and run.link("best").name == "step-00000008"
    again, _ = fit(workplace, "patient", *AUTO, **patience)
    assert "has finished" in again.stderr and "in trainer.callbacks that stopped it" in again.stderr
    assert run.read("run.json")["step"] == 8
    patience["trainer.early_stopping"]["patience"] = 2
    again, _ = fit(workplace, "patient", *AUTO, **patience)
    assert run.read("run.json")["step"] == 12  # one more validation without a new best
    assert "stopped early, at step 12 of 40: the validation loss has not fallen" in again.stderr


def test_a_run_that_a_callback_has_stopped_early_continues_without_it(workplace):
    early = "lightning.pytorch.callbacks.EarlyStopping"
    for callbacks, step in (([equipment(early, monitor="val/loss", patience=1, min_delta=10.0)], 8), (None, 12)):
        _, run = fit(workplace, "callback", *AUTO, **{"trainer.callbacks": callbacks})
        assert run.read("run.json")["step"] == step
