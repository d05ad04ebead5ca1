"""Guards that evaluate conditions on logged metrics: the alerts of a config, and loss spikes."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from lm.system.units import format_figure
from lm.training.alerts import NAMES, Condition
from lm.training.callbacks.guards import Finding, Guard
from lm.training.config import Action
from lm.training.module import LanguageModule
from lm.training.schedule import warmup_and_decay_steps
from lm.training.trainer import Trainer

ONCE = ("warn", "checkpoint")  # actions that come once, until the condition was false
FIRST_LINES = 10  # of a run, that count as its warm-up at least


class Alerts(Guard):
    """Evaluates every condition when its metric is logged, over the newest value and the last finite ones before.

    A condition is undecided (None) until its metric has a value and the window of its median is full; then it does not
    fire. `stop` and `rollback` come whenever it is true: the weights have changed since, so the finding is a new one.
    During the warm-up a condition does nothing before a line at which it is not true: `loss > 10` is true of every
    model that has learned nothing.
    """

    guard = "alert"

    def __init__(self, alerts: Mapping[str, Action]) -> None:
        self._actions = {Condition(text): action for text, action in alerts.items()}
        depths: dict[str, int] = {}
        for condition in self._actions:
            depths |= {name: max(depth, depths.get(name, 0)) for name, depth in condition.depths.items()}
        self._newest: dict[str, float] = {}
        self._before = {name: deque[float](maxlen=depth) for name, depth in depths.items()}
        self._reported: set[str] = set()
        self._armed: dict[str, int] = {}  # were not true once -> the newest step at which they were not

    def observe(self, trainer: Trainer, metrics: Mapping[str, float]) -> list[Finding]:
        """Findings such as `loss > 10: loss is 12.31 at step 130`."""
        findings = []
        step, schedule = trainer.global_step, trainer.lightning_module.options.schedule
        warmup, _ = warmup_and_decay_steps(trainer.max_steps, schedule)
        begins = step - schedule.begin_step <= max(warmup, FIRST_LINES * trainer.options.log_interval)
        values = {**metrics, "step": step, "data/tokens": trainer.tokens_seen}
        for condition, holds in self.evaluate(values).items():
            action, text = self._actions[condition], condition.text
            if holds is False:
                self._reported.discard(text)
            if not holds:  # false or undecided, as until its windows are full
                self._armed[text] = step
            if not holds or (begins and text not in self._armed):
                continue
            if not (action in ONCE and text in self._reported):
                message = self.explain(condition, step)
                began = self._armed.get(text, step - 1) + 1
                findings.append(Finding(self.guard, action, message, save=action == "checkpoint", began=began))
            self._reported.add(text)
        return findings

    def evaluate(self, metrics: Mapping[str, float]) -> dict[Condition, bool | None]:
        """Add the metrics of a log line, and evaluate the conditions whose metric is in the line; None: undecided."""
        values = {name: float(metrics[tag]) for name, tag in NAMES.items() if tag in metrics}
        for name in self._before.keys() & values.keys():
            if math.isfinite(self._newest.get(name, math.nan)):
                self._before[name].append(self._newest[name])
            self._newest[name] = values[name]
        return {each: self._holds(each) for each in self._actions if each.metric in values}

    def _holds(self, condition: Condition) -> bool | None:
        value, limit = self._newest[condition.metric], condition.number
        if condition.median_of:
            limit *= self._median(condition)
        return None if math.isnan(value) or math.isnan(limit) else condition.compare(value, limit)

    def _median(self, condition: Condition) -> float:
        values = list(self._before[condition.median_of])[-condition.count :]
        return median(values) if len(values) == condition.count else math.nan

    def explain(self, condition: Condition, step: int) -> str:
        """A condition, and the values of its metric and median: `loss > 10: loss is 12.31 at step 130`."""
        figures = []
        if condition.metric != "step":
            figures.append(f"{condition.metric} is {format_figure(self._newest[condition.metric])}")
        if condition.median_of:
            median_value = format_figure(self._median(condition))
            figures.append(f"median({condition.median_of}, {condition.count}) is {median_value}")
        return " ".join(filter(None, [f"{condition.text}:", ", ".join(figures), f"at step {step}"]))

    def on_guard(self, trainer: Trainer, pl_module: LanguageModule, guard: str, action: Action, message: str) -> None:
        if action == "rollback":
            self._newest.clear()  # values of a bad state are no measure for later ones: they enter no window

    def state_dict(self) -> dict[str, Any]:
        return {
            "newest": {name: value for name, value in self._newest.items() if math.isfinite(value)},
            "before": {name: list(values) for name, values in self._before.items()},
            "reported": sorted(self._reported),
            "not_true_at": self._armed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._newest = {name: value for name, value in state_dict["newest"].items() if name in self._before}
        for name, values in self._before.items():
            values.clear()
            values.extend(state_dict["before"].get(name, []))
        self._reported = set(state_dict["reported"])
        self._armed = dict(state_dict.get("not_true_at", {}))  # which an older checkpoint lacks


class Spike(Alerts):
    """Warns of a loss spike, of which `callbacks/postmortem` then writes a post-mortem."""

    guard = "spike"

    def __init__(self, condition: str) -> None:
        super().__init__({condition: "warn"})
