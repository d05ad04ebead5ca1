"""Guards: observers that get every log line of a training and return what they find. None of them changes anything.

`callbacks/guards` shows them the lines of a training and acts on their findings. Others are in `callbacks/alerts`,
`callbacks/throughput_floor` and `budget`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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


class Observer(ABC):
    """Watches a training by its log lines. Its state, where it has one, is in checkpoints under the class's name."""

    @abstractmethod
    def observe(self, line: Line) -> list[Finding]:
        """What this line shows."""

    def forget_newest(self) -> None:
        """A rollback took back the steps of the newest line."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


# ---- NaN and Inf -----------------------------------------------------------------------------------------------------


class NotFinite(Observer):
    """Finds optimizer steps whose loss or gradient was not finite, and stops a run that has no others.

    Such a step changes no weight: the device decides that before the optimizer's step, the same on all ranks
    (see `training/step`).
    """

    def __init__(self, policy: Literal["skip", "stop"], max_skipped: int) -> None:
        self.policy, self.max_skipped, self._in_a_row = policy, max_skipped, 0

    def observe(self, line: Line) -> list[Finding]:
        if "train/loss" not in line.metrics:
            loss = line.metrics.get("val/loss", 0.0)
            return [] if math.isfinite(loss) else [Finding("not-finite", "warn", f"validation loss {loss}")]
        skipped = []
        for step in line.steps:
            if math.isfinite(step.loss) and (line.scaled or math.isfinite(step.grad_norm)):
                self._in_a_row = 0
            else:
                self._in_a_row += 1
                skipped.append(step)
        if not skipped:
            return []
        first, too_many = skipped[0], self._in_a_row >= self.max_skipped
        more = f" and {len(skipped) - 1} more since" if len(skipped) > 1 else ""
        message = (
            f"step {first.step}{more} changed no weight: its loss is {first.loss:.4g}, its gradient norm "
            f"{first.grad_norm:.4g}; `lm data show --run {line.run} --step {first.step}` has its samples"
        )
        if too_many:
            message += f"; {self._in_a_row} in a row are as many as guards.max_skipped allows"
        stop = too_many or self.policy == "stop"
        began = min(first.step, skipped[-1].step - self._in_a_row + 1)  # perhaps in an earlier log line
        return [Finding("not-finite", "stop" if stop else "warn", message, save=stop, began=began)]

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._in_a_row = state_dict.get("in_a_row", 0)
