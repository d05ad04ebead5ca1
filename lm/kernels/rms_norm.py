"""RMSNorm with the residual addition before it, alone or joined with the linear layer after it.

Joined, the normalised activations are not saved for the backward pass, which recomputes them while it reads the stream
anyway. `swiglu` does the same for the MLP's second linear layer.
"""

from typing import Any

import torch
from torch import Tensor

from lm.kernels import linear, runtime
from lm.kernels.fp8 import Scaling
from lm.kernels.linear import Matrix
from lm.kernels.runtime import define

BLOCKS_PER_MULTIPROCESSOR = 8  # of the backward pass: enough to hide latency, few enough for short partial sums


def _cpu_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x.contiguous() if residual is None else x.contiguous() + residual.contiguous()
    wide = total.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (..., 1)
    y = (wide * rstd * weight.float()).to(x.dtype)
    return x.new_empty(0) if residual is None else total, y, rstd.squeeze(-1)


def _cpu_backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor, recompute: bool
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


def constants(dtype: torch.dtype, weight_dtype: torch.dtype, width: int, vec: int) -> dict[str, object]:
    """Preprocessor constants of the kernels for rows of this width, loaded in vectors of `vec` elements."""
    warps = [runtime.warps(width // vec, max(1, held // vec)) for held in (16, 8)]
    return dict(T=runtime.TYPES[dtype], W=runtime.TYPES[weight_dtype], WIDTH=width, VEC=vec, FORWARD_WARPS=warps[0],
                BACKWARD_WARPS=warps[1])  # fmt: skip


def _program(width: int, x: Tensor, weight: Tensor, *tensors: Tensor | None) -> tuple[runtime.Program, int, int]:
    """The kernels for rows of this width, and the threads of a forward and of a backward block."""
    chosen = constants(x.dtype, weight.dtype, width, runtime.vector(width, x, weight, *tensors))
    run = runtime.program("rms_norm", x.device, **chosen)
    return run, chosen["FORWARD_WARPS"] * 32, chosen["BACKWARD_WARPS"] * 32


def _cuda_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x, adds = x.contiguous(), residual is not None
    residual = residual.contiguous() if adds else None
    stream, y = torch.empty_like(x) if adds else x.new_empty(0), torch.empty_like(x)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    run, threads, _ = _program(x.shape[-1], x, weight, residual)
    run("rms_norm_forward", rstd.numel(), threads, x, residual, weight, stream if adds else None, y, rstd, eps)
    return stream, y, rstd


def _cuda_backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dy, stream = dy.contiguous(), stream.contiguous()
    dstream = None if dstream is None else dstream.contiguous()
    width, rows = stream.shape[-1], rstd.numel()
    dx, dweight = torch.empty_like(stream), torch.empty_like(weight)
    y = torch.empty_like(stream) if recompute else stream.new_empty(0)
    run, _, threads = _program(width, stream, weight, dy, dstream)
    blocks = min(rows, BLOCKS_PER_MULTIPROCESSOR * runtime.multiprocessors(stream.device))
    partial = weight.new_empty((blocks, width), dtype=torch.float32)
    run("rms_norm_backward", blocks, threads, dy, dstream, stream, weight, rstd, dx, y if recompute else None, partial,
        rows)
    run("rms_norm_weight", -(-width // 32), 256, partial, dweight, blocks)
    return dx, y, dweight


# An op returns new tensors only: without a residual, where the stream is `x`, an empty one stands in its place.
FORWARD = define(
    "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu_forward,
    cuda=_cuda_forward,
    fake=lambda x, residual, weight, eps: (
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(x.shape),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    ),
)
BACKWARD = define(
    "rms_norm_backward(Tensor dy, Tensor? dstream, Tensor stream, Tensor weight, Tensor rstd, bool recompute)"
    " -> (Tensor, Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=_cuda_backward,
    fake=lambda dy, dstream, stream, weight, rstd, recompute: (
        stream.new_empty(stream.shape),
        stream.new_empty(stream.shape if recompute else 0),
        torch.empty_like(weight),
    ),
)


class _Norm(torch.autograd.Function):
    """`norm_linear`, or `rms_norm` where `weight` is None. The stream is None where `x` is it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor | None,
        matrix: Matrix | None, scaling: Scaling | None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        if residual is not None and residual.dtype != x.dtype:
            raise TypeError(f"x and residual are one precision, and these are {x.dtype} and {residual.dtype}")
        stream, y, rstd = FORWARD(x, residual, norm_weight, eps)
        ctx.adds, ctx.scaling = residual is not None, scaling
        ctx.weight_dtype = None if weight is None else weight.dtype
        saved = ()
        if matrix is not None:
            saved, y = linear.saved_for_dx(matrix), linear.forward(y, matrix, scaling)
        ctx.save_for_backward(stream if ctx.adds else x, norm_weight, rstd, *saved)
        ctx.set_materialize_grads(False)
        return stream if ctx.adds else None, y

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        stream, norm_weight, rstd, *weight = ctx.saved_tensors
        if dout is None:  # only the stream was used
            return dstream, dstream if ctx.adds else None, *(None,) * 6
        joined, wanted = ctx.weight_dtype is not None, ctx.needs_input_grad[4]
        if joined:
            dout = linear.gradient_matrix(dout, ctx.scaling, True, wanted)
        dy = linear.dx(dout, weight, stream.dtype) if joined else dout  # (..., C)
        dx, y, dnorm = BACKWARD(dy, dstream, stream, norm_weight, rstd, wanted)
        dweight = None
        if wanted:
            dweight = linear.dweight(dout, y, ctx.scaling, ctx.weight_dtype)  # (out, C)
        return dx, dx if ctx.adds else None, dnorm, None, dweight, None, None, None


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`stream = x + residual` and `y = stream / rms(stream) * weight` (Zhang and Sennrich, 2019, arXiv:1910.07467).

    Args:
        x: the output of a branch, `(..., C)` in bf16, fp16 or fp32.
        residual: the residual stream, like `x`; None: `x` is the stream.
        weight: `(C)`, in any of these precisions.
        eps: added to the mean square.

    Returns:
        `(stream, y)`, like `x`. The statistics are fp32, of the stream as it is stored.

    Raises:
        TypeError: `x` and `residual` are of different precisions.
    """
    stream, y = _Norm.apply(x, residual, weight, eps, None, None, None)
    return x if stream is None else stream, y


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor,
    scaling: Scaling | None = None, copy: Matrix | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rms_norm`, then a linear layer; the backward pass recomputes the normalised rows.

    Args:
        x, residual, norm_weight, eps: as for `rms_norm`.
        weight: `(out, C)`; its gradient has its precision.
        scaling: how FP8 products are scaled; None: no FP8.
        copy: of `weight`, as for `linear`; None: made here.

    Returns:
        `(stream, y @ weight.T)`: `(..., C)` and `(..., out)`.
    """
    matrix = linear.weight_matrix(weight, x.dtype, scaling, copy)
    stream, out = _Norm.apply(x, residual, norm_weight, eps, weight, matrix, scaling)
    return x if stream is None else stream, out
