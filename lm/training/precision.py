"""Number formats of a training: Lightning's precision plugins by name, and one of ours for FP8."""

import logging
from fnmatch import fnmatchcase

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision

from lm.errors import RequestError
from lm.kernels.fp8 import Scaling
from lm.kernels.linear import MULTIPLE
from lm.kernels.operations import kernels_missing
from lm.model.decoder import Decoder, Linear
from lm.model.low_precision import LowPrecisionLinear, use_low_precision
from lm.system.hardware import cpu_half_precision, device_name, has_fp8
from lm.training.config import Precision

log = logging.getLogger(__name__)


class Float8Precision(MixedPrecision):
    """`bf16-mixed`, and the products of the blocks' matrices in FP8 (see `kernels/fp8` and `kernels/linear`).

    Weights and what the optimizer holds stay fp32; attention, the norms, the embedding and the output matrix compute as
    in `bf16-mixed`. So do the matrices that `keep` names, by default those of the last block: the weight gradients
    of the last layers suffer most from few bits (found for FP4 by NVIDIA, 2025, arXiv:2509.25149), and one block is
    what Megatron-LM leaves out at the end, too.

    Args:
        scaling: what shares a scale: a matrix, or each of its rows.
        keep: patterns of the names of matrices that stay in bf16, such as `layers.0.*` or `*.down_proj`; None: those of
            the last block.
        device: type of the device.
    """

    def __init__(self, scaling: Scaling, keep: list[str] | None, device: str = "cuda") -> None:
        super().__init__("bf16-mixed", device)
        self.precision = f"fp8-{scaling}"
        self.scaling = scaling
        self.keep = keep

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    def refuse_device(self, device: torch.device) -> None:
        """Raise RequestError where a device has no FP8 arithmetic, or does not run the kernel that quantises."""
        if not has_fp8(device):
            found = f"a {device.type}" if device.type != "cuda" else device_name(device)
            raise RequestError(
                f"trainer.precision {self.precision} needs an NVIDIA GPU of compute capability 8.9 or later (Ada, "
                f"Hopper, Blackwell), and this is {found}: take bf16-mixed"
            )
        missing = kernels_missing(device) if device.type == "cuda" else None
        if missing is not None:
            raise RequestError(f"trainer.precision {self.precision} quantises by a CUDA kernel, and {missing}")

    def convert_module(self, module: LightningModule) -> LightningModule:
        """Set how the products of the decoder's matrices are scaled. Lightning calls this once the decoder is built.

        Raises:
            RequestError: as `choose_matrices`, and for a number of tokens that FP8 does not take.
        """
        decoder = module.decoder
        keep = [f"layers.{len(decoder.layers) - 1}.*"] if self.keep is None else self.keep
        matrices, chosen = choose_matrices(decoder, self.precision, keep)
        data = module.trainer.datamodule  # its tokens are a dimension of the products that are weights' gradients
        if module.fitting and data.micro_batch_size * data.seq_len % MULTIPLE:
            raise RequestError(
                f"trainer.precision {self.precision} takes multiples of {MULTIPLE} tokens a micro-batch, and these are "
                f"{data.micro_batch_size} x {data.seq_len}: change data.micro_batch_size or data.seq_len"
            )
        use_low_precision(decoder)
        for name, matrix in matrices.items():
            matrix.scaling = self.scaling if name in chosen else None
        log.info("precision: %s in %d of the blocks' %d matrices; bf16 in %s",
                 self.precision, len(chosen), len(matrices), " ".join(keep) or "none")  # fmt: skip
        return module


def choose_matrices(decoder: Decoder, precision: str, keep: list[str]) -> tuple[dict[str, Linear], dict[str, Linear]]:
    """The matrices of a decoder's blocks by name, and those of them that are multiplied in FP8.

    Raises:
        RequestError: for a pattern of `keep` that fits no matrix, where none is left for FP8, and for sizes that it
            does not take.
    """
    matrices = {name: part for name, part in decoder.named_modules()
                if type(part) in (Linear, LowPrecisionLinear)}  # fmt: skip
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in matrices):
            *names, last = matrices
            raise RequestError(f"trainer.fp8_keep {pattern} fits no matrix: they are {', '.join(names[:4])} ... {last}")
    chosen = {name: matrix for name, matrix in matrices.items()
              if not any(fnmatchcase(name, pattern) for pattern in keep)}  # fmt: skip
    if not chosen:
        raise RequestError(f"trainer.fp8_keep {' '.join(keep)} leaves no matrix for FP8: take bf16-mixed")
    for name, matrix in chosen.items():
        if matrix.in_features % MULTIPLE or matrix.out_features % MULTIPLE:
            raise RequestError(
                f"trainer.precision {precision} takes multiples of {MULTIPLE}, and {name} is {matrix.out_features} x "
                f"{matrix.in_features}: change the decoder's sizes, or name it in trainer.fp8_keep"
            )
    return matrices, chosen


def choose_precision(precision: Precision, fp8_keep: list[str] | None, accelerator: str) -> str | Float8Precision:
    """The precision for Lightning, a name or our plugin: on a CPU one that it does well, which is logged; FP8 stays."""
    if precision.startswith("fp8-"):
        return Float8Precision(precision.removeprefix("fp8-"), fp8_keep)
    if fp8_keep is not None:
        raise RequestError(
            f"trainer.fp8_keep {' '.join(fp8_keep)} is for FP8, and trainer.precision is {precision}: leave it out, or "
            "take fp8-tensorwise or fp8-rowwise"
        )
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
    """The precision of the matrix multiplications, as `system/hardware.peak_flops` takes it."""
    return "tf32" if precision == "32-true" and matmul_precision != "highest" else precision


def refuse_matmul_precision(matmul_precision: str, precision: str) -> None:
    """Raise RequestError where no matrices in fp32 are multiplied."""
    if matmul_precision != "highest" and precision != "32-true":
        raise RequestError(
            f"trainer.matmul_precision {matmul_precision} is for trainer.precision 32-true, and this is {precision}, "
            "which is faster already: leave it out"
        )
