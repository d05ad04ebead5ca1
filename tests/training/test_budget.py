"""The budget: what is spent is counted on a clock that does not jump, and a run ends when the cap is reached; the time
that is left, estimated from log lines and pauses."""

import json
import math
import random
import signal
import subprocess
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from trainings import HERE, wait_until, write_config

from lm.cli.command import main
from lm.errors import RequestError
from lm.runs.run import Run
from lm.system.process import seconds_since_process_start
from lm.training.budget import STALE, Cost, Meter, Sidecar, judge, read_budget_file
from lm.training.callbacks.budget import BudgetGuard
from lm.training.config import BudgetConfig
from lm.training.pace import StepTimeEstimator
from lm.training.run_state import RunState

KEEPER = HERE.parent / "configs" / "launch" / "keep_budget.py"


class Clock:
    """A clock that a test turns."""

    now = 1000.0

    def __call__(self):
        return self.now


# ---- counting --------------------------------------------------------------------------------------------------------
def test_the_meter_continues_over_sessions_and_from_the_start_of_the_process():
    """Two hours before at $2, then a session that started half an hour ago at $3 and continues for an hour."""
    clock = Clock()
    meter = Meter(3.0, Cost(2.0, 4.0), age=1800.0, clock=clock)
    clock.now += 3600
    assert meter.read() == pytest.approx(Cost(3.5, 8.5))
    assert meter.read(ahead=7200) == pytest.approx(Cost(5.5, 14.5))
    assert Meter(None, Cost(0.0, None), 0.0, clock).read().usd is None


def test_the_age_of_the_process_is_known():
    """It grows with time, and is at least what this process has computed for."""
    first = seconds_since_process_start()
    time.sleep(0.05)
    assert first >= 0 and 0.03 < seconds_since_process_start() - first < 5
    assert first + 0.05 > time.thread_time() * 0.5 or first == 0  # the process may have computed on many cores


@pytest.mark.parametrize(
    ("hours", "usd", "end", "kind"),
    [(1, 3, 9.9, None), (1, 3, None, None), (1, 8, 9.9, "near"), (1, 8, 10.1, "projected"), (1, 10, 10, "spent"),
     (1, None, None, None), (5, 0, 0, "spent"), (4, 0, 0, "near")],
)  # fmt: skip
def test_what_a_cost_means(hours, usd, end, kind):
    """Under a cap of $10 and 5 hours: the worst is what is said."""
    config = BudgetConfig(cap_usd=10, rate_usd_per_hr=3, max_hours=5)
    verdict = judge(config, Cost(hours, usd), None if end is None else Cost(hours, end))
    assert (verdict and verdict.kind) == kind


def test_hours_that_will_not_suffice():
    verdict = judge(BudgetConfig(max_hours=5), Cost(1, None), Cost(6.5, None))
    assert verdict.kind == "projected" and "6.50 hours of 5.00 hours" in verdict.reason
    tiny = judge(BudgetConfig(cap_usd=0.002, rate_usd_per_hr=1), Cost(0, 0.0031), None)
    assert tiny.reason == "$0.0031 of $0.002 are spent"


@pytest.mark.parametrize(("wrong", "word"), [
    ({"cap_usd": 20}, "rate_usd_per_hr"), ({"cap_usd": -1, "rate_usd_per_hr": 3}, "cap_usd"),
    ({"cap_usd": 1, "rate_usd_per_hr": -1}, "rate_usd_per_hr"), ({"max_hours": math.nan}, "max_hours"),
    ({"cap_usd": math.inf, "file": "x"}, "cap_usd"),
])  # fmt: skip
def test_an_inconsistent_budget_is_refused(wrong, word):
    with pytest.raises(RequestError, match=word):
        BudgetConfig(**wrong)


# ---- another program's count -----------------------------------------------------------------------------------------
def stamp(seconds_ago=0.0):
    return (datetime.now(UTC) - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_sidecar(path, seconds_ago=0.0, **values):
    path.write_text(json.dumps({"spent_usd": 3, "last_update_utc": stamp(seconds_ago)} | values))


def test_a_sidecar_is_read_when_it_has_news(tmp_path):
    clock = Clock()
    path = tmp_path / "budget.json"
    sidecar = Sidecar(path, clock)
    assert "cannot be read" in sidecar.read()[1]
    for half in ('{"spent_usd": 3.2, "last_up', "[]", "{}", f'{{"spent_usd": "x", "last_update_utc": "{stamp()}"}}',
                 '{"spent_usd": 1, "last_update_utc": "yesterday"}', '{"spent_usd": -1, "last_update_utc": ""}'):  # fmt: skip
        path.write_text(half)
        assert sidecar.read()[0] is None and "not whole" in sidecar.read()[1]
    write_sidecar(path, STALE + 60)
    assert sidecar.read()[0] is None and "more than 10 minutes ago" in sidecar.read()[1]
    write_sidecar(path, 60)
    assert sidecar.read()[0]["spent_usd"] == 3 and sidecar.read()[1] is None
    clock.now += STALE + 1
    assert "10 minutes" in sidecar.read()[1]
    write_sidecar(path, spent_usd=4, last_update_utc="2001-01-01T00:00:00")
    assert sidecar.read()[0]["spent_usd"] == 4, "a date that jumps back is news all the same"


# ---- a run, with the clock turned ------------------------------------------------------------------------------------
class Simulation:
    """A run of 1000 steps with a log line every 10, on a clock of its own; `act` is what the guard asked for."""

    def __init__(self, tmp_path, monkeypatch, config, val_interval=250):
        run = Run(tmp_path)
        self.acts = []
        self.trainer = SimpleNamespace(
            run=run, global_step=0, max_steps=1000, world_size=1, is_global_zero=True,
            options=SimpleNamespace(val_interval=val_interval, log_interval=10),
            datamodule=SimpleNamespace(has_validation=True), run_state=RunState(run=run), tokens_seen=0,
            strategy=SimpleNamespace(broadcast=lambda value: value),
        )  # fmt: skip
        self.module = SimpleNamespace(options=SimpleNamespace(schedule=None))
        self.clock = Clock()
        self.budget = BudgetGuard(config, self.clock)
        monkeypatch.setattr("lm.training.callbacks.budget.seconds_since_process_start", lambda: 0.0)
        for module in ("guards", "budget"):
            monkeypatch.setattr(f"lm.training.callbacks.{module}.act", self._act)
        self.budget.on_train_start(self.trainer, self.module)

    def _act(self, trainer, pl_module, finding):
        self.acts.append((trainer.global_step, finding.action, finding.save, finding.message))
        if finding.action == "stop":
            trainer.run_state.stop = RuntimeError(finding.message)

    @property
    def spent(self):
        return self.budget.meter.read().usd

    def lines(self, count, seconds, validation=0.0):
        """Log lines of 10 steps, each step so long; stops where the guard does."""
        for _ in range(count):
            if self.trainer.run_state.stop:
                return
            self.trainer.global_step += 10
            self.clock.now += 10 * seconds
            self.budget.on_metrics(self.trainer, self.module, {})
            if validation and self.trainer.global_step % self.trainer.options.val_interval == 0:
                self.clock.now += validation
                self.budget.on_pause(self.trainer, validation, "validation")
                self.budget.on_metrics(self.trainer, self.module, {})

    @property
    def file(self):
        return json.loads((self.trainer.run.path / "budget.json").read_text())


def hourly(cap, **more):
    """A budget of so many seconds, for the rate is a dollar a second."""
    return BudgetConfig(cap_usd=cap, rate_usd_per_hr=3600, **more)


@pytest.mark.parametrize(("val_interval", "lines", "spent"), [
    (250, [(1, 60), (99, 1, 60)], 1830),  # four validations of 60 s and a first line of ten minutes, for compilation
    (10, [(100, 1, 10)], 2000),  # a validation of 10 s at every line
])  # fmt: skip
def test_a_run_that_fits_is_left_alone(tmp_path, monkeypatch, val_interval, lines, spent):
    """1000 steps of 1 s under $2300; each validation is counted once."""
    simulation = Simulation(tmp_path, monkeypatch, hourly(2300, warn_at=1), val_interval)
    for each in lines:
        simulation.lines(*each)
    assert simulation.acts == []
    simulation.budget.on_train_end(simulation.trainer, None)
    file = simulation.file
    assert file["spent_usd"] == file["projected_total_usd"] == pytest.approx(spent, rel=0.01)
    assert file["hours_elapsed"] == pytest.approx(spent / 3600) and file["cap_usd"] == 2300
    assert file["rate_usd_per_hr"] == 3600 and datetime.fromisoformat(file["last_update_utc"])


@pytest.mark.parametrize(("budget", "lines", "acts", "words", "spent"), [
    # 80 % of it is spent: a warning, once.
    (dict(cap=1200), [(100, 1)], [(960, "warn", False)], "80%", 1000),
    # Twice as long as the cap allows from the first step on: seen after ten measured lines, three times in a row.
    (dict(cap=1000), [(100, 2)], [(130, "stop", True)], "$2,000.00 of $1,000.00", 260),
    # 1000 steps of 1 s fit in $1100, and four validations of 60 s do not; the first of them tells.
    (dict(cap=1100), [(100, 1, 60)], [(280, "stop", True)], "will have taken $1,240.00", 340),
    # The machine stands still for an hour: no projection saw it coming.
    (dict(cap=2000), [(50, 1), (1, 360)], [(510, "stop", False)], "are spent", 4100),
    # Ten seconds a log line, and no projection yet: at $90 of $100 there is time for one more and a checkpoint.
    (dict(cap=100, warn_at=1), [(100, 1)], [(90, "stop", True)], "$90.00 so far", 90),
    # From step 500 on they take 45 times as long: it ends before the median of their times has seen that.
    (dict(cap=2000, warn_at=1), [(50, 1), (50, 45)], [(520, "stop", True)], "so far", 1400),
    # The run is over anyway, and its last checkpoint is worth what was paid.
    (dict(cap=1000, warn_at=1), [(99, 1), (1, 2)], [], "", 1010),
    (dict(cap=500, dry_run=True), [(100, 1)], [(130, "warn", False), (500, "warn", False)],
     "if not for the dry run: the run ends with a checkpoint", 1000),
])  # fmt: skip
def test_a_run_ends_in_time_and_with_a_checkpoint_if_possible(tmp_path, monkeypatch, budget, lines, acts, words, spent):
    simulation = Simulation(tmp_path, monkeypatch, hourly(**budget))
    for each in lines:
        simulation.lines(*each)
    assert [act[:3] for act in simulation.acts] == acts and words in "".join(act[3] for act in simulation.acts[:1])
    assert simulation.spent == pytest.approx(spent)


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_slow_stretches_stop_nothing(tmp_path, monkeypatch, seed):
    """Steps of about 1 s and a few lines ten times slower, early ones among them, under a cap that is enough."""
    draw = random.Random(seed)
    simulation = Simulation(tmp_path, monkeypatch, hourly(2600))
    simulation.lines(1, 30)
    slow = {5, 9, *draw.sample(range(99), 5)}
    for line in range(99):
        simulation.lines(1, 10 if line in slow else draw.uniform(0.8, 1.2), validation=30)
    assert simulation.trainer.global_step == 1000
    assert simulation.spent < 2600 and "stop" not in [act[1] for act in simulation.acts]


DAMAGED = "is damaged, so what the run has cost is not known"


@pytest.mark.parametrize(("content", "error"), [
    *((damaged, DAMAGED) for damaged in ('{"spent_', "[]", "{}", '{"spent_usd": "9", "hours_elapsed": NaN}',
                                         '{"spent_usd": -5, "hours_elapsed": 1.0}')),
    ('{"spent_usd": 2000, "hours_elapsed": 0.5}', r"\$2,000.00 of \$2,000.00 are spent"),
    ('{"spent_usd": null, "hours_elapsed": 4.5}', "4.50 hours of 4.00 hours are spent"),
])  # fmt: skip
def test_a_run_is_not_resumed_where_its_budget_is_spent_or_not_known(tmp_path, monkeypatch, content, error):
    (tmp_path / "budget.json").write_text(content)
    with pytest.raises(RequestError if error is DAMAGED else RuntimeError, match=error):
        Simulation(tmp_path, monkeypatch, hourly(2000, max_hours=4))


def test_a_budget_is_kept_over_machines_and_ends_this_one(tmp_path):
    """By `configs/launch/keep_budget.py`, whose file the training reads; a second start on a machine counts once."""
    file = tmp_path / "budget.json"

    def keep(rate, cap):
        command = [KEEPER, file, "--rate", str(rate), "--cap", str(cap), "--at_cap", f"touch {tmp_path}/ended"]
        before = file.read_text() if file.exists() else ""
        process = subprocess.Popen([*command, "--interval", "0.05"], stdout=subprocess.PIPE, text=True)
        if cap > 1e6:
            wait_until(lambda: file.exists() and file.read_text() != before, process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.7 if cap > 1e6 else 30)
        process.kill()
        said, _ = process.communicate()
        content, problem = Sidecar(file).read()
        assert problem is None
        return process.returncode, content["spent_usd"], said

    code, first, _ = keep(3600, 1e12)  # a dollar a second
    assert code == -signal.SIGKILL and 0 < first and not (tmp_path / "ended").exists()
    _, again, _ = keep(3600, 1e12)
    assert first < again < first + 30
    file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": "another"}))
    _, other, _ = keep(3600, 1e12)
    assert other >= again + first
    code, _, said = keep(3600, 1)
    assert code == 0 and "of 1.00 USD are spent: touch" in said and (tmp_path / "ended").exists()


def test_a_sidecar_counts_and_the_own_clock_takes_over_where_it_ends(tmp_path, monkeypatch, caplog):
    """The sidecar knows of $300 before this process was there. When it falls silent, counting continues from there at
    its rate, and that is said once."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "sidecar.json"
    sidecar = {"rate_usd_per_hr": 3600, "hours_elapsed": 1.0}
    write_sidecar(path, spent_usd=300, **sidecar)
    simulation = Simulation(tmp_path / "run", monkeypatch, BudgetConfig(cap_usd=1800, file=str(path)))
    simulation.lines(40, 1)
    assert simulation.file["spent_usd"] == pytest.approx(700) and simulation.file["hours_elapsed"] > 1.1
    path.write_text('{"spent_')
    simulation.lines(20, 1)
    path.unlink()
    simulation.lines(20, 1)
    assert simulation.file["spent_usd"] == pytest.approx(1100) and simulation.acts == []
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and "not whole" in said[0] and "cannot be read" in said[1] and "own clock" in said[1]
    write_sidecar(path, -60, spent_usd=1900, **sidecar)
    simulation.lines(1, 1)
    assert [act[:3] for act in simulation.acts] == [(810, "stop", False)]


def test_what_the_file_says_later_ends_the_run_with_a_checkpoint(tmp_path, monkeypatch):
    """And the file is not written over, though it may be kept in the run folder."""
    path = tmp_path / "budget.json"
    write_sidecar(path, 60, rate_usd_per_hr=2)
    simulation = Simulation(tmp_path, monkeypatch, BudgetConfig(cap_usd=50, file=str(path)))
    simulation.lines(20, 1)
    assert simulation.acts == []
    write_sidecar(path, rate_usd_per_hr=2, projected_total_usd=99)
    text = path.read_text()
    simulation.lines(20, 1)
    [(step, action, saves, words, *_)] = simulation.acts
    assert (step, action, saves) == (230, "stop", True) and "$99.00" in words  # three log lines in a row
    assert path.read_text() == text


@pytest.mark.parametrize(("content", "words"), [
    (None, "cannot be read (No such file or directory)"),
    ('{"spent_usd": 1}', "is not whole"),
    ('{"spent_usd": 1, "last_update_utc": "2001-01-01T00:00:00Z"}', "more than 10 minutes ago"),
])  # fmt: skip
def test_a_cap_that_cannot_be_counted_is_refused_by_a_fit_before_it_writes_and_by_plan(
    tmp_path, monkeypatch, capsys, content, words
):
    if content:
        (tmp_path / "budget.json").write_text(content)
    write_config(tmp_path, **{"guards.budget": {"cap_usd": 5, "file": "budget.json"}, "trainer.callbacks": None})
    monkeypatch.chdir(tmp_path)
    for command in (["plan", "--device", "h200"], ["fit", "--force"]):
        assert main([command[0], "--config", "small.yaml", *command[1:]]) == 2
        shown = capsys.readouterr()
        assert words in shown.out + shown.err and (command[0] == "plan" or shown.err.count("\n") == 1)
    assert {path.name for path in tmp_path.iterdir()} <= {"small.yaml", "budget.json"}
    # With a rate its own clock counts.
    assert read_budget_file(BudgetConfig(cap_usd=5, file="budget.json", rate_usd_per_hr=3)) == {}


# ---- time left ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("log_interval", [10, 100])  # with 100 a validation lies between any two lines
def test_the_time_left_is_right_to_a_second_after_a_hang_too(log_interval):
    """2,000 steps of 0.5 s, compilation in the first, a validation of 20 s every 100; the disk hangs for 600 s once."""
    pace, now, lines, estimates = StepTimeEstimator(), 0.0, {}, {}
    for step in range(1, 2001):
        now += 0.5 + (60.0 if step == 1 else 0.0) + (600.0 if step == 1005 else 0.0)
        if step % log_interval == 0:
            pace.add_line(step, now)
            lines[step], estimates[step] = now, pace.rest(2000 - step, 20 - (step - 1) // 100)
        if step % 100 == 0:
            now += 20.0
            pace.add_pause(step, 20.0, "validation")
    assert estimates.pop(log_interval) is None  # one line says nothing of the pace
    for step, seconds in estimates.items():
        if step > 100:
            hang = 600.0 if step < 1005 else 0.0  # is not foreseen
            assert seconds == pytest.approx(now - lines[step] - hang, abs=1.0), step


def test_pauses_that_come_again_are_part_of_the_pace_and_a_single_one_is_not():
    """Evaluations of 120 s every 250 steps make a step of 0.1 s one of 0.58 s."""
    pace = StepTimeEstimator()
    pace.steps.append(0.1)
    pace.pauses.append((250, 500.0))  # the first of a session, which compiled something
    assert pace.rest(1000, 0) == pytest.approx(100.0)
    pace.pauses.extend([(500, 120.0), (750, 120.0)])
    assert pace.rest(1000, 0) == pytest.approx(100.0 + 4 * 120.0)
