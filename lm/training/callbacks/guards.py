"""Guards: alerts, NaN and Inf, rollback, damaged data, and what a guard may do to a run when it finds something."""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import LightningModule

from lm.data.loader import Batch
from lm.errors import GuardStop
from lm.runs.checkpoint import find_damage, step_of
from lm.system.process import steady_time
from lm.training import checkpointing
from lm.training.alerts import AlertEvaluator
from lm.training.callback import Callback, call_hook
from lm.training.step_stats import Step
from lm.training.trainer import Trainer

# ---- actions ---------------------------------------------------------------------------------------------------------
# What a guard may do to a run when it finds something, in one place for all of them.

log = logging.getLogger(__name__)

Action = Literal["warn", "checkpoint", "stop", "rollback"]


def from_rank_zero(trainer: Trainer, value: Any) -> Any:
    """The value of rank zero, on every rank."""
    return trainer.strategy.broadcast(value) if trainer.world_size > 1 else value


def act(
    trainer: Trainer, pl_module: LightningModule, guard: str, action: Action, message: str, save: bool = False
) -> None:
    """Say what was found and do what was asked for; on every rank, with the same arguments.

    Callbacks with `on_guard` are told before anything changes, in their order.

    Args:
        guard: who found it: `alert`, `not-finite`, `budget`, `throughput`, `spike`.
        action: `warn` is to say it and no more; `checkpoint` saves after this step; `stop` ends the run with exit code
            3; `rollback` returns to the weights of the last good checkpoint.
        message: what was found, in a line.
        save: `stop` with a checkpoint of this step, because nothing is wrong with the weights. Otherwise `last` stays
            what it was: a state that may be broken must not become the one that `auto` goes on from.
    """
    if trainer.is_global_zero:
        log.warning("%s: %s%s", guard, message, "" if action == "warn" else f": {action}")
        said = {"guard": guard, "action": action, "message": message}
        trainer.run.append_alert({"step": trainer.global_step, "time": steady_time(), **said})
    call_hook(trainer, "on_guard", pl_module, guard, action, message)
    if action == "checkpoint" or save:
        trainer.checkpoint_callback.request()
    if action == "stop":
        trainer.stop = GuardStop(f"{guard}: {message}")


# ---- pauses ----------------------------------------------------------------------------------------------------------
# Time in which a training does something else, which those who measure it are told of.


@contextmanager
def not_training(trainer: Trainer) -> Iterator[None]:
    """Call `on_pause` of every callback with the seconds that the block took."""
    began = time.monotonic()
    try:
        yield
    finally:
        call_hook(trainer, "on_pause", time.monotonic() - began, "other")


# ---- alerts ----------------------------------------------------------------------------------------------------------
# The alerts of a config: what is done when a condition over the metrics becomes true.

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
        self.evaluator = AlertEvaluator(alerts)
        self.actions = {expression: alerts[text] for text, expression in zip(alerts, self.evaluator.expressions)}
        self._said: set[str] = set()

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """Take the metrics of a log line; called on every rank."""
        if not self.actions:
            return
        line = {**metrics, "step": trainer.global_step, "data/tokens": trainer.tokens_seen}
        for action, message in from_rank_zero(trainer, self._found(line)):
            act(trainer, pl_module, "alert", action, message)

    def on_guard(
        self, trainer: Trainer, pl_module: LightningModule, guard: str, action: Action, message: str
    ) -> None:
        """What led to a rollback is no measure for what comes after it."""
        if action == "rollback":
            self.evaluator.history.drop_newest()

    def _found(self, line: dict[str, float]) -> list[tuple[Action, str]]:
        """What is to be done, and what was found: `loss > 10: loss is 12.31 at step 130`."""
        found = []
        for expression, holds in self.evaluator.evaluate(line).items():
            action = self.actions[expression]
            if holds and not (action in ONCE and expression.text in self._said):
                figures = expression.explain(self.evaluator.history, omit=("step",))
                found.append((action, f"{expression.text}: {figures}{' ' if figures else ''}at step {line['step']}"))
            if holds:
                self._said.add(expression.text)
            elif holds is False:
                self._said.discard(expression.text)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**self.evaluator.history.state_dict(), "said": sorted(self._said)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluator.history.load_state_dict(state_dict)
        self._said = set(state_dict["said"])


# ---- not finite ------------------------------------------------------------------------------------------------------
# NaN and Inf: such a step changes no weight, and what to do about it is decided here.
#
# That it changes nothing is settled on the device, before the optimizer's step and on all ranks alike
# (`lm/training/step_stats`), and costs nothing. At the next log line this callback learns which steps they were.


class NotFinite(Callback):
    """Reports steps that were left out, and stops a run that has nothing else.

    Args:
        policy: `skip` goes on; `stop` ends the run at the first such step.
        max_skipped: as many in a row end the run in any case.
    """

    def __init__(self, policy: Literal["skip", "stop"], max_skipped: int) -> None:
        self.policy = policy
        self.max_skipped = max_skipped
        self._in_a_row = 0

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """Take the metrics of a log line; called on every rank with the same."""
        if "train/loss" in metrics:
            self._after_steps(trainer, pl_module)
        elif not math.isfinite(metrics.get("val/loss", 0.0)):
            act(trainer, pl_module, "not-finite", "warn", f"validation loss {metrics['val/loss']}")

    def _after_steps(self, trainer: Trainer, pl_module: LightningModule) -> None:
        overflows = getattr(trainer.precision_plugin, "scaler", None) is not None  # then they are the scaler's
        skipped: list[Step] = []
        for step in pl_module.recent_steps:
            if math.isfinite(step.loss) and (overflows or math.isfinite(step.grad_norm)):
                self._in_a_row = 0
            else:
                self._in_a_row += 1
                skipped.append(step)
        if not skipped:
            return
        first, too_many = skipped[0], self._in_a_row >= self.max_skipped
        more = f" and {len(skipped) - 1} more since" if len(skipped) > 1 else ""
        message = (
            f"step {first.step}{more} changed no weight: its loss is {first.loss:.4g}, its gradient norm "
            f"{first.grad_norm:.4g}; `lm data show --run {trainer.run.name} --step {first.step}` has its samples"
        )
        if too_many:
            message += f"; {self._in_a_row} in a row are as many as guards.max_skipped allows"
        stop = too_many or self.policy == "stop"
        act(trainer, pl_module, "not-finite", "stop" if stop else "warn", message, save=stop)


# ---- rollback --------------------------------------------------------------------------------------------------------
# Rollback: back to the weights of the last good checkpoint, past the samples that were trained on since.
#
# The steps go on counting. So the order of samples, the schedule and the curves are those of any other run, the samples
# since that checkpoint are not seen again, and what they had done to weights and optimizer is gone. (Chowdhery et al.,
# 2022, arXiv:2204.02311, section 5.1, restart about 100 steps before a spike and skip 200 to 500 batches.)


class Rollback(Callback):
    """Goes back when a guard asks for it.

    The last good checkpoint is the newest whole one that is not younger than the last log line at which no guard
    asked for a rollback.

    Args:
        most: how often, in the whole run; the next time ends it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.done = 0
        self._good = 0  # the last step of which nothing bad was found
        self._asked = False  # at this log line

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._good = trainer.global_step

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """After all guards have seen the line."""
        if not self._asked and "train/loss" in metrics:  # other lines say nothing of the steps before them
            self._good = trainer.global_step
        self._asked = False

    def on_guard(
        self, trainer: Trainer, pl_module: LightningModule, guard: str, action: Action, message: str
    ) -> None:
        if action != "rollback" or self._asked:
            return
        self._asked = True
        if self.done >= self.most:
            trainer.stop = GuardStop(f"{guard}: {message}; guards.max_rollbacks {self.most} are used up")
            return
        folder = from_rank_zero(trainer, self._last_good(trainer) if trainer.is_global_zero else None)
        if folder is None:
            trainer.stop = GuardStop(
                f"{guard}: {message}; there is no checkpoint of step {self._good} or before to return to"
            )
            return
        self._return_to(trainer, pl_module, folder)

    def _last_good(self, trainer: Trainer) -> Path | None:
        trainer.checkpoint_io.drain()
        left_behind = trainer.checkpoint_callback.left_behind  # they are of another stretch of training
        folders = [
            path for step, path in trainer.run.steps().items() if step <= self._good and path.name not in left_behind
        ]
        return next((path for path in reversed(folders) if find_damage(path) is None), None)

    def _return_to(self, trainer: Trainer, pl_module: LightningModule, folder: Path) -> None:
        checkpoint = trainer.strategy.load_checkpoint(folder)
        checkpointing.restore_weights(pl_module, checkpoint)
        trainer.strategy.load_model_state_dict(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        self.done += 1
        trainer.checkpoint_callback.request()  # or a kill would bring the bad stretch back
        if trainer.is_global_zero:
            returned = {"step": trainer.global_step, "to": step_of(folder)}
            trainer.run.describe(rollbacks=[*trainer.run.read("run.json").get("rollbacks", []), returned])
            log.warning(
                "rollback %d of %d: weights and optimizer are those of step %d again; training goes on with step %d, "
                "past the samples in between", self.done, self.most, returned["to"], trainer.global_step + 1,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]


# ---- skipped data ----------------------------------------------------------------------------------------------------
# Samples that were left out because their shard is damaged: told once a block, and counted.


class SkippedData(Callback):
    """Counts what `data.on_bad_shard: skip` leaves out, over all ranks and since the beginning of the run.

    Without it nothing is left out, and there is nothing to exchange.
    """

    def __init__(self) -> None:
        self._asked_for = False
        self._samples = 0  # that were not trained on, on all ranks
        self._told: list[str] = []  # what is wrong with which block
        self._new: list[str] = []  # of these, what was not told yet
        self._here: list[str] = []  # an entry a row, on this rank since the ranks spoke of it
        self._validated: set[str] = set()  # blocks of validations, likewise

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._asked_for = trainer.datamodule.on_bad_shard == "skip"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self._here += batch.bad

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._validated |= set(batch.bad)

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """How many samples were left out; called on every rank."""
        if not self._asked_for:
            return {}
        self._exchange()
        return {"data/skipped_samples": self._samples}

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        """Tell of blocks that were met for the first time; called on every rank."""
        new, self._new = self._new, []
        for text in new:
            act(trainer, pl_module, "data", "warn", f"its samples are skipped: {text}")

    def state_dict(self) -> dict[str, Any]:
        if self._asked_for:
            self._exchange()
        return {"samples": self._samples, "told": [text for text in self._told if text not in self._new]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples, self._told = state_dict["samples"], list(state_dict["told"])

    def _exchange(self) -> None:
        """Add up what all ranks met."""
        mine = (len(self._here), sorted({*self._here, *self._validated}))
        everyone = [mine]
        if dist.is_available() and dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        self._here, self._validated = [], set()
        for samples, texts in everyone:
            self._samples += samples
            fresh = [text for text in texts if text not in self._told]
            self._told += fresh
            self._new += fresh
