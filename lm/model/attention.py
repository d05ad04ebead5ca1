"""Attention by the library kernel that is right for the device and for who sees whom; none of it is ours.

`Reach` says who sees whom, and with that the kernel is chosen: plain causal attention is
`scaled_dot_product_attention`; windows and documents are flash attention over sequences of unequal length where that
runs (CUDA from Ampere on, half precision, no dropout), and elsewhere a mask, which is also the reference for all.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

HALF = (torch.bfloat16, torch.float16)
FLASH_FROM = (8, 0)  # compute capability
FLASH_WIDTH = 8  # widths of a head are multiples of it
GROUPS_IN_VARLEN = "enable_gqa" in inspect.signature(varlen_attn).parameters  # since torch 2.13
Way = Literal["causal", "varlen", "masked"]


class Documents(NamedTuple):
    """Which tokens belong together."""

    ids: Tensor  # (B, T), not decreasing along a row
    positions: Tensor  # (B, T) int32, counted from the beginning of each document


class Past(NamedTuple):
    """Keys and values of tokens that were read before, and the slots for those at hand (see `model/decoder`)."""

    keys: Tensor  # (B, slots, KV, D)
    values: Tensor  # alike
    positions: Tensor  # (B, T), the slots that the tokens at hand take


class Reach(NamedTuple):
    """Who sees whom in a layer: a token sees itself and what is before it; and of that

    the last `window` tokens, itself included (None: all), in its own sequence (`starts`) or where `mask` is true.
    """

    window: int | None
    starts: Tensor | None  # (sequences + 1) int32, where each begins among all tokens of the batch, and their number
    mask: Tensor | None  # (B or 1, 1, T, T), true where the row's token sees the column's; with a past (B, 1, T, S)
    past: Past | None = None  # while generating: its first S slots are seen, too


def documents_from(document_ids: Tensor) -> Documents:
    """Positions that restart with every document.

    Args:
        document_ids: `(B, T)`, not decreasing along a row.
    """
    time = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)  # (B, T)
    positions = time - torch.where(_begins(document_ids), time, 0).cummax(1).values
    return Documents(document_ids, positions.int())


def _begins(document_ids: Tensor) -> Tensor:
    return F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)  # (B, T)


def way_for(device_type: str, capability: tuple[int, int], dtype: torch.dtype, window: int | None, documents: bool,
            dropout: float) -> Way:  # fmt: skip
    """Which kind of kernel does it.

    Args:
        device_type: such as "cuda".
        capability: compute capability of a CUDA device.
        dtype: of queries, keys and values.
        window: tokens that a token sees; None: all before it.
        documents: whether rows are divided into documents.
        dropout: probability of dropping a weight.
    """
    if window is None and not documents:
        return "causal"
    flash = device_type == "cuda" and capability >= FLASH_FROM and dtype in HALF
    return "varlen" if flash and not dropout else "masked"


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def reach(x: Tensor, window: int | None, documents: Documents | None, dropout: float = 0.0) -> Reach:
    """Who sees whom in the layers with this window. Where documents become sequences this waits for the device.

    Args:
        x: hidden states `(B, T, C)`: their shape, device and precision are what counts.
        window: tokens that a token sees, itself included; None: all before it.
        documents: None: each row is one.
        dropout: of attention weights.
    """
    batch, length = x.shape[:2]
    if window is not None and window >= length:
        window = None
    way = way_for(x.device.type, _capability(x.device), x.dtype, window, documents is not None, dropout)
    if way == "causal":
        return Reach(window, None, None)
    if way == "varlen":
        end = torch.full((1,), batch * length, dtype=torch.int32, device=x.device)
        if documents is None:
            return Reach(window, torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=x.device), None)
        return Reach(window, torch.cat((_begins(documents.ids).flatten().nonzero()[:, 0].int(), end)), None)
    return masked_reach(length, window, documents, x.device)


def masked_reach(length: int, window: int | None, documents: Documents | None, device: torch.device) -> Reach:
    """The reference for all: who sees whom as a mask. Arguments as for `reach`, `length` being T."""
    time = torch.arange(length, device=device)
    mask = (time[:, None] >= time)[None, None]  # (1, 1, T, T)
    if window is not None:
        mask = mask & (time[:, None] - time < window)
    if documents is not None:
        mask = mask & (documents.ids[:, None, :, None] == documents.ids[:, None, None, :])  # (B, 1, T, T)
    return Reach(window, None, mask)


def attend(q: Tensor, k: Tensor, v: Tensor, reach: Reach, dropout: float = 0.0) -> Tensor:
    """Causal attention with grouped key and value heads.

    Args:
        q: `(B, T, H, D)`.
        k: `(B, T, KV, D)`, KV a divisor of H.
        v: alike.
        reach: who sees whom.
        dropout: probability of dropping a weight.

    Returns:
        `(B, T, H, D)`.
    """
    if reach.starts is not None:
        return _varlen(q, k, v, reach)
    if reach.past is not None:
        k, v = _with_past(k, v, reach)
        if q.shape[1] == 1:
            return _one_token(q, k, v, reach)
    heads, kv_heads = q.shape[2], k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, D)
    # The fused kernels for fp32 and for masks know nothing of groups, so they are spelled out.
    spelled = heads != kv_heads and (reach.mask is not None or q.device.type == "cuda" and q.dtype not in HALF)
    if spelled:
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))  # (B, H, T, D)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=reach.mask, is_causal=reach.mask is None, dropout_p=dropout,
        enable_gqa=heads != kv_heads and not spelled,
    )  # fmt: skip
    return out.transpose(1, 2)  # (B, T, H, D)


def _one_token(q: Tensor, k: Tensor, v: Tensor, reach: Reach) -> Tensor:
    """The heads of a group take the place of tokens, so that no key is copied for them."""
    q = q[:, 0].unflatten(1, (k.shape[2], -1))  # (B, KV, H / KV, D)
    k, v = (t.transpose(1, 2) for t in (k, v))  # (B, KV, S, D)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=reach.mask)
    return out.flatten(1, 2)[:, None]  # (B, 1, H, D)


def _with_past(k: Tensor, v: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
    keys, values, positions = reach.past
    rows = torch.arange(k.shape[0], device=k.device)[:, None]  # (B, 1)
    keys[rows, positions], values[rows, positions] = k, v
    used = reach.mask.shape[-1]
    return keys[:, :used], values[:, :used]  # (B, S, KV, D)


def _varlen(q: Tensor, k: Tensor, v: Tensor, reach: Reach) -> Tensor:
    length, heads, kv_heads, width = q.shape[1], q.shape[2], k.shape[2], q.shape[3]
    groups = {"enable_gqa": heads != kv_heads} if GROUPS_IN_VARLEN else {}
    if not GROUPS_IN_VARLEN and heads != kv_heads:
        k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))  # (B, T, H, D)
    if width % FLASH_WIDTH:  # zeros change no product of queries and keys, and add columns of zeros to the result
        q, k, v = (F.pad(t, (0, -width % FLASH_WIDTH)) for t in (q, k, v))
    left = -1 if reach.window is None else reach.window - 1  # flash counts the tokens before, not the token itself
    out = varlen_attn(
        *(t.flatten(0, 1) for t in (q, k, v)), reach.starts, reach.starts, length, length, scale=width**-0.5,
        window_size=(left, 0), **groups,
    )  # (B * T, H, D), or wider
    return out[..., :width].unflatten(0, (-1, length))  # (B, T, H, D)


def backends(capability: tuple[int, int], masked: bool) -> list[SDPBackend]:
    """The kernels behind `scaled_dot_product_attention` on a GPU, best first; the first that takes the inputs runs.

    cuDNN's is the fastest on Hopper. It is left out on Blackwell, where it corrupts results with fewer than 8 key
    heads (pytorch issue 193893), and with masks, for which its backward pass may give NaN (pytorch issue 196678).

    Args:
        capability: compute capability of the device.
        masked: whether a mask is given.
    """
    hopper = [SDPBackend.CUDNN_ATTENTION] if capability[0] == 9 and not masked else []
    flash = [SDPBackend.FLASH_ATTENTION] if capability >= FLASH_FROM else []
    return [*hopper, *flash, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def chosen_kernels(device: torch.device, reaches: Iterable[Reach]) -> Iterator[None]:
    """While it lasts, `scaled_dot_product_attention` takes the kernels that are best for a device, and right."""
    if device.type != "cuda":
        yield
        return
    masked = any(reach.mask is not None for reach in reaches)
    with sdpa_kernel(backends(_capability(device), masked), set_priority=True):
        yield


def describe(device: torch.device, dtype: torch.dtype, windows: Iterable[int | None], documents: bool,
             dropout: float) -> str:  # fmt: skip
    """What will run, for people."""
    capability = _capability(device)
    ways = {way_for(device.type, capability, dtype, window, documents, dropout) for window in windows}
    names = []
    if "causal" in ways and device.type == "cuda":
        wide = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)  # the only ones for fp32
        best = [b for b in backends(capability, "masked" in ways) if dtype in HALF or b in wide]
        names.append(", then ".join(b.name.removesuffix("_ATTENTION").lower() for b in best[:2]))
    elif "causal" in ways:
        names.append("scaled_dot_product_attention")
    names += ["flash over sequences"] * ("varlen" in ways) + ["masked"] * ("masked" in ways)
    return " and ".join(names)
