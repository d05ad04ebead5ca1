"""How the weights are distributed: a histogram of every matrix and norm, now and then, for TensorBoard."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lm.model.huggingface import to_huggingface
from lm.trainer import Trainer

BUCKETS = 30  # what TensorBoard draws


class Histograms(Callback):
    """Writes histograms of the decoder's weights under Hugging Face's names.

    They are counted where the weights are; only the counts travel. Shards of a weight are gathered, one weight at a
    time.

    Args:
        interval: optimizer steps between them.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.step_taken(batch_idx)
        if step is None or step % self.interval:
            return
        counted: dict[str, Tensor] = {}
        for name, parameter in pl_module.decoder.named_parameters():
            weight = parameter.detach()
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # on every rank
            if trainer.is_global_zero:
                parts = to_huggingface({name: weight}, pl_module.config)
                counted |= {part: count(values) for part, values in parts.items()}
        if counted:
            write(trainer.logger.experiment, counted, step)


def count(values: Tensor) -> Tensor:
    """A histogram of buckets of equal width between the smallest and the largest value.

    Args:
        values: any shape.

    Returns:
        (5 + BUCKETS,) fp64, on the same device: minimum, maximum, number, sum, sum of squares, and the counts.
    """
    flat = values.flatten().float()
    low, high = flat.aminmax()
    width = ((high - low) / BUCKETS).clamp(min=1e-30)
    # Clamped as integers: what is not finite has no bucket, and must not have one beyond the last.
    bucket = ((flat - low) / width).to(torch.uint8).clamp_(max=BUCKETS - 1)
    counts = torch.bincount(bucket, minlength=BUCKETS)
    number = torch.full_like(low, flat.numel(), dtype=torch.float64)
    sums = flat.sum(dtype=torch.float64), flat.square().sum(dtype=torch.float64)
    return torch.cat([torch.stack([low.double(), high.double(), number, *sums]), counts.double()])


def write(experiment: Any, counted: dict[str, Tensor], step: int) -> None:
    """Add histograms to an event file; a weight that is not finite everywhere has none.

    Args:
        experiment: a SummaryWriter.
        counted: what `count` returned, by name.
        step: the optimizer step.
    """
    rows = torch.stack(list(counted.values())).cpu()  # (weights, 5 + BUCKETS); the one wait for the device
    for name, row in zip(counted, rows, strict=True):
        low, high, number, total, squares = row[:5].tolist()
        if not row.isfinite().all():
            continue
        limits = torch.linspace(low, high, BUCKETS + 1, dtype=torch.float64)[1:]
        experiment.add_histogram_raw(
            f"weights/{name}", min=low, max=high, num=int(number), sum=total, sum_squares=squares,
            bucket_limits=limits.tolist(), bucket_counts=row[5:].tolist(), global_step=step,
        )
