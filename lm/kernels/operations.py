"""The fused ops as one object, and whether they can run on a device.

`model/fused` builds the decoder's forward pass from them. On a GPU they are CUDA kernels; on a CPU, which only tests
use, they are plain PyTorch.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lm.errors import RequestError, RunError
from lm.kernels import runtime, swiglu
from lm.kernels.cross_entropy import linear_cross_entropy
from lm.kernels.qk_norm_rope import qk_norm_rope
from lm.kernels.rms_norm import norm_linear, rms_norm
from lm.kernels.swiglu import swiglu_linear


class FusedOps(NamedTuple):
    """The ops of a fused forward pass; each is documented where it is defined."""

    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    norm_linear: Callable[..., tuple[Tensor, Tensor]]
    qk_norm_rope: Callable[..., tuple[Tensor, Tensor, Tensor]]
    swiglu_linear: Callable[..., Tensor]
    linear_cross_entropy: Callable[..., tuple[Tensor, Tensor]]


FUSED = FusedOps(rms_norm, norm_linear, qk_norm_rope, swiglu_linear, linear_cross_entropy)


def choose_kernels(kernels: str, device: torch.device) -> tuple[FusedOps | None, str]:
    """The fused ops, if a device can run them, else None for plain PyTorch; and why, in words for the log.

    `kernels` is `on`, where they have to run, `off`, or `auto`.
    """
    if kernels == "off":
        return None, "plain PyTorch"
    missing = kernels_missing(device)
    if missing is None:
        return FUSED, "CUDA"
    if kernels == "on":
        raise RequestError(f"model.kernels on: {missing}; `auto` takes plain PyTorch there")
    return None, f"plain PyTorch ({missing})"


def kernels_missing(device: torch.device) -> str | None:
    """Why our kernels cannot run on a device; None if they can."""
    if device.type != "cuda" or torch.version.hip:
        return f"no CUDA device, the model is on {'an AMD GPU' if torch.version.hip else device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):  # which has bf16 in hardware
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    if not runtime.available():
        return "NVRTC is not installed (pip install cuda-bindings nvidia-cuda-nvrtc)"
    try:  # an older driver does not load what a newer NVRTC compiles
        runtime.program("swiglu", device, **swiglu.constants(torch.bfloat16, 64, 8))
    except RunError as error:
        return f"a kernel does not load: {error}"
    return None
