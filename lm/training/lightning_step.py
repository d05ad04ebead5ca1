"""Runs `training/step` with Lightning's strategy, precision and profiler; drops late steps."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lm.data.loader import Batch
from lm.errors import RequestError
from lm.model.decoder import Losses
from lm.system.stop_signals import STOP
from lm.training.lightning_patches import drop_step_context
from lm.training.rng_state import restore_rng_state, rng_state
from lm.training.schedule import lr_fraction
from lm.training.step import StepResult, optimizer_step

if TYPE_CHECKING:
    from lm.training.module import LanguageModule


class StepDropped(Exception):
    """Raised in a step that is not finished in time after a signal."""


class LightningStep:
    """Runs the optimizer steps of a `LanguageModule`; made when its training starts.

    What `optimizer_step` leaves to its arguments is done by Lightning: its precision runs the forward pass in half
    precision and scales an fp16 loss before the backward pass; its strategy averages the gradients over ranks in the
    last one; and its optimizer, which counts the steps, calls the scaler, which unscales the gradients.
    """

    def __init__(self, module: "LanguageModule") -> None:
        trainer = module.trainer
        if len(trainer.optimizers) != 1 or trainer.lr_scheduler_configs:
            raise RequestError(
                f"{type(module).__name__}.configure_optimizers returns one optimizer and no scheduler: "
                "model.schedule sets the rate of all its groups"
            )
        drop_step_context(trainer)
        self._module, self._optimizer = module, module.optimizers()
        self._weight_copies = weight_copies(module)
        self._scaler: torch.amp.GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
        self.scaled = self._scaler is not None  # the scaler multiplies the gradients

    def __call__(self, batch: Batch, step: int) -> StepResult:
        """Run optimizer step number `step` (the first is 0) on this rank's rows `(B, T + 1)` of the global batch.

        Raises:
            StepDropped: it was not finished; weights, gradients and random generators are as before it.
        """
        module, steps = self._module, self._module.run_state.steps
        unscaled = torch.ones((), device=module.device)
        generators = rng_state()
        try:
            with self._weight_copies:
                return optimizer_step(
                    batch,
                    self.compute_losses,
                    self._optimizer.optimizer,
                    micro_batch_size=steps.micro_batch_size,
                    lr_factor=lr_fraction(step, steps.max_steps, module.options.schedule),
                    max_norm=module.run_state.clip,
                    backward=self.backward,
                    no_sync=getattr(module.trainer.strategy, "block_backward_sync", nullcontext),
                    update=self._optimizer.step,
                    loss_scale=self._scaler.scale(unscaled) if self._scaler else 1.0,
                )
        except StepDropped:
            restore_rng_state(generators)  # dropout has drawn from them
            raise
        finally:
            self._optimizer.optimizer.zero_grad()

    def compute_losses(self, micro_batch: Batch) -> Losses:
        """The losses of one micro-batch; StepDropped if the time after a signal is half over."""
        if STOP.half_time_over:
            raise StepDropped
        with self._module.trainer.profiler.profile("forward"):
            return self._module.losses(micro_batch)

    def backward(self, loss: Tensor) -> None:
        with self._module.trainer.profiler.profile("backward"):
            self._module.manual_backward(loss)  # by Lightning's strategy and precision


def weight_copies(module: "LanguageModule") -> AbstractContextManager[Any]:
    """A context in which all micro-batches share copies of the weights in half precision, where that pays."""
    precision = module.trainer.precision
    mixed = precision not in ("32-true", "bf16-true")
    if not (mixed and module.built.fused) or hasattr(module.trainer.strategy, "shard"):
        return nullcontext()
    from lm.model.low_precision import WeightCopies

    alone = isinstance(module.trainer.strategy, SingleDeviceStrategy) and module.options.compile == "none"
    return WeightCopies(module.decoder, torch.float16 if precision == "16-mixed" else torch.bfloat16, adds=alone)
