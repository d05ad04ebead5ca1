"""The cost of a run over all sessions, by its own clock or by the file of another program, against its caps."""

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from lm.errors import RequestError
from lm.system.parsing import nonnegative, parse_json
from lm.system.units import format_figure
from lm.training.config import BudgetConfig

STALE = 600.0  # seconds after which a sidecar's file that has not changed is ignored


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


def format_usd(number: float) -> str:
    return f"${format_figure(number)}"


def format_hours(number: float) -> str:
    return f"{format_figure(number)} hours"


class Verdict(NamedTuple):
    kind: str  # "near", "projected" or "spent"
    reason: str


def judge(config: BudgetConfig, cost: Cost, projected: Cost | None) -> Verdict | None:
    """The worst that is true of a cost and its projection to the end of the run; None where all is well."""
    end = projected or Cost(-math.inf, None)
    caps = [(config.cap_usd, format_usd, cost.usd, end.usd), (config.max_hours, format_hours, cost.hours, end.hours)]
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
