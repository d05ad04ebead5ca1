"""Attention masks, and the choice of an attention kernel; all kernels are from libraries.

Plain causal attention is `scaled_dot_product_attention`. Windows and documents are flash attention over sequences of
unequal length (`varlen_attn`) if supported: CUDA from Ampere on, half precision, heads of at most 256.
Otherwise they are a dense mask, which is also the reference for the other two.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

HALF = (torch.bfloat16, torch.float16)
FLASH_FROM = (8, 0)  # compute capability
CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
FLASH_WIDTH = 8  # head widths must be multiples of it
GROUPS_IN_VARLEN = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 infers groups without it
_order_is_set = False  # whether `kernel_order` is entered


class Documents(NamedTuple):
    """The documents of a batch: the document of each token, and the token's position in it."""

    ids: Tensor  # (B, T), not decreasing along a row
    positions: Tensor  # (B, T) int32, from the beginning of each document
    limit: int | None = None  # upper bound on the number of documents in the batch; None: not known on the host


class Past(NamedTuple):
    """A layer's part of the `KVCache` (`inference/kv_cache`), into which `attend` writes the new tokens."""

    keys: Tensor  # (B, slots, KV, D)
    values: Tensor  # alike
    positions: Tensor  # (B, T), the slots of the new tokens


class AttentionMask(NamedTuple):
    """Which tokens each token of a layer attends to: itself and earlier ones, within a window and a document."""

    window: int | None  # tokens, the token itself included; None: no limit
    # (sequences + 1) int32, as `cu_seqlens`: start of each sequence, then the number of tokens, possibly repeated
    offsets: Tensor | None
    dense: Tensor | None  # (B or 1, 1, T, T), true where the row's token attends to the column's; with a past S columns
    past: Past | None = None  # while generating: the first S slots of the cache are attended to


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Causal attention of `q` `(B, T, H, D)` to `k` and `v` `(B, T, KV, D)`, KV a divisor of H: `(B, T, H, D)`."""
    if mask.offsets is not None:
        return _varlen(q, k, v, mask)
    if mask.past is not None:
        k, v = _with_past(k, v, mask.past, mask)
        if q.shape[1] == 1:
            return _one_token(q, k, v, mask)
    heads, kv_heads = q.shape[2], k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, D)
    # The fused kernels for fp32 and for dense masks do not support grouped heads: repeat keys and values for them.
    copied = heads != kv_heads and (mask.dense is not None or q.device.type == "cuda" and q.dtype not in HALF)
    if copied:
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))  # (B, H, T, D)
    out = _scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask.dense is None, enable_gqa=heads != kv_heads and not copied
    )
    return out.transpose(1, 2)  # (B, T, H, D)


def _one_token(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Attention of a single new token: the query heads of a group take the token dimension, so no key is copied."""
    q = q[:, 0].unflatten(1, (k.shape[2], -1))  # (B, KV, H / KV, D)
    k, v = (t.transpose(1, 2) for t in (k, v))  # (B, KV, S, D)
    out = _scaled_dot_product_attention(q, k, v, mask)
    return out.flatten(1, 2)[:, None]  # (B, 1, H, D)


def _scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, **options: Any) -> Tensor:
    """torch's function, inside `chosen_kernels`; enters it if the caller has not."""
    outside = q.device.type != "cuda" or torch.compiler.is_compiling() or _order_is_set
    with nullcontext() if outside else chosen_kernels(q.device, [mask]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, **options)


def _with_past(k: Tensor, v: Tensor, past: Past, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    keys, values, positions = past
    rows = torch.arange(k.shape[0], device=k.device)[:, None]  # (B, 1)
    keys[rows, positions], values[rows, positions] = k, v
    assert mask.dense is not None
    used = mask.dense.shape[-1]
    return keys[:, :used], values[:, :used]  # (B, S, KV, D)


def _varlen(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    length, heads, kv_heads, width = q.shape[1], q.shape[2], k.shape[2], q.shape[3]
    groups = {"enable_gqa": heads != kv_heads} if GROUPS_IN_VARLEN else {}
    if width % FLASH_WIDTH:  # zero padding does not change the products, and adds zero columns to the result
        q, k, v = (F.pad(t, (0, -width % FLASH_WIDTH)) for t in (q, k, v))
    left = -1 if mask.window is None else mask.window - 1  # flash counts the tokens before, without the token itself
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out: Any = varlen_attn(
        q, k, v, mask.offsets, mask.offsets, length, length, scale=width**-0.5, window_size=(left, 0), **groups
    )  # (B * T, H, D), or wider
    return out[..., :width].unflatten(0, (-1, length))  # (B, T, H, D)


def documents_from(document_ids: Tensor, limit: int | None = None) -> Documents:
    """Compute positions that restart with every document, from ids `(B, T)`; `limit` as in `Documents`."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)  # (B, T)
    positions = index - torch.where(_begins(document_ids), index, 0).cummax(1).values
    return Documents(document_ids, positions.int(), limit)


def _begins(document_ids: Tensor) -> Tensor:
    """Where a document begins: `(B, T)` bool."""
    return F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)


def kernel_for(
    device_type: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    window: int | None,
    documents: bool,
    head_dim: int,
) -> Literal["causal", "varlen", "masked"]:
    """The kernel on a device for layers with this window; `documents`: whether rows are divided into documents."""
    if window is None and not documents:
        return "causal"
    flash = device_type == "cuda" and capability >= FLASH_FROM and dtype in HALF and head_dim <= 256
    return "varlen" if flash else "masked"


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def attention_mask(x: Tensor, window: int | None, documents: Documents | None, head_dim: int) -> AttentionMask:
    """The mask of the layers with this window, for hidden states like `x` `(B, T, C)`; no documents: each row is one.

    With `varlen_attn`, documents and no known limit, this synchronizes with the device.
    """
    batch, length = x.shape[:2]
    if window is not None and window >= length:
        window = None
    kernel = kernel_for(x.device.type, _capability(x.device), x.dtype, window, documents is not None, head_dim)
    if kernel == "causal":
        return AttentionMask(window, None, None)
    if kernel == "masked":
        return dense_mask(length, window, documents, x.device)
    if documents is None:
        offsets = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=x.device)
    else:
        offsets = _offsets(documents)
    return AttentionMask(window, offsets, None)


def _offsets(documents: Documents) -> Tensor:
    """Start of each document among all tokens, then the number of tokens, repeated up to the limit: empty sequences."""
    begins = _begins(documents.ids).flatten()  # (B * T,)
    tokens, limit = begins.numel(), documents.limit
    if limit is None:
        limit = int(begins.sum())
    offsets = begins.new_full((limit + 1,), tokens, dtype=torch.int32)
    # Every token writes its index: the first token of a document at the document's place, any other at the last place.
    place = torch.where(begins, begins.cumsum(0) - 1, limit)
    offsets.scatter_(0, place, torch.arange(tokens, dtype=torch.int32, device=begins.device))
    offsets[-1:].fill_(tokens)
    return offsets


def dense_mask(length: int, window: int | None, documents: Documents | None, device: torch.device) -> AttentionMask:
    """The mask as a tensor, the reference for all kernels."""
    index = torch.arange(length, device=device)
    dense = (index[:, None] >= index)[None, None]  # (1, 1, T, T)
    if window is not None:
        dense = dense & (index[:, None] - index < window)
    if documents is not None:
        dense = dense & (documents.ids[:, None, :, None] == documents.ids[:, None, None, :])  # (B, 1, T, T)
    return AttentionMask(window, None, dense)


# Compute capability from which on the row holds -> kernels of `scaled_dot_product_attention`, best first, and why. The
# first one that accepts the inputs runs: flash takes heads of at most 256, cuDNN of at most 128, both half precision.
KERNELS = [
    ((10, 0), (FLASH, EFFICIENT, MATH)),  # Blackwell: cuDNN is wrong with fewer than 8 key heads (pytorch #193893)
    ((9, 0), (CUDNN, FLASH, EFFICIENT, MATH)),  # Hopper: heads of 128: cuDNN 268 TFLOP/s, flash 177; of 64: 208, 156
    (FLASH_FROM, (FLASH, EFFICIENT, MATH)),  # Ampere and Ada: flash was written for them
    ((0, 0), (EFFICIENT, MATH)),  # older GPUs: flash does not run there
]


def backends(capability: tuple[int, int], masked: bool) -> list[SDPBackend]:
    """The kernels for a GPU, best first, by `KERNELS`; `masked`: for a decoder of which some layers have a mask.

    Flash does not take a mask, and the backward pass of cuDNN's may give NaN with one (pytorch #196678). So layers with
    windows or documents are flash over sequences where that runs, which needs no mask.
    """
    order = next(kernels for since, kernels in KERNELS if capability >= since)
    return [kernel for kernel in order if not (masked and kernel is CUDNN)]


@contextmanager
def kernel_order(order: list[SDPBackend]) -> Iterator[None]:
    """Inside the `with`, `scaled_dot_product_attention` tries only these kernels, in this order."""
    global _order_is_set
    before, _order_is_set = _order_is_set, True
    try:
        with sdpa_kernel(order, set_priority=True):
            yield
    finally:
        _order_is_set = before


@contextmanager
def chosen_kernels(
    device: torch.device, masks: Iterable[AttentionMask], first: SDPBackend | None = None
) -> Iterator[None]:
    """Inside the `with`, `scaled_dot_product_attention` uses the best kernel for a device that gives correct results.

    An order that is already set stays, unless `first` is given. Without a dense mask, `first` is
    preferred to the usual best kernel.
    """
    if device.type != "cuda" or (_order_is_set and first is None):
        yield
        return
    masked = any(mask.dense is not None for mask in masks)
    order = backends(_capability(device), masked)
    if first is not None and not masked:
        order = [first, *(backend for backend in order if backend != first)]
    with kernel_order(order):
        yield


def enter_kernels(decoder: nn.Module, first: SDPBackend | None = None) -> None:
    """Enter `chosen_kernels` around all blocks of a decoder, also compiled ones, once per forward pass."""
    decoder.run_blocks = partial(_run_by_kernels, decoder.run_blocks, first)


def _run_by_kernels(
    run_blocks: Callable[..., Tensor], first: SDPBackend | None, x: Tensor, rotary: Any, masks: list[AttentionMask]
) -> Tensor:
    with chosen_kernels(x.device, masks, first):
        return run_blocks(x, rotary, masks)


def describe_attention(
    device: torch.device,
    dtype: torch.dtype,
    windows: Iterable[int | None],
    documents: bool,
    head_dim: int,
    first: SDPBackend | None = None,
) -> str:
    """Describe the kernels that will run, for the log; `first` is as in `chosen_kernels`."""
    capability = _capability(device)
    kernels = {kernel_for(device.type, capability, dtype, window, documents, head_dim) for window in windows}
    names = []
    if "causal" in kernels and device.type == "cuda":
        best = [b for b in backends(capability, "masked" in kernels) if dtype in HALF or b in (EFFICIENT, MATH)]
        best.sort(key=lambda backend: backend != first)  # a stable sort: the others stay in order
        names.append(", then ".join(b.name.removesuffix("_ATTENTION").lower() for b in best[:2]))
    elif "causal" in kernels:
        names.append("scaled_dot_product_attention")
    names += [name for kernel, name in (("varlen", "flash over sequences"), ("masked", "masked")) if kernel in kernels]
    return " and ".join(names)
