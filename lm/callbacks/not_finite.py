"""NaN and Inf: such a step changes no weight, and what to do about it is decided here.

That it changes nothing is settled on the device, before the optimizer's step and on all ranks alike (`lm/tally`), and
costs nothing. At the next log line this callback learns which steps they were.
"""

import math
from typing import Literal

from lightning.pytorch import Callback, LightningModule

from lm.callbacks.actions import act
from lm.tally import Step
from lm.trainer import Trainer


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
