"""What is known of a moment when a training went wrong: the records that a post-mortem is made of.

`callbacks/post_mortem` notices the moment, `evidence` looks into it, `post_mortem_page` puts it into words and
`post_mortem` into a folder.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """A sample of the step, with its losses by the weights of now."""

    index: int  # in the stream of samples
    shard: str | None  # None: injected
    window: int | None
    tokens: list[int]  # T + 1 of them
    losses: list[float]  # T of them, of tokens 1 to T

    @property
    def loss(self) -> float:
        """Mean over its tokens."""
        return sum(self.losses) / len(self.losses)


@dataclass
class Moment:
    """What happened, in what can be written as JSON."""

    run: str
    step: int  # of the log line at which the guard acted
    time: float  # seconds since 1970
    guard: str
    action: str
    message: str
    tokens_per_step: int
    worst: int  # the step of this log line that stands out
    steps: list[tuple[int, float, float, bool]]  # of this log line: step, loss, gradient norm, whether it was applied
    baseline: float | None  # median loss of the log lines before
    injected: bool
    lines: list[dict[str, Any]] = field(default_factory=list)  # the log lines up to this one
    highest: tuple[int, float] | None = None  # the step with the highest finite loss so far, and that loss
    closed: str | None = None  # how it ended

    def __post_init__(self) -> None:
        nan = math.nan  # of which JSON makes null
        self.steps = [
            (step, nan if loss is None else loss, nan if norm is None else norm, applied)
            for step, loss, norm, applied in self.steps
        ]
        if self.highest is None:
            self.rise(self.steps)

    def rise(self, steps: Iterable[tuple]) -> None:
        """Take note of more steps, which begin with their number and loss."""
        for step, loss, *_ in steps:
            if math.isfinite(loss) and (self.highest is None or loss > self.highest[1]):
                self.highest = (step, loss)


@dataclass
class Evidence:
    """What the step saw and what that does in the network; empty where it could not be looked at."""

    samples: list[Sample] = field(default_factory=list)  # the worst first
    texts: list[str] = field(default_factory=list)  # of each sample
    pieces: list[list[str]] = field(default_factory=list)  # of the worst samples, the text of each token
    worst: dict[str, Any] | None = None  # the micro-batch: `what`, `activations`, `gradients`
    ordinary: dict[str, Any] | None = None  # alike
    without_gradients: str | None = None  # why there are none
