"""The budget of a run: its cost, over all sessions, and the end before the cost exceeds a cap."""

import logging
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from lm.errors import RequestError
from lm.system.parsing import nonnegative, parse_json
from lm.system.units import format_figure
from lm.training.config import BudgetConfig
from lm.training.guards import Finding, Line
from lm.training.pace import StepTimeEstimator

log = logging.getLogger(__name__)

STALE = 600.0  # seconds after which a sidecar's file that has not changed is ignored
SETTLED_LINES = 10  # log lines that a pace is measured over before a projection counts
PROJECTIONS = 3  # over the cap, in a row, end the run


class Cost(NamedTuple):
    """Hours and US dollars; dollars are None where no rate is known."""

    hours: float
    usd: float | None


class Meter:
    """Counts what a run costs: `rate` US dollars an hour, since `age` seconds ago, added to its cost `before`."""

    def __init__(self, rate: float | None, before: Cost, age: float, clock: Callable[[], float] = time.monotonic):
        self.rate, self._base, self._clock = rate, before, clock
        self._since = clock() - age

    def read(self, ahead: float = 0.0) -> Cost:
        hours = (self._clock() + ahead - self._since) / 3600
        usd = self._base.usd if self.rate is None else (self._base.usd or 0.0) + hours * self.rate
        return Cost(self._base.hours + hours, usd)

    def set(self, cost: Cost, rate: float | None) -> None:
        """Count on from this cost, and at this rate if it is known."""
        self._base, self._since = cost, self._clock()
        self.rate = self.rate if rate is None else rate


class Sidecar:
    """A `budget.json` that another program keeps.

    At first sight its own date says how old it is. From then on it is stale when it has not changed for `STALE` seconds
    of a clock that does not jump.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock = path, clock
        self._update: str | None = None  # of the newest reading
        self._seen = 0.0

    def read(self) -> tuple[dict[str, Any] | None, str | None]:
        """Its content if that is new, and what is wrong with it."""
        try:
            content = parse_json(self.path.read_bytes())
            update, spent = str(content["last_update_utc"]), nonnegative(content["spent_usd"])
            date = datetime.fromisoformat(update)
            if spent is None:
                raise ValueError(content["spent_usd"])
        except OSError as error:
            return None, f"cannot be read ({error.strerror})"
        except (ValueError, KeyError, TypeError):
            return None, "is not whole: spent_usd and last_update_utc are needed"
        if update == self._update:
            return None, "has not been updated for 10 minutes" if self._clock() - self._seen > STALE else None
        age = (datetime.now(UTC) - (date if date.tzinfo else date.replace(tzinfo=UTC))).total_seconds()
        if self._update is None and age > STALE:
            return None, f"was last updated at {update}, more than 10 minutes ago"
        self._update, self._seen = update, self._clock()
        return content, None


def read_budget_file(budget: BudgetConfig) -> dict[str, Any]:
    """What `file` says before a run starts; empty where it is not given or its figures do not count."""
    if budget.file is None:
        return {}
    content, problem = Sidecar(Path(budget.file)).read()
    if problem is not None and budget.cap_usd is not None and budget.rate_usd_per_hr is None:
        raise RequestError(
            f"guards.budget.file {budget.file} {problem}, and without guards.budget.rate_usd_per_hr "
            "guards.budget.cap_usd cannot be counted: start the program that keeps the file, or give the rate"
        )
    return content or {}


def _usd(number: float) -> str:
    return f"${format_figure(number)}"


def _hours(number: float) -> str:
    return f"{format_figure(number)} hours"


class Verdict(NamedTuple):
    kind: str  # "near", "projected" or "spent"
    reason: str


def judge(config: BudgetConfig, cost: Cost, projected: Cost | None) -> Verdict | None:
    """The worst that is true of a cost and its projection to the end of the run; None where all is well."""
    end = projected or Cost(-math.inf, None)
    caps = [(config.cap_usd, _usd, cost.usd, end.usd), (config.max_hours, _hours, cost.hours, end.hours)]
    caps = [(cap, form, now, then) for cap, form, now, then in caps if None not in (cap, now)]
    for cap, form, now, _ in caps:
        if now >= cap:
            return Verdict("spent", f"{form(now)} of {form(cap)} are spent")
    for cap, form, now, then in caps:
        if then is not None and then > cap:
            return Verdict("projected", f"the run will have taken {form(then)} of {form(cap)}; {form(now)} so far")
    for cap, form, now, _ in caps:
        if now >= config.warn_at * cap:
            return Verdict("near", f"{form(now)} of {form(cap)} are spent, {now / cap:.0%}")
    return None


class Budget:
    """Counts the cost of a run, and finds at log lines that it is near its cap, will be over it, or is spent.

    Near the cap it warns; if the projection is over the cap, the run ends with a checkpoint; once the cap is spent, it
    ends without one.

    The first steps are slow and say little. So a projection (see `StepTimeEstimator`) ends a run only once it is
    measured over `SETTLED_LINES` and is over the cap for the `PROJECTIONS`th time in a row. Before that, and where
    steps become slow all of a sudden, the last log line that leaves time for one more and a checkpoint ends the run.

    The clock must not jump.
    """

    def __init__(self, config: BudgetConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self._clock = config, clock
        self._sidecar = Sidecar(Path(config.file), clock) if config.file else None
        self.meter = cast(Meter, None)  # on rank zero, from the start of a training
        self.pace = StepTimeEstimator()
        self._interval: tuple[float, int] | None = None  # seconds and steps between the newest log lines
        self._file_end: float | None = None  # US dollars that the other program projects
        self._over = 0  # projections over the cap in a row
        self._reported: set[str] = set()

    def begin(self, before: Cost, age: float) -> list[Finding]:
        """Start to count, as `Meter` does; a run that is resumed after its end has nothing left to spend."""
        self.meter = Meter(self.config.rate_usd_per_hr, before, age, self._clock)
        self._read_file()
        verdict = judge(self.config, self.meter.read(), None)
        spent = verdict is not None and verdict.kind == "spent" and not self.config.dry_run
        return [self._finding(verdict)] if spent else []

    def observe(self, line: Line) -> list[Finding]:
        """Look at the cost, once an optimizer step."""
        if self.meter is None or line.step == self.pace.newest_step:
            return []
        self._interval = self.pace.add_line(line.step, self._clock())
        self._read_file()
        verdict = self._verdict(line)
        if verdict is None or verdict.kind in self._reported:
            return []
        return [self._finding(verdict)] if verdict.kind == "near" or line.step < line.max_steps else []

    def _finding(self, verdict: Verdict) -> Finding:
        self._reported.add(verdict.kind)
        if verdict.kind == "near":
            return Finding("budget", "warn", verdict.reason)
        end = "the run ends without a checkpoint" if verdict.kind == "spent" else "the run ends with a checkpoint"
        end += "; a larger cap lets a resume go on"
        if self.config.dry_run:
            return Finding("budget", "warn", f"{verdict.reason}; if not for the dry run: {end}")
        return Finding("budget", "stop", f"{verdict.reason}: {end}", save=verdict.kind != "spent")

    def _verdict(self, line: Line) -> Verdict | None:
        cost = self.meter.read()
        settled = len(self.pace.steps) >= SETTLED_LINES
        end = self.projection(line.max_steps - line.step, line.validations_left) if settled else None
        verdict = judge(self.config, cost, end)
        self._over = self._over + 1 if verdict and verdict.kind == "projected" else 0
        verdict = judge(self.config, cost, None) if 0 < self._over < PROJECTIONS else verdict
        return verdict if verdict and verdict.kind != "near" else self._exceeds_before_next_line(line, cost) or verdict

    def _exceeds_before_next_line(self, line: Line, cost: Cost) -> Verdict | None:
        """Whether the cap would be spent by the time of the next log line and, as long again, a checkpoint."""
        if self._interval is None:
            return None
        seconds, steps = self._interval
        lines_left = (line.max_steps - line.step) / steps
        coming = self.meter.read(ahead=(1 - 1e-9) * seconds * min(2.0, lines_left))
        verdict = judge(self.config, coming, None)
        if verdict is None or verdict.kind != "spent":
            return None
        have = _hours(cost.hours) if cost.usd is None else _usd(cost.usd)
        return Verdict("projected", f"{have} so far, and before the next log line is written {verdict.reason}")

    def projection(self, steps: int, validations: int) -> Cost | None:
        """What the run will have cost after so many more; None where that is not known yet."""
        seconds = self.pace.rest(steps, validations)
        if seconds is None:
            return None
        end = self.meter.read(ahead=seconds)
        return end if self._file_end is None else end._replace(usd=self._file_end)

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
