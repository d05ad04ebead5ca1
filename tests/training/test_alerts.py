"""Alerts: a small language that is read without running anything, decides nothing it does not know, and acts once."""

import json
import math
import operator
import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_guards import found_in
from trainings import fit, make_workplace, write_config

from lm.cli.main import main
from lm.errors import RequestError
from lm.training.alerts import NAMES as METRICS
from lm.training.alerts import AlertEvaluator, Expression
from lm.training.guards import Alerts

NAMES = ("loss", "grad_norm", "val_loss")


def holds(text, *lines):
    """What an expression says after these log lines, each a dict by short names; None: not looked at, or undecided."""
    watch, said = AlertEvaluator([text]), {}
    for line in lines:
        said = watch.evaluate({METRICS[name]: value for name, value in line.items()})
    return next(iter(said.values()), None)


# ---- what it means ---------------------------------------------------------------------------------------------------


NUMBERS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: a / b if b else math.nan,
    "abs": abs, "negative": operator.neg,
}  # fmt: skip
SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne}
WINDOWS = {"mean": statistics.fmean, "median": statistics.median, "min": min, "max": max, "std": statistics.pstdev,
           "previous": max}  # fmt: skip


def three_valued(tree, log):
    """A tree over a log with gaps, the straightforward way: an unknown number is NaN, an undecided condition None."""
    kind, *parts = tree
    if kind == "number":
        return parts[0]
    if kind in ("metric", *WINDOWS):
        name, count = parts
        given = [line[name] for line in log if name in line]
        before = [value for value in given[:-1] if math.isfinite(value)]
        if kind == "metric":
            return given[-1] if given else math.nan
        return WINDOWS[kind](before[-count:]) if len(before) >= count else math.nan
    if kind == "compare":
        signs, *parts = parts
        sides = [three_valued(part, log) for part in parts]
        pairs = zip(sides, sides[1:], [SIGNS[sign] for sign in signs])
        kind, sides = "and", [None if math.isnan(a) or math.isnan(b) else sign(a, b) for a, b, sign in pairs]
    else:
        sides = [three_valued(part, log) for part in parts]
    if kind in NUMBERS:
        return NUMBERS[kind](*sides)
    if kind == "not":
        return None if sides[0] is None else not sides[0]
    decides = kind == "or"
    return decides if decides in sides else None if None in sides else not decides


def written(tree):
    """A tree as an expression, every part in parentheses."""
    kind, *parts = tree
    if kind in ("number", "metric"):
        return str(parts[0])
    if kind in WINDOWS:
        return f"previous({parts[0]})" if kind == "previous" else f"{kind}({parts[0]}, {parts[1]})"
    if kind == "compare":
        signs, *parts = parts
        return " ".join(word for part, sign in zip(parts, [*signs, ""]) for word in (f"({written(part)})", sign))
    sides = [f"({written(part)})" for part in parts]
    before = {"not": "not ", "abs": "abs", "negative": "-"}
    return before[kind] + sides[0] if kind in before else f" {kind} ".join(sides)


values = st.integers(-8, 8).map(lambda n: n / 4)
leaves = st.one_of(
    st.tuples(st.just("number"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["metric", *WINDOWS]), st.sampled_from(NAMES), st.integers(1, 4)).map(
        lambda leaf: (*leaf[:2], 1) if leaf[0] == "previous" else leaf),
)  # fmt: skip
terms = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("+-*"), inner, inner), st.tuples(st.just("/"), inner, leaves),
        st.tuples(st.sampled_from(["abs", "negative"]), inner),
    ),
    max_leaves=5,
)  # fmt: skip
signs = st.sampled_from(list(SIGNS))
trees = st.recursive(
    st.one_of(
        st.tuples(st.just("compare"), st.tuples(signs), terms, terms),
        st.tuples(st.just("compare"), st.tuples(signs, signs), terms, terms, terms),
    ),
    lambda inner: st.one_of(st.tuples(st.sampled_from(["and", "or"]), inner, inner), st.tuples(st.just("not"), inner)),
    max_leaves=4,
)
whole = st.fixed_dictionaries({name: values for name in NAMES})
gaps = st.dictionaries(st.sampled_from(NAMES), values | st.sampled_from([math.nan, math.inf, -math.inf]))


@settings(max_examples=600, deadline=None)
@given(trees.filter(lambda tree: len(written(tree)) < 450), st.lists(gaps | whole, max_size=9), gaps)
def test_it_is_what_python_says_and_undecided_where_something_is_not_known(tree, log, last):
    """Over logs with gaps, NaN and infinities it is what three-valued logic says, and never an error."""
    text = f"({written(tree)}) or loss / (loss - loss) > 1"  # the latter is never decided, and names a metric
    log = [*log, {"loss": 1.0, **last}]
    undecided = ("compare", (">",), ("number", math.nan), ("number", 1))
    assert holds(text, *log) is three_valued(("or", tree, undecided), log)


def test_nothing_fires_until_a_window_is_full():
    """The value that is looked at is no part of its own window, and a NaN in the log is no part of any."""
    spike = "loss > 1.5 * median(loss, 3)"
    assert holds(spike, *[{"loss": loss} for loss in (1, 1, 9)]) is None
    assert holds(spike, *[{"loss": loss} for loss in (1, 1, math.nan, 9)]) is None
    assert holds(spike, *[{"loss": loss} for loss in (1, 1, math.nan, 1, 9)]) is True
    assert holds(spike, *[{"loss": loss} for loss in (1, 1, 1, math.nan)]) is None
    assert holds(spike + " and step > 5", *[{"loss": 9, "step": 2}]) is False


def test_it_is_looked_at_when_one_of_its_metrics_is_logged():
    watch = AlertEvaluator(["loss > 1", "val_loss > 1 and step > 3", "step > 1"])
    seen = {each.text for each in watch.evaluate({"train/loss": 2.0, "step": 4})}
    assert seen == {"loss > 1", "step > 1"}
    assert {each.text for each in watch.evaluate({"val/loss": 2.0, "step": 4})} == {
        "val_loss > 1 and step > 3",
        "step > 1",
    }


# ---- what it refuses -------------------------------------------------------------------------------------------------

HOSTILE = [
    "__import__('os').system('true') > 1", "loss.__class__ > 1", "loss.real > 1", "(lambda: 1)() > loss",
    "[x for x in (1,)] > loss", "loss > 10 ** 10 ** 10", "loss > 2 << 100000", "'a' > loss", "b'a' > loss",
    "f'{loss}' > 1", "(x := loss) > 1", "loss[0] > 1", "loss > 1 if loss else loss > 2", "loss in (1, 2)",
    "loss is 1", "loss // 2 > 1", "loss % 2 > 1", "loss & 1 > 1", "~loss > 1", "loss > 1j", "loss > True",
    "loss > None", "... > loss", "loss, loss", "loss > 1; loss", "x = loss > 1", "await loss > 1", "yield", "*loss",
    "loss > 1e309", "loss > " + "9" * 400, "loss > -1e309", "median(*loss) > 1", "median(loss, n=3) > 1",
    "median(loss, 3)(1) > 1", "exec('1') > loss", "open('x') > loss", "print(loss) > 1", "(" * 90 + "loss" + ")" * 90,
    "(" * 240 + "loss > 1" + ")" * 240, "+".join(["loss"] * 80),
    "loss > 1\nloss > 2", "loss > 1 # \n or loss > 0", "\0", "loss >\x1b[31m 1", "", "   ", "loss >", "> 1",
    "x" * 10**6,
]  # fmt: skip
WRONG = {
    "los > 10": "did you mean loss?", "train_loss > 1": "did you mean loss?", "train/loss > 1": "write loss",
    "gradnorm > 1": "did you mean grad_norm?", "mediam(loss, 5) > 1": "median?",
    "loss": "compare it", "not loss": "compare it", "loss and lr > 1": "compare it", "loss + 1": "compare it",
    "(loss > 1) > 2": "a number is needed", "(loss > 1) + 1 > 2": "a number is needed",
    "median(loss) > 1": "median(loss, 100)", "median(loss, 0) > 1": "1 to 10,000", "median(loss, -1) > 1": "1 to",
    "median(loss, 2.5) > 1": "1 to", "median(loss, True) > 1": "1 to", "median(loss, 10_001) > 1": "1 to",
    "median(loss, step) > 1": "1 to", "median(loss + 1, 3) > 1": "median(loss, 100)", "median > 1": "a function",
    "previous(loss, 2) > 1": "previous(loss)", "abs(loss, lr) > 1": "abs(", "abs() > loss": "abs(",
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:30]))
def test_what_is_not_in_the_language_is_refused(text):
    """One line, at once, and nothing has run; never another exception."""
    began = time.process_time()
    with pytest.raises(RequestError) as error:
        Expression(text)
    assert time.process_time() - began < 0.5
    assert str(error.value).isprintable() and len(str(error.value)) < 1500


@pytest.mark.parametrize(("text", "cure"), WRONG.items())
def test_the_error_of_a_wrong_expression_says_what_is_wrong_and_what_to_write(text, cure):
    with pytest.raises(RequestError) as error:
        Expression(text)
    assert text in str(error.value) and cure in str(error.value) and str(error.value).isprintable()


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("loss>< =()[]+-*/.,:'\"\\_19e\n@#{}"), max_size=40) | st.text(max_size=40))
def test_any_text_is_an_expression_or_a_request_error(text):
    try:
        Expression(text)
    except RequestError as error:
        assert "\n" not in str(error)


# ---- what it keeps ---------------------------------------------------------------------------------------------------


def test_windows_continue_after_a_resume():
    """What a watch keeps is plain finite JSON, and another one continues from it as if nothing had been."""
    texts = ["loss > 2 * median(loss, 4)", "val_loss > previous(val_loss)"]
    lines = [{"train/loss": loss, "val/loss": loss} for loss in (1, 2, math.inf, 1, 3, math.nan, 9, 1, 2, 30)]
    whole, first = AlertEvaluator(texts), AlertEvaluator(texts)
    said = [list(whole.evaluate(line).values()) for line in lines]
    for cut in range(len(lines)):
        second = AlertEvaluator(texts)
        second.history.load_state_dict(json.loads(json.dumps(first.history.state_dict(), allow_nan=False)))
        assert [list(second.evaluate(line).values()) for line in lines[cut:]] == said[cut:]
        first.evaluate(lines[cut])


def test_memory_is_bounded():
    """A window keeps its values and no more, whatever the length of a run."""
    watch = AlertEvaluator(["loss > mean(loss, 10)", "lr > max(lr, 99)"])
    for step in range(200):
        watch.evaluate({"train/loss": 1.0, "optim/lr": float(step)})
    assert {name: len(values) for name, values in watch.history.before.items()} == {"loss": 10, "lr": 99}


# ---- in a training ---------------------------------------------------------------------------------------------------


def test_a_training_warns_once_and_stops(tmp_path):
    """Both conditions hold from then on: the warning comes once; the stop ends the run with exit code 3, says why in
    one line, and leaves no checkpoint of weights that may be broken: `auto` resumes from the one
    before. What is true of an untrained model stops nothing."""
    folder = make_workplace(tmp_path)
    window = {"loss < mean(loss, 8)": "warn"}
    stop = {"loss > 1 and step >= 5": "stop"}
    untrained = {"loss > 3.5": "stop"}  # ln(38) = 3.64
    ended, run = fit(folder, expect=3, guards={"alerts": {"step > 1": "warn", **untrained, **stop, **window}})
    assert "Traceback" not in ended.stderr and "loss > 1 and step >= 5: loss is " in ended.stderr.splitlines()[-1]
    alerts = [(alert["step"], alert["guard"], alert["action"]) for alert in run.alerts()]
    assert alerts == [(2, "alert", "warn"), (5, "alert", "stop")]
    assert next(line["train/loss"] for line in run.metrics()) > 3.5
    reasons = [run.read(name)["reason"] for name in ("run.json", "state.json")]
    for said in (ended.stderr, (run.path / "log.txt").read_text(), *reasons):
        assert "loss > 1 and step >= 5" in said and "at step 5" in said
    assert run.status() == run.read("state.json")["status"] == "stopped"
    assert list(run.steps()) == [4] and run.link("last").name == "step-00000004"  # the best; none of step 5

    # Windows continue with the run: eight lines before the one of step 9, four of them in the other process.
    fit(folder, "small", "--ckpt_path", "auto", guards={"alerts": window})
    assert [alert["step"] for alert in run.alerts()] == [2, 5, 9] and run.status() == "finished"


def stops(losses, state=None, warmup=0, begin=0):
    """Steps at which `loss > 10` stops a run of these losses, a log line a step of 1000; and its state."""
    observer = Alerts({"loss > 10": "stop"})
    lines = [(step, {"train/loss": loss}) for step, loss in enumerate(losses, begin + 1)]
    found = found_in(lines, observer, state, max_steps=1000, warmup_steps=warmup, begin_step=begin)
    assert {finding.action for _, finding in found} <= {"stop"}
    return [step for step, _ in found], observer.state_dict()


@pytest.mark.parametrize(("losses", "warmup", "steps"), [
    ([10.4] * 9 + [9.0], 0, []), ([10.4, 9.0, 11.0], 0, [3]), ([9.0, 11.0], 0, [2]),
    ([10.4] * 13, 0, [11, 12, 13]), ([10.4] * 13, 12, [13]),
])  # fmt: skip
def test_what_is_true_from_the_start_waits_until_it_is_not_or_the_warm_up_is_over(losses, warmup, steps):
    assert stops(losses, warmup=warmup)[0] == steps


@pytest.mark.parametrize(("warmup", "steps"), [(0, [211, 212, 213]), (12, [213])])
def test_a_branch_has_a_warm_up_of_its_own(warmup, steps):
    assert stops([10.4] * 13, warmup=warmup, begin=200)[0] == steps


def test_it_is_known_after_a_resume_whether_a_condition_was_false():
    assert stops([10.4], stops([10.4, 9.0])[1])[0] == [1]
    assert stops([10.4], stops([10.4])[1])[0] == []


@pytest.mark.parametrize(("alerts", "words"), [
    ({"loss > 9": {"action": "halt"}}, "halt"), ({"loss > 9": "stopp"}, "'stop'"),
    ([{"loss > 9": "stop"}], "expected dict"), ({"los > 9": "stop"}, "did you mean loss"),
])  # fmt: skip
def test_a_wrong_alert_is_one_line(tmp_path, monkeypatch, capsys, alerts, words):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, guards={"alerts": alerts})
    for command in ("plan", "fit"):
        assert main([command, "--config", "small.yaml"]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
