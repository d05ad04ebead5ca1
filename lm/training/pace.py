"""The time that is left of a training: one estimate, which log lines, the progress bar and `lm monitor` show."""

import math
import statistics
from collections import deque


class Pace:
    """How long steps and validations take, by the newest ones; a median, so that a hiccup does not move it.

    The first log line begins the first interval: what it took to start and to compile is in none.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=50)  # seconds a step
        self._validations: deque[float] = deque(maxlen=10)  # seconds
        self._validated: deque[int] = deque(maxlen=2)  # steps
        self._before: tuple[int, float] | None = None  # step and time of the line before
        self._between = 0  # steps between two log lines

    def add(self, step: int, at: float, validation: bool) -> None:
        """A log line, written at a time, after its step or, if it is a validation's, after that."""
        if validation:
            self._validated.append(step)
        if self._before is not None:
            steps, seconds = step - self._before[0], at - self._before[1]
            if validation and (self._steps or steps == 0):
                training = steps * statistics.median(self._steps) if steps else 0.0
                self._validations.append(max(0.0, seconds - training))
            elif not validation and steps > 0:
                self._steps.append(seconds / steps)
                self._between = steps
        self._before = (step, at)

    def eta(self, step: int, last: int, now: float) -> float | None:
        """Seconds until the last step is done and validated; None before two log lines were written."""
        if not self._steps or self._before is None:
            return None
        pace = statistics.median(self._steps)
        left = (last - step) * pace
        if self._validations:
            every = self._validated[-1] - (self._validated[0] if len(self._validated) > 1 else 0)
            coming = math.ceil(last / every) - step // every if every > 0 else 0
            left += coming * statistics.median(self._validations)
        since = min(max(0.0, now - self._before[1]), self._between * pace, left)  # it counts down until the next line
        return left - since if step < last else 0.0

