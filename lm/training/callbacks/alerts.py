"""Guards that evaluate conditions on logged metrics: the alerts of a config, and loss spikes."""

from collections.abc import Mapping
from typing import Any

from lm.training.alerts import AlertEvaluator
from lm.training.config import Action
from lm.training.guards import Finding, Line, Observer
from lm.training.schedule import warmup_and_decay_steps

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
        self._armed: dict[str, int] = {}  # were not true once -> the newest step at which they were not

    def observe(self, line: Line) -> list[Finding]:
        """Findings such as `loss > 10: loss is 12.31 at step 130`."""
        findings = []
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
                began = self._armed.get(text, line.step - 1) + 1
                findings.append(Finding(self.guard, action, message, save=action == "checkpoint", began=began))
            self._reported.add(text)
        return findings

    def forget_newest(self) -> None:
        self.evaluator.newest.clear()  # values of a bad state are no measure for later ones: they enter no window

    def state_dict(self) -> dict[str, Any]:
        alerts = {"reported": sorted(self._reported), "not_true_at": self._armed}
        return {**self.evaluator.state_dict(), **alerts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluator.load_state_dict(state_dict)
        self._reported = set(state_dict["reported"])
        self._armed = dict(state_dict.get("not_true_at", {}))  # which an older checkpoint lacks


class Spike(Alerts):
    """Warns of a loss spike, of which `callbacks/postmortem` then writes a post-mortem."""

    guard = "spike"

    def __init__(self, condition: str | None) -> None:
        super().__init__({condition: "warn"} if condition else {})
