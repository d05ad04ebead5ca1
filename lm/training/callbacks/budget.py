"""What a run costs, and its end before it costs too much."""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule

from lm.errors import RequestError
from lm.runs.run import Run
from lm.system.files import nonnegative, write_atomically
from lm.system.process import seconds_since_process_start
from lm.training.callback import Callback
from lm.training.callbacks.guards import act, from_rank_zero
from lm.training.trainer import Trainer

# ---- spending --------------------------------------------------------------------------------------------------------
# What a run costs while it runs: a meter that goes on over its sessions, another program's count, the time to come.

STALE = 600.0  # seconds without news after which another program's count is no longer taken for the present
SETTLED = 10  # log lines that a pace is taken from before it says anything
RECENT = 100  # and at most


class Cost(NamedTuple):
    """Hours and US dollars; dollars are None where nobody knows the rate."""

    hours: float
    usd: float | None


class Meter:
    """Counts what a run costs, from what it had cost before.

    Args:
        rate: US dollars an hour; None: not known.
        before: what its earlier sessions cost.
        age: seconds that this session has been running for.
        clock: seconds; must not jump.
    """

    def __init__(self, rate: float | None, before: Cost, age: float, clock: Callable[[], float] = time.monotonic):
        self.rate, self._base, self._clock = rate, before, clock
        self._since = clock() - age

    def read(self, ahead: float = 0.0) -> Cost:
        """What it is now, or will be some seconds ahead."""
        hours = (self._clock() + ahead - self._since) / 3600
        usd = self._base.usd if self.rate is None else (self._base.usd or 0.0) + hours * self.rate
        return Cost(self._base.hours + hours, usd)

    def set(self, cost: Cost, rate: float | None) -> None:
        """Go on from what somebody else has counted, who may know the rate, too."""
        self._base, self._since = cost, self._clock()
        self.rate = self.rate if rate is None else rate


class Sidecar:
    """A `budget.json` that another program keeps.

    How old it is on first sight is told by its own date. From then on it is old when it has not changed for a while
    on a clock that does not jump, whatever the dates say.

    Args:
        path: the file.
        clock: seconds; must not jump.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock = path, clock
        self._update: str | None = None  # of the newest reading
        self._seen = 0.0

    def read(self) -> tuple[dict[str, Any] | None, str | None]:
        """What is new in it, if anything; and what is wrong with it, if anything."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
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


class Pace:
    """How long the rest of a run takes, from how long its steps, validations and other pauses took.

    A step counts as the median over the newest log lines, a validation as the median of all, so that one slow stretch
    does not count: a compilation, a full disk's minute. The line in which a session starts is left out altogether.
    Pauses, such as evaluations, count by the step: those after the first over the steps since then, so a single one
    says nothing.
    """

    def __init__(self) -> None:
        self.steps: deque[float] = deque(maxlen=RECENT)  # seconds a step, a line each
        self.validations: deque[float] = deque(maxlen=RECENT)  # seconds
        self.pauses: deque[tuple[int, float]] = deque(maxlen=RECENT)  # after which step, and seconds

    def rest(self, steps: int, validations: int) -> float | None:
        """Seconds that so many steps and validations will take; None while nothing is known."""
        if not self.steps:
            return None
        validating = validations * (median(self.validations) if self.validations else 0.0)
        return steps * (median(self.steps) + self._paused_a_step()) + validating

    def _paused_a_step(self) -> float:
        if not self.pauses:
            return 0.0
        (first, _), (last, _) = self.pauses[0], self.pauses[-1]
        return sum(seconds for step, seconds in self.pauses if step > first) / (last - first) if last > first else 0.0

    @property
    def settled(self) -> bool:
        return len(self.steps) >= SETTLED


# ---- budget ----------------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

WRITE_EVERY = 10.0  # seconds between writes of budget.json
IN_A_ROW = 3  # projections over the cap before it does


@dataclass
class BudgetConfig:
    """What a run may cost.

    Args:
        cap_usd: US dollars that the run may cost over all its sessions.
        rate_usd_per_hr: What the machine costs, in US dollars an hour.
        max_hours: Hours that the run may take over all its sessions.
        file: A `budget.json` that another program keeps; what it says counts, and the own clock where it says nothing.
        warn_at: Share of the cap, or of the hours, at which a warning is due.
        dry_run: Only say what would be done.
    """

    cap_usd: float | None = None
    rate_usd_per_hr: float | None = None
    max_hours: float | None = None
    file: str | None = None
    warn_at: float = 0.8
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("cap_usd", "rate_usd_per_hr", "max_hours"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(f"guards.budget.{name} {value} must be more than 0")
        if not 0 < self.warn_at <= 1:
            raise RequestError(f"guards.budget.warn_at {self.warn_at} is a share of the cap: more than 0, at most 1")
        if self.cap_usd is not None and self.rate_usd_per_hr is None and self.file is None:
            raise RequestError("guards.budget.cap_usd needs guards.budget.rate_usd_per_hr, or a guards.budget.file")
        if self.dry_run and self.cap_usd is None and self.max_hours is None:
            raise RequestError("guards.budget.dry_run needs guards.budget.cap_usd or guards.budget.max_hours")

    @property
    def wanted(self) -> bool:
        """Whether there is anything to count."""
        return any(value is not None for value in (self.cap_usd, self.rate_usd_per_hr, self.max_hours, self.file))


class Verdict(NamedTuple):
    kind: str  # "near", "projected" or "spent"
    reason: str


def judge(config: BudgetConfig, cost: Cost, projected: Cost | None) -> Verdict | None:
    """What a cost and its projection to the end of the run mean.

    Returns:
        The worst that can be said: the cap is spent, it will be, or most of it is; None where all is well.
    """
    for kind in ("spent", "projected", "near"):
        for cap, form, index in ((config.cap_usd, "${:,.2f}", 1), (config.max_hours, "{:,.2f} hours", 0)):
            now, end = cost[index], projected[index] if projected else None
            if cap is None or now is None:
                continue
            most, have = form.format(cap), form.format(now)
            if kind == "spent" and now >= cap:
                return Verdict(kind, f"{have} of {most} are spent")
            if kind == "projected" and end is not None and end > cap:
                return Verdict(kind, f"the run will have taken {form.format(end)} of {most}; {have} so far")
            if kind == "near" and now >= config.warn_at * cap:
                return Verdict(kind, f"{have} of {most} are spent, {now / cap:.0%}")
    return None


class Budget(Callback):
    """Counts the cost, writes `budget.json`, and ends the run in time.

    The clock runs from the start of the process, for the machine is paid for from then on, and goes on from what
    earlier sessions wrote. At log lines: most of the cap is spent, a warning; it will not suffice for the rest of the
    run, a checkpoint and the end; it is spent, the end at once, without a checkpoint.

    The first steps are slow and say little. So a projection (see `Pace`) stops a run only once it is measured over 10
    log lines of this session and is over the cap for the third time in a row. Before that, and where steps become
    slower all of a sudden, the last log line that leaves time for one more and a checkpoint is the one that stops it.

    Args:
        config: the cap and the rate.
        clock: seconds; must not jump.
    """

    def __init__(self, config: BudgetConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self.meter: Meter | None = None  # on rank zero, from the start of a training
        self._sidecar: Sidecar | None = None
        self._pace = Pace()
        self._line: tuple[float, int] | None = None  # when the newest log line was, and after which step
        self._told: tuple[float, int] | None = None  # when the newest log line was written, and after which step
        self._since: tuple[float, int] | None = None  # all seconds and steps between it and the one before
        self._written = -math.inf
        self._end_by_sidecar: float | None = None  # US dollars, where it says so
        self._over = 0  # projections over the cap in a row
        self._said: set[str] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.config.wanted:
            return
        if trainer.is_global_zero:
            cost = _spent_before(trainer.run)
            self.meter = Meter(self.config.rate_usd_per_hr, cost, seconds_since_process_start(), self._clock)
            self._sidecar = Sidecar(Path(self.config.file), self._clock) if self.config.file else None
        verdict = from_rank_zero(trainer, self._look(trainer))
        if verdict and verdict.kind == "spent" and not self.config.dry_run:  # gone on with after its end
            self._act(trainer, pl_module, verdict)
            raise trainer.stop

    def on_pause(self, trainer: Trainer, seconds: float, kind: str) -> None:
        """Leave a pause out of the time of the steps, and count it as one that will come again."""
        if kind == "validation":
            self._pace.validations.append(seconds)
        else:
            self._pace.pauses.append((trainer.global_step, seconds))
        if self._line:
            self._line = (self._line[0] + seconds, self._line[1])

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """Look at the cost, once a log line of the training; called on every rank."""
        step = trainer.global_step
        if not self.config.wanted or (self._line and step == self._line[1]):
            return
        now = self._clock()
        if self._line and step > self._line[1]:
            self._pace.steps.append((now - self._line[0]) / (step - self._line[1]))
        self._line = (now, step)
        self._since = (now - self._told[0], step - self._told[1]) if self._told else None
        self._told = (now, step)
        verdict = from_rank_zero(trainer, self._look(trainer))
        if verdict and verdict.kind not in self._said and (verdict.kind == "near" or step < trainer.max_steps):
            self._act(trainer, pl_module, verdict)

    def _act(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict) -> None:
        self._said.add(verdict.kind)
        end = {"near": "", "projected": "a checkpoint and the end", "spent": "the end, without a checkpoint"}
        if verdict.kind == "near":
            act(trainer, pl_module, "budget", "warn", verdict.reason)
        elif self.config.dry_run:
            act(trainer, pl_module, "budget", "warn", f"{verdict.reason}; if not for the dry run: {end[verdict.kind]}")
        else:
            reason = f"{verdict.reason}: {end[verdict.kind]}"
            act(trainer, pl_module, "budget", "stop", reason, save=verdict.kind == "projected")

    def _look(self, trainer: Trainer) -> Verdict | None:
        """What there is to say, on rank zero; the file is written on the way."""
        if self.meter is None:
            return None
        self._listen()
        cost, end = self.meter.read(), self._end(trainer)
        if self._clock() - self._written >= WRITE_EVERY:
            self._write(trainer)
        verdict = judge(self.config, cost, end if self._pace.settled else None)
        self._over = self._over + 1 if verdict and verdict.kind == "projected" else 0
        verdict = judge(self.config, cost, None) if 0 < self._over < IN_A_ROW else verdict
        return verdict if verdict and verdict.kind != "near" else self._last_moment(trainer, cost) or verdict

    def _last_moment(self, trainer: Trainer, cost: Cost) -> Verdict | None:
        """Whether the cap would be spent by the time of the next log line and, as long again, a checkpoint."""
        if self._since is None or self._since[1] < 1:
            return None
        seconds, steps = self._since
        left = (trainer.max_steps - trainer.global_step) / steps
        coming = self.meter.read(ahead=(1 - 1e-9) * seconds * min(2.0, left))
        verdict = judge(self.config, coming, None)
        if verdict is None or verdict.kind != "spent":
            return None
        have = f"{cost.hours:,.2f} hours" if cost.usd is None else f"${cost.usd:,.2f}"
        return Verdict("projected", f"{have} so far, and before the next log line is written {verdict.reason}")

    def _end(self, trainer: Trainer) -> Cost | None:
        """What the whole run will have cost."""
        seconds = self._pace.rest(*_left(trainer))
        if seconds is None:
            return None
        end = self.meter.read(ahead=seconds)
        return end if self._end_by_sidecar is None else end._replace(usd=self._end_by_sidecar)

    def _listen(self) -> None:
        """Take over what the sidecar has counted."""
        if self._sidecar is None:
            return
        content, problem = self._sidecar.read()
        if content is not None:
            hours = nonnegative(content.get("hours_elapsed"))
            cost = Cost(self.meter.read().hours if hours is None else hours, nonnegative(content["spent_usd"]))
            self.meter.set(cost, nonnegative(content.get("rate_usd_per_hr")))
            self._end_by_sidecar = nonnegative(content.get("projected_total_usd"))
        if problem is not None:
            self._end_by_sidecar = None
            if problem not in self._said:
                self._said.add(problem)
                instead = "the own clock counts on" if self.meter.rate else "nothing counts: no rate is known"
                log.warning("guards.budget.file %s %s; %s", self._sidecar.path, problem, instead)

    def _write(self, trainer: Trainer) -> None:
        self._written = self._clock()
        path = trainer.run.path / "budget.json"
        if self._sidecar and self._sidecar.path.resolve() == path.resolve():
            return  # it is the other's
        cost, end = self.meter.read(), self._end(trainer)
        content = {
            "spent_usd": cost.usd, "rate_usd_per_hr": self.meter.rate, "hours_elapsed": cost.hours,
            "projected_total_usd": end and end.usd, "cap_usd": self.config.cap_usd,
            "last_update_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }  # fmt: skip
        with suppress(OSError):  # a full disk: what is vital will say so
            write_atomically(path, json.dumps(content) + "\n", durable=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.meter is not None:
            self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.meter is not None:
            self._write(trainer)


def _spent_before(run: Run) -> Cost:
    """What the run's earlier sessions cost.

    Raises:
        RequestError: the file that has it is damaged; to count from 0 would be to spend the cap twice.
    """
    before = run.read("budget.json")
    hours, usd = nonnegative(before.get("hours_elapsed")), nonnegative(before.get("spent_usd"))
    if (run.path / "budget.json").exists() and hours is None and usd is None:
        raise RequestError(
            f"{run.path / 'budget.json'} is damaged, so what the run has cost is not known: write "
            '{"hours_elapsed": H, "spent_usd": S} into it, or remove it to count from 0'
        )
    return Cost(hours or 0.0, usd)


def _left(trainer: Trainer) -> tuple[int, int]:
    """Optimizer steps and validations that are still to come."""
    step, end, interval = trainer.global_step, trainer.max_steps, trainer.val_interval
    if not trainer.datamodule.has_validation:
        return end - step, 0
    return end - step, end // interval - step // interval + (end % interval > 0)
