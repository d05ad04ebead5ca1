"""The alerts of a config: what is done when a condition over the metrics becomes true."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule

from lm.alerts import Watch
from lm.callbacks.actions import Action, act, agree
from lm.trainer import Trainer

ONCE = ("warn", "checkpoint")  # not said again until it was false; after the others nothing is as it was


class Alerts(Callback):
    """Looks at every condition when one of its metrics is logged.

    `warn` and `checkpoint` come once, when a condition becomes true, and not again until it was false. `stop` and
    `rollback` come whenever it is true: a run that was stopped and is gone on with, or that went back, is on other
    weights, and what still holds there is a new finding. Rank zero decides, since tokens a second differ among ranks.

    Args:
        alerts: expressions, and what is done when they hold.

    Raises:
        RequestError: an expression cannot be read.
    """

    def __init__(self, alerts: Mapping[str, Action]) -> None:
        self.watch = Watch(alerts)
        self.actions = {expression: alerts[text] for text, expression in zip(alerts, self.watch.expressions)}
        self._said: set[str] = set()

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """Take the metrics of a log line; called on every rank."""
        if not self.actions:
            return
        line = {**metrics, "step": trainer.global_step, "data/tokens": trainer.tokens_seen}
        for action, message in agree(trainer, self._found(line)):
            act(trainer, pl_module, "alert", action, message)

    def on_guard(
        self, trainer: Trainer, pl_module: LightningModule, guard: str, action: Action, message: str
    ) -> None:
        """What led to a rollback is no measure for what comes after it."""
        if action == "rollback":
            self.watch.history.drop_newest()

    def _found(self, line: dict[str, float]) -> list[tuple[Action, str]]:
        """What is to be done, and what was found: `loss > 10: loss is 12.31 at step 130`."""
        found = []
        for expression, holds in self.watch.look(line).items():
            action = self.actions[expression]
            if holds and not (action in ONCE and expression.text in self._said):
                figures = expression.explain(self.watch.history, but=("step",))
                found.append((action, f"{expression.text}: {figures}{' ' if figures else ''}at step {line['step']}"))
            if holds:
                self._said.add(expression.text)
            elif holds is False:
                self._said.discard(expression.text)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**self.watch.history.state_dict(), "said": sorted(self._said)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.watch.history.load_state_dict(state_dict)
        self._said = set(state_dict["said"])
