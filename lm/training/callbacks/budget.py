"""What a run costs over all its sessions, and its end before it costs too much."""

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule

from lm.errors import RequestError
from lm.runs.run import Run
from lm.system.files import nonnegative, parse_json, write_atomically
from lm.system.process import seconds_since_process_start
from lm.system.units import format_figure
from lm.training.callback import Callback
from lm.training.callbacks.guards import act, from_rank_zero
from lm.training.callbacks.logging import StepTimeEstimator, remaining
from lm.training.config import BudgetConfig
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)

STALE = 600.0  # seconds after which a sidecar's file that has not changed is ignored
WRITE_INTERVAL = 10.0  # seconds between writes of budget.json
SETTLED_LINES = 10  # log lines that a pace is measured over before a projection counts
PROJECTIONS = 3  # over the cap, in a row, end the run


class Cost(NamedTuple):
    """Hours and US dollars; dollars are None where no rate is known."""

    hours: float
    usd: float | None


class Meter:
    """Counts what a run costs.

    Args:
        rate: US dollars an hour; None: not known.
        before: the cost of its earlier sessions.
        age: seconds that this session has been running for.
        clock: seconds; must not jump.
    """

    def __init__(self, rate: float | None, before: Cost, age: float, clock: Callable[[], float] = time.monotonic):
        self.rate, self._base, self._clock = rate, before, clock
        self._since = clock() - age

    def read(self, ahead: float = 0.0) -> Cost:
        """The cost now, or some seconds ahead."""
        hours = (self._clock() + ahead - self._since) / 3600
        usd = self._base.usd if self.rate is None else (self._base.usd or 0.0) + hours * self.rate
        return Cost(self._base.hours + hours, usd)

    def set(self, cost: Cost, rate: float | None) -> None:
        """Count on from this cost, and at this rate if it is known."""
        self._base, self._since = cost, self._clock()
        self.rate = self.rate if rate is None else rate


class Sidecar:
    """A `budget.json` that another program keeps, beside the training.

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
            update = str(content["last_update_utc"])
            date = datetime.fromisoformat(update)
            usable = nonnegative(content["spent_usd"]) is not None
        except OSError as error:
            return None, f"cannot be read ({error.strerror})"
        except (ValueError, KeyError, TypeError):
            usable = False
        if not usable:
            return None, "is not whole: spent_usd and last_update_utc are needed"
        if update == self._update:
            return None, "has not been updated for 10 minutes" if self._clock() - self._seen > STALE else None
        age = (datetime.now(UTC) - (date if date.tzinfo else date.replace(tzinfo=UTC))).total_seconds()
        if self._update is None and age > STALE:
            return None, f"was last updated at {update}, more than 10 minutes ago"
        self._update, self._seen = update, self._clock()
        return content, None


def read_budget_file(budget: BudgetConfig) -> dict[str, Any]:
    """What `file` says before a run starts; empty where it is not given or its figures do not count.

    Raises:
        RequestError: without it the cap cannot be counted, or it has too high a rate.
    """
    if budget.file is None:
        return {}
    content, problem = Sidecar(Path(budget.file)).read()
    if problem is not None and budget.cap_usd is not None and budget.rate_usd_per_hr is None:
        raise RequestError(
            f"guards.budget.file {budget.file} {problem}, and without guards.budget.rate_usd_per_hr "
            "guards.budget.cap_usd cannot be counted: start the program that keeps the file, or give the rate"
        )
    content = content or {}
    rate = nonnegative(content.get("rate_usd_per_hr"))
    budget.refuse_rate(rate, f"guards.budget.file {budget.file}: rate_usd_per_hr")
    return content


def _usd(number: float) -> str:
    return f"${format_figure(number)}"


def _hours(number: float) -> str:
    return f"{format_figure(number)} hours"


class Verdict(NamedTuple):
    kind: str  # "near", "projected", "rate" or "spent"
    reason: str


def judge(config: BudgetConfig, cost: Cost, projected: Cost | None, rate: float | None = None) -> Verdict | None:
    """The worst that is true of a cost, its projection to the end of the run, and the machine's rate in US dollars an
    hour; None where all is well."""
    limit = config.max_rate_usd_per_hr
    for kind in ("spent", "rate", "projected", "near"):
        if kind == "rate" and None not in (rate, limit) and rate > limit:
            return Verdict(kind, f"an hour costs {_usd(rate)}, more than the {_usd(limit)} that it may")
        for cap, form, index in ((config.cap_usd, _usd, 1), (config.max_hours, _hours, 0)):
            now, end = cost[index], projected[index] if projected else None
            if cap is None or now is None:
                continue
            most, have = form(cap), form(now)
            if kind == "spent" and now >= cap:
                return Verdict(kind, f"{have} of {most} are spent")
            if kind == "projected" and end is not None and end > cap:
                return Verdict(kind, f"the run will have taken {form(end)} of {most}; {have} so far")
            if kind == "near" and now >= config.warn_at * cap:
                return Verdict(kind, f"{have} of {most} are spent, {now / cap:.0%}")
    return None


class Budget(Callback):
    """Counts the cost, writes `budget.json`, and ends the run in time.

    The clock runs from the start of the process, since the machine is paid for from then on. At log lines: near the
    cap, a warning; a projection over it, or too high a rate, a checkpoint and the end; the cap spent, the end without
    a checkpoint.

    The first steps are slow and say little. So a projection (see `StepTimeEstimator`) ends a run only once it is
    measured over `SETTLED_LINES` and is over the cap for the `PROJECTIONS`th time in a row. Before that, and where
    steps become slow all of a sudden, the last log line that leaves time for one more and a checkpoint ends the run.

    Args:
        clock: seconds; must not jump.
        age: seconds that this session has been running for when it starts to train; those of the process if not given.
    """

    def __init__(
        self, config: BudgetConfig, clock: Callable[[], float] = time.monotonic, age: float | None = None
    ) -> None:  # fmt: skip
        self.config = config
        self._clock, self._age = clock, age
        self.meter: Meter | None = None  # on rank zero, from the start of a training
        self._sidecar: Sidecar | None = None
        self._pace = StepTimeEstimator()
        self._interval: tuple[float, int] | None = None  # seconds and steps between the newest log lines
        self._written = -math.inf
        self._sidecar_end: float | None = None  # US dollars that the sidecar projects
        self._over = 0  # projections over the cap in a row
        self._reported: set[str] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.config.wanted:
            return
        if trainer.is_global_zero:
            cost = _spent_before(trainer.run)
            age = seconds_since_process_start() if self._age is None else self._age
            self.meter = Meter(self.config.rate_usd_per_hr, cost, age, self._clock)
            self._sidecar = Sidecar(Path(self.config.file), self._clock) if self.config.file else None
        verdict = from_rank_zero(trainer, self._look(trainer))
        if verdict and verdict.kind == "spent" and not self.config.dry_run:  # resumed after its end
            self._act(trainer, pl_module, verdict)
            raise trainer.run_state.stop

    def on_pause(self, trainer: Trainer, seconds: float, kind: str) -> None:
        self._pace.add_pause(trainer.global_step, seconds, kind)

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """Look at the cost, once an optimizer step."""
        step = trainer.global_step
        if not self.config.wanted or step == self._pace.newest_step:
            return
        self._interval = self._pace.add_line(step, self._clock())
        verdict = from_rank_zero(trainer, self._look(trainer))
        if verdict and verdict.kind not in self._reported and (verdict.kind == "near" or step < trainer.max_steps):
            self._act(trainer, pl_module, verdict)

    def _act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> None:
        self._reported.add(verdict.kind)
        end = "the end, without a checkpoint" if verdict.kind == "spent" else "a checkpoint and the end"
        if verdict.kind == "near":
            act(trainer, pl_module, "budget", "warn", verdict.reason)
        elif self.config.dry_run:
            act(trainer, pl_module, "budget", "warn", f"{verdict.reason}; if not for the dry run: {end}")
        else:
            reason = f"{verdict.reason}: {end}"
            act(trainer, pl_module, "budget", "stop", reason, save=verdict.kind != "spent")

    def _look(self, trainer: Trainer) -> Verdict | None:
        """The verdict on the cost as it is now, on rank zero; reads the sidecar and writes the file."""
        if self.meter is None:
            return None
        self._read_sidecar()
        cost, end = self.meter.read(), self._end(trainer)
        if self._clock() - self._written >= WRITE_INTERVAL:
            self._write(trainer)
        rate = self.meter.rate
        verdict = judge(self.config, cost, end if len(self._pace.steps) >= SETTLED_LINES else None, rate)
        self._over = self._over + 1 if verdict and verdict.kind == "projected" else 0
        verdict = judge(self.config, cost, None, rate) if 0 < self._over < PROJECTIONS else verdict
        return verdict if verdict and verdict.kind != "near" else self._last_moment(trainer, cost) or verdict

    def _last_moment(self, trainer: Trainer, cost: Cost) -> Verdict | None:
        """Whether the cap would be spent by the time of the next log line and, as long again, a checkpoint."""
        if self._interval is None:
            return None
        seconds, steps = self._interval
        left = (trainer.max_steps - trainer.global_step) / steps
        coming = self.meter.read(ahead=(1 - 1e-9) * seconds * min(2.0, left))
        verdict = judge(self.config, coming, None)
        if verdict is None or verdict.kind != "spent":
            return None
        have = _hours(cost.hours) if cost.usd is None else _usd(cost.usd)
        return Verdict("projected", f"{have} so far, and before the next log line is written {verdict.reason}")

    def _end(self, trainer: Trainer) -> Cost | None:
        """What the whole run will cost."""
        seconds = self._pace.rest(*remaining(trainer))
        if seconds is None:
            return None
        end = self.meter.read(ahead=seconds)
        return end if self._sidecar_end is None else end._replace(usd=self._sidecar_end)

    def _read_sidecar(self) -> None:
        if self._sidecar is None:
            return
        content, problem = self._sidecar.read()
        if content is not None:
            hours = nonnegative(content.get("hours_elapsed"))
            cost = Cost(self.meter.read().hours if hours is None else hours, nonnegative(content["spent_usd"]))
            self.meter.set(cost, nonnegative(content.get("rate_usd_per_hr")))
            self._sidecar_end = nonnegative(content.get("projected_total_usd"))
        if problem is not None:
            self._sidecar_end = None
            if problem not in self._reported:
                self._reported.add(problem)
                instead = "its own clock counts on" if self.meter.rate else "nothing is counted: no rate is known"
                log.warning("guards.budget.file %s %s; %s", self._sidecar.path, problem, instead)

    def _write(self, trainer: Trainer) -> None:
        self._written = self._clock()
        path = trainer.run.path / "budget.json"
        if self._sidecar and self._sidecar.path.resolve() == path.resolve():
            return  # the sidecar's own
        cost, end = self.meter.read(), self._end(trainer)
        content = {
            "spent_usd": cost.usd, "rate_usd_per_hr": self.meter.rate, "hours_elapsed": cost.hours,
            "projected_total_usd": end and end.usd, "cap_usd": self.config.cap_usd,
            "last_update_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }  # fmt: skip
        with suppress(OSError):  # a full disk; a checkpoint that cannot be written is an error
            write_atomically(path, json.dumps(content) + "\n", durable=False)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        if self.meter is not None:
            self._write(trainer)

    on_exception = on_train_end


def _spent_before(run: Run) -> Cost:
    """The cost of the run's earlier sessions.

    Raises:
        RequestError: `budget.json` is damaged; to count from 0 would be to spend the cap twice.
    """
    before = run.read("budget.json")
    hours, usd = nonnegative(before.get("hours_elapsed")), nonnegative(before.get("spent_usd"))
    if (run.path / "budget.json").exists() and hours is None and usd is None:
        raise RequestError(
            f"{run.path / 'budget.json'} is damaged, so what the run has cost is not known: write "
            '{"hours_elapsed": H, "spent_usd": S} into it, or remove it to count from 0'
        )
    return Cost(hours or 0.0, usd)
