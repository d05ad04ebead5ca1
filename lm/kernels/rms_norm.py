"""RMSNorm with the residual addition before it, alone or joined with the linear layer after it.

Joined, the normalised activations are not saved for the backward pass, which recomputes them while it reads the stream
anyway. `swiglu` does the same for the MLP's second linear layer.
"""

from typing import Any

import torch
from torch import Tensor

from lm.kernels import linear, runtime
from lm.kernels.fp8 import E4M3, Scaled, Scaling, empty_rows, quantized_rows, top
from lm.kernels.linear import Matrix
from lm.kernels.runtime import define

BLOCKS_PER_MULTIPROCESSOR = 8  # of the backward pass: enough to hide latency, few enough for short partial sums
LANE_ELEMENTS = 16  # of a row that a lane keeps in registers; half in the backward pass, with three values of each


def _cpu_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x.contiguous() if residual is None else x.contiguous() + residual.contiguous()
    wide = total.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (..., 1)
    y = (wide * rstd * weight.float()).to(x.dtype)
    return x.new_empty(0) if residual is None else total, y, rstd.squeeze(-1)


def _cpu_forward_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stream, y, rstd = _cpu_forward(x, residual, weight, eps)
    return stream, *quantized_rows(y), rstd


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


def constants(
    dtype: torch.dtype, weight_dtype: torch.dtype, width: int, vec: int, float8: bool = False
) -> dict[str, object]:  # fmt: skip
    """Preprocessor constants of the kernels for rows of this width, loaded in vectors of `vec` elements.

    With `float8` the forward pass returns e4m3.
    """
    forward, backward = (runtime.warps(width // vec, max(1, held // vec))
                         for held in (LANE_ELEMENTS, LANE_ELEMENTS // 2))  # fmt: skip
    return dict(T=runtime.TYPES[dtype], W=runtime.TYPES[weight_dtype], WIDTH=width, VEC=vec, FORWARD_WARPS=forward,
                BACKWARD_WARPS=backward, TOP=top(E4M3) if float8 else 0)  # fmt: skip


def _program(
    width: int, float8: bool, x: Tensor, weight: Tensor, *tensors: Tensor | None
) -> tuple[runtime.Program, int, int]:
    """The kernels for rows of this width, and the threads of a forward and of a backward block."""
    chosen = constants(x.dtype, weight.dtype, width, runtime.vector(width, x, weight, *tensors), float8)
    run = runtime.program("rms_norm", x.device, **chosen)
    return run, chosen["FORWARD_WARPS"] * 32, chosen["BACKWARD_WARPS"] * 32


def _cuda_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    stream, rstd = _run_forward(x, residual, weight, eps, y, None)
    return stream, y, rstd


def _cuda_forward_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, scale = empty_rows(x, x.shape)
    stream, rstd = _run_forward(x, residual, weight, eps, values, scale)
    return stream, values, scale, rstd


def _run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, y: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, adds = x.contiguous(), residual is not None
    residual = residual.contiguous() if adds else None
    stream = torch.empty_like(x) if adds else x.new_empty(0)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    run, threads, _ = _program(x.shape[-1], scale is not None, x, weight, residual)
    run("rms_norm_forward", rstd.numel(), threads, x, residual, weight, stream if adds else None, y, scale, rstd, eps)
    return stream, rstd


def _cuda_backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dy, stream = dy.contiguous(), stream.contiguous()
    dstream = None if dstream is None else dstream.contiguous()
    width, rows = stream.shape[-1], rstd.numel()
    dx, dweight = torch.empty_like(stream), torch.empty_like(weight)
    y = torch.empty_like(stream) if recompute else stream.new_empty(0)
    run, _, threads = _program(width, False, stream, weight, dy, dstream)
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
FORWARD_FP8 = define(  # `y` in e4m3 with a scale for each row, as `fp8` makes it of the `y` of `rms_norm`
    "rms_norm_fp8(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu_forward_fp8,
    cuda=_cuda_forward_fp8,
    fake=lambda x, residual, weight, eps: (
        x.new_empty(0 if residual is None else x.shape),
        *empty_rows(x, x.shape),
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


# ---- the norm --------------------------------------------------------------------------------------------------------


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor | None, Tensor]:
        stream, y, rstd = FORWARD(x, residual, weight, eps)
        ctx.adds = residual is not None
        ctx.save_for_backward(stream if ctx.adds else x, weight, rstd)
        ctx.set_materialize_grads(False)
        return stream if ctx.adds else None, y  # without a residual `x` is the stream

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:  # only the stream was used
            return dstream, dstream if ctx.adds else None, None, None
        dx, _, dweight = BACKWARD(dy, dstream, *ctx.saved_tensors, False)
        return dx, dx if ctx.adds else None, dweight, None


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`stream = x + residual` and `y = stream / rms(stream) * weight` (Zhang and Sennrich, 2019, arXiv:1910.07467).

    `x`, the output of a branch, is `(..., C)` in bf16, fp16 or fp32, and so are the residual stream, which is `x` where
    there is none, and both results; `weight` is `(C)` in any of these precisions. The statistics are fp32, of the
    stream as it is stored.
    """
    _refuse_mismatch(x, residual, weight)
    stream, y = _Norm.apply(x, residual, weight, eps)
    return x if stream is None else stream, y


def _refuse_mismatch(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    """TypeError: shapes or precisions do not fit, for which a kernel does not look."""
    if residual is not None and (residual.dtype, residual.shape) != (x.dtype, x.shape):
        raise TypeError(f"x is {tuple(x.shape)} in {x.dtype}, and residual {tuple(residual.shape)} in {residual.dtype}")
    if weight.shape != x.shape[-1:]:
        raise TypeError(f"rows of x have {x.shape[-1]} elements, and the norm's weight is {tuple(weight.shape)}")


# ---- the norm and a linear layer -------------------------------------------------------------------------------------


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor, matrix: Matrix,
        scaling: Scaling | None, total: Tensor | None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        if scaling == "rowwise":
            stream, *y, rstd = FORWARD_FP8(x, residual, norm_weight, eps)
            out = linear.product(Scaled(*y), matrix.matrix, x.dtype)
        else:
            stream, y, rstd = FORWARD(x, residual, norm_weight, eps)
            out = linear.forward(y, matrix, scaling)
        ctx.adds, ctx.scaling, ctx.weight_dtype, ctx.total = residual is not None, scaling, weight.dtype, total
        ctx.save_for_backward(stream if ctx.adds else x, norm_weight, rstd, *linear.saved_for_dx(matrix))
        ctx.set_materialize_grads(False)
        return stream if ctx.adds else None, out

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return dstream, dstream if ctx.adds else None, *(None,) * 6
        stream, norm_weight, rstd, *weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4]
        dout = linear.gradient_matrix(dout, ctx.scaling, True, wanted)
        dy = linear.dx(dout, weight, stream.dtype)  # (..., C)
        dx, y, dnorm = BACKWARD(dy, dstream, stream, norm_weight, rstd, wanted)
        dweight = linear.dweight(dout, y, ctx.scaling, ctx.weight_dtype, ctx.total) if wanted else None  # (out, C)
        return dx, dx if ctx.adds else None, dnorm, None, dweight, *(None,) * 3


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor,
    scaling: Scaling | None = None, copy: Matrix | None = None, total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rms_norm`, then `linear`; the backward pass recomputes the normalised rows.

    With a weight `(out, C)` it gives `(stream, y @ weight.T)`: `(..., C)` and `(..., out)`.
    """
    _refuse_mismatch(x, residual, norm_weight)
    matrix = linear.weight_matrix(weight, x.dtype, scaling, copy)
    stream, out = _NormLinear.apply(x, residual, norm_weight, eps, weight, matrix, scaling, total)
    return x if stream is None else stream, out
