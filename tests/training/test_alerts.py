"""Alerts: conditions on a metric that decide nothing they do not know, and act once."""

import json
import math

import pytest
from test_guards import found_in
from trainings import fit

from lm.errors import RequestError
from lm.training.alerts import NAMES as METRICS
from lm.training.alerts import Condition
from lm.training.callbacks.alerts import Alerts


def holds(text, *lines):
    """What a condition says after these log lines, each a dict by short names; None: not looked at, or undecided."""
    watch, said = Alerts({text: "warn"}), {}
    for line in lines:
        said = watch.evaluate({METRICS[name]: value for name, value in line.items()})
    return next(iter(said.values()), None)


# ---- what it means ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "true"), [
    ("loss > 2", [3]), ("loss >= 2.", [2, 3]), ("loss<2", [1]), ("loss <= 20e-1", [1, 2]), ("loss == +2.0", [2]),
    ("loss != 2", [1, 3]), ("loss > -.5", [1, 2, 3]), ("train/loss > 2", [3]), ("train_loss > 2", [3]),
])  # fmt: skip
def test_comparisons_and_ways_to_write_a_number(text, true):
    assert [loss for loss in (1, 2, 3) if holds(text, {"loss": loss})] == true
    assert holds(text, {"loss": math.nan}) is None and holds(text, {"lr": 1}) is None


def test_nothing_fires_until_a_window_is_full():
    """The value that is looked at is no part of its own window, and a NaN in the log is no part of any."""
    spike = "loss > 1.5 * median(loss, 3)"
    assert holds(spike, *[{"loss": loss} for loss in (1, 1, 9)]) is None
    assert holds(spike, *[{"loss": loss} for loss in (1, 1, math.nan, 9)]) is None
    assert holds(spike, *[{"loss": loss} for loss in (1, 1, math.nan, 1, 9)]) is True
    assert holds(spike, *[{"loss": loss} for loss in (1, 1, 1, math.nan)]) is None
    other = "val_loss > 2 * median(loss, 2)"
    assert holds(other, *[{"loss": 1}] * 3, {"val_loss": 3}) is True and holds(other, *[{"loss": 1}] * 3) is None


def test_it_is_looked_at_when_its_metric_is_logged():
    watch = Alerts(dict.fromkeys(["loss > 1", "val_loss > 1", "step > 1"], "warn"))
    seen = {each.text for each in watch.evaluate({"train/loss": 2.0, "step": 4})}
    assert seen == {"loss > 1", "step > 1"}
    assert {each.text for each in watch.evaluate({"val/loss": 2.0, "step": 4})} == {"val_loss > 1", "step > 1"}


def test_it_says_the_values_that_it_looked_at():
    watch = Alerts(dict.fromkeys(["loss > 1.5 * median(loss, 2)", "loss > 1.5 * median(loss, 3)"], "warn"))
    for loss in (9.0, 3.0, 3.5, 12.312):
        condition, _ = watch.evaluate({"train/loss": loss})
    said = "loss > 1.5 * median(loss, 2): loss is 12.31, median(loss, 2) is 3.25 at step 130"
    assert watch.explain(condition, 130) == said


# ---- what it refuses -------------------------------------------------------------------------------------------------
FORM = "`metric op number`, such as `loss > 10`, or `metric op number * median(metric, n)`"
WRONG = dict.fromkeys([
    "val_loss > 4 and step > 1000", "not loss > 1", "loss > mean(loss, 8)", "loss > 2 * previous(loss)", "1 < loss",
    "loss > lr", "loss > 1 + 1", "loss > 2 * median(loss)", "loss > 2 * median(loss, 0)", "loss > nan", "loss",
    "loss > 2 * median(loss, 10000)", "loss > 1\nloss > 2", "loss >\x1b[31m 1", "", "x" * 10**6,
    "loss > " + "9" * 10**6 + "x",
], FORM) | {
    "los > 10": "did you mean loss?", "vall_loss > 1": "did you mean val_loss?",
    "gradnorm > 1": "did you mean grad_norm?", "loss > 2 * median(los, 5)": "did you mean loss?",
    "x" * 10**6 + " > 1": "there are loss, max_loss",
}  # fmt: skip


@pytest.mark.parametrize(("text", "cure"), WRONG.items(), ids=lambda text: repr(text[:30]))
def test_what_is_no_condition_is_one_line_with_what_is(text, cure):
    with pytest.raises(RequestError) as error:
        Condition(text)
    said = str(error.value)
    assert cure in said and repr(text[:200])[:-1] in said and said.isprintable() and len(said) < 1000


# ---- what it keeps ---------------------------------------------------------------------------------------------------
def test_windows_continue_after_a_resume():
    """What a watch keeps is plain finite JSON, and another one continues from it as if nothing had been."""
    texts = dict.fromkeys(["loss > 2 * median(loss, 4)", "val_loss > 1 * median(val_loss, 1)"], "warn")
    lines = [{"train/loss": loss, "val/loss": loss} for loss in (1, 2, math.inf, 1, 3, math.nan, 9, 1, 2, 30)]
    whole, first = Alerts(texts), Alerts(texts)
    said = [list(whole.evaluate(line).values()) for line in lines]
    for cut in range(len(lines)):
        second = Alerts(texts)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert [list(second.evaluate(line).values()) for line in lines[cut:]] == said[cut:]
        first.evaluate(lines[cut])


# ---- in a training ---------------------------------------------------------------------------------------------------
def test_a_training_warns_once_and_stops(workplace):
    """Both conditions stay true: the warning comes once; the stop ends the run with exit code 3, says why in one line,
    and leaves no checkpoint of weights that may be broken: `auto` resumes from the one before. What is true of an
    untrained model stops nothing."""
    window = {"loss < 1 * median(loss, 8)": "warn"}
    stop = {"step >= 5": "stop"}
    untrained = {"loss > 3.5": "stop"}  # ln(38) = 3.64
    ended, run = fit(workplace, expect=3, guards={"alerts": {"step > 1": "warn", **untrained, **stop, **window}})
    assert "Traceback" not in ended.stderr and "step >= 5: at step 5" in ended.stderr.splitlines()[-1]
    alerts = [(alert["step"], alert["guard"], alert["action"]) for alert in run.alerts()]
    assert alerts == [(2, "alert", "warn"), (5, "alert", "stop")]
    assert next(line["train/loss"] for line in run.metrics()) > 3.5
    reasons = [run.read(name)["reason"] for name in ("run.json", "state.json")]
    for said in (ended.stderr, (run.path / "log.txt").read_text(), *reasons):
        assert "step >= 5: at step 5" in said
    assert run.status() == run.read("state.json")["status"] == "stopped"
    assert list(run.steps()) == [4] and run.link("last").name == "step-00000004"  # the best; none of step 5

    # Windows continue with the run: eight lines before the one of step 9, four of them in the other process.
    fit(workplace, "small", "--ckpt_path", "auto", guards={"alerts": window})
    assert [alert["step"] for alert in run.alerts()] == [2, 5, 9] and run.status() == "finished"


def stops(losses, state=None, warmup=0, begin=0):
    """Steps at which `loss > 10` stops a run of these losses, a log line a step of 1000; and its state."""
    observer = Alerts({"loss > 10": "stop"})
    lines = [(step, {"train/loss": loss}) for step, loss in enumerate(losses, begin + 1)]
    found = found_in(lines, observer, state, max_steps=1000, warmup_steps=warmup, begin_step=begin)
    assert {finding.action for _, finding in found} <= {"stop"}
    return [step for step, _ in found], observer.state_dict()


@pytest.mark.parametrize(("losses", "warmup", "begin", "steps"), [
    ([10.4] * 9 + [9.0], 0, 0, []), ([10.4, 9.0, 11.0], 0, 0, [3]), ([9.0, 11.0], 0, 0, [2]),
    ([10.4] * 13, 0, 0, [11, 12, 13]), ([10.4] * 13, 12, 0, [13]),
    ([10.4] * 13, 0, 200, [211, 212, 213]), ([10.4] * 13, 12, 200, [213]),  # a branch has a warm-up of its own
])  # fmt: skip
def test_what_is_true_from_the_start_waits_until_it_is_not_or_the_warm_up_is_over(losses, warmup, begin, steps):
    assert stops(losses, warmup=warmup, begin=begin)[0] == steps


def test_it_is_known_after_a_resume_whether_a_condition_was_false():
    assert stops([10.4], stops([10.4, 9.0])[1])[0] == [1]
    assert stops([10.4], stops([10.4])[1])[0] == []
