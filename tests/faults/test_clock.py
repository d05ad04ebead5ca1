"""The wall clock of the machine is set while a run is trained: nothing that the run reports leaps with it."""

import json
import time
from itertools import pairwise

import pytest
from trainings import RECORDER, equipment, expected, lm, losses, start, wait_until, write_config

from lm.runs.facts import LiveRun
from lm.runs.run import Run
from lm.system.process import steady_time

DAY = 86_400.0
FIT = ("fit", "--config", "small.yaml", "--ckpt_path", "auto")


@pytest.mark.fault(24)
def test_a_clock_that_jumps_a_day_forth_and_two_back_changes_nothing(workplace, monkeypatch):
    """Also a look from a machine whose clock is years ahead: the run is running, its time left is a matter of seconds,
    and what it costs is what it took. A budget of half an hour is not spent by a leap of a day."""
    jump = equipment("clock_jump.Jump", at=[5, 13], seconds=[DAY, -DAY])
    callbacks = [RECORDER, jump, equipment("waiting.WaitAt", micro_batch=19)]
    budget = {"max_hours": 0.5, "rate_usd_per_hr": 3.6}
    write_config(workplace, **{"trainer.callbacks": callbacks}, guards={"budget": budget})
    began = time.time()
    process = start(workplace, *FIT)
    run = Run(workplace / "checkpoints" / "small")
    try:
        wait_until((workplace / "waits").exists, process)
        wait_until(lambda: run.read("heartbeat.json").get("time", began) < began - DAY / 2, process)
        assert run.status() == "running"
        seen = json.loads(lm(workplace, "monitor", "small", "--json").stdout)
        assert seen["status"] == "running" and seen["step"] == 9 and 0 <= seen["eta_seconds"] < 60
        ages = [seen[f"{name}_age_seconds"] for name in ("heartbeat", "logged", "started")]
        assert min(ages) >= 0 and ages[2] < 120
        rows = json.loads(lm(workplace, "runs", "ls", "--json").stdout)
        assert [row["status"] for row in rows if row["path"] == str(run.path.resolve())] == ["running"]
        assert "is being trained by process" in lm(workplace, *FIT, expect=2).stderr
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda true=time.time: true() + 1000 * DAY)
            assert run.status() == "running" and 0 <= LiveRun(run).refresh()["eta_seconds"] < 60
        (workplace / "go").touch()
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    took = time.time() - began
    assert losses(workplace) == expected(workplace) and run.status() == "finished"
    assert run.read("state.json")["eta_seconds"] == 0
    times = [line["time"] for line in run.metrics()]
    assert all(a <= b for a, b in pairwise(times)) and began <= times[0] and times[-1] - times[0] < took
    cost = run.read("budget.json")
    assert 0 < cost["hours_elapsed"] * 3600 < took + 5
    assert cost["spent_usd"] == pytest.approx(cost["hours_elapsed"] * 3.6)


def test_of_runs_of_a_name_the_newest_is_the_one_started_last_whatever_the_clock_said(tmp_path):
    """The first was started by a clock that was a year ahead."""
    first, second = Run.create("a", tmp_path), Run.create("a", tmp_path)
    for run, entered in ((first, time.time() + 365 * DAY), (second, time.time())):
        run.describe(name="a", entered=entered, turn=Run.next_start(tmp_path))
    assert Run.all(tmp_path, "a")[-1].name == second.name and [run.name for run in Run.all(tmp_path)] == ["a", "a-2"]
    first.describe(turn=Run.next_start(tmp_path))  # resumed
    assert Run.all(tmp_path, "a")[-1].name == first.name


def test_dates_continue_when_the_clock_is_set(monkeypatch):
    before, true = steady_time(), time.time
    assert abs(before - true()) < 60
    for jump in (DAY, -DAY):
        monkeypatch.setattr(time, "time", lambda jump=jump: true() + jump)
        assert before <= steady_time() < before + 60


@pytest.mark.parametrize("ahead", [0, DAY])
def test_a_heartbeat_from_another_machine_does_not_hold_up_a_resume(tmp_path, monkeypatch, ahead):
    """Without a lock to look at, as in a copy of the run, another heartbeat is waited for, and none comes."""
    monkeypatch.setattr("lm.runs.run.SILENCE", 0.5)
    run = Run.create("a", tmp_path)
    run.describe(status="running", turn=1, entered=time.time())
    beat = {"time": time.time() + ahead, "pid": 1, "host": "elsewhere", "machine": {}}
    (run.path / "heartbeat.json").write_text(json.dumps(beat))
    assert run.status() == "running" and run.is_locked() is None
    run.check_not_trained()
