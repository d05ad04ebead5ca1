"""How long the steps of a training take, and its rest: one estimate for log lines, progress bar and budget."""

from collections import deque
from collections.abc import Sequence
from statistics import median

KEPT_LINES = 100  # of the newest, that a pace is the median of


class StepTimeEstimator:
    """A step counts as the median over log lines, a validation as the median of all, so that one slow part does not
    count. The line in which a session starts is left out. Other pauses, such as evaluations, count by the step: those
    after the first over the steps since then.
    """

    def __init__(self) -> None:
        self.steps: deque[float] = deque(maxlen=KEPT_LINES)  # seconds a step, of each log line
        self.validations: deque[float] = deque(maxlen=KEPT_LINES)  # seconds
        self.pauses: deque[tuple[int, float]] = deque(maxlen=KEPT_LINES)  # after which step, and seconds
        self.newest_step = -1  # of a log line
        self._newest_time = self._paused = 0.0  # of that line, and seconds of pauses since then

    def add_line(self, step: int, now: float) -> tuple[float, int] | None:
        """Count a log line of training; returns the seconds and steps since the one before, if there is one."""
        interval = (now - self._newest_time, step - self.newest_step) if self.newest_step >= 0 else None
        if interval and interval[1]:
            self.steps.append((interval[0] - self._paused) / interval[1])
        self.newest_step, self._newest_time, self._paused = step, now, 0.0
        return interval

    def add_pause(self, step: int, seconds: float, kind: str) -> None:
        """Count a pause after a step, as callbacks' `on_pause` have it."""
        self._paused += seconds
        if kind == "validation":
            self.validations.append(seconds)
        else:
            self.pauses.append((step, seconds))

    def rest(self, steps: int, validations: int) -> float | None:
        """Seconds that so many steps and validations will take; None before two log lines."""
        if not self.steps:
            return None
        seconds = steps * median(self.steps) + validations * median(self.validations or [0.0])
        if self.pauses and (since := self.pauses[-1][0] - self.pauses[0][0]):
            seconds += steps * sum(pause for step, pause in self.pauses if step > self.pauses[0][0]) / since
        return seconds


def validations_left(step: int, max_steps: int, interval: int) -> int:
    """Validations after a step: one every `interval` steps, and one after the last step."""
    return max_steps // interval - step // interval + (max_steps % interval > 0)


def steps_within(seconds: float, step: float, pauses: Sequence[tuple[int, float]]) -> float:
    """Optimizer steps of `step` seconds in some time, with pauses: every how many steps, and of how many seconds."""
    return seconds / (step + sum(pause / interval for interval, pause in pauses))
