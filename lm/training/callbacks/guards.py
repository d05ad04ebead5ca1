"""Guards: alerts, NaN and Inf, rollback, damaged data, and what a guard may do to a run when it finds something."""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule

from lm.data.loader import Batch
from lm.errors import GuardStop
from lm.runs.checkpoint import find_damage
from lm.system.process import steady_time
from lm.training import checkpoint_state
from lm.training.alerts import AlertEvaluator, true_of_untrained
from lm.training.callback import Callback, call_hook
from lm.training.config import Action, Alert, action_and_message
from lm.training.distributed import gather_from_ranks
from lm.training.schedule import lr_fraction
from lm.training.step_stats import StepRecord
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)


def from_rank_zero(trainer: Trainer, value: Any) -> Any:
    """The value of rank zero, on every rank."""
    return trainer.strategy.broadcast(value) if trainer.world_size > 1 else value


def act(
    trainer: Trainer, pl_module: LightningModule, guard: str, action: Action, message: str, save: bool = False
) -> None:
    """Report a finding and do what the config asks for; call it on every rank, with the same arguments.

    Args:
        guard: `alert`, `not-finite`, `budget`, `throughput`, `spike`, `plateau`, `overfitting`, `drill` or `data`.
        save: `stop` with a checkpoint of this step, because nothing is wrong with the weights. Otherwise `last` stays
            what it was: `auto` must not resume from a state that may be broken.
    """
    if trainer.is_global_zero:
        log.warning("%s: %s%s", guard, message, "" if action == "warn" else f": {action}")
        finding = {"guard": guard, "action": action, "message": message}
        trainer.run.append_alert({"step": trainer.global_step, "time": steady_time(), **finding})
    call_hook(trainer, "on_guard", pl_module, guard, action, message)
    if action == "checkpoint" or save:
        trainer.checkpoint_callback.request()
    if action == "stop":
        trainer.run_state.stop = GuardStop(f"{guard}: {message}")


@contextmanager
def not_training(trainer: Trainer) -> Iterator[None]:
    """Call `on_pause` of every callback with the seconds that the block took."""
    began = time.monotonic()
    try:
        yield
    finally:
        call_hook(trainer, "on_pause", time.monotonic() - began, "other")


# ---- alerts ----------------------------------------------------------------------------------------------------------

ONCE = ("warn", "checkpoint")  # actions that come once, until the condition was false


class Alerts(Callback):
    """Evaluates every condition when one of its metrics is logged.

    `warn` and `checkpoint` come once, when a condition becomes true, and again only after it was false. `stop` and
    `rollback` come whenever it is true: the weights have changed since, so the finding is a new one. Rank zero decides,
    since tokens a second differ among ranks.

    A condition that is true of an untrained model does nothing before it was false once, in this process or before a
    resume.

    Args:
        alerts: expressions, and the action of each, with a message or without.
    """

    def __init__(self, alerts: Mapping[str, Action | Alert]) -> None:
        self.evaluator = AlertEvaluator(alerts)
        actions = map(action_and_message, alerts.values())
        self.actions = dict(zip(self.evaluator.expressions, actions, strict=True))
        self._reported: set[str] = set()
        self._was_false: set[str] = set()
        self._untrained: set[str] = set()  # true of an untrained model

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        texts, step = [expression.text for expression in self.actions], trainer.log_interval
        tokens = step * trainer.steps.tokens_per_step
        self._untrained = set(true_of_untrained(texts, pl_module.config, step, tokens))

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        if not self.actions:
            return
        line = {**metrics, "step": trainer.global_step, "data/tokens": trainer.tokens_seen}
        for action, message in from_rank_zero(trainer, self._found(line)):
            act(trainer, pl_module, "alert", action, message)

    def on_guard(self, trainer: Trainer, pl_module: LightningModule, guard: str, action: Action, message: str) -> None:
        if action == "rollback":
            self.evaluator.history.drop_newest()  # values of a bad state are no measure for later ones

    def _found(self, line: dict[str, float]) -> list[tuple[Action, str]]:
        """Actions that are due, each with its finding: `loss > 10: loss is 12.31 at step 130`."""
        found = []
        for expression, holds in self.evaluator.evaluate(line).items():
            (action, said), text = self.actions[expression], expression.text
            waits = text in self._untrained - self._was_false
            if holds and not waits and not (action in ONCE and text in self._reported):
                figures = expression.explain(self.evaluator.history, omit=("step",))
                at = f"{figures}{' ' if figures else ''}at step {line['step']}"
                found.append((action, f"{text}: {at}{'; ' * bool(said)}{said}"))
            if holds and not waits:
                self._reported.add(text)
            elif holds is False:
                self._reported.discard(text)
                self._was_false.add(text)
        return found

    def state_dict(self) -> dict[str, Any]:
        alerts = {"reported": sorted(self._reported), "was_false": sorted(self._was_false)}
        return {**self.evaluator.history.state_dict(), **alerts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluator.history.load_state_dict(state_dict)
        self._reported = set(state_dict["reported"])
        self._was_false = set(state_dict.get("was_false", ()))


# ---- NaN and Inf -----------------------------------------------------------------------------------------------------


class NotFinite(Callback):
    """Reports optimizer steps whose loss or gradient was not finite, and stops a run that has no others.

    Such a step changes no weight: the device decides that before the optimizer's step, alike on all ranks (see
    `training/step`). This callback learns of them at the next log line.

    Args:
        policy: `skip` continues with the next step; `stop` ends the run at the first such step.
        max_skipped: as many in a row end the run in any case.
    """

    def __init__(self, policy: Literal["skip", "stop"], max_skipped: int) -> None:
        self.policy = policy
        self.max_skipped = max_skipped
        self._in_a_row = 0

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        if "train/loss" in metrics:
            self._report_steps(trainer, pl_module)
        elif not math.isfinite(metrics.get("val/loss", 0.0)):
            act(trainer, pl_module, "not-finite", "warn", f"validation loss {metrics['val/loss']}")

    def _report_steps(self, trainer: Trainer, pl_module: LightningModule) -> None:
        overflows = getattr(trainer.precision_plugin, "scaler", None) is not None  # then they are the scaler's
        skipped: list[StepRecord] = []
        for step in trainer.run_state.stats.recent:
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


# ---- plateau and overfitting -----------------------------------------------------------------------------------------

PLATEAU = 1 / 3  # of the run without a better validation
HIGH_RATE = 0.5  # of the peak, from which on a plateau is not the end of the schedule
RISES = 3  # validations in a row, each worse than the one before


class ValidationTrend(Callback):
    """Warns once of a plateau, and once of overfitting; neither does anything to the run.

    A plateau: no better validation loss in a third of the run's steps, while the learning rate is still above half of
    its peak. Overfitting: the validation loss rises three times in a row, while the mean training loss between these
    validations falls each time.
    """

    def __init__(self) -> None:
        self._best: tuple[int, float] | None = None  # step and validation loss
        self._newest: list[tuple[float, float]] = []  # validation loss, and mean training loss since the one before
        self._training = (0.0, 0)  # sum and count of the training losses logged since the newest validation
        self._reported: set[str] = set()

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        trained, loss = metrics.get("train/loss", math.nan), metrics.get("val/loss", math.nan)
        (total, count), step = self._training, trainer.global_step
        if math.isfinite(trained):
            self._training = (total + trained, count + 1)
        if not math.isfinite(loss):
            return
        if count:  # else no step was logged since the one before
            self._newest = [*self._newest[-RISES:], (loss, total / count)]
            self._training = (0.0, 0)
        if self._best is None or loss < self._best[1]:
            self._best = (step, loss)
        rate = lr_fraction(max(0, step - 1), trainer.max_steps, pl_module.options.schedule)
        for guard, message in from_rank_zero(trainer, self._found(step, trainer.max_steps, rate)).items():
            self._reported.add(guard)
            act(trainer, pl_module, guard, "warn", message)

    def _found(self, step: int, max_steps: int, rate: float) -> dict[str, str]:
        """What is true now and was not reported."""
        found, (best_step, best) = {}, self._best
        since = step - best_step
        if since >= PLATEAU * max_steps and rate > HIGH_RATE:
            found["plateau"] = (
                f"the validation loss was {best:.4f} at step {best_step} and not lower in the {since} of {max_steps} "
                f"steps since, and the learning rate is at {rate:.0%} of its peak: an earlier decay or a lower peak "
                "may help"
            )
        validated, trained = [each[0] for each in self._newest], [each[1] for each in self._newest]
        apart = all(a < b for a, b in pairwise(validated)) and all(a > b for a, b in pairwise(trained))
        if len(validated) > RISES and apart:
            found["overfitting"] = (
                f"the validation loss rose {RISES} times in a row, from {validated[0]:.4f} to {validated[-1]:.4f}, "
                f"while the training loss fell from {trained[0]:.4f} to {trained[-1]:.4f}: more data, fewer epochs or "
                f"dropout may help; the best validation was at step {best_step}"
            )
        return {guard: message for guard, message in found.items() if guard not in self._reported}

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "newest": self._newest, "training": self._training,
                "reported": sorted(self._reported)}  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self._training = state_dict["best"], state_dict["training"]
        self._newest, self._reported = state_dict["newest"], set(state_dict["reported"])


# ---- rollback --------------------------------------------------------------------------------------------------------


class Rollback(Callback):
    """Returns to the weights of the last good checkpoint when a guard asks for it.

    The steps count on. So the order of samples, the schedule and the curves are those of any other run, and the samples
    since that checkpoint are not seen again. (Chowdhery et al., 2022, arXiv:2204.02311, section 5.1, restart about 100
    steps before a spike and skip 200 to 500 batches.)

    The last good checkpoint is the newest whole one that is not younger than the last log line at which no guard
    asked for a rollback.

    Args:
        max_rollbacks: in the whole run; the next one ends it.
    """

    def __init__(self, max_rollbacks: int) -> None:
        self.max_rollbacks = max_rollbacks
        self.done = 0
        self._good = 0  # the last step without a finding
        self._asked = False  # at this log line

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._good = trainer.global_step

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        if not self._asked and "train/loss" in metrics:  # other lines say nothing of the steps before them
            self._good = trainer.global_step
        self._asked = False

    def on_guard(self, trainer: Trainer, pl_module: LightningModule, guard: str, action: Action, message: str) -> None:
        if action != "rollback" or self._asked:
            return
        self._asked = True
        if self.done >= self.max_rollbacks:
            trainer.run_state.stop = GuardStop(
                f"{guard}: {message}; guards.max_rollbacks {self.max_rollbacks} are used up"
            )
            return
        folder = from_rank_zero(trainer, self._last_good(trainer) if trainer.is_global_zero else None)
        if folder is None:
            trainer.run_state.stop = GuardStop(
                f"{guard}: {message}; there is no checkpoint of step {self._good} or before to return to"
            )
            return
        self._return_to(trainer, pl_module, folder)

    def _last_good(self, trainer: Trainer) -> Path | None:
        trainer.checkpoint_io.drain()
        left_behind = trainer.checkpoint_callback.left_behind  # a resume began before them
        folders = [
            path for step, path in trainer.run.steps().items() if step <= self._good and path.name not in left_behind
        ]
        return next((path for path in reversed(folders) if find_damage(path) is None), None)

    def _return_to(self, trainer: Trainer, pl_module: LightningModule, folder: Path) -> None:
        self._load(trainer, pl_module, folder)
        self.done += 1
        trainer.checkpoint_callback.request()  # or a resume after a kill would repeat the bad steps
        if trainer.is_global_zero:
            returned = {"step": trainer.global_step, "to": int(folder.name.removeprefix("step-"))}
            trainer.run.describe(rollbacks=[*trainer.run.read("run.json").get("rollbacks", []), returned])
            log.warning(
                "rollback %d of %d: weights and optimizer are those of step %d; training continues with step %d and "
                "skips the samples in between", self.done, self.max_rollbacks, returned["to"], trainer.global_step + 1,
            )  # fmt: skip

    def _load(self, trainer: Trainer, pl_module: LightningModule, folder: Path) -> None:
        checkpoint = trainer.strategy.load_checkpoint(folder)
        checkpoint_state.restore_weights(pl_module, checkpoint)
        trainer.strategy.load_model_state_dict(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]


# ---- skipped data ----------------------------------------------------------------------------------------------------


class SkippedData(Callback):
    """Counts the samples that `data.on_bad_shard: skip` leaves out, over all ranks and since the beginning of the run.

    A damaged block is reported once. With `on_bad_shard: raise` the ranks exchange nothing.
    """

    def __init__(self) -> None:
        self._wanted = False
        self._samples = 0  # on all ranks
        self._blocks: list[str] = []  # damaged ones, and what is wrong with them
        self._unreported: list[str] = []  # of these
        self._rows: list[str] = []  # the damaged block of each skipped row, on this rank since the last exchange
        self._validated: set[str] = set()  # damaged blocks of validations, likewise

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wanted = trainer.datamodule.options.on_bad_shard == "skip"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self._rows += batch.bad

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._validated |= set(batch.bad)

    def logged_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        self._exchange()
        return {"data/skipped_samples": self._samples} if self._wanted else {}

    def on_metrics(self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]) -> None:
        blocks, self._unreported = self._unreported, []
        for block in blocks:
            act(trainer, pl_module, "data", "warn", f"its samples are skipped: {block}")

    def state_dict(self) -> dict[str, Any]:
        self._exchange()
        return {"samples": self._samples, "blocks": [block for block in self._blocks if block not in self._unreported]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples, self._blocks = state_dict["samples"], list(state_dict["blocks"])

    def _exchange(self) -> None:
        """Add up what all ranks have skipped."""
        if not self._wanted:
            return
        found = gather_from_ranks((len(self._rows), sorted({*self._rows, *self._validated})))
        self._rows, self._validated = [], set()
        for samples, blocks in found:
            self._samples += samples
            new = [block for block in blocks if block not in self._blocks]
            self._blocks += new
            self._unreported += new
