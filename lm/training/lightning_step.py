"""Runs `training/step` with Lightning's strategy, precision and profiler; drops late steps."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lm.data.loader import Batch
from lm.errors import RequestError
from lm.system.stop_signals import STOP
from lm.training import checkpoint_state
from lm.training.lightning_patches import drop_step_context, loss_scale
from lm.training.schedule import lr_fraction
from lm.training.step import StepResult, optimizer_step


class StepDropped(Exception):
    """Raised in a step that is not finished in time after a signal."""


class LightningStep:
    """Runs the optimizer steps of a `LanguageModule`; made when its training starts."""

    def __init__(self, module: Any) -> None:
        trainer = module.trainer
        if len(trainer.optimizers) != 1 or trainer.lr_scheduler_configs:
            raise RequestError(f"{type(module).__name__}.configure_optimizers returns one optimizer and no scheduler: "
                               "model.schedule sets the rate of all its groups")  # fmt: skip
        drop_step_context(trainer)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scaled = scaler is not None  # whether a GradScaler multiplies the gradients
        self._module, self._optimizer = module, module.optimizers()
        self._loss_scale = None if scaler is None else partial(loss_scale, scaler)
        self._weight_copies = weight_copies(module)

    def __call__(self, batch: Batch, step: int) -> StepResult:
        """Run optimizer step number `step` (the first is 0) on this rank's rows `(B, T + 1)` of the global batch.

        Raises:
            StepDropped: it was not finished; weights, gradients and random generators are as before it.
        """
        module, steps = self._module, self._module.run_state.steps
        generators = checkpoint_state.rng_state()
        try:
            with self._weight_copies:
                return optimizer_step(
                    batch, self.forward_backward, self._optimizer.optimizer, micro_batch_size=steps.micro_batch_size,
                    tokens_per_step=steps.tokens_per_step, max_norm=module.run_state.clip,
                    lr_factor=lr_fraction(step, steps.max_steps, module.options.schedule),
                    update=self._optimizer.step, loss_scale=self._loss_scale,
                    no_sync=getattr(module.trainer.strategy, "block_backward_sync", nullcontext),
                )  # fmt: skip
        except StepDropped:
            checkpoint_state.restore_generators(generators)  # dropout has drawn from them
            raise
        finally:
            self._optimizer.optimizer.zero_grad()

    def forward_backward(self, micro_batch: Batch) -> Tensor:
        """Run one micro-batch, as `optimizer_step` asks; StepDropped if the time after a signal is half over."""
        if STOP.half_time_over:
            raise StepDropped
        part = self._module.trainer.profiler.profile
        with part("forward"):
            total, token_losses = self._module.losses(micro_batch)  # (), (b, T)
            mean = total / token_losses.numel() / self._module.run_state.steps.accumulate
        with part("backward"):
            self._module.manual_backward(mean)
        return token_losses


def weight_copies(module: Any) -> AbstractContextManager[Any]:
    """A context in which all micro-batches share copies of the weights in half precision, where that pays."""
    precision = module.trainer.precision
    mixed = precision not in ("32-true", "bf16-true")
    if not (mixed and module.built.fused) or hasattr(module.trainer.strategy, "shard"):
        return nullcontext()
    from lm.model.low_precision import WeightCopies

    alone = isinstance(module.trainer.strategy, SingleDeviceStrategy) and module.options.compile == "none"
    return WeightCopies(module.decoder, torch.float16 if precision == "16-mixed" else torch.bfloat16, adds=alone)
