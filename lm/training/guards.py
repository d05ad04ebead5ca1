"""What a guard sees, a `Line`, and what it returns, a `Finding`. Guards are callbacks; see `callbacks/guards`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lm.training.config import Action, ScheduleConfig
from lm.training.step_stats import StepRecord


@dataclass(frozen=True)
class Line:
    """The metrics of a log line, of a validation or of an evaluation, and where the run stands."""

    run: str  # its name
    step: int
    max_steps: int
    tokens: int  # that were trained on
    metrics: Mapping[str, float]
    log_interval: int
    schedule: ScheduleConfig
    validations_left: int = 0
    steps: Sequence[StepRecord] = ()  # since the log line before
    scaled: bool = False  # by a GradScaler, which overflows gradients now and then


class Finding(NamedTuple):
    """What a guard has found, and what is to be done."""

    guard: str  # `alert`, `not-finite`, `budget`, `throughput`, `spike` or `drill`
    action: Action
    message: str
    # Take a checkpoint of this step. A `stop` does so where nothing is wrong with the weights. Otherwise `last` stays
    # what it was: `auto` must not resume from a state that may be broken.
    save: bool = False
    began: int | None = None  # the step from which on something may be wrong; None: the newest

    def __str__(self) -> str:
        return f"{self.guard}: {self.message}" + ("" if self.action == "warn" else f": {self.action}")
