"""An attention kernel by name, `model.attention`, in place of the order that `model/attention` has for a device."""

from functools import partial

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from lm.errors import RequestError, first_line
from lm.model.attention import AttentionMask, attend, backends, enter_kernels, kernel_order
from lm.model.config import Attention, DecoderConfig


def use_attention(
    decoder: nn.Module, name: Attention, device: torch.device, dtype: torch.dtype, config: DecoderConfig
) -> SDPBackend:
    """Make a decoder use the kernel of this name; returns `backend(name)`. RequestError if it does not run."""
    if reason := why_it_fails(name, device, dtype, config):
        raise RequestError(f"model.attention {name} does not run here ({reason}): use auto")
    enter_kernels(decoder, backend(name))
    return backend(name)


def backend(name: str) -> SDPBackend:
    return SDPBackend.MATH if name == "math" else getattr(SDPBackend, f"{name.upper()}_ATTENTION")


def kernel_names(device: torch.device) -> list[str]:
    """The kernels that give right results on a device. Which of them run, `why_it_fails` finds out."""
    if device.type != "cuda":
        return ["flash", "math"]
    known = backends(torch.cuda.get_device_capability(device), masked=False)[:-1]
    return [backend.name.removesuffix("_ATTENTION").lower() for backend in known]


def why_it_fails(name: str, device: torch.device, dtype: torch.dtype, config: DecoderConfig) -> str | None:
    """Why a kernel does not run forward and backward for the heads of a model, by trying it; None if it does."""
    # Zeros, as random numbers would change those that the run draws.
    zeros = partial(torch.zeros, device=device, dtype=dtype, requires_grad=True)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    q, k, v = (zeros(1, 128, count, config.head_dim) for count in (heads, kv_heads, kv_heads))
    try:
        with kernel_order([backend(name)]):
            attend(q, k, v, AttentionMask(None, None, None)).sum().backward()
    except RuntimeError as error:  # not for these heads
        return first_line(error)
    return None
