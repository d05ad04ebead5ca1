"""RMSNorm with the residual addition before it.

`norm_linear` joins it with the linear layer after it, and `fp8/norm_linear` returns the normalised rows in FP8.
"""

from typing import Any

import torch
from torch import Tensor

from lm.kernels import runtime
from lm.kernels.runtime import define

BLOCKS_PER_MULTIPROCESSOR = 8  # of the backward pass: enough to hide latency, few enough for short partial sums
# A lane of the forward pass holds this many elements of a row in registers. A lane of the backward pass holds half as
# many, since it has three values of each.
LANE_ELEMENTS = 16

# ---- forward: stream, y, 1 / rms -------------------------------------------------------------------------------------
# Without a residual the stream is `x`. An op may return neither its input nor None: its stream is then empty. `_Norm`
# returns None in its place, so that autograd computes no gradient of it, and `rms_norm` returns `x`.


def _cpu_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    stream = x.contiguous() if residual is None else x.contiguous() + residual.contiguous()
    x_fp32 = stream.float()
    rstd = torch.rsqrt(x_fp32.square().mean(-1) + eps)
    y = (x_fp32 * rstd[..., None] * weight.float()).to(x.dtype)
    return x.new_empty(0) if residual is None else stream, y, rstd


def _cuda_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    stream, y, rstd = _empty_forward(x, residual, weight, eps)
    launch_forward(x, residual, weight, eps, stream=stream, y=y, scale=None, rstd=rstd)
    return stream, y, rstd


def _empty_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    stream = x.new_empty(0 if residual is None else x.shape)
    return stream, x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    stream: Tensor,
    y: Tensor | None,
    scale: Tensor | None,
    rstd: Tensor,
) -> None:
    """Fill the results `stream`, `y` and `rstd`, `1 / rms`; with a `scale` `(rows)`, which is filled too, y is e4m3.

    The kernel has a null pointer for the stream without a residual, and for a `y` or `scale` of None.
    """
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    chosen = _constants_for(x, weight, residual, float8=scale is not None)
    run = runtime.program("rms_norm", x.device, **chosen)
    threads = chosen["FORWARD_WARPS"] * 32
    new_stream = None if residual is None else stream
    run("rms_norm_forward", rstd.numel(), threads, x, residual, weight, new_stream, y, scale, rstd, eps)


# ---- backward: the gradient of the stream, y (empty unless it is recomputed), the gradient of the weight -------------


def _cpu_backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor, *, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scale = rstd[..., None]  # (..., 1)
    n, d, w = stream.float() * scale, dy.contiguous().float(), weight.float()
    g = d * w
    dx = scale * (g - n * (g * n).mean(-1, keepdim=True))
    if dstream is not None:
        dx = dx + dstream.float()
    y = (n * w).to(stream.dtype) if recompute else stream.new_empty(0)
    dweight = (d * n).flatten(0, -2).sum(0)
    return dx.to(stream.dtype), y, dweight.to(weight.dtype)


def _cuda_backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor, *, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dy, stream = dy.contiguous(), stream.contiguous()
    dstream = None if dstream is None else dstream.contiguous()
    dx, y, dweight = _empty_backward(dy, dstream, stream, weight, rstd, recompute=recompute)
    chosen = _constants_for(stream, weight, dy, dstream)
    run = runtime.program("rms_norm", stream.device, **chosen)
    threads = chosen["BACKWARD_WARPS"] * 32
    rows, width = rstd.numel(), stream.shape[-1]
    blocks = min(rows, BLOCKS_PER_MULTIPROCESSOR * runtime.multiprocessors(stream.device))
    partial = weight.new_empty((blocks, width), dtype=torch.float32)
    new_y = y if recompute else None
    run("rms_norm_backward", blocks, threads, dy, dstream, stream, weight, rstd, dx, new_y, partial, rows)
    run("rms_norm_weight", -(-width // 32), 256, partial, dweight, blocks)
    return dx, y, dweight


def _empty_backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor, *, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = stream.new_empty(stream.shape if recompute else 0)
    return stream.new_empty(stream.shape), y, torch.empty_like(weight)


# ---- registration ----------------------------------------------------------------------------------------------------


def constants(
    dtype: torch.dtype, weight_dtype: torch.dtype, width: int, vec: int, *, float8: bool = False
) -> dict[str, Any]:
    """Preprocessor constants of the kernels for rows of this width, loaded in vectors of `vec` elements.

    With `float8` the forward pass returns e4m3, with a scale per row.
    """
    return {
        "T": runtime.TYPES[dtype],
        "W": runtime.TYPES[weight_dtype],
        "WIDTH": width,
        "VEC": vec,
        "FORWARD_WARPS": runtime.warps(width // vec, max(1, LANE_ELEMENTS // vec)),
        "BACKWARD_WARPS": runtime.warps(width // vec, max(1, LANE_ELEMENTS // 2 // vec)),
        "FP8": int(float8),
    }


def _constants_for(x: Tensor, weight: Tensor, *tensors: Tensor | None, float8: bool = False) -> dict[str, Any]:
    vec = runtime.vector(x.shape[-1], x, weight, *tensors)
    return constants(x.dtype, weight.dtype, x.shape[-1], vec, float8=float8)


FORWARD = define(
    "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu_forward,
    cuda=_cuda_forward,
    fake=_empty_forward,
)
BACKWARD = define(
    "rms_norm_backward(Tensor dy, Tensor? dstream, Tensor stream, Tensor weight, Tensor rstd, *, bool recompute)"
    " -> (Tensor, Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=_cuda_backward,
    fake=_empty_backward,
)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor | None, Tensor]:
        stream, y, rstd = FORWARD(x, residual, weight, eps)
        ctx.adds = residual is not None
        ctx.save_for_backward(stream if ctx.adds else x, weight, rstd)
        ctx.set_materialize_grads(False)  # the gradient of what nothing uses is None
        return stream if ctx.adds else None, y

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dstream, dstream, None, None
        dx, _, dweight = BACKWARD(dy, dstream, *ctx.saved_tensors, recompute=False)
        return dx, dx if ctx.adds else None, dweight, None


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`stream = x + residual` and `y = stream / rms(stream) * weight` (Zhang and Sennrich, 2019, arXiv:1910.07467).

    The statistics are computed in fp32 from the stream as it is stored. Returns `(stream, y)`.

    Args:
        x: `(..., C)` in bf16, fp16 or fp32, the output of a branch.
        residual: as x, the residual stream before the branch; None: x itself is the stream.
        weight: `(C)` in bf16, fp16 or fp32. The results have the shape and dtype of x.
    """
    check_shapes_and_dtypes(x, residual, weight)
    stream, y = _Norm.apply(x, residual, weight, eps)
    return x if stream is None else stream, y


def check_shapes_and_dtypes(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    """Raise TypeError if shapes or dtypes do not match, which kernels do not check."""
    if residual is not None and (residual.dtype, residual.shape) != (x.dtype, x.shape):
        raise TypeError(f"x is {tuple(x.shape)} in {x.dtype}, and residual {tuple(residual.shape)} in {residual.dtype}")
    if weight.shape != x.shape[-1:]:
        raise TypeError(f"rows of x have {x.shape[-1]} elements, and the norm's weight is {tuple(weight.shape)}")
