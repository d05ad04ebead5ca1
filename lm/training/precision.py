"""Number formats of a training: Lightning's precision plugins by name, and one of ours for FP8."""

import logging
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision

from lm.model.decoder import Linear
from lm.system.hardware import cpu_half_precision
from lm.training.config import Precision

if TYPE_CHECKING:
    from lm.kernels.fp8.quantization import Scaling

log = logging.getLogger(__name__)


class Float8Precision(MixedPrecision):
    """`bf16-mixed`, and the products of the blocks' matrices in FP8 (see `kernels/fp8`).

    Weights and what the optimizer holds stay fp32; attention, the norms, the embedding and the output matrix compute as
    in `bf16-mixed`. So do the matrices that `keep` names, by patterns such as `layers.0.*` or `*.down_proj`, by default
    those of the last block: the weight gradients of the last layers suffer most from few bits (found for FP4 by NVIDIA,
    2025, arXiv:2509.25149), and one block is what Megatron-LM leaves out at the end, too.
    """

    def __init__(self, scaling: "Scaling", keep: list[str] | None, device: str = "cuda") -> None:
        super().__init__("bf16-mixed", device)
        self.precision = f"fp8-{scaling}"
        self.scaling = scaling
        self.keep = keep

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    def convert_module(self, module: Any) -> LightningModule:
        """Set how the products of the decoder's matrices are scaled. Lightning calls this once the decoder is built."""
        from lm.model.low_precision import LowPrecisionLinear, use_low_precision

        decoder = module.decoder
        keep = kept_in_bf16(self.keep, len(decoder.layers))
        matrices = {name: part for name, part in decoder.named_modules()
                    if type(part) in (Linear, LowPrecisionLinear)}  # fmt: skip
        chosen = [name for name in matrices if not any(fnmatchcase(name, pattern) for pattern in keep)]
        use_low_precision(decoder)
        for name, matrix in matrices.items():
            matrix.scaling = self.scaling if name in chosen else None
        log.info("precision: %s in %d of the blocks' %d matrices; bf16 in %s",
                 self.precision, len(chosen), len(matrices), " ".join(keep) or "none")  # fmt: skip
        return module


def kept_in_bf16(fp8_keep: list[str] | None, blocks: int) -> list[str]:
    """Patterns of the matrices that FP8 leaves in bf16: those of the last block if none are given."""
    return [f"layers.{blocks - 1}.*"] if fp8_keep is None else fp8_keep


def choose_precision(precision: Precision, fp8_keep: list[str] | None, accelerator: str) -> str | Float8Precision:
    """The precision for Lightning: our plugin for FP8, else a name; on a CPU that of a fast one, which is logged."""
    if precision.startswith("fp8-"):
        return Float8Precision(precision.removeprefix("fp8-"), fp8_keep)
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
    half = cpu_half_precision()
    return "32-true" if half is None else "bf16-true" if precision == "bf16-true" else "bf16-mixed"


def multiplication_precision(precision: str, matmul_precision: str) -> str:
    """The precision of the matrix multiplications, as `system/devices.peak_flops` takes it."""
    return "tf32" if precision == "32-true" and matmul_precision != "highest" else precision
