"""The registry finds a user's runs from anywhere, can be lost without loss, and never holds up a training."""

import logging
import sqlite3
import subprocess
import sys
import time

import pytest

from lm.errors import RequestError
from lm.runs import registry
from lm.runs.facts import run_row
from lm.runs.find import find_run
from lm.runs.run import Run


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A registry of this test alone."""
    path = tmp_path / "home" / "runs.db"
    monkeypatch.setenv("LM_REGISTRY", str(path))
    return path


def make(root, name="a", losses=(3.0, 2.0, 2.5)):
    """A run folder as a training leaves it."""
    run = Run.create(name, root)
    run.describe(id=run.name, name=name, status="finished", entered=time.time(), host="here")
    for step, loss in enumerate(losses, 1):
        run.append("metrics.jsonl", {"step": step, "tokens": step * 8, "time": float(step), "val/loss": loss})
    metrics = {"train/loss": losses[-1] + 1, "val/loss": losses[-1], "perf/tokens_per_second": 1000.0}
    run.write_state({"step": len(losses), "max_steps": 9, "tokens": len(losses) * 8, "metrics": metrics})
    run.config.write_text("seed_everything: 7\n")
    return run


def test_a_recorded_run_is_known_with_what_a_list_of_runs_shows(place, tmp_path):
    run = make(tmp_path / "checkpoints")
    registry.record_run(run)
    (row,) = registry.known_runs()
    assert row == {name: run_row(run)[name] for name in registry.COLUMNS}
    assert (row["path"], row["name"], row["status"]) == (str(run.path.resolve()), "a", "finished")
    assert (row["step"], row["max_steps"], row["best_loss"], row["val_loss"], row["loss"]) == (3, 9, 2.0, 2.5, 3.5)
    assert place.read_bytes()[18] == 2  # SQLite's file format: it has a write-ahead log
    run.describe(status="failed", reason="of this")
    registry.record_run(run)
    assert [(row["status"], row["reason"]) for row in registry.known_runs()] == [("failed", "of this")]


def test_the_best_loss_forgets_what_a_resume_took_back(tmp_path):
    run = make(tmp_path, losses=(3.0, 2.0, 1.0))
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "val/loss": 0.')  # a kill
        file.write("\n")
    run.append("metrics.jsonl", {"resumed_at": 1})
    run.append("metrics.jsonl", {"step": 2, "val/loss": float("nan")})
    run.append("metrics.jsonl", {"step": 3, "val/loss": 2.5})
    assert run_row(run)["best_loss"] == 2.5


def test_the_place_is_read_when_it_is_needed_and_follows_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("LM_REGISTRY", str(tmp_path / "mine.db"))
    assert registry.place() == tmp_path / "mine.db"
    monkeypatch.delenv("LM_REGISTRY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert registry.place() == tmp_path / "lm" / "runs.db"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    assert registry.place() == tmp_path / "somebody" / ".local" / "share" / "lm" / "runs.db"


def recorded(run, caplog):
    """Record, and return the warnings that it wrote."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="lm"):
        registry.record_run(run)
    return [entry.getMessage() for entry in caplog.records]


@pytest.mark.parametrize("damage", ["a damaged page", "a table of an older version"])
def test_a_damaged_registry_is_one_line_and_rebuilt(damage, place, tmp_path, caplog):
    run = make(tmp_path / "checkpoints")
    registry.record_run(run)
    content = bytearray(place.read_bytes())
    if damage == "a table of an older version":
        place.unlink()
        with sqlite3.connect(place) as database:
            database.execute("CREATE TABLE runs (path TEXT PRIMARY KEY, name TEXT)")
            database.execute("INSERT INTO runs VALUES ('/somewhere/old', 'old')")
    else:
        content[4096 - 400 :] = b"\xff" * (len(content) - 4096 + 400)
        place.write_bytes(content)
    warnings = recorded(run, caplog)
    assert len(warnings) == 1 and "cannot be written" in warnings[0] and "lm runs rebuild" in warnings[0]
    content = place.read_bytes()
    caplog.clear()
    if damage == "a table of an older version":
        assert [row["path"] for row in registry.known_runs()] == ["/somewhere/old"]
    else:
        assert registry.known_runs() == [] and "cannot be read" in caplog.text and "lm runs rebuild" in caplog.text
    assert place.read_bytes() == content  # looking changes nothing
    registry.rebuild([run])
    assert [row["path"] for row in registry.known_runs()] == [str(run.path.resolve())]


@pytest.mark.parametrize("what", ["a file in place of the folder", "a folder in place of the file"])
def test_a_registry_that_cannot_be_written_is_one_line(what, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LM_REGISTRY", str(tmp_path / ("file/runs.db" if what.startswith("a file") else "")))
    run = make(tmp_path / "checkpoints")
    warnings = recorded(run, caplog)
    assert len(warnings) == 1 and warnings[0].startswith("the registry of runs was not updated")
    assert find_run("a", tmp_path / "checkpoints").path == run.path  # commands do without


def test_many_processes_record_at_once(place, tmp_path):
    code = "import sys; from lm.runs.registry import note; from lm.runs.run import Run; [note([Run(p)]) for p in sys.argv[1:]]"
    paths = [[str(make(tmp_path / "checkpoints").path) for _ in range(3)] for _ in range(4)]
    processes = [subprocess.Popen([sys.executable, "-c", code, *some]) for some in paths]
    assert [process.wait() for process in processes] == [0] * 4
    assert len(registry.known_runs()) == 12


def test_a_name_is_a_folder_under_the_root_then_the_registry_then_a_path(place, tmp_path, monkeypatch):
    first_root, second_root = tmp_path / "here" / "checkpoints", tmp_path / "there" / "checkpoints"
    first, theirs, other = make(first_root), make(second_root), make(second_root, "b")
    registry.note([theirs, other])
    monkeypatch.chdir(tmp_path / "here")
    assert find_run("a").path.resolve() == first.path.resolve()
    assert find_run("b").path == other.path.resolve()
    assert find_run(str(theirs.path)).path.resolve() == theirs.path.resolve()
    assert find_run("../there/checkpoints/a").path.resolve() == theirs.path.resolve()
    registry.note([first])
    with pytest.raises(RequestError, match="several runs are named a; give the path of one: ") as refused:
        find_run("a", tmp_path / "elsewhere")
    assert str(first.path.resolve()) in str(refused.value) and str(theirs.path.resolve()) in str(refused.value)


def test_an_unknown_name_is_answered_with_the_nearest(place, tmp_path):
    make(tmp_path, "depth-12"), registry.note([make(tmp_path / "other", "depth-20")])
    with pytest.raises(RequestError, match="no run 'depth-21' .* did you mean depth-12"):
        find_run("depth-21", tmp_path)
    with pytest.raises(RequestError, match="is in the folder of a run: give the run alone, .*/depth-12$"):
        find_run(str(tmp_path / "depth-12/best"))
    for name in ("xyz", "deep"):
        with pytest.raises(RequestError, match="`lm runs ls` lists them"):
            find_run(name, tmp_path)
