"""The two ways to do a block's arithmetic: plain PyTorch, or our ops, which are kernels on a GPU.

`model/decoder` is written in terms of these four and does not know which it has.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lm.errors import RequestError
from lm.kernels import runtime
from lm.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_plain
from lm.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_plain
from lm.kernels.rms_norm import norm_linear, norm_linear_plain, rms_norm, rms_norm_plain
from lm.kernels.swiglu import swiglu_linear, swiglu_linear_plain

OLDEST = (8, 0)  # compute capability with bf16 in hardware


class Operations(NamedTuple):
    """The fused steps of a decoder; each is documented where it is defined."""

    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    norm_linear: Callable[..., tuple[Tensor, Tensor]]
    qk_norm_rope: Callable[..., tuple[Tensor, Tensor, Tensor]]
    swiglu_linear: Callable[..., Tensor]
    linear_cross_entropy: Callable[..., tuple[Tensor, Tensor]]


PLAIN = Operations(
    rms_norm_plain, norm_linear_plain, qk_norm_rope_plain, swiglu_linear_plain, linear_cross_entropy_plain)  # fmt: skip
FUSED = Operations(rms_norm, norm_linear, qk_norm_rope, swiglu_linear, linear_cross_entropy)


def choose(kernels: str, device: torch.device) -> tuple[Operations, str]:
    """The operations for a device.

    Args:
        kernels: `on`, `off`, or `auto`: ours where they can run.
        device: where the model will be.

    Returns:
        The operations, and what was taken and why, for people.

    Raises:
        RequestError: `on` where they cannot run.
    """
    if kernels == "off":
        return PLAIN, "plain PyTorch"
    missing = _missing(device)
    if missing is None:
        return FUSED, "CUDA"
    if kernels == "on":
        raise RequestError(f"model.kernels on: {missing}; `auto` takes plain PyTorch there")
    return PLAIN, f"plain PyTorch ({missing})"


def _missing(device: torch.device) -> str | None:
    """What keeps our kernels from running on a device; None if nothing does."""
    if device.type != "cuda" or torch.version.hip:
        return f"no CUDA device, the model is on {'an AMD GPU' if torch.version.hip else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    if not runtime.available():
        return "NVRTC is not installed (pip install cuda-bindings nvidia-cuda-nvrtc)"
    return None
