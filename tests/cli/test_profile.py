"""`lm profile` gives every moment of a training step to the part that it was spent on, and leaves nothing behind."""

import json
import time

import pytest
from lightning.pytorch import Callback
from trainings import lm, make_workplace, write_config

from lm.cli.profile import FORMULAS, SAVING, TITLES, Label, StepTimes, account, show_parts
from lm.cli.profile import profile as command
from lm.errors import RequestError

STEPS, FIRST = 12, 9  # optimizer steps that are timed, and those before them
WAIT, HOOK = 0.06, 0.05  # seconds of the slow loader and of the slow callback, a step


class Clock(Callback):
    """Writes down when each optimizer step has ended."""

    def __init__(self):
        self.ends = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ends[trainer.global_step] = time.perf_counter()

    def on_train_end(self, trainer, pl_module):
        with open("clock.json", "w") as file:
            json.dump(self.ends, file)


class SlowHook(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        time.sleep(HOOK)


class SlowData(Callback):
    """Lets every batch be waited for."""

    def setup(self, trainer, pl_module, stage):
        batches = trainer.datamodule.train_dataloader

        def slow():
            for batch in batches():
                time.sleep(WAIT)
                yield batch

        trainer.datamodule.train_dataloader = lambda: Endless(slow)


class Endless:
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


def profile(folder, *callbacks, arguments=()):
    """The JSON object for a very small config with these callbacks."""
    paths = [{"class_path": f"test_profile.{callback.__name__}"} for callback in callbacks]
    write_config(folder, **{"trainer.callbacks": paths, "trainer.log_interval": 10})
    ended = lm(folder, "profile", "--config", "small.yaml", "--steps", str(STEPS), "--json", *arguments)
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A profile on random tokens with a trace, and the folder where it ran."""
    folder = tmp_path_factory.mktemp("traced")
    arguments = ("--trace", "trace.json", "--model.decoder.vocab_size", "64")
    return profile(folder, Clock, arguments=arguments), folder


@pytest.fixture(scope="module")
def slowed(tmp_path_factory):
    """A profile on the config's own data, with a loader and a callback that sleep."""
    folder = make_workplace(tmp_path_factory.mktemp("slowed"))
    lm(folder, "data", "prepare", "--input", "texts", "--output", "data/small", "--tokenizer", "char",
       "--val_fraction", "0.2")  # fmt: skip
    return profile(folder, SlowData, SlowHook), folder


def test_the_parts_add_up_to_a_step(traced):
    """To its time by the clock, which another clock confirms."""
    found, folder = traced
    parts = found["parts"]
    assert list(parts) == list(TITLES)
    assert found["sum_ms"] == pytest.approx(sum(part["ms_per_step"] for part in parts.values()))
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    assert found["sum_ms"] == pytest.approx(found["ms_per_step"], rel=0.02)
    ends = {int(step): end for step, end in json.loads((folder / "clock.json").read_text()).items()}
    by_clock = (ends[FIRST + STEPS] - ends[FIRST]) / STEPS * 1e3
    assert found["mean_ms_per_step"] == pytest.approx(by_clock, rel=0.1)
    assert all(parts[name]["ms_per_step"] > 0 for name in TITLES if name != "validation")
    assert parts["validation"]["ms_per_step"] == 0 and found["data"].startswith("random tokens")  # none without data


def test_it_says_what_was_measured_and_how(traced):
    found = traced[0]
    assert found["config"] == "small" and found["device"] and found["accelerator"] == "cpu" and found["threads"] == 1
    assert (found["seq_len"], found["micro_batch_size"], found["accumulate"], found["steps"]) == (32, 4, 2, STEPS)
    assert found["parts"]["logging"]["interval_steps"] == 10 and found["parts"]["checkpoint"]["interval_steps"] == 3
    assert {"RunLog", "Throughput", "Clock"} <= found["callbacks"].keys()
    assert found["undisturbed_ms_per_step"] > 0 and found["formulas"] == FORMULAS


def test_nothing_is_left_but_the_trace(traced, slowed):
    """Neither a run nor data, nor a cache beside the data that was there."""
    assert {path.name for path in traced[1].iterdir()} == {"small.yaml", "clock.json", "trace.json"}
    assert {path.name for path in slowed[1].iterdir()} == {"small.yaml", "texts", "data"}
    assert [path.name for path in (slowed[1] / "data").iterdir()] == ["small"]


def test_the_trace_has_the_parts_as_ranges_around_the_operators(traced):
    found, folder = traced
    events = json.loads((folder / found["trace"]).read_text())["traceEvents"]
    ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {f"lm.{part}" for part in ("data", "forward", "backward", "optimizer", "logging")} <= ranges
    forward = [event for event in events if event["name"] == "lm.forward"]
    assert len(forward) == 3 * 2  # three steps of two micro-batches
    products = [event["ts"] for event in events if event["name"] == "aten::linear"]
    assert products and all(any(f["ts"] <= at <= f["ts"] + f["dur"] for f in forward) for at in products)


def test_the_most_expensive_operators_are_a_table(traced):
    operators = traced[0]["operators"]
    assert len(operators) == 10 and all(not operator["name"].startswith(("lm.", "Profiler")) for operator in operators)
    costs = [operator["ms_per_step"] for operator in operators]
    assert costs == sorted(costs, reverse=True) and costs[-1] > 0
    assert sum(operator["share"] for operator in operators) <= 1
    assert "aten::mm" in {operator["name"] for operator in operators}


def test_a_slow_loader_is_waiting_for_data_and_a_slow_callback_is_logging(slowed):
    """Each in its own part, with its own name, and nowhere else."""
    found = slowed[0]
    parts = found["parts"]
    assert found["data"] == "the config's"
    assert WAIT * 1e3 <= parts["data"]["ms_per_step"] < 2 * WAIT * 1e3
    assert HOOK * 1e3 <= parts["logging"]["ms_per_step"] < 2 * HOOK * 1e3
    assert next(iter(found["callbacks"])) == "SlowHook" and found["callbacks"]["SlowHook"] >= HOOK * 1e3
    assert parts["rest"]["ms_per_step"] < WAIT * 1e3 and parts["checkpoint"]["ms_per_step"] < HOOK * 1e3


def test_a_validation_is_shared_out_over_the_steps_between_two(slowed):
    validation = slowed[0]["parts"]["validation"]
    assert validation["interval_steps"] == 4 and validation["each_ms"] > 0
    assert validation["ms_per_step"] == pytest.approx(validation["each_ms"] / 4)


def test_tables_for_people(traced, capsys):
    """The parts, the operators, and on a CPU how far the figures can be trusted."""
    show_parts(traced[0])
    shown = capsys.readouterr().out
    assert all(title in shown for title in TITLES.values()) and "aten::mm" in shown
    assert "shares are more reliable" in shown
    show_parts(traced[0] | {"operators": None, "accelerator": "cuda"})
    shown = capsys.readouterr().out
    assert "aten::mm" not in shown and "the device waited for in between" in shown


@pytest.mark.parametrize(
    "wrong, said", [(["--steps", "2"], "at least 6"), (["--trace", "no/t.json"], "no/t.json"), ([], "vocab_size")]
)
def test_a_wrong_request_is_refused_before_anything_is_run(tmp_path, monkeypatch, wrong, said):
    """Too few steps, a file that cannot be written, a vocabulary that nobody knows yet."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, **{"trainer.callbacks": None})
    with pytest.raises(RequestError, match=said):
        command(["--config", "small.yaml", *wrong])
    assert {path.name for path in tmp_path.iterdir()} == {"small.yaml"}


# ---- the arithmetic --------------------------------------------------------------------------------------------------


def steps_of(number, log_every, save_every):
    """Steps of 10 ms; a log line takes 4 ms and a checkpoint 6 ms more."""
    times = []
    for step in range(1, number + 1):
        seconds = {Label("data"): 0.001, Label("forward"): 0.003, Label("backward"): 0.005, Label("rest"): 0.001}
        if step % log_every == 0:
            seconds[Label("logging", "RunLog")] = 0.004
        if step % save_every == 0:
            seconds[SAVING] = 0.006
        times.append(StepTimes(step, seconds, sum(seconds.values())))
    return times


def test_what_happens_now_and_then_counts_with_its_interval():
    """The config's, however often it happened here; of a validation, its batches are scaled and its callbacks not."""
    validated = StepTimes(31, {Label("validation"): 0.1, Label("validation", "Samples"): 0.02}, 0.12)
    intervals = {"logging": 20, "checkpoint": 100, "validation": 200}
    found = account(steps_of(30, 5, 10), validated, 3.0, intervals, 5)
    ms = {name: part["ms_per_step"] for name, part in found["parts"].items()}
    assert ms == pytest.approx({
        "data": 1, "forward": 3, "backward": 5, "optimizer": 0, "logging": 4 / 20, "checkpoint": 6 / 100,
        "validation": (300 + 20) / 200, "rest": 1,
    })  # fmt: skip
    assert (found["sum_ms"], found["ms_per_step"]) == pytest.approx((sum(ms.values()),) * 2)
    assert found["callbacks"] == pytest.approx({"RunLog": 4 / 5})


def test_a_log_line_at_every_step_counts_once():
    intervals = {"logging": 1, "checkpoint": 3, "validation": 5}
    found = account(steps_of(9, 1, 3), StepTimes(10, {}, 0.01), 0.0, intervals, 1)
    assert found["parts"]["logging"]["ms_per_step"] == pytest.approx(4)
    assert (found["sum_ms"], found["ms_per_step"]) == pytest.approx((10 + 4 + 6 / 3,) * 2)


def test_a_slow_neighbour_is_left_out():
    """A few steps that took ten times as long change nothing, and the parts still add up."""
    times = steps_of(24, 100, 100)
    slow = [StepTimes(t.step, {label: s * 10 for label, s in t.seconds.items()}, t.whole * 10) for t in times[:4]]
    intervals = {"logging": 100, "checkpoint": 100, "validation": 100}
    found = account([*slow, *times[4:]], StepTimes(25, {}, 0.01), 0.0, intervals, 100)
    assert found["parts"]["backward"]["ms_per_step"] == pytest.approx(5)
    assert found["sum_ms"] == pytest.approx(10) and found["mean_ms_per_step"] == pytest.approx((4 * 100 + 200) / 24)
