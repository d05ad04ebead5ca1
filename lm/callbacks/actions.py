"""What a guard may do to a run when it finds something, in one place for all of them."""

import logging
from typing import Any, Literal

from lightning.pytorch import LightningModule

from lm import steady_clock
from lm.errors import GuardStop
from lm.trainer import Trainer

log = logging.getLogger(__name__)

Action = Literal["warn", "checkpoint", "stop", "rollback"]


def agree(trainer: Trainer, value: Any) -> Any:
    """What rank zero says, on every rank."""
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
        trainer.run.append_alert({"step": trainer.global_step, "time": steady_clock.now(), **said})
    for callback in trainer.callbacks:
        if hasattr(callback, "on_guard"):
            callback.on_guard(trainer, pl_module, guard, action, message)
    if action == "checkpoint" or save:
        trainer.checkpoint_callback.request()
    if action == "stop":
        trainer.stop = GuardStop(f"{guard}: {message}")
