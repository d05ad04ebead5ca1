"""The guards of a run: what they are told in the config, and who they are."""

import sys
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning.pytorch import Callback

from lm.alerts import Watch
from lm.callbacks.actions import Action
from lm.callbacks.alerts import Alerts
from lm.callbacks.budget import Budget, BudgetConfig
from lm.callbacks.not_finite import NotFinite
from lm.callbacks.post_mortem import PostMortem
from lm.callbacks.rollback import Rollback
from lm.callbacks.spike import SpikeInjection
from lm.callbacks.throughput_floor import ThroughputConfig, ThroughputFloor
from lm.errors import RequestError


@dataclass
class GuardsConfig:
    """What is watched while a run trains, and what is done about it.

    A guard that stops a run ends it with exit code 3, and says why in `run.json`, `state.json` and `alerts.jsonl`.

    Args:
        alerts: Conditions over the logged metrics, and what to do when one becomes true, such as `loss > 10: stop` or
            `loss > 1.5 * median(loss, 100): rollback`. `warn` says so; `checkpoint` saves; `stop` ends the run;
            `rollback` returns to the weights of the last good checkpoint and goes on with the samples that come next.
            Windows count log lines before the newest.
        not_finite: When a loss or gradient is NaN or Inf, no weight is changed; then `skip` goes on with the next
            step, and `stop` ends the run with a checkpoint.
        max_skipped: So many such steps in a row end the run.
        max_rollbacks: How often a run may roll back; the next time ends it.
        budget: What the run may cost.
        throughput: Tokens a second that it must reach.
        spike: The condition of a loss spike, which is written up in a post-mortem; none: no spike is looked for.
        inject_step: A drill: five steps of rare tokens from this step on.

    Raises:
        RequestError: an expression cannot be read, or a number is outside its range.
    """

    alerts: dict[str, Action] = field(default_factory=dict)
    not_finite: Literal["skip", "stop"] = "skip"
    max_skipped: int = 10
    max_rollbacks: int = 3
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)
    spike: str | None = "max_loss > 1.3 * median(loss, 10)"
    inject_step: int | None = None

    def __post_init__(self) -> None:
        Watch([*self.alerts, *([self.spike] if self.spike else [])])  # read now, so that a typo costs no GPU time
        for name, least in {"max_skipped": 1, "max_rollbacks": 0, "inject_step": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"guards.{name} {value} must be at least {least}")

    def harmless(self) -> "GuardsConfig":
        """The same guards, which look and change nothing: for a few steps that are not the run that they are for."""
        return replace(
            self, alerts=dict.fromkeys(self.alerts, "warn"), not_finite="skip", max_skipped=sys.maxsize,
            budget=BudgetConfig(), throughput=ThroughputConfig(), inject_step=None,
        )  # fmt: skip


def guard_callbacks(config: GuardsConfig) -> list[Callback]:
    """The guards, in the order in which they look at a log line.

    Those that find something come first, then who writes it up, then who undoes it.
    """
    injection = [] if config.inject_step is None else [SpikeInjection(config.inject_step)]
    return [
        *injection,
        NotFinite(config.not_finite, config.max_skipped),
        Alerts(config.alerts),
        Budget(config.budget),
        ThroughputFloor(config.throughput),
        PostMortem(config.spike),
        Rollback(config.max_rollbacks),
    ]
