"""Histograms of the weights in TensorBoard."""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lm.model.huggingface import to_huggingface
from lm.training.callback import Callback
from lm.training.callbacks.tensorboard import EventFile
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

BUCKETS = 30  # number of buckets that TensorBoard draws


class Histograms(Callback):
    """Writes histograms of the decoder's weights to TensorBoard, under Hugging Face's names.

    They are computed on the device: `SummaryWriter.add_histogram` copies each weight to the host and takes a second for
    25 million of them. Shards of a weight are gathered, one weight at a time.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_train_batch_end(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
        if trainer.global_step % self.interval:
            return
        for name, parameter in pl_module.decoder.named_parameters():
            weight = parameter.detach()
            weight = weight.full_tensor() if isinstance(weight, DTensor) else weight  # on every rank
            if not trainer.is_global_zero:
                continue
            parts = to_huggingface({name: weight}, pl_module.config) if pl_module.builtin else {name: weight}
            for part, values in parts.items():
                if (histogram := count_values(values)) is not None:
                    event_file = cast(EventFile, trainer.logger)
                    event_file.experiment.add_histogram_raw(
                        f"weights/{part}", **histogram, global_step=trainer.global_step
                    )


def count_values(values: Tensor) -> dict[str, Any] | None:
    """Compute a histogram for `SummaryWriter.add_histogram_raw`; None if a value is not finite."""
    flat = values.flatten().float()
    low, high = (bound.item() for bound in flat.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    width = max((high - low) / BUCKETS, 1e-30)
    counts = torch.bincount(((flat - low) / width).to(torch.uint8).clamp_(max=BUCKETS - 1), minlength=BUCKETS)
    return {
        "min": low,
        "max": high,
        "num": flat.numel(),
        "sum": flat.sum(dtype=torch.float64).item(),
        "sum_squares": flat.square().sum(dtype=torch.float64).item(),
        "bucket_counts": counts.tolist(),
        "bucket_limits": torch.linspace(low, high, BUCKETS + 1, dtype=torch.float64)[1:].tolist(),
    }
