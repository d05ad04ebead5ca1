"""`bench_loop.py` compares Lightning's loop with a plain one."""

import json
import math

import bench_loop
import pytest
from bench_loop import Stretch, overhead
from trainings import write_config


def test_both_loops_are_timed(tmp_path, monkeypatch, capsys):
    write_config(tmp_path, **{"trainer.log_interval": 2, "trainer.callbacks": None})
    monkeypatch.chdir(tmp_path)
    bench_loop.main(["--config", "small.yaml", "--model.decoder.vocab_size", "64", "--steps", "4"])
    found = json.loads(capsys.readouterr().out)
    assert found["ms_per_step"] > 0 and found["plain"]["ms_per_step"] > 0
    assert all(math.isfinite(value) for value in found["overhead"].values())


def test_overhead_compares_each_turn_with_its_neighbours():
    """A machine that gets slower and slower does not look like overhead."""
    lightning = [Stretch(1.1 * (2 + i), 1.0) for i in range(3)]
    plain = [Stretch(1.5 + i, 1.0) for i in range(4)]
    assert overhead(lightning, plain) == pytest.approx((0.1, 0.0))
