"""`lm profile` gives every moment of a training step to the part that it was spent on, and leaves nothing behind."""

import json
import time

import pytest
import torch
from lightning.pytorch import Callback
from trainings import lm, make_workplace, write_config

from lm.cli.profile import TITLES, named_range, show_parts
from lm.cli.profile import profile as command
from lm.errors import RequestError

STEPS, FIRST = 12, 5  # optimizer steps that are timed, and those before them
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
    assert found["ms_per_step"] == pytest.approx(sum(part["ms_per_step"] for part in parts.values()))
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    ends = {int(step): end for step, end in json.loads((folder / "clock.json").read_text()).items()}
    by_clock = (ends[FIRST + STEPS] - ends[FIRST]) / STEPS * 1e3
    assert found["ms_per_step"] == pytest.approx(by_clock, rel=0.1)
    assert all(parts[name]["ms_per_step"] > 0 for name in TITLES) and found["data"].startswith("random tokens")


def test_it_says_what_was_measured_and_how(traced):
    found = traced[0]
    assert found["config"] == "small" and found["device"] and found["accelerator"] == "cpu" and found["threads"] == 1
    assert (found["seq_len"], found["micro_batch_size"], found["accumulate"], found["steps"]) == (32, 4, 2, STEPS)
    assert {"RunLog", "Throughput", "Clock"} <= found["callbacks"].keys()


def test_nothing_is_left_but_the_trace(traced, slowed):
    """Neither a run nor data, nor a cache beside the data that was there."""
    assert {path.name for path in traced[1].iterdir()} == {"small.yaml", "clock.json", "trace.json"}
    assert {path.name for path in slowed[1].iterdir()} == {"small.yaml", "texts", "data"}
    assert [path.name for path in (slowed[1] / "data").iterdir()] == ["small"]


def test_the_trace_has_the_parts_as_ranges_around_the_operators(traced):
    found, folder = traced
    events = json.loads((folder / found["trace"]).read_text())["traceEvents"]
    ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {f"lm.{part}" for part in ("data", "forward", "backward", "optimizer", "[Callback]RunLog")} <= ranges
    forward = [event for event in events if event["name"] == "lm.forward"]
    assert len(forward) == 3 * 2  # three steps of two micro-batches
    products = [event["ts"] for event in events if event["name"] == "aten::linear"]
    assert products and all(any(f["ts"] <= at <= f["ts"] + f["dur"] for f in forward) for at in products)


def test_on_a_gpu_the_parts_are_nvtx_ranges_with_a_trace_and_without(monkeypatch):
    """Each is closed, also where the part ends with an error."""
    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    for device, tracing in (("cuda", False), ("cuda", True), ("cpu", True)):
        with pytest.raises(MemoryError), named_range("lm.forward", tracing, torch.device(device)):
            raise MemoryError
    assert calls == ["lm.forward", "end"] * 2


def test_a_slow_loader_is_waiting_for_data_and_a_slow_callback_is_logging(slowed):
    """Each in its own part, with its own name, and nowhere else."""
    found = slowed[0]
    parts = found["parts"]
    assert found["data"] == "the config's"
    assert WAIT * 1e3 <= parts["data"]["ms_per_step"] < 2 * WAIT * 1e3
    assert HOOK * 1e3 <= parts["callbacks"]["ms_per_step"] < 2 * HOOK * 1e3
    assert next(iter(found["callbacks"])) == "SlowHook" and found["callbacks"]["SlowHook"] >= HOOK * 1e3
    assert parts["rest"]["ms_per_step"] < WAIT * 1e3


def test_tables_for_people(traced, capsys):
    """The parts, and on a CPU how far the figures can be trusted."""
    show_parts(traced[0])
    shown = capsys.readouterr().out
    assert all(title in shown for title in TITLES.values()) and "shares are more reliable" in shown


@pytest.mark.parametrize(
    "wrong, said", [(["--steps", "0"], "at least 1"), (["--trace", "no/t.json"], "no/t.json"), ([], "vocab_size")]
)
def test_a_wrong_request_is_refused_before_anything_is_run(tmp_path, monkeypatch, wrong, said):
    """Too few steps, a file that cannot be written, a vocabulary that nobody knows yet."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, **{"trainer.callbacks": None})
    with pytest.raises(RequestError, match=said):
        command(["--config", "small.yaml", *wrong])
    assert {path.name for path in tmp_path.iterdir()} == {"small.yaml"}
