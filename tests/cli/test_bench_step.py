"""`lm bench step` times what `lm fit` does, and leaves nothing behind."""

import json
import os
import subprocess
import sys

import pytest
from trainings import PLACES, lm, write_config

from lm.cli.bench import FORMULAS, show_times
from lm.cli.bench import step as command
from lm.cli.plan_facts import read_bench
from lm.training.trainer import Trainer

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
    """A CPU has no MFU."""
    result = found[0]
    assert result["ms_per_step"] == pytest.approx(2 * result["ms_per_micro_batch"])
    assert result["tokens_per_second"] == pytest.approx(4 * 32 / result["ms_per_micro_batch"] * 1e3)
    assert 0 < result["cpu_ms_per_step"] and result["mfu"] is result["mfu_full_attention"] is None
    assert result["flops_per_token_full_attention"] > result["flops_per_token"]
    optimizer = result["optimizer"]
    assert 0 < optimizer["ms_per_step"] < result["ms_per_step"] / 2
    assert optimizer["share"] == pytest.approx(optimizer["ms_per_step"] / result["ms_per_step"])
    assert result["first_step_s"] > result["first_step"]["step_s"] > 0
    assert result["peak_memory_bytes"] > 2**20
    assert 3 * 4 * result["parameters"] < result["predicted_memory_bytes"] < result["peak_memory_bytes"]


def test_a_checkpoint_is_timed_until_it_is_on_the_disk(found):
    """The stall is a part of the whole, and the bytes are those of weights and optimizer."""
    result = found[0]
    checkpoint = result["checkpoint"]
    assert 0 < checkpoint["stall_ms"] <= checkpoint["total_ms"]
    assert checkpoint["interval_steps"] == 3
    assert checkpoint["stall_share"] == pytest.approx(checkpoint["stall_ms"] / (3 * result["ms_per_step"]))
    assert checkpoint["bytes"] > 3 * 4 * result["parameters"]  # fp32 weights and two moments


def test_both_ways_to_count_mfu_are_printed(found, capsys):
    show_times(found[0] | {"mfu": 0.44, "mfu_full_attention": 0.466})
    shown = " ".join(capsys.readouterr().out.split())
    assert "MFU: 44.0% by what attention attends to; 46.6% by its full length" in shown
    assert f"the optimizer: {found[0]['optimizer']['ms_per_step']:.2f} ms" in shown


def test_without_checkpoints_none_is_written(tmp_path, monkeypatch, capsys):
    """A large model's takes longer than the steps; the end of a fit would write one too."""
    write_config(tmp_path, **{"trainer.log_interval": 2, "trainer.callbacks": None})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "save_checkpoint", lambda *_, **__: pytest.fail("a checkpoint was written"))
    command([*SMALL[2:], "--checkpoints", "0", "--output", "found.json"])
    assert json.loads((tmp_path / "found.json").read_text())["checkpoint"] is None
    assert "a checkpoint of" not in capsys.readouterr().out


def test_a_vocabulary_that_is_not_made_yet_is_one_line(tmp_path):
    """A character tokenizer's size is not guessed."""
    write_config(tmp_path)
    ended = lm(tmp_path, "bench", "step", "--config", "small.yaml", expect=2)
    assert "--model.decoder.vocab_size" in ended.stderr and ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_a_schedule_longer_than_the_measurement_is_no_obstacle(tmp_path):
    """It is for the run; a step takes as long at any learning rate."""
    changes = {"model.schedule.name": "wsd", "model.schedule.decay_steps": 5000, "trainer.max_steps": 10_000}
    write_config(tmp_path, **{"trainer.log_interval": 2, "trainer.callbacks": None, **changes})
    assert "ms" in lm(tmp_path, *SMALL).stdout


@pytest.mark.slow
def test_the_ranks_of_torchrun_are_measured_together_and_planned_with_one_by_one(tmp_path):
    """One report, with the memory of a shard; `lm plan --bench` divides the rate by the ranks."""
    write_config(tmp_path, **{"trainer.callbacks": None, "trainer.strategy": "fsdp2"})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "lm"]
    ended = subprocess.run(
        [*command, *SMALL, "--json", "--trainer.distributed.reshard", "false"], cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["ranks"], found["strategy"], found["accumulate"]) == (2, "fsdp2", 1) and found["checkpoint"]
    alone = json.loads(lm(tmp_path, *SMALL, "--json", "--trainer.distributed.reshard", "false").stdout)
    assert alone["ranks"] == 1 and found["predicted_memory_bytes"] < alone["predicted_memory_bytes"]
    (tmp_path / "found.json").write_text(json.dumps(found))
    bench = read_bench(tmp_path / "found.json", found["parameters"], found["seq_len"])
    assert bench["tokens_per_second"] == found["tokens_per_second"] / 2
    assert not list(tmp_path.glob(".lm-bench-*"))
