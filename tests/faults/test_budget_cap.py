"""A run that would cost more than it may ends in time, with a checkpoint, and resumes only when it may cost more."""

import pytest
from trainings import RECORDER, equipment, lm, losses, write_config

from lm.runs.postmortem import steps_of
from lm.runs.run import Run

FIT = ("fit", "--config", "small.yaml", "--ckpt_path", "auto")
MANY = {"trainer.max_steps": 10**6, "trainer.val_interval": 10**6, "trainer.checkpoint_interval": 10**6}
UNTIL_60 = equipment("recorder.KillAt", signal_name="SIGTERM", micro_batch=119)


def configure(folder, *callbacks, **budget):
    more = {"guards": {"budget": {"rate_usd_per_hr": 3600, **budget}}} if budget else {}
    write_config(folder, **MANY, **{"trainer.callbacks": [RECORDER, *callbacks]}, **more)


@pytest.mark.fault(23)
def test_a_training_that_costs_too_much_ends_with_a_checkpoint_under_the_cap_and_resumes_when_it_is_raised(workplace):
    """A dollar a second and steps for hours: it ends in time. Another session adds to what was spent, and where that is
    all of the budget, it ends before its first step. With a higher cap it resumes as a run without one."""
    configure(workplace, UNTIL_60)
    lm(workplace, *FIT, "--run", "free", expect=75)
    free = losses(workplace)
    assert max(free) == (60, 1)
    (workplace / "trace.jsonl").unlink()

    configure(workplace, cap_usd=600)
    fit = lm(workplace, *FIT, expect=3)
    assert "goes on from" not in fit.stderr  # the weights are sound: no earlier checkpoint is named
    run = Run(workplace / "checkpoints" / "small")
    assert "Traceback" not in fit.stderr and "of $600.00; " in fit.stderr.splitlines()[-1]
    (step,) = run.steps()
    assert 12 < step < 60 and run.status() == "stopped" and max(losses(workplace)) == (step, 1)
    assert steps_of(run) == []  # no post-mortem: samples and weights do not explain a cost
    first = run.read("budget.json")
    assert 0 < first["spent_usd"] < 600 < first["projected_total_usd"]
    assert first["spent_usd"] == pytest.approx(first["hours_elapsed"] * 3600)

    configure(workplace, cap_usd=first["spent_usd"])
    fit = lm(workplace, *FIT, expect=3)
    assert "are spent: the run ends without a checkpoint; a larger cap" in fit.stderr.splitlines()[-1]
    assert run.read("budget.json")["spent_usd"] > first["spent_usd"] and list(run.steps()) == [step]
    assert [(alert["guard"], alert["action"]) for alert in run.alerts()] == [("budget", "stop")] * 2
    assert max(losses(workplace)) == (step, 1)

    configure(workplace, UNTIL_60, cap_usd=10**9)
    lm(workplace, *FIT, expect=75)
    assert losses(workplace) == free and list(run.steps()) == [60]
