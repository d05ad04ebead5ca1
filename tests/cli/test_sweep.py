"""A sweep: its runs are compared, the best one first, and the rest is removed."""

import json

import pytest
from run_folders import write_live_run, write_run

from lm.cli.runs import rm
from lm.cli.runs_compare import compare
from lm.errors import RequestError


@pytest.fixture
def sweep(tmp_path):
    for name, loss in {"lr-1": 3.5, "lr-2": 3.1, "lr-3": 3.3}.items():
        lines = [{"step": 10, "train/loss": 4.0}, {"step": 10, "val/loss": loss}]
        config = ["--config=mine.yaml"] if name == "lr-2" else ["--config", "mine.yaml"]
        write_run(tmp_path, name, lines, command=["lm", "fit", *config, "--run", name])
    return str(tmp_path)


def test_the_best_run_is_the_first(sweep, capsys):
    compare(["lr-*"], root=sweep, json=True)
    assert [run["run"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["lr-2", "lr-3", "lr-1"]
    write_run(sweep, "lr-4", [{"step": 10, "train/loss": 1.0}])
    compare(["lr-*"], root=sweep)
    shown = capsys.readouterr().out
    assert shown.index("lr-2 ") < shown.index("lr-1 ") < shown.index("lr-4 ")  # without a validation, the last


def test_runs_are_removed_once_it_is_confirmed(sweep, tmp_path, monkeypatch, capsys):
    with pytest.raises(RequestError, match="--yes"):
        rm(["lr-1"], root=sweep)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    rm(["lr-1"], root=sweep)
    assert (tmp_path / "lr-1").exists()
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    rm(["lr-1", "lr-3"], root=sweep)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lr-2"] and "10 steps" in capsys.readouterr().out
    write_live_run(tmp_path, "live")
    with pytest.raises(RequestError, match="live is still being trained"):
        rm(["live"], yes=True, root=sweep)
    rm(["lr-2"], yes=True, root=sweep)
    assert not (tmp_path / "lr-2").exists()
