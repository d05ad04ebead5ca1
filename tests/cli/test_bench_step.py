"""`lm bench step` times what `lm fit` does, beside a plain loop, and leaves nothing behind."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from trainings import lm, write_config

from lm.cli.bench import ALL, FORMULAS, Mode, Stretch, overhead, parse_modes

SMALL = ("bench", "step", "--config", "small.yaml", "--model.decoder.vocab_size", "64", "--steps", "4")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The JSON object for a very small config, its file, and what was left where it ran."""
    folder = tmp_path_factory.mktemp("bench")
    write_config(folder, **{"trainer.log_interval": 2, "trainer.callbacks": None})
    ended = lm(folder, *SMALL, "--json", "--output", "found.json")
    return json.loads(ended.stdout), json.loads((folder / "found.json").read_text()), {p.name for p in folder.iterdir()}


def test_prints_one_object_writes_the_same_and_cleans_up(found):
    """Standard output is one JSON object, the file holds it too, and neither data nor a run is left."""
    printed, written, left = found
    assert printed == written
    assert left == {"small.yaml", "found.json"}


def test_says_what_was_measured_and_how(found):
    result = found[0]
    assert result["config"] == "small" and result["date"] and result["device"] and result["threads"] == 1
    assert {"torch", "lightning"} <= result["versions"].keys()
    assert (result["seq_len"], result["micro_batch_size"], result["accumulate"]) == (32, 4, 2)
    assert (result["turns"], result["steps_per_turn"]) == (2, 2)
    assert result["formulas"] == FORMULAS


def test_times_agree_with_each_other(found):
    """Both loops have plausible figures, the parts are no longer than the whole, and a CPU has no MFU."""
    result = found[0]
    for loop in (result["lightning"], result["plain"]):
        assert loop["ms_per_step"] == pytest.approx(2 * loop["ms_per_micro_batch"])
        assert loop["tokens_per_second"] == pytest.approx(4 * 32 / loop["ms_per_micro_batch"] * 1e3)
        assert 0 < loop["cpu_ms_per_micro_batch"] and loop["mfu"] is None
    assert all(math.isfinite(value) for value in result["overhead"].values())
    assert all(value > 0 for value in result["parts"].values())
    assert result["peak_memory_bytes"] > 2**20
    assert 3 * 4 * result["parameters"] < result["predicted_memory_bytes"] < result["peak_memory_bytes"]


def test_a_checkpoint_is_timed_until_it_is_on_the_disk(found):
    """The stall is a part of the whole, and the bytes are those of weights and optimizer."""
    result = found[0]
    checkpoint = result["checkpoint"]
    assert 0 < checkpoint["stall_ms"] <= checkpoint["total_ms"]
    assert checkpoint["interval_steps"] == 3
    assert checkpoint["stall_share"] == pytest.approx(checkpoint["stall_ms"] / (3 * result["lightning"]["ms_per_step"]))
    assert checkpoint["bytes"] > 3 * 4 * result["parameters"]  # fp32 weights and two moments


def test_a_vocabulary_that_is_not_made_yet_is_one_line(tmp_path):
    """A character tokenizer's size is not guessed."""
    write_config(tmp_path)
    ended = lm(tmp_path, "bench", "step", "--config", "small.yaml", expect=2)
    assert "--model.decoder.vocab_size" in ended.stderr and ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_overhead_compares_each_turn_with_its_neighbours():
    """A machine that gets slower and slower does not look like overhead."""
    lightning = [Stretch(1.1 * (2 + i), 1.0) for i in range(3)]
    plain = [Stretch(1.5 + i, 1.0) for i in range(4)]
    assert overhead(lightning, plain) == pytest.approx((0.1, 0.0))


def test_modes_are_measured_side_by_side(tmp_path):
    """Each in a process of its own; what cannot run here is said, with the reason, and the others are measured."""
    write_config(tmp_path, **{"trainer.log_interval": 2, "trainer.callbacks": None})
    modes = ("--modes", "none", "triton_free", "triton_free+graphs", "none/on")
    ended = lm(tmp_path, *SMALL, *modes, "--json")
    found = json.loads(ended.stdout)["modes"]
    assert list(found) == list(modes[1:])
    assert found["none"]["compile"] == "none" and found["triton_free"]["compile"] == "triton_free"
    assert "cuda_graphs" in found["triton_free+graphs"]["unavailable"]
    assert "no CUDA device" in found["none/on"]["unavailable"]
    shown = lm(tmp_path, *SMALL, "--modes", "none", "none+graphs").stdout
    assert "1.000x" in shown and "none+graphs is unavailable" in shown


def test_a_killed_comparison_leaves_the_modes_that_were_measured(tmp_path):
    write_config(tmp_path, **{"trainer.log_interval": 2, "trainer.callbacks": None})
    command = [sys.executable, "-m", "lm", *SMALL, "--modes", "none", "triton_free", "--output", "found.json"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "found.json").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it and what it has started
        process.wait()
    found = json.loads((tmp_path / "found.json").read_text())["modes"]
    assert list(found) == ["none"] and found["none"]["lightning"]["ms_per_step"] > 0


def test_a_schedule_longer_than_the_measurement_is_no_obstacle(tmp_path):
    """It is for the run; a step takes as long at any learning rate."""
    changes = {"model.schedule.name": "wsd", "model.schedule.decay_steps": 5000, "trainer.max_steps": 10_000}
    write_config(tmp_path, **{"trainer.log_interval": 2, "trainer.callbacks": None, **changes})
    assert "ms" in lm(tmp_path, *SMALL).stdout


def test_modes_that_cannot_run_at_all_are_a_wrong_request(tmp_path):
    write_config(tmp_path, **{"trainer.callbacks": None})
    ended = lm(tmp_path, *SMALL, "--modes", "none+graphs", expect=2)
    assert "cuda_graphs" in ended.stderr and ended.stderr.count("\n") == 1
    ended = lm(tmp_path, *SMALL, "--modes", "fast", expect=2)
    assert "no mode 'fast'" in ended.stderr and "triton_free" in ended.stderr and ended.stderr.count("\n") == 1


def test_a_mode_is_read_as_it_is_written():
    for mode in ALL:
        assert Mode.parse(str(mode)) == mode
    assert parse_modes(["all", "inductor", "none/off"]) == ALL  # each once
