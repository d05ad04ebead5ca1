"""Split the packed projection into queries, keys and values, normalise (optionally) and rotate them, in one pass."""

from typing import Any

import torch
from torch import Tensor

from lm.kernels import runtime
from lm.kernels.runtime import define

BLOCKS_PER_MULTIPROCESSOR = 8  # of the backward pass with a norm; each block writes a partial sum
Heads = tuple[Tensor, Tensor, Tensor]  # q (B, T, H, D), k (B, T, KV, D), v (B, T, KV, D)


def _cpu_forward(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    heads: int,
    kv_heads: int,
    eps: float,
) -> Heads:
    packed = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))  # (B, T, H + 2 KV, D)
    q, k, v = packed.split((heads, kv_heads, kv_heads), dim=2)
    q, k = (
        _rotate(_normalise(x.float(), weight, eps), cos, sin, positions).to(qkv.dtype).contiguous()
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return q, k, v.clone(memory_format=torch.contiguous_format)


def _normalise(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:  # (B, T, heads, D) in fp32
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    if positions is None:
        cos, sin = (table[: x.shape[1], None] for table in (cos, sin))  # (T, 1, D / 2)
    else:
        cos, sin = (table[positions][:, :, None] for table in (cos, sin))  # (B, T, 1, D / 2)
    left, right = x.chunk(2, dim=-1)  # (B, T, heads, D / 2)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _cpu_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    heads, kv_heads = dq.shape[2], dk.shape[2]
    back = [_rotate(d.float(), cos, -sin, positions) for d in (dq, dk)]
    dweights = dq.new_empty(0)
    if q_weight is not None and k_weight is not None and qkv is not None:
        packed = qkv.float().unflatten(-1, (heads + 2 * kv_heads, -1))
        sums = []
        for i, (x, weight) in enumerate(zip(packed.split((heads, kv_heads, kv_heads), dim=2), (q_weight, k_weight))):
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            n, g = x * scale, back[i] * weight.float()
            sums.append((back[i] * n).sum((0, 1, 2)))
            back[i] = scale * (g - n * (g * n).mean(-1, keepdim=True))
        dweights = torch.stack(sums).to(q_weight.dtype)  # (2, D)
    return torch.cat((*back, dv.float()), dim=2).flatten(2).to(dq.dtype), dweights


def constants(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, heads: int, kv_heads: int, dim: int, vec: int
) -> dict[str, Any]:
    """Preprocessor constants of the kernels for these heads, halves of a head loaded in vectors of `vec` elements.

    Without a `weight_dtype` there is no norm.
    """
    lanes = 1
    while lanes < 32 and lanes < dim // 2 // vec:
        lanes *= 2
    return {
        "T": runtime.TYPES[dtype],
        "W": runtime.TYPES[weight_dtype or torch.float32],
        "DIM": dim,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "VEC": vec,
        "LANES": lanes,
        "NORM": int(weight_dtype is not None),
    }


def _program(
    like: Tensor, weight: Tensor | None, heads: int, kv_heads: int, dim: int, *tensors: Tensor | None
) -> tuple[runtime.Program, int]:
    """The kernels for these heads, and how many heads a block of 256 threads handles at once."""
    vec = runtime.vector(dim // 2, like, weight, *tensors)
    chosen = constants(like.dtype, None if weight is None else weight.dtype, heads, kv_heads, dim, vec)
    return runtime.program("qk_norm_rope", like.device, **chosen), 256 // chosen["LANES"]


def _cuda_forward(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    heads: int,
    kv_heads: int,
    eps: float,
) -> Heads:
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    positions = None if positions is None else positions.contiguous()
    batch, length, total = qkv.shape
    dim = total // (heads + 2 * kv_heads)
    q, k, v = (qkv.new_empty((batch, length, n, dim)) for n in (heads, kv_heads, kv_heads))
    run, groups = _program(qkv, q_weight, heads, kv_heads, dim, cos, sin, k_weight)
    tokens = batch * length
    blocks = -(-tokens * (heads + 2 * kv_heads) // groups)
    run("qk_norm_rope_forward", blocks, 256, qkv, q_weight, k_weight, cos, sin, positions, q, k, v, tokens, length, eps)
    return q, k, v


def _cuda_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.contiguous(), sin.contiguous()
    positions = None if positions is None else positions.contiguous()
    qkv = None if qkv is None else qkv.contiguous()
    gradients = [_rows(d) for d in (dq, dk, dv)]
    batch, length, heads, dim = dq.shape
    kv_heads = dk.shape[2]
    dqkv = dq.new_empty((batch, length, (heads + 2 * kv_heads) * dim))
    run, groups = _program(gradients[0], q_weight, heads, kv_heads, dim, *gradients, qkv, cos, sin, k_weight)
    tokens = batch * length
    blocks = -(-tokens * (heads + 2 * kv_heads) // groups)
    dweights, partial = dq.new_empty(0), None
    if q_weight is not None:
        blocks = min(blocks, BLOCKS_PER_MULTIPROCESSOR * runtime.multiprocessors(dq.device))
        dweights = q_weight.new_empty((2, dim))
        partial = dq.new_empty((blocks, 2, dim), dtype=torch.float32)
    strided = [argument for d in gradients for argument in (d, *d.stride()[:3])]
    arguments = *strided, qkv, q_weight, k_weight, cos, sin, positions, dqkv, partial, tokens, length, eps
    run("qk_norm_rope_backward", blocks, 256, *arguments)
    if q_weight is not None:
        run("qk_norm_rope_weights", -(-2 * dim // 32), 256, partial, dweights, blocks)
    return dqkv, dweights


def _rows(gradient: Tensor) -> Tensor:
    """Return the gradient if each head is contiguous and aligned for vector loads, otherwise a contiguous copy."""
    count = 16 // gradient.element_size()
    aligned = gradient.stride(-1) == 1 and all(stride % count == 0 for stride in gradient.stride()[:-1])
    return gradient if aligned else gradient.contiguous()


FORWARD = define(
    "qk_norm_rope(Tensor qkv, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? positions, "
    "int heads, int kv_heads, float eps) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu_forward,
    cuda=_cuda_forward,
    fake=lambda qkv, q_weight, k_weight, cos, sin, positions, heads, kv_heads, eps: tuple(
        qkv.new_empty((*qkv.shape[:2], n, qkv.shape[2] // (heads + 2 * kv_heads))) for n in (heads, kv_heads, kv_heads)
    ),
)
BACKWARD = define(
    "qk_norm_rope_backward(Tensor dq, Tensor dk, Tensor dv, Tensor? qkv, Tensor? q_weight, Tensor? k_weight, "
    "Tensor cos, Tensor sin, Tensor? positions, float eps) -> (Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=_cuda_backward,
    fake=lambda dq, dk, dv, qkv, q_weight, k_weight, cos, sin, positions, eps: (
        dq.new_empty((*dq.shape[:2], (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3])),
        dq.new_empty(0) if q_weight is None else q_weight.new_empty((2, dq.shape[3])),
    ),
)


class _QkNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Heads:
        """The arguments are those of `qk_norm_rope`."""
        qkv, q_weight, k_weight, cos, sin, positions, _, _, eps = arguments
        ctx.save_for_backward(qkv if q_weight is not None else None, q_weight, k_weight, cos, sin, positions)
        ctx.eps = eps
        return FORWARD(*arguments)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple:
        saved = ctx.saved_tensors  # accessed once: activation checkpointing drops them after the first access
        dqkv, dweights = BACKWARD(dq, dk, dv, *saved, ctx.eps)
        norms = (None, None) if saved[1] is None else dweights.unbind(0)
        return dqkv, *norms, *(None,) * 6


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    heads: int,
    kv_heads: int,
    eps: float,
) -> Heads:
    """RMSNorm over each query and key head, then the rotary embedding (Su et al., 2021, arXiv:2104.09864).

    Henry et al. (2020, arXiv:2010.04245) proposed to normalise queries and keys, with another norm. The layout is the
    half-split one of Hugging Face: pairs `(i, i + D / 2)` rotate together. All is computed in fp32 and rounded
    once at the end.

    Args:
        qkv: the projection, `(B, T, (H + 2 KV) * D)`: queries, keys, values; in bf16, fp16 or fp32.
        q_weight, k_weight: `(D)` of the norms, in one of these precisions; None: no norm.
        cos, sin: `(P, D / 2)` fp32, a row for each position.
        positions: `(B, T)` int32, the position of each token; None: token t is at position t.

    Returns:
        q `(B, T, H, D)`, k and v `(B, T, KV, D)`. The values are copied, so that the projection need not be saved.
    """
    return _QkNormRope.apply(qkv, q_weight, k_weight, cos, sin, positions, heads, kv_heads, eps)
