"""An attention kernel by name, `model.attention`, in place of the order that `model/attention` has for a device."""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)

from lm.errors import RequestError, RunError, first_line
from lm.model.attention import AttentionMask, attend, backends, enter_kernels, kernel_order
from lm.model.config import Attention

FLASH = {"flash": None, "flash3": "FA3", "flash4": "FA4"}  # torch's names of versions that are wheels of their own


class Heads(NamedTuple):
    """The heads of a layer."""

    queries: int
    key_values: int
    width: int


def use_attention(
    decoder: nn.Module, name: Attention, device: torch.device, dtype: torch.dtype, heads: Heads, sequences: bool = False
) -> SDPBackend | None:
    """Make a decoder use the kernel of this name, or with `auto` the best one for its device; returns `backend(name)`.

    A version of flash attention also computes `sequences`, the layers with windows or documents, and is set for the
    process. RequestError if the kernel does not run.
    """
    if name == "auto":
        if device.type == "cuda":
            _use_flash(None)
        enter_kernels(decoder)
        return None
    if device.type != "cuda" or dtype == torch.float32:
        raise RequestError(f"model.attention {name} needs a CUDA device and half precision: use auto")
    reason = why_it_fails(name, device, dtype, heads)
    if reason is None and sequences and name in FLASH:
        reason = why_it_fails(name, device, dtype, heads, window=64)
    if reason:
        raise RequestError(f"model.attention {name} does not run here ({reason}): use auto")
    enter_kernels(decoder, backend(name))
    _use_flash(FLASH.get(name))
    return backend(name)


def backend(name: Attention) -> SDPBackend | None:
    """torch's name of a kernel; None for `auto`."""
    if name == "auto":
        return None
    name = "flash" if name in FLASH else name
    return SDPBackend.MATH if name == "math" else getattr(SDPBackend, f"{name.upper()}_ATTENTION")


def kernel_names(device: torch.device) -> list[str]:
    """The kernels that give right results on a device. Which of them are installed, `why_it_fails` finds out."""
    if device.type != "cuda":
        return ["flash", "math"]
    known = backends(torch.cuda.get_device_capability(device), masked=False)[:-1]
    names = [backend.name.removesuffix("_ATTENTION").lower() for backend in known]
    return names + [flash for flash, version in FLASH.items() if version in list_flash_attention_impls()]


def why_it_fails(
    name: str, device: torch.device, dtype: torch.dtype, heads: Heads, window: int | None = None
) -> str | None:
    """Why a kernel does not run forward and backward on a device, by trying it; None if it does.

    With a window it is flash attention over sequences.
    """
    before = current_flash_attention_impl()
    # Zeros, as random numbers would change those that the run draws.
    zeros = partial(torch.zeros, device=device, dtype=dtype, requires_grad=True)
    q, k, v = (zeros(1, 128, count, heads.width) for count in (heads.queries, heads.key_values, heads.key_values))
    offsets = None if window is None else torch.tensor([0, 128], dtype=torch.int32, device=device)
    try:
        _use_flash(FLASH.get(name))
        with kernel_order([backend(name)]):
            attend(q, k, v, AttentionMask(window, offsets, None)).sum().backward()
    except (RuntimeError, RunError) as error:  # not for these heads, or not installed
        return first_line(error)
    finally:
        _use_flash(before)
    return None


def _use_flash(version: str | None) -> None:
    """Make torch's flash attention the version of this name, one of torch's names; None: the one that torch brings."""
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    if version is not None:
        try:
            activate_flash_attention_impl(version)
        except (ImportError, RuntimeError, ValueError) as error:  # ValueError: torch does not know the name
            raise RunError(f"flash attention {version}: {first_line(error)}: install its wheel") from error
