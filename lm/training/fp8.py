"""FP8 as a precision plugin of Lightning's Trainer, and which devices and models it fits."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision

from lm.data.config import DataConfig
from lm.kernels.fp8.linear import MULTIPLE
from lm.model.build import kernels_missing
from lm.model.config import DecoderConfig
from lm.model.decoder import Block, Linear
from lm.model.low_precision import LowPrecisionLinear, use_low_precision
from lm.training.config import TrainerConfig
from lm.training.findings import Finding, Known, error

if TYPE_CHECKING:
    from lm.kernels.fp8.quantization import Scaling

log = logging.getLogger(__name__)
FP8_FROM = (8, 9)  # compute capability


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


def check_fp8(trainer: TrainerConfig, decoder: DecoderConfig, data: DataConfig, known: Known) -> Iterator[Finding]:
    """Devices and shapes that FP8 does not support."""
    precision, device = trainer.precision, known.device
    if device is not None and (device.capability is None or device.capability < FP8_FROM):
        yield error(
            f"trainer.precision {precision} needs an NVIDIA GPU of compute capability 8.9 or later (Ada, "
            f"Hopper, Blackwell), and this is {'a cpu' if device.capability is None else device.name}",
            "take bf16-mixed",
        )
    elif known.on_this_machine and (missing := kernels_missing(torch.device("cuda"))) is not None:
        yield error(f"trainer.precision {precision} quantises by a CUDA kernel, and {missing}")
    seq_len = data.seq_len or decoder.max_position_embeddings
    if data.micro_batch_size * seq_len % MULTIPLE:  # tokens are a dimension of the products that are weights' gradients
        yield error(
            f"trainer.precision {precision} takes multiples of {MULTIPLE} tokens a micro-batch, and these are "
            f"{data.micro_batch_size} x {seq_len}",
            "change data.micro_batch_size or data.seq_len",
        )
    if decoder.num_hidden_layers == 1:
        yield error(
            f"trainer.precision {precision} is for all blocks but the last, and there is one", "take bf16-mixed"
        )
    with torch.device("meta"):
        block = Block(decoder)
    for name, part in block.named_modules():
        if isinstance(part, Linear) and (part.in_features % MULTIPLE or part.out_features % MULTIPLE):
            yield error(
                f"trainer.precision {precision} takes multiples of {MULTIPLE}, and a block's {name} is "
                f"{part.out_features} x {part.in_features}",
                "change the decoder's sizes",
            )
            return
