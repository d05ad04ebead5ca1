"""Guards: what follows their findings (report, checkpoint, stop, rollback), their base, and that of NaN and Inf."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from lm.errors import GuardStop
from lm.runs.trainer_json import find_damage
from lm.system.process import steady_time
from lm.training.callback import Callback, call_hook
from lm.training.checkpoint_content import from_content
from lm.training.config import Action
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)


class Finding(NamedTuple):
    """What a guard has found, and what is to be done."""

    guard: str  # `alert`, `not-finite`, `budget`, `throughput`, `spike` or `drill`
    action: Action
    message: str
    # Take a checkpoint of this step. A `stop` does so where nothing is wrong with the weights. Otherwise `last` stays
    # what it was: `auto` must not resume from a state that may be broken.
    save: bool = False
    began: int | None = None  # the step from which on something may be wrong; None: the newest

    def __str__(self) -> str:
        return f"{self.guard}: {self.message}" + ("" if self.action == "warn" else f": {self.action}")


def act(trainer: Trainer, pl_module: LanguageModule, finding: Finding) -> None:
    """Report a finding and take its configured action; call it on every rank, with the same finding."""
    guard, action, message, save, began = finding
    if trainer.is_global_zero:
        log.warning("%s", finding)
        alert = {"guard": guard, "action": action, "message": message}
        trainer.run.append("alerts.jsonl", {"step": trainer.global_step, "time": steady_time(), **alert})
    call_hook(trainer, "on_guard", pl_module, guard, action, message)
    if save:
        trainer.checkpoint_callback.request()
    if action == "stop":
        sound = guard in ("budget", "throughput")  # the weights, so the run itself can go on
        way_on = "" if sound else f"; {how_to_go_on(trainer, began or trainer.global_step)}"
        trainer.run_state.stop = GuardStop(f"{guard}: {message}{way_on}")


def how_to_go_on(trainer: Trainer, began: int) -> str:
    """The words of a stop on the newest checkpoint from before a step, which is kept; call it on every rank."""
    step = newest_checkpoint(trainer, began - 1)
    if step is None:
        return (
            f"there is no checkpoint from before step {began}: start a new run with changed settings; with a "
            "smaller trainer.checkpoint_interval or more trainer.keep_checkpoints there is one"
        )
    trainer.checkpoint_callback.keep_for_rollback(step)
    command = trainer.run.resume_command(f"step-{step:08d}")
    return (
        f"`{command}` goes on from the newest checkpoint before step {began}, with the same samples: change a "
        "setting too, such as a lower learning rate"
    )


def newest_checkpoint(trainer: Trainer, last: int) -> int | None:
    """The step of the newest complete checkpoint at or before a step; call it on every rank."""
    newest = None
    if trainer.is_global_zero:
        trainer.checkpoint_io.drain()
        stale = trainer.checkpoint_callback.stale  # the resume began before these
        folders = {step: path for step, path in trainer.run.steps().items() if step <= last and path.name not in stale}
        newest = next((step for step in reversed(folders) if find_damage(folders[step]) is None), None)
    return trainer.strategy.broadcast(newest)


class Guard(Callback, ABC):
    """Looks at every log line, and acts on what it finds there. Rank zero decides, since speed and time differ.

    Its state, where it has one, is in checkpoints under the name of its class. Others are in `callbacks/alerts`,
    `callbacks/throughput_floor` and `callbacks/budget`.
    """

    @abstractmethod
    def observe(self, trainer: Trainer, metrics: Mapping[str, float]) -> list[Finding]:
        """What the metrics of a log line, a validation or an evaluation show. It changes nothing of the training."""

    def on_metrics(self, trainer: Trainer, pl_module: LanguageModule, metrics: Mapping[str, float]) -> None:
        for finding in trainer.strategy.broadcast(self.observe(trainer, metrics)):
            act(trainer, pl_module, finding)


# ---- NaN and Inf -----------------------------------------------------------------------------------------------------


class NotFinite(Guard):
    """Finds optimizer steps whose loss or gradient was not finite, and stops a run that has no others.

    Such a step changes no weight: the device decides that before the optimizer's step, the same on all ranks
    (see `training/step`).
    """

    def __init__(self, policy: Literal["skip", "stop"], max_skipped: int) -> None:
        self.policy, self.max_skipped, self._in_a_row = policy, max_skipped, 0

    def observe(self, trainer: Trainer, metrics: Mapping[str, float]) -> list[Finding]:
        if "train/loss" not in metrics:
            loss = metrics.get("val/loss", 0.0)
            return [] if math.isfinite(loss) else [Finding("not-finite", "warn", f"validation loss {loss}")]
        skipped, stats = [], trainer.run_state.stats
        for step in stats.recent:
            if math.isfinite(step.loss) and (stats.scaled or math.isfinite(step.grad_norm)):
                self._in_a_row = 0
            else:
                self._in_a_row += 1
                skipped.append(step)
        if not skipped:
            return []
        first, too_many = skipped[0], self._in_a_row >= self.max_skipped
        more = f" and {len(skipped) - 1} more since" if len(skipped) > 1 else ""
        message = (
            f"step {first.step}{more} changed no weight: its loss is {first.loss:.4g}, its gradient norm "
            f"{first.grad_norm:.4g}; `lm data show --run {trainer.run.name} --step {first.step}` has its samples"
        )
        if too_many:
            message += f"; {self._in_a_row} in a row are as many as guards.max_skipped allows"
        stop = too_many or self.policy == "stop"
        began = min(first.step, skipped[-1].step - self._in_a_row + 1)  # perhaps in an earlier log line
        return [Finding("not-finite", "stop" if stop else "warn", message, save=stop, began=began)]

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._in_a_row = state_dict.get("in_a_row", 0)


# ---- rollback --------------------------------------------------------------------------------------------------------


class Rollback(Callback):
    """Restores the weights of the last good checkpoint when a guard requests it.

    Steps are still counted up. So the order of samples, the schedule and the curves are those of any run, and samples
    since that checkpoint are not repeated. (Chowdhery et al., 2022, arXiv:2204.02311, section 5.1, restart about 100
    steps before a spike and skip 200 to 500 batches.)

    The last good checkpoint is the newest complete one at or before the last log line without such a request.
    """

    def __init__(self, max_rollbacks: int) -> None:
        self.max_rollbacks, self.done = max_rollbacks, 0
        self.good = 0  # the step of the last log line at which no guard asked for one, or of the newest rollback
        self.asked = False  # at this log line

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        # `good` may be from an earlier process; a signal may have come after steps that no guard has seen.
        if not trainer.ckpt_path or not any(step <= self.good for step in trainer.run.steps()):
            self.good = trainer.global_step
        trainer.checkpoint_callback.keep_for_rollback(self.good)

    def on_metrics(self, trainer: Trainer, pl_module: LanguageModule, metrics: Mapping[str, float]) -> None:
        if not self.asked and "train/loss" in metrics:  # other lines say nothing of the steps before them
            self.good = trainer.global_step
        self.asked = False
        if trainer.run_state.stop is None:  # else its message names a checkpoint
            trainer.checkpoint_callback.keep_for_rollback(self.good)

    def on_guard(self, trainer: Trainer, pl_module: LanguageModule, guard: str, action: Action, message: str) -> None:
        if action != "rollback" or self.asked:
            return
        self.asked = True
        used_up = self.done >= self.max_rollbacks
        to = None if used_up else newest_checkpoint(trainer, self.good)
        if to is None:
            why = f"guards.max_rollbacks {self.max_rollbacks} are used up"
            why = why if used_up else "a rollback has nothing to return to"
            way_on = how_to_go_on(trainer, self.good + 1)
            trainer.run_state.stop = GuardStop(f"{guard}: {message}; {why}; {way_on}")
            return
        step = trainer.global_step
        self.done, self.good = self.done + 1, step  # whose checkpoint will have the weights that are returned to
        checkpoint = from_content(pl_module, trainer.strategy.load_checkpoint(trainer.run.path / f"step-{to:08d}"))
        trainer.strategy.load_model_state_dict(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        trainer.checkpoint_callback.request()  # otherwise a resume after a kill would repeat the bad steps
        if trainer.is_global_zero:
            returned = {"step": step, "to": to}
            trainer.run.describe(rollbacks=[*trainer.run.read("run.json").get("rollbacks", []), returned])
            log.warning(
                f"rollback {self.done} of {self.max_rollbacks}: weights and optimizer are those of step {to}; training "
                f"continues with step {step + 1} and skips the samples in between"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "good": self.good}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done, self.good = state_dict["done"], state_dict.get("good", -1)
