"""The hooks that callbacks of this project have beyond Lightning's, and those of Lightning's that do not work here."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import Callback as LightningCallback

from lm.errors import RequestError
from lm.system.arguments import shown


class Callback(LightningCallback):
    """Lightning's Callback with further hooks, which do nothing here.

    A callback that is not of this class may define any of them, too: `call_hook` goes by the name.
    """

    def on_model_built(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The decoder is there, with its first weights; the optimizer is not, and nothing is compiled or sharded."""

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> Mapping[str, float]:
        """Metrics for the log line of this optimizer step. Called on every rank, every `trainer.log_interval` steps."""
        return {}

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: Mapping[str, float]) -> None:
        """Metrics have been logged: those of a log line, of a validation, or of an evaluation. Called on every rank."""

    def on_guard(self, trainer: Trainer, pl_module: LightningModule, guard: str, action: str, message: str) -> None:
        """A guard has found something; called before its action changes anything. See `callbacks/guards.act`."""

    def on_pause(self, trainer: Trainer, seconds: float, kind: str) -> None:
        """Training has stood still for so long, for a `validation` or for something `other`, such as samples."""

    def rows_of_step(self, trainer: Trainer, step: int) -> np.ndarray | None:
        """The global batch `(N, T + 1)` that this callback put in the place of the data's own; None: it did not."""
        return None


def call_hook(trainer: Trainer, name: str, *args: Any) -> list[Any]:
    """Call a hook of every callback that has it, in their order, with the trainer and `args`.

    Returns:
        What each of them returned.
    """
    return [getattr(callback, name)(trainer, *args) for callback in trainer.callbacks if hasattr(callback, name)]


# ---- callbacks of Lightning ------------------------------------------------------------------------------------------

MONITORED = ("val/loss", "val/perplexity", "val/bpb")  # what Lightning knows of a validation
# Lightning's callbacks that do not work here, and what does their work.
REFUSED: dict[type[LightningCallback], str] = {
    callbacks.GradientAccumulationScheduler: "every step has data.global_batch_tokens tokens",
    callbacks.StochasticWeightAveraging: "an epoch has no end here; `--model.schedule.name wsd` ends with a low rate",
    callbacks.WeightAveraging: "checkpoints have no second set of weights",
    callbacks.ModelPruning: "its masks rename weights, and checkpoints have Hugging Face's names",
    callbacks.BackboneFinetuning: "the decoder is trained as a whole",
    callbacks.LearningRateFinder: "give --model.optimizer.lr; `lm scale --depth N` proposes one",
    callbacks.BatchSizeFinder: "`lm plan --config FILE --fit` prints the largest data.micro_batch_size",
    callbacks.Timer: "--guards.budget.max_hours ends a run in time, over all its sessions",
    callbacks.LearningRateMonitor: "optim/lr is in every log line, in metrics.jsonl and in TensorBoard",
    callbacks.DeviceStatsMonitor: "the machine's load is in metrics.jsonl and in TensorBoard",
    callbacks.ThroughputMonitor: "perf/tokens_per_second and perf/mfu are in metrics.jsonl and in TensorBoard",
    callbacks.SpikeDetection: "guards.spike finds spikes, and guards.alerts can stop a run or roll it back",
    callbacks.OnExceptionCheckpoint: "a state that may be broken is not saved; lower --trainer.checkpoint_interval",
    callbacks.ProgressBar: "a terminal shows the progress, and log lines do elsewhere",
}


def refuse_callbacks(given: list[LightningCallback]) -> None:
    """Refuse what is no callback, and those of Lightning that cannot work where a batch is an optimizer step and an
    epoch has no end.

    Raises:
        RequestError: names the callback, and what does its work.
    """
    for callback in given:
        if isinstance(callback, type):
            raise RequestError(f"callbacks: {callback.__name__} is a class: give an object, {callback.__name__}()")
        if not isinstance(callback, LightningCallback):
            raise RequestError(f"callbacks: {shown(callback)} is no callback: derive its class from lm.Callback")
        name, monitor = type(callback).__name__, getattr(callback, "monitor", None)
        for kind, instead in REFUSED.items():
            if isinstance(callback, kind):
                raise RequestError(f"trainer.callbacks: {name} of Lightning does not work here: {instead}")
        # A callback of the user's may log more with `pl_module.log`.
        known = all(type(each).__module__.startswith(("lightning.", "lm.")) for each in given)
        if known and monitor not in (None, *MONITORED):
            raise RequestError(f"trainer.callbacks: {name} has no {monitor} to monitor: give {' or '.join(MONITORED)}")
