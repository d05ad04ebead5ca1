"""What a run costs while it runs: a meter that goes on over its sessions, another program's count, the time to come."""

import json
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lm.documents import number

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
            usable = number(content["spent_usd"]) is not None
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
