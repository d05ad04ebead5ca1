"""FP8 as a precision plugin of Lightning's Trainer."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision

from lm.model.low_precision import LowPrecisionLinear, use_low_precision

if TYPE_CHECKING:
    from lm.kernels.fp8.quantization import Scaling

log = logging.getLogger(__name__)


class Float8Precision(MixedPrecision):
    """`bf16-mixed`, and the products of the blocks' matrices in FP8 (see `kernels/fp8`).

    Weights and what the optimizer holds stay fp32; attention, the norms, the embedding and the output matrix compute as
    in `bf16-mixed`. So do the matrices of the last block: the weight gradients of the last layers suffer most from few
    bits (found for FP4 by NVIDIA, 2025, arXiv:2509.25149), and one block is what Megatron-LM leaves out, too.
    """

    def __init__(self, scaling: "Scaling", device: str = "cuda") -> None:
        super().__init__("bf16-mixed", device)
        self.precision = f"fp8-{scaling}"
        self.scaling = scaling

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    def convert_module(self, module: Any) -> LightningModule:
        """Set how the products of the decoder's matrices are scaled. Lightning calls this once the decoder is built."""
        decoder = module.decoder
        use_low_precision(decoder)
        for block in decoder.layers[:-1]:
            for part in block.modules():
                if isinstance(part, LowPrecisionLinear):
                    part.scaling = self.scaling
        log.info("precision: %s in the matrices of the blocks, but bf16 in the last block", self.precision)
        return module
