"""Where the time of a training step goes: Lightning's spans, each moment of a fit given to one part of the step.

`profile` runs the fit and says what was found.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from lightning.pytorch.profilers import Profiler
from torch.autograd.profiler import record_function

from lm.callbacks.checkpoints import Checkpoints
from lm.commands.step_loops import synchronize

if TYPE_CHECKING:
    from lm.trainer import Trainer

# Lightning's name of a span, after its last dot -> the part of a step. Spans nest: an optimizer step has the forward
# and backward pass of its last micro-batch in it. What is in no span, or in one that is not here, is the part around
# it; in none at all it is the rest: the loop's own work.
SPANS = {
    "train_dataloader_next": "data",
    "batch_to_device": "data",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
}
PARTS = ("data", "forward", "backward", "optimizer", "logging", "checkpoint", "validation", "rest")
RANGE = "lm."  # begins the names of the parts in a trace


class Label(NamedTuple):
    """What a moment of a training was spent on."""

    part: str
    callback: str | None = None  # whose hook it was


REST = Label("rest")
SAVING = Label("checkpoint")


class StepTimes(NamedTuple):
    """Where the time of one optimizer step went, with all that followed before the next one."""

    step: int
    seconds: dict[Label, float]  # each moment once
    whole: float  # seconds on the clock, from one end of a step to the next

    def part(self, part: str) -> float:
        """Seconds of one part, the hooks of all callbacks together."""
        return sum(seconds for label, seconds in self.seconds.items() if label.part == part)

    @property
    def saved(self) -> bool:
        """Whether it was followed by a checkpoint."""
        return SAVING in self.seconds


class Parts(Profiler):
    """Follows Lightning's spans and adds up seconds by part, step by step.

    The device is waited for wherever one part ends and another begins, or its work would count where it is waited for
    by chance.

    Args:
        borders_from: the optimizer step after which that is so; up to there it is waited for at the ends of steps.
        at_step: called with each optimizer step when it has ended, between two steps.

    Attributes:
        trainer: whose spans these are; to be set before the fit.
        steps: the finished steps, in order.
        tracing: whether the parts are marked for a running torch profiler.
    """

    trainer: "Trainer"

    def __init__(self, borders_from: int, at_step: Callable[[int], None]) -> None:
        super().__init__()
        self.steps: list[StepTimes] = []
        self.tracing = False
        self._borders_from = borders_from
        self._at_step = at_step
        self._spans: list[tuple[Label, record_function | None]] = []  # those that are open, outermost first
        self._now: Label | None = None  # None: in no span
        self._since = self._step_since = time.perf_counter()
        self._seconds: dict[Label, float] = defaultdict(float)

    def start(self, action_name: str) -> None:
        """A span begins."""
        hook = action_name.rpartition(".")[2]
        if hook in ("train_dataloader_next", "on_train_epoch_end"):
            self._end_step()
        label = self._label(action_name, hook)
        mark = None
        if self.tracing and label not in (None, self._now):
            mark = record_function(RANGE + label.part)
            mark.__enter__()
        self._spans.append((label, mark))
        self._cross(label)

    def stop(self, action_name: str) -> None:
        """The innermost span ends."""
        _, mark = self._spans.pop()
        self._cross(self._spans[-1][0] if self._spans else None)
        if mark is not None:
            mark.__exit__(None, None, None)

    def _label(self, action: str, hook: str) -> Label | None:
        """What a span inside the innermost open one is spent on."""
        around = self._now
        if hook == "save_checkpoint":
            return SAVING
        if around is not None and (around == SAVING or around.callback):
            return around
        name = re.match(r"\[Callback\](\w+)", action)
        if name and name[1] == Checkpoints.__name__:
            return Label("checkpoint", name[1])
        if self.trainer.validating:
            return Label("validation", name[1] if name else None)
        if name:
            return Label("logging", name[1])
        return Label(SPANS[hook]) if hook in SPANS else around

    def _cross(self, label: Label | None) -> None:
        """From here on time is spent on `label`."""
        if label == self._now:
            return
        if self._step > self._borders_from:
            synchronize(self.trainer.strategy.root_device)
        now = time.perf_counter()
        spent = self._now or (Label("validation") if self.trainer.validating else REST)
        self._seconds[spent] += now - self._since
        self._since, self._now = now, label

    @property
    def _step(self) -> int:
        """The optimizer step that is under way."""
        return (self.steps[-1].step if self.steps else 0) + 1

    def _end_step(self) -> None:
        if self.trainer.global_step < self._step:
            return  # in the middle of an accumulation
        synchronize(self.trainer.strategy.root_device)
        now = time.perf_counter()
        self._seconds[self._now or REST] += now - self._since
        self.steps.append(StepTimes(self._step, dict(self._seconds), now - self._step_since))
        self._seconds.clear()
        self._at_step(self.steps[-1].step)
        self._since = self._step_since = time.perf_counter()
