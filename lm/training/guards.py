"""Guards: observers that get every log line of a training and return what they find. None of them changes anything.

`callbacks/guards` shows them the lines of a training and acts on their findings. The budget is such an observer too, in
`budget`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lm.kernels.torch_private import compiled_graphs
from lm.system.units import format_count, plural
from lm.training.alerts import AlertEvaluator
from lm.training.config import Action, ScheduleConfig, ThroughputConfig
from lm.training.schedule import warmup_and_decay_steps
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


# ---- alerts ----------------------------------------------------------------------------------------------------------

ONCE = ("warn", "checkpoint")  # actions that come once, until the condition was false
FIRST_LINES = 10  # of a run, that count as its warm-up at least


class Alerts(Observer):
    """Evaluates every condition when its metric is logged.

    `stop` and `rollback` come whenever it is true: the weights have changed since, so the finding is a new one. During
    the warm-up a condition does nothing before a line at which it is not true: `loss > 10` is true of every model that
    has learned nothing.
    """

    guard = "alert"

    def __init__(self, alerts: Mapping[str, Action]) -> None:
        self.evaluator = AlertEvaluator(alerts)
        self._actions = dict(zip(self.evaluator.conditions, alerts.values(), strict=True))
        self._reported: set[str] = set()
        self._armed: dict[str, int] = {}  # were not true once -> the newest step at which they were not; 0: not known

    def observe(self, line: Line) -> list[Finding]:
        """Findings such as `loss > 10: loss is 12.31 at step 130`."""
        found = []
        warmup, _ = warmup_and_decay_steps(line.max_steps, line.schedule)
        begins = line.step - line.schedule.begin_step <= max(warmup, FIRST_LINES * line.log_interval)
        values = {**line.metrics, "step": line.step, "data/tokens": line.tokens}
        for condition, holds in self.evaluator.evaluate(values).items():
            action, text = self._actions[condition], condition.text
            if holds is False:
                self._reported.discard(text)
            if not holds:  # false or undecided, as until its windows are full
                self._armed[text] = line.step
            if not holds or (begins and text not in self._armed):
                continue
            if not (action in ONCE and text in self._reported):
                message = self.evaluator.explain(condition, line.step)
                began = (self._armed.get(text) or line.step - 1) + 1
                found.append(Finding(self.guard, action, message, save=action == "checkpoint", began=began))
            self._reported.add(text)
        return found

    def forget_newest(self) -> None:
        self.evaluator.drop_newest()  # values of a bad state are no measure for later ones

    def state_dict(self) -> dict[str, Any]:
        alerts = {"reported": sorted(self._reported), "not_true_at": self._armed}
        return {**self.evaluator.state_dict(), **alerts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluator.load_state_dict(state_dict)
        self._reported = set(state_dict["reported"])
        older = dict.fromkeys(state_dict.get("was_false", ()), 0)  # of a checkpoint that names no steps
        self._armed = older | state_dict.get("not_true_at", {})


class Spike(Alerts):
    """Warns of a loss spike, of which `callbacks/postmortem` then writes a post-mortem."""

    guard = "spike"

    def __init__(self, condition: str | None) -> None:
        super().__init__({condition: "warn"} if condition else {})


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


# ---- throughput ------------------------------------------------------------------------------------------------------

DATA_WAIT = 0.1  # part of the time without data from which on data is named as a cause


class ThroughputFloor(Observer):
    """Names the causes when training is below its floor for some log lines, and again only after it was above it.

    The first log line of a session is not judged: in it kernels are compiled and caches are cold.
    """

    def __init__(self, config: ThroughputConfig) -> None:
        self.config = config
        self.begin()

    def begin(self, computed: str = "", known_causes: Callable[[], list[str]] = list) -> None:
        """A session begins, with these kernels, in words; `known_causes` of a low throughput are in no log line."""
        self._computed, self._known_causes = computed, known_causes
        self._first = True
        self._below = 0  # log lines in a row
        self._graphs = 0  # that torch.compile had made when the first of them began

    def observe(self, line: Line) -> list[Finding]:
        rate, floor = line.metrics.get("perf/tokens_per_second"), self.config.floor
        if floor is None or rate is None:
            return []
        graphs, reason = compiled_graphs()
        if self._first or rate >= floor:
            self._first, self._below, self._graphs = False, 0, graphs
            return []
        self._below += 1
        if self._below != self.config.patience:
            return []
        lines = plural(self._below, "log line")
        causes = self._causes(line.metrics.get("perf/data_wait"), graphs - self._graphs, reason, lines)
        message = f"{format_count(rate)} tokens/s, below {format_count(floor)} for {lines}: {'; '.join(causes)}"
        action = self.config.action if line.step < line.max_steps else "warn"
        return [Finding("throughput", action, message, save=action != "warn")]

    def _causes(self, data_wait: float | None, graphs: int, reason: str, lines: str) -> list[str]:
        """Every known cause: part of the time without data, graphs that were compiled in these lines, and others."""
        found = []
        if data_wait is not None and data_wait >= DATA_WAIT:
            found.append(f"waiting for data {data_wait:.0%} of the time; is the storage of the shards slow?")
        if graphs:
            why = f", the last time because {reason}" if reason else ""
            found.append(f"torch.compile made {graphs} new graphs in {lines}{why}")
        if found := found + self._known_causes():
            return found
        wait = "not measured" if data_wait is None else f"{data_wait:.1%}"
        return [f"no cause found (data wait {wait}, no new graphs, {self._computed}, no limit of clocks seen)"]


# ---- rollbacks -------------------------------------------------------------------------------------------------------


class Rollbacks:
    """Counts the rollbacks of a run, at most `most` of them, and knows since when something may be wrong."""

    def __init__(self, most: int) -> None:
        self.most, self.done = most, 0
        self.good = 0  # the step of the last log line at which no guard asked for one, or of the newest rollback
        self.asked = False  # at this log line

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """The guards have seen this line."""
        if not self.asked and "train/loss" in metrics:  # other lines say nothing of the steps before them
            self.good = step
        self.asked = False

    def ask(self, step: int, newest: Callable[[int], int | None]) -> tuple[int | None, str]:
        """The step to return to from this one, and what the log says of it; None: there is no way back, and why.

        `newest` gives the step of the newest sound checkpoint that is not younger than a step.
        """
        self.asked = True
        if self.done >= self.most:
            return None, f"guards.max_rollbacks {self.most} are used up"
        to = newest(self.good)
        if to is None:
            return None, "a rollback has nothing to return to"
        self.done += 1
        self.good = step  # whose checkpoint will have the weights that are returned to
        return to, (
            f"rollback {self.done} of {self.most}: weights and optimizer are those of step {to}; training continues "
            f"with step {step + 1} and skips the samples in between"
        )
