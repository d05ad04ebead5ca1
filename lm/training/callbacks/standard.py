"""The config of the guards, and the callbacks of every training in their order."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Literal

from lightning.pytorch import Callback

from lm.errors import RequestError, require_at_least
from lm.training.alerts import AlertEvaluator
from lm.training.callbacks.budget import Budget, BudgetConfig
from lm.training.callbacks.checkpoints import Checkpoints
from lm.training.callbacks.evaluation import EvaluationConfig, Evaluations, Predictions, Samples, SamplesConfig
from lm.training.callbacks.guards import (
    Action,
    Alert,
    Alerts,
    NotFinite,
    Rollback,
    SkippedData,
    ValidationTrend,
    action_and_message,
)
from lm.training.callbacks.logging import Histograms, ProgressBar, RunLog
from lm.training.callbacks.notifications import Notifications, open_recipients
from lm.training.callbacks.postmortem import PostMortem, SpikeInjection
from lm.training.callbacks.run_folder import Heartbeat, RunFolder
from lm.training.callbacks.stopping import EarlyStopping, Interrupt
from lm.training.callbacks.throughput import Throughput, ThroughputConfig, ThroughputFloor
from lm.training.trainer import Trainer


@dataclass
class GuardsConfig:
    """Guards that watch a run while it trains.

    A guard that stops a run ends it with exit code 3; its reason is in `run.json`, `state.json` and `alerts.jsonl`.

    Args:
        alerts: Conditions over the logged metrics, and the action when one becomes true, such as `loss > 10: stop` or
            `loss > 1.5 * median(loss, 100): rollback`. `warn` reports it; `checkpoint` saves; `stop` ends the run;
            `rollback` returns to the weights of the last good checkpoint and continues with the next samples.
            Windows count log lines before the newest. With a message: `{action: stop, message: look at the data}`.
            A condition that is true of an untrained model does nothing before it was false once.
        not_finite: When a loss or gradient is NaN or Inf, no weight is changed; then `skip` continues with the next
            step, and `stop` ends the run with a checkpoint.
        max_skipped: This many such steps in a row end the run.
        max_rollbacks: How often a run may roll back; the next rollback ends it.
        budget: What the run may cost.
        throughput: Tokens a second that it must reach.
        spike: The condition of a loss spike, for which a post-mortem is written; none: no spike is looked for.
        inject_step: A drill: five steps of rare tokens from this step on, and a post-mortem of them.
    """

    alerts: dict[str, Action | Alert] = field(default_factory=dict)
    not_finite: Literal["skip", "stop"] = "skip"
    max_skipped: int = 10
    max_rollbacks: int = 3
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)
    spike: str | None = "max_loss > 1.3 * median(loss, 9)"  # from the tenth log line on
    inject_step: int | None = None

    def __post_init__(self) -> None:
        AlertEvaluator([*self.alerts, *([self.spike] if self.spike else [])])  # refuses a typo
        for text, (_, message) in zip(self.alerts, map(action_and_message, self.alerts.values())):
            if message and not message.isprintable():
                raise RequestError(f"guards.alerts `{text}`: its message {message!r} must be one line of text")
        require_at_least(1, "guards.", max_skipped=self.max_skipped, inject_step=self.inject_step)
        require_at_least(0, "guards.", max_rollbacks=self.max_rollbacks)

    def harmless(self) -> "GuardsConfig":
        """The same guards without their effects on a run, for a few steps that are only timed."""
        return replace(
            self, alerts=dict.fromkeys(self.alerts, "warn"), not_finite="skip", max_skipped=sys.maxsize,
            budget=BudgetConfig(), throughput=ThroughputConfig(), inject_step=None,
        )  # fmt: skip


def standard_callbacks(
    trainer: Mapping[str, Any],
    run_folder: RunFolder,
    guards: GuardsConfig = GuardsConfig(),
    samples: SamplesConfig = SamplesConfig(),
    evaluation: EvaluationConfig = EvaluationConfig(),
    notify: Sequence[Any] = (),
) -> list[Callback]:
    """The callbacks of `lm fit` in their order, from the config under `trainer:`, `guards:` and so on.

    The run's folder comes first, so that those after it may write. Of the guards those that find something come first,
    then the post-mortem of it, then the rollback.

    Args:
        trainer: the arguments of the `Trainer`; those that are left out have its defaults.
        notify: addresses to send messages to, as under `notify:`.

    Raises:
        RequestError: an address cannot be used.
    """
    trainer = {name: parameter.default for name, parameter in signature(Trainer).parameters.items()} | dict(trainer)
    early, every = trainer["early_stopping"], trainer["histogram_interval"]
    stopping = [] if early.patience is None else [EarlyStopping(early.patience, early.min_delta)]
    injection = [] if guards.inject_step is None else [SpikeInjection(guards.inject_step)]
    optional: list[Callback] = [] if every is None else [Histograms(every)]
    notifications = [Notifications(open_recipients(notify))] if notify else []
    if samples.prompts:
        optional.append(Samples(samples))
    if evaluation.tasks:
        optional.append(Evaluations(evaluation))
    return [
        run_folder,
        Heartbeat(),
        SkippedData(),
        RunLog(trainer["log_interval"]),
        Throughput(),
        *injection,
        NotFinite(guards.not_finite, guards.max_skipped),
        ValidationTrend(),
        Alerts(guards.alerts),
        Budget(guards.budget),
        ThroughputFloor(guards.throughput),
        PostMortem(guards.spike, guards.inject_step),
        Rollback(guards.max_rollbacks),
        *notifications,
        ProgressBar(),
        *optional,
        *stopping,
        Checkpoints(
            trainer["checkpoint_interval"], early.min_delta, trainer["keep_checkpoints"], trainer["keep_every"]
        ),
        Interrupt(),
        Predictions(),
    ]
