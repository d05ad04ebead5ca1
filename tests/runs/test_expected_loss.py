"""An expected loss: by the newest ladder on the same data, else by the published law where it says something."""

import json
import os

import pytest
from run_folders import write_run

from lm.runs.expected_loss import PUBLISHED, expected_loss, published_loss

FLOPS = (1e14, 1e15, 1e16)


def write_ladder(root, name, data, factor=100.0, age=0):
    """As `lm ladder` leaves it, with losses on a power law; its runs are in its folder."""
    (root / name).mkdir(parents=True)
    write_run(root / name, "d2", changes={"data.path": data})
    sizes = [{"flops": flops, "losses": [factor * flops**-0.1]} for flops in FLOPS]
    results = {"unit": "bits per byte", "sizes": sizes, "runs": [{"run": "d2"}]}
    file = root / name / "ladder.json"
    file.write_text(json.dumps(results))
    os.utime(file, (1e9 - age, 1e9 - age))


def test_a_ladder_on_the_same_data_counts_and_the_newest_of_several(tmp_path):
    write_ladder(tmp_path, "old", "data/mine", factor=50.0, age=100)
    write_ladder(tmp_path, "new", "data/mine")
    write_ladder(tmp_path, "other", "data/other", factor=10.0, age=-100)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/ladder.json").write_text("{")
    expected = expected_loss(1e8, 1e7, 1e17, "data/mine", tmp_path)
    assert expected.loss == pytest.approx(100 * 1e17**-0.1, rel=0.02) and expected.unit == "bits per byte"
    assert str(expected).endswith(f"by the ladder {tmp_path}/new, with 10 times the FLOPs of its largest size")


def test_without_one_it_is_the_published_law_from_a_billion_tokens_on(tmp_path):
    write_ladder(tmp_path, "other", "data/other")
    assert expected_loss(1e8, 2e9, 1e18, "data/mine", tmp_path)[0] == published_loss(1e8, 2e9)
    assert PUBLISHED in str(expected_loss(1e8, 2e9, 1e18, None, tmp_path))
    short = expected_loss(1e6, 2e6, 1e13, "data/mine", tmp_path)
    assert short.loss is None and "no published law covers so short a run" in str(short)
