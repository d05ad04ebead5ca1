"""`training/step` under Lightning: what its strategies, precisions and profilers do becomes the step's arguments."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lm.data.loader import Batch
from lm.model.compile import GraphedMicroBatch
from lm.model.fused import is_fused
from lm.model.low_precision import WeightCopies
from lm.system.stop_signals import STOP
from lm.training.distributed import FullyShardedStrategy
from lm.training.lightning_patches import drop_step_context, loss_scale
from lm.training.step import OptimizerStep


class StepDropped(Exception):
    """A signal came, and the time to finish the step under way is over."""


def drop_when_time_is_over() -> None:
    """Raise StepDropped where it is."""
    if STOP.half_time_over:
        raise StepDropped


def lightning_step(module: LightningModule) -> OptimizerStep:
    """The step of a `LanguageModule` whose training begins."""
    trainer, optimizer, state = module.trainer, module.optimizers(), module.run_state
    graphs = module.options.cuda_graphs
    # A recorded pass is measured as a whole: a profiler may wait for the device, which a recording must not.
    measured = (lambda part, function: function) if graphs else partial(_measured, module)
    drop_step_context(trainer)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return OptimizerStep(
        measured("forward", lambda batch: module.losses(batch)),  # looked up each time: a callback may replace it
        optimizer.optimizer, state.steps, module.options.schedule, state.clip,
        backward=measured("backward", module.manual_backward),
        update=optimizer.step,
        hold_gradients=getattr(trainer.strategy, "block_backward_sync", nullcontext),
        loss_scale=None if scaler is None else partial(loss_scale, scaler),
        before_micro_batch=drop_when_time_is_over,
        record=partial(_record, module) if graphs else None,
    )  # fmt: skip


def weight_copies(module: LightningModule) -> AbstractContextManager:
    """A context in which the micro-batches of a step share copies of the weights in half precision, where that pays."""
    precision = module.trainer.precision
    mixed = precision not in ("32-true", "bf16-true")
    if not (mixed and is_fused(module.decoder)) or isinstance(module.trainer.strategy, FullyShardedStrategy):
        return nullcontext()
    return WeightCopies(module.decoder, torch.float16 if precision == "16-mixed" else torch.bfloat16)


def _measured(module: LightningModule, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a part of the step that Lightning's profilers know, and `lm profile`."""

    def call(*args: Any) -> Any:
        with module.trainer.profiler.profile(part):
            return function(*args)

    return call


def _record(
    module: LightningModule, forward_backward: Callable[[Batch], Tensor]
) -> Callable[[Batch], Tensor]:  # fmt: skip
    """The same forward and backward pass as CUDA graphs, one for each number of documents; few numbers occur."""
    graphed = GraphedMicroBatch(
        module.decoder.parameters(),
        lambda tokens, row_documents: forward_backward(Batch(tokens, row_documents=row_documents)),
        capture=module.device.type == "cuda",
    )
    return _measured(module, "forward", lambda batch: graphed(
        batch.tokens, batch.max_documents and (batch.max_documents,)))  # fmt: skip
