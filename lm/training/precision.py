"""The precision of a training run: the names of Lightning, and a plugin of ours for FP8."""

import logging

import torch
from lightning.pytorch.plugins import MixedPrecision

from lm.system.hardware import cpu_half_precision
from lm.training.config import Precision

log = logging.getLogger(__name__)


def choose_precision(precision: Precision, accelerator: str) -> str | MixedPrecision:
    """The precision for Lightning: our plugin for FP8, else a name; on a CPU that of a fast one, which is logged."""
    if precision.startswith("fp8-"):
        from lm.training.fp8 import Float8Precision

        return Float8Precision(precision.removeprefix("fp8-"))
    on_cpu = accelerator == "cpu" or (
        accelerator == "auto" and not torch.cuda.is_available() and not torch.backends.mps.is_available()
    )
    instead = precision_for_cpu(precision) if on_cpu else precision
    if instead != precision:
        log.info(f"precision {precision} -> {instead}: this CPU has no fast {precision} arithmetic")
    return instead


def precision_for_cpu(precision: Precision) -> Precision:
    """The precision that this CPU does well, in place of the one that was asked for."""
    if precision == "32-true" or precision.startswith("fp8-"):
        return precision
    if cpu_half_precision() is None:
        return "32-true"
    return "bf16-true" if precision == "bf16-true" else "bf16-mixed"


def multiplication_precision(precision: str, matmul_precision: str) -> str:
    """The precision of the matrix multiplications, as `system/devices.peak_flops` takes it."""
    return "tf32" if precision == "32-true" and matmul_precision != "highest" else precision
