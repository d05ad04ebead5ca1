"""FP8 as a precision plugin of Lightning's Trainer, and which devices and models it fits."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision

from lm.data.config import DataConfig
from lm.kernels.fp8.linear import MULTIPLE
from lm.model.build import kernels_missing
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder, Linear
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
        decoder = module.decoder
        keep = kept_in_bf16(self.keep, len(decoder.layers))
        matrices = {name: part for name, part in decoder.named_modules() if type(part) in (Linear, LowPrecisionLinear)}
        chosen = [name for name in matrices if not matches(name, keep)]
        use_low_precision(decoder)
        for name, matrix in matrices.items():
            matrix.scaling = self.scaling if name in chosen else None
        log.info(
            "precision: %s in %d of the blocks' %d matrices; bf16 in %s",
            self.precision,
            len(chosen),
            len(matrices),
            " ".join(keep) or "none",
        )
        return module


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def kept_in_bf16(fp8_keep: list[str] | None, blocks: int) -> list[str]:
    """Patterns of the matrices that FP8 leaves in bf16: those of the last block if none are given."""
    return [f"layers.{blocks - 1}.*"] if fp8_keep is None else fp8_keep


def check_fp8(trainer: TrainerConfig, decoder: DecoderConfig, data: DataConfig, known: Known) -> Iterator[Finding]:
    """Devices and shapes that FP8 does not support, and patterns of `fp8_keep` that match nothing or everything."""
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
    with torch.device("meta"):
        parts = Decoder(replace(decoder, vocab_size=1)).named_modules()
        matrices = {name: part for name, part in parts if isinstance(part, Linear)}
    for pattern in trainer.fp8_keep or ():
        if not any(fnmatchcase(name, pattern) for name in matrices):
            *names, last = matrices
            yield error(f"trainer.fp8_keep {pattern} fits no matrix", f"they are {', '.join(names[:4])} ... {last}")
    keep = kept_in_bf16(trainer.fp8_keep, decoder.num_hidden_layers)
    chosen = {name: matrix for name, matrix in matrices.items() if not matches(name, keep)}
    if not chosen:
        of_default = "" if trainer.fp8_keep is not None else ", which are the last block's by default,"
        yield error(f"trainer.fp8_keep {' '.join(keep)}{of_default} leaves no matrix for FP8", "take bf16-mixed")
    for name, matrix in chosen.items():
        if matrix.in_features % MULTIPLE or matrix.out_features % MULTIPLE:
            yield error(
                f"trainer.precision {precision} takes multiples of {MULTIPLE}, and {name} is "
                f"{matrix.out_features} x {matrix.in_features}",
                "change the decoder's sizes, or name it in trainer.fp8_keep",
            )
            break  # the other blocks have the same
