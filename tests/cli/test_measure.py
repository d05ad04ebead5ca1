"""`lm bench step` times what `lm fit` does, `lm profile` says where the time goes, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from lightning.pytorch import Callback
from trainings import PLACES, lm, make_workplace, start, wait_until, write_config

from lm.cli import request
from lm.cli.bench_step import bench_step, show_times
from lm.cli.command import main
from lm.cli.hours import steps_of_hours, validation_tokens
from lm.cli.plan_facts import read_bench
from lm.cli.profile_step import TITLES, profile, show_parts
from lm.errors import RequestError
from lm.model.memory import training_memory
from lm.runs.run import Run
from lm.training.trainer import Trainer

BENCH = ("bench", "step", "--config", "small.yaml", "--model.decoder.vocab_size", "64", "--steps", "4")
STEPS, FIRST = 12, 5  # optimizer steps that a profile times, and those before them
WAIT, HOOK = 0.06, 0.05  # seconds of the slow loader and of the slow callback, a step


@pytest.mark.parametrize("name, command, wrong, said", [
    ("bench step", bench_step, [], "--model.decoder.vocab_size"),  # a character tokenizer's size is not guessed
    ("profile", profile, [], "--model.decoder.vocab_size"),
])  # fmt: skip
def test_a_wrong_request_is_refused_before_anything_is_run(here, name, command, wrong, said):
    write_config(here, **{"trainer.callbacks": None})
    with pytest.raises(RequestError, match=said):
        command(request.read(name, ["--config", "small.yaml", *wrong]))
    assert {path.name for path in here.iterdir()} == {"small.yaml"}


# ---- lm bench step --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """The JSON object for a very small config, whose schedule is longer than the measurement."""
    folder = tmp_path_factory.mktemp("bench")
    schedule = {"model.schedule.name": "wsd", "model.schedule.decay_steps": 5000, "trainer.max_steps": 10_000}
    write_config(folder, **{"trainer.log_interval": 2, "trainer.callbacks": None, **schedule})
    printed = json.loads(lm(folder, *BENCH, "--json", "--output", "found.json").stdout)
    assert printed == json.loads((folder / "found.json").read_text())
    assert {path.name for path in folder.iterdir()} == {"small.yaml", "found.json"}  # neither data nor a run
    return printed


def test_the_object_says_what_was_measured_and_its_times_agree(timed):
    """A CPU has no MFU; a checkpoint's stall is a part of the whole, and its bytes are weights and optimizer."""
    assert timed["config"] == "small" and timed["date"] and timed["device"] and timed["threads"] == 1
    assert {"torch", "lightning"} <= timed["versions"].keys()
    assert (timed["seq_len"], timed["micro_batch_size"], timed["accumulate"]) == (32, 4, 2)
    assert (timed["turns"], timed["steps_per_turn"]) == (2, 2)
    assert timed["ms_per_step"] == pytest.approx(2 * timed["ms_per_micro_batch"])
    assert timed["tokens_per_second"] == pytest.approx(4 * 32 / timed["ms_per_micro_batch"] * 1e3)
    assert timed["mfu"] is timed["mfu_full_attention"] is None
    assert timed["flops_per_token_full_attention"] > timed["flops_per_token"]
    optimizer, checkpoint = timed["optimizer"], timed["checkpoint"]
    assert 0 < optimizer["ms_per_step"] < timed["ms_per_step"] / 2
    assert optimizer["share"] == pytest.approx(optimizer["ms_per_step"] / timed["ms_per_step"])
    assert timed["first_step_s"] > 0
    assert 3 * 4 * timed["parameters"] < timed["predicted_memory_bytes"] < timed["peak_memory_bytes"]
    assert 0 < checkpoint["stall_ms"] <= checkpoint["total_ms"] and checkpoint["interval_steps"] == 3
    assert checkpoint["stall_share"] == pytest.approx(checkpoint["stall_ms"] / (3 * timed["ms_per_step"]))
    assert checkpoint["bytes"] > 3 * 4 * timed["parameters"]  # fp32 weights and two moments


def test_both_ways_to_count_mfu_are_printed(timed, capsys):
    show_times(timed | {"mfu": 0.44, "mfu_full_attention": 0.466})
    shown = " ".join(capsys.readouterr().out.split())
    assert "MFU: 44.0% by what attention attends to; 46.6% by its full length" in shown
    assert f"the optimizer: {timed['optimizer']['ms_per_step']:.2f} ms" in shown


def bench_without_checkpoints(*more):
    bench_step(request.read("bench step", [*BENCH[2:], "--checkpoints", "0", *more]))


def test_a_checkpoint_that_is_not_timed_is_not_written(here, monkeypatch, capsys):
    """A large model's takes longer than the steps; the end of a fit would write one too."""
    write_config(here, **{"trainer.log_interval": 2, "trainer.callbacks": None})
    written, planned = [], []
    monkeypatch.setattr("lm.training.checkpoint_io.write_folder", lambda path, content: written.append(path))
    monkeypatch.setattr("lm.cli.bench_step.training_memory", lambda *of: planned.append(of) or training_memory(*of))
    profile(request.read("profile", [*BENCH[2:6], "--steps", "2"]))
    capsys.readouterr()
    monkeypatch.setattr(Trainer, "save_checkpoint", lambda *_, **__: pytest.fail("a checkpoint was made"))
    bench_without_checkpoints("--output", "found.json", "--model.document_mask", "true")
    assert written == [] and planned[0][1].documents_per_token == pytest.approx(1 / 64, rel=0.5)  # in random tokens
    assert json.loads((here / "found.json").read_text())["checkpoint"] is None
    assert "a checkpoint of" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_ranks_of_torchrun_are_measured_together_and_planned_with_one_by_one(tmp_path):
    """One report, with the memory of a shard; `lm plan --bench` divides the rate by the ranks."""
    write_config(tmp_path, **{"trainer.callbacks": None, "trainer.strategy": "fsdp2"})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "lm"]
    ended = subprocess.run(
        [*command, *BENCH, "--json", "--trainer.distributed.reduce_dtype", "bf16"], cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["ranks"], found["strategy"], found["accumulate"]) == (2, "fsdp2", 1) and found["checkpoint"]
    alone = json.loads(lm(tmp_path, *BENCH, "--json", "--trainer.distributed.reduce_dtype", "bf16").stdout)
    assert alone["ranks"] == 1 and found["predicted_memory_bytes"] < alone["predicted_memory_bytes"]
    (tmp_path / "found.json").write_text(json.dumps(found))
    bench = read_bench(tmp_path / "found.json", found["parameters"], found["seq_len"])
    assert bench["tokens_per_second"] == found["tokens_per_second"] / 2
    assert not list(tmp_path.glob(".lm-bench-*"))


# ---- lm profile -----------------------------------------------------------------------------------------------------
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
        self.batches, trainer.datamodule.train_dataloader = trainer.datamodule.train_dataloader, lambda: self

    def __iter__(self):
        for batch in self.batches():
            time.sleep(WAIT)
            yield batch


def profiled(folder, *callbacks, arguments=()):
    """The JSON object for a very small config with these callbacks."""
    paths = [{"class_path": f"test_measure.{callback.__name__}"} for callback in callbacks]
    write_config(folder, **{"trainer.callbacks": paths, "trainer.log_interval": 10})
    ended = lm(folder, "profile", "--config", "small.yaml", "--steps", str(STEPS), "--json", *arguments)
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A profile on random tokens with a trace, and the folder where it ran."""
    folder = tmp_path_factory.mktemp("traced")
    return profiled(folder, Clock, arguments=("--trace", "trace.json", "--model.decoder.vocab_size", "64")), folder


@pytest.fixture(scope="module")
def slowed(prepared):
    """A profile on the config's own data, with a loader and a callback that sleep."""
    return profiled(prepared, SlowData, SlowHook), prepared


def test_the_parts_add_up_to_a_step(traced, capsys):
    found, folder = traced
    parts = found["parts"]
    assert list(parts) == list(TITLES) and found["data"].startswith("random tokens") and found["steps"] == STEPS
    assert found["ms_per_step"] == pytest.approx(sum(part["ms_per_step"] for part in parts.values()))
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    ends = {int(step): end for step, end in json.loads((folder / "clock.json").read_text()).items()}
    by_clock = (ends[FIRST + STEPS] - ends[FIRST]) / STEPS * 1e3
    assert found["ms_per_step"] == pytest.approx(by_clock, rel=0.1)
    assert all(parts[name]["ms_per_step"] > 0 for name in TITLES)
    assert {"RunLog", "Throughput", "Clock"} <= found["callbacks"].keys()
    show_parts(found)
    shown = capsys.readouterr().out
    assert all(title in shown for title in TITLES.values())


def test_nothing_is_left_but_the_trace(traced, slowed):
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


def test_a_slow_loader_is_waiting_for_data_and_a_slow_callback_is_logging(slowed):
    found = slowed[0]
    parts = found["parts"]
    assert found["data"] == "the config's"
    assert WAIT * 1e3 <= parts["data"]["ms_per_step"] < 2 * WAIT * 1e3
    assert HOOK * 1e3 <= parts["callbacks"]["ms_per_step"] < 2 * HOOK * 1e3
    assert next(iter(found["callbacks"])) == "SlowHook" and found["callbacks"]["SlowHook"] >= HOOK * 1e3
    assert parts["rest"]["ms_per_step"] < WAIT * 1e3


def test_the_length_of_a_run_of_some_hours(here, capsys):
    """It is printed as an option of `lm fit`, and nothing else; a time without a step is one line."""
    write_config(here, **{"trainer.log_interval": 2, "trainer.callbacks": None})
    bench_without_checkpoints("--hours", "0.5", "--output", "found.json")
    found = json.loads((here / "found.json").read_text())
    config = request.read("bench step", list(BENCH[2:]))
    steps = steps_of_hours(config, 0.5, found, validation_tokens(config))
    assert capsys.readouterr().out == f"--trainer.max_steps {steps}\n" and steps * found["ms_per_step"] / 1e3 < 1800
    found["first_step_s"] = 1.0  # and not the age of the process that runs the tests
    short, long = (steps_of_hours(config, hours, found, validation_tokens(config)) for hours in (0.5, 1))
    assert 1.99 < long / short < 2.01
    bench_without_checkpoints("--hours", "0.5", "--model.schedule.warmup_steps", "1M")
    _, steps, option, warmup = capsys.readouterr().out.split()
    assert option == "--model.schedule.warmup_steps" and int(warmup) == int(steps) // 10
    with pytest.raises(RequestError, match="--hours 1e-06 are too few: the start takes"):
        bench_without_checkpoints("--hours", "1e-6")


@pytest.mark.slow
def test_a_fit_of_some_hours_keeps_its_length(tmp_path):
    """The steps are measured once: the run that is stopped and resumed by the same command has as many."""
    workplace = make_workplace(tmp_path, "data/small")
    config = write_config(workplace, "timed", **{"trainer.checkpoint_interval": 20, "trainer.callbacks": None})
    command = ["fit", "--config", str(config), "--hours", "0.1", "--ckpt_path", "auto"]
    run, steps = Run(workplace / "checkpoints" / "timed"), set()
    for saved in (20, 40):
        process = start(workplace, *command)
        wait_until(lambda: max(run.steps(), default=0) >= saved, process, seconds=300)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
        assert process.returncode == 75, said
        steps.add(run.settings()["trainer"]["max_steps"])
    assert f"--hours 0.1: timed keeps its {next(iter(steps))} optimizer steps" in said and len(steps) == 1
    process = start(workplace, "fit", "--run", "timed", "--ckpt_path", "auto", "--hours", "9")  # its config
    wait_until(lambda: max(run.steps()) >= 60, process)
    process.send_signal(signal.SIGTERM)
    assert "measuring" not in process.communicate()[1] and run.settings()["trainer"]["max_steps"] in steps


def test_hours_without_data_or_under_torchrun_are_one_line(here, monkeypatch, capsys):
    write_config(here)
    nothing = ("--data.path", "none", "--data.prepare", "null")
    assert main(["fit", "--config", "small.yaml", "--hours", "1", *nothing]) == 2
    said = capsys.readouterr().err
    assert "data.path none holds no manifest.json" in said and "measuring" not in said
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["fit", "--config", "small.yaml", "--hours", "1"]) == 2
    assert "here start `lm bench step --hours H` as you start this" in capsys.readouterr().err
