"""`learning.py` sweeps learning rates and trains the best with every seed."""

import json
import subprocess
from types import SimpleNamespace

import learning
import pytest
from trainings import make_workplace, start, write_config


@pytest.mark.slow
def test_the_best_scale_is_trained_with_every_seed(tmp_path, monkeypatch, capsys):
    write_config(make_workplace(tmp_path), **{"trainer.max_steps": 20, "trainer.callbacks": None})
    monkeypatch.chdir(tmp_path)

    def run(command, **options):
        process = start(tmp_path, *command[command.index("lm") + 1 :])
        out, err = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    monkeypatch.setattr(learning, "subprocess", SimpleNamespace(run=run))
    learning.main(["--config", "small.yaml", "--corpora", "config", "--scales", "0.01,1", "--seeds", "1,2",
                   "--compile", "none", "--folder", "bench"])  # fmt: skip
    (result,) = json.loads(capsys.readouterr().out)["results"]
    swept = [(0.01, 1), (1, 1), (100, 1)]  # 1 was the best and the last
    assert result["scale"] == 1 and [(run["scale"], run["seed"]) for run in result["runs"]] == [*swept, (1, 2)]
    assert result["bpb"] < result["scales"]["0.01"]
    for run in result["runs"]:
        ((step, tokens, seconds, bpb),) = run["curve"]
        assert (step, tokens) == (20, 20 * 256) and seconds > 0 and bpb == run["bpb"]


def test_seconds_leave_out_the_compiling_of_the_first_steps():
    lines = [{"step": 10, "tokens": 1000, "perf/tokens_per_second": 1.0},
             {"step": 20, "tokens": 2000, "perf/tokens_per_second": 100.0}, {"step": 20, "tokens": 2000, "val/bpb": 1.5}]  # fmt: skip
    assert learning.curve_of(lines) == [[20, 2000, 20.0, 1.5]]


def test_docstrings_are_long_texts():
    assert len(next(iter(learning.docstrings()))) > 200
