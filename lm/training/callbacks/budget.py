"""The guard of a run's budget: the run ends before it costs too much, and `budget.json` has its cost."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from lm.errors import RequestError
from lm.runs.run import Run
from lm.system.files import write_atomically
from lm.system.parsing import nonnegative
from lm.system.process import seconds_since_process_start
from lm.training.budget import Cost, Meter, Sidecar, Verdict, format_hours, format_usd, judge
from lm.training.callbacks.guards import Finding, Guard, act
from lm.training.callbacks.logging import remaining
from lm.training.config import BudgetConfig
from lm.training.module import LanguageModule
from lm.training.pace import StepTimeEstimator
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)

SETTLED_LINES = 10  # log lines that a pace is measured over before a projection counts
PROJECTIONS = 3  # over the cap, in a row, end the run


class BudgetGuard(Guard):
    """Counts the cost of a run, and finds at log lines that it is near its cap, will be over it, or is spent.

    Near the cap it warns; if the projection is over the cap, the run ends with a checkpoint; once the cap is spent, it
    ends without one.

    The first steps are slow and say little. So a projection (see `StepTimeEstimator`) ends a run only once it is
    measured over `SETTLED_LINES` and is over the cap for the `PROJECTIONS`th time in a row. Before that, and where
    steps become slow all of a sudden, the last log line that leaves time for one more and a checkpoint ends the run.

    The clock starts with the process, since the machine is paid for from then on, and must not jump.
    """

    def __init__(self, config: BudgetConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self._clock = config, clock
        self._sidecar = Sidecar(Path(config.file), clock) if config.file else None
        self.meter = cast(Meter, None)  # on rank zero, from the start of a training
        self._pace = StepTimeEstimator()
        self._interval: tuple[float, int] | None = None  # seconds and steps between the newest log lines
        self._file_end: float | None = None  # US dollars that the other program projects
        self._over = 0  # projections over the cap in a row
        self._reported: set[str] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        """Start to count; a run that is resumed after its end has nothing left to spend."""
        spent = []
        if trainer.is_global_zero:
            before, age = _spent_before(trainer.run), seconds_since_process_start()
            self.meter = Meter(self.config.rate_usd_per_hr, before, age, self._clock)
            self._read_file()
            verdict = judge(self.config, self.meter.read(), None)
            if verdict is not None and verdict.kind == "spent" and not self.config.dry_run:
                spent = [self._finding(verdict)]
            self._write(trainer)
        for finding in trainer.strategy.broadcast(spent):
            act(trainer, pl_module, finding)
            if trainer.run_state.stop is not None:
                raise trainer.run_state.stop

    def on_pause(self, trainer: Trainer, seconds: float, kind: str) -> None:
        self._pace.add_pause(trainer.global_step, seconds, kind)

    def on_metrics(self, trainer: Trainer, pl_module: LanguageModule, metrics: Mapping[str, float]) -> None:
        super().on_metrics(trainer, pl_module, metrics)
        self._write(trainer)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self._write(trainer)

    on_exception = on_train_end  # pyright: ignore[reportAssignmentType]

    # ---- findings -----------------------------------------------------------------------------------------------

    def observe(self, trainer: Trainer, metrics: Mapping[str, float]) -> list[Finding]:
        """Look at the cost, once an optimizer step."""
        step = trainer.global_step
        if self.meter is None or step == self._pace.newest_step:
            return []
        self._interval = self._pace.add_line(step, self._clock())
        self._read_file()
        verdict = self._verdict(trainer)
        if verdict is None or verdict.kind in self._reported:
            return []
        return [self._finding(verdict)] if verdict.kind == "near" or step < trainer.max_steps else []

    def _finding(self, verdict: Verdict) -> Finding:
        self._reported.add(verdict.kind)
        if verdict.kind == "near":
            return Finding("budget", "warn", verdict.reason)
        end = "the run ends without a checkpoint" if verdict.kind == "spent" else "the run ends with a checkpoint"
        end += "; a larger cap lets a resume go on"
        if self.config.dry_run:
            return Finding("budget", "warn", f"{verdict.reason}; if not for the dry run: {end}")
        return Finding("budget", "stop", f"{verdict.reason}: {end}", save=verdict.kind != "spent")

    def _verdict(self, trainer: Trainer) -> Verdict | None:
        cost = self.meter.read()
        end = self._projection(trainer) if len(self._pace.steps) >= SETTLED_LINES else None
        verdict = judge(self.config, cost, end)
        self._over = self._over + 1 if verdict and verdict.kind == "projected" else 0
        verdict = judge(self.config, cost, None) if 0 < self._over < PROJECTIONS else verdict
        if verdict and verdict.kind != "near":
            return verdict
        return self._exceeds_before_next_line(trainer, cost) or verdict

    def _exceeds_before_next_line(self, trainer: Trainer, cost: Cost) -> Verdict | None:
        """Whether the cap would be spent by the time of the next log line and, as long again, a checkpoint."""
        if self._interval is None:
            return None
        seconds, steps = self._interval
        lines_left = (trainer.max_steps - trainer.global_step) / steps
        coming = self.meter.read(ahead=(1 - 1e-9) * seconds * min(2.0, lines_left))
        verdict = judge(self.config, coming, None)
        if verdict is None or verdict.kind != "spent":
            return None
        have = format_hours(cost.hours) if cost.usd is None else format_usd(cost.usd)
        return Verdict("projected", f"{have} so far, and before the next log line is written {verdict.reason}")

    def _projection(self, trainer: Trainer) -> Cost | None:
        """What the run will have cost at its end; None where that is not known yet."""
        seconds = self._pace.rest(*remaining(trainer))
        if seconds is None:
            return None
        end = self.meter.read(ahead=seconds)
        return end if self._file_end is None else end._replace(usd=self._file_end)

    # ---- files --------------------------------------------------------------------------------------------------

    def _read_file(self) -> None:
        if self._sidecar is None:
            return
        content, problem = self._sidecar.read()
        if content is not None:
            hours = nonnegative(content.get("hours_elapsed"))
            cost = Cost(self.meter.read().hours if hours is None else hours, nonnegative(content["spent_usd"]))
            self.meter.set(cost, nonnegative(content.get("rate_usd_per_hr")))
            self._file_end = nonnegative(content.get("projected_total_usd"))
        if problem is not None:
            self._file_end = None
            if problem not in self._reported:
                self._reported.add(problem)
                instead = "its own clock counts on" if self.meter.rate else "nothing is counted: no rate is known"
                log.warning("guards.budget.file %s %s; %s", self.config.file, problem, instead)

    def _write(self, trainer: Trainer) -> None:
        if self.meter is None:  # on other ranks, and before a training
            return
        trainer.run_state.usd_per_hour = self.meter.rate
        path = trainer.run.path / "budget.json"
        if self.config.file and Path(self.config.file).resolve() == path.resolve():
            return  # the other program's own
        cost, end = self.meter.read(), self._projection(trainer)
        content = {
            "spent_usd": cost.usd,
            "rate_usd_per_hr": self.meter.rate,
            "hours_elapsed": cost.hours,
            "projected_total_usd": end and end.usd,
            "cap_usd": self.config.cap_usd,
            "last_update_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        with suppress(OSError):  # a full disk; a checkpoint that cannot be written is an error
            write_atomically(path, json.dumps(content) + "\n", durable=False)


def _spent_before(run: Run) -> Cost:
    """The cost of the run's earlier sessions. If the file is damaged, counting from 0 would spend the cap twice."""
    before = run.read("budget.json")
    hours, usd = before.get("hours_elapsed"), before.get("spent_usd")  # without a rate there are no dollars
    stated = [number for number in (hours, usd) if number is not None]
    if (run.path / "budget.json").exists() and (not stated or None in map(nonnegative, stated)):
        raise RequestError(
            f"{run.path / 'budget.json'} is damaged, so what the run has cost is not known: write "
            '{"hours_elapsed": H, "spent_usd": S} into it, or remove it to count from 0'
        )
    return Cost(hours or 0.0, usd)
