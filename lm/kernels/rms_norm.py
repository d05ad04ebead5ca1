"""RMSNorm with the residual addition before it, alone or joined with the linear layer after it.

Joined, the normalised activations are not saved for the backward pass, which recomputes them while it reads the stream
anyway. `swiglu` does the same for the MLP's second linear layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lm.kernels import fp8, linear, runtime
from lm.kernels.fp8 import E4M3, Scaled, Scaling
from lm.kernels.linear import Layer, Matrix
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
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rowwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stream, y, rstd = _cpu_forward(x, residual, weight, eps)
    return stream, *fp8.on_cpu(y, E4M3, rowwise, True, False)[:2], rstd


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


def _cpu_backward_fp8(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor, rowwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, y, dweight = _cpu_backward(dy, dstream, stream, weight, rstd, True)
    return dx, *fp8.transposed(fp8.on_cpu(y, E4M3, rowwise, False, True)), dweight


def constants(
    dtype: torch.dtype, weight_dtype: torch.dtype, width: int, vec: int, float8: bool = False
) -> dict[str, object]:  # fmt: skip
    """Preprocessor constants of the kernels for rows of this width, loaded in vectors of `vec` elements.

    With `float8` the forward pass returns e4m3, with a scale for each row.
    """
    forward, backward = (runtime.warps(width // vec, max(1, held // vec))
                         for held in (LANE_ELEMENTS, LANE_ELEMENTS // 2))  # fmt: skip
    return dict(T=runtime.TYPES[dtype], W=runtime.TYPES[weight_dtype], WIDTH=width, VEC=vec, FORWARD_WARPS=forward,
                BACKWARD_WARPS=backward, FP8=int(float8))  # fmt: skip


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
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rowwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, scale, *_ = results = fp8.empty(x, x.shape, E4M3, rowwise, True, False)
    stream, rstd = _run_forward(x, residual, weight, eps, values if rowwise else None, scale if rowwise else None)
    if not rowwise:  # the largest value has to be known first, of what is quantised then and stored nowhere
        fp8.launch("NORMED", x.contiguous() if residual is None else stream, results, rowwise, weight=weight, rstd=rstd)
    return stream, values, scale, rstd


def _run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, y: Tensor | None, scale: Tensor | None
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


def _cuda_backward_fp8(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight: Tensor, rstd: Tensor, rowwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stream = stream.contiguous()
    dx, _, dweight = _cuda_backward(dy, dstream, stream, weight, rstd, False)
    results = fp8.empty(stream, stream.shape, E4M3, rowwise, False, True)
    fp8.launch("NORMED", stream, results, rowwise, weight=weight, rstd=rstd)
    return dx, *fp8.transposed(results), dweight


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
FORWARD_FP8 = define(  # `y` in e4m3 with its scale, as `fp8` makes it of the `y` of `rms_norm`
    "rms_norm_fp8(Tensor x, Tensor? residual, Tensor weight, float eps, bool rowwise)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu_forward_fp8,
    cuda=_cuda_forward_fp8,
    fake=lambda x, residual, weight, eps, rowwise: (
        x.new_empty(0 if residual is None else x.shape),
        *fp8.empty(x, x.shape, E4M3, rowwise, True, False)[:2],
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
BACKWARD_FP8 = define(  # the transpose of `y` in e4m3 with its scale, likewise
    "rms_norm_backward_fp8(Tensor dy, Tensor? dstream, Tensor stream, Tensor weight, Tensor rstd, bool rowwise)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu_backward_fp8,
    cuda=_cuda_backward_fp8,
    fake=lambda dy, dstream, stream, weight, rstd, rowwise: (
        stream.new_empty(stream.shape),
        *fp8.transposed(fp8.empty(stream, stream.shape, E4M3, rowwise, False, True)),
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
    refuse_mismatch(x, residual, weight)
    stream, y = _Norm.apply(x, residual, weight, eps)
    return x if stream is None else stream, y


def refuse_mismatch(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    """TypeError: shapes or precisions do not fit, for which a kernel does not look."""
    if residual is not None and (residual.dtype, residual.shape) != (x.dtype, x.shape):
        raise TypeError(f"x is {tuple(x.shape)} in {x.dtype}, and residual {tuple(residual.shape)} in {residual.dtype}")
    if weight.shape != x.shape[-1:]:
        raise TypeError(f"rows of x have {x.shape[-1]} elements, and the norm's weight is {tuple(weight.shape)}")


# ---- the norm and a linear layer -------------------------------------------------------------------------------------


def normed_product(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, matrix: Matrix, of: Layer
) -> tuple[Tensor, Tensor, Tensor]:
    """The stream, or an empty tensor without a residual; `y @ weight.T`; and what the norm's `BACKWARD` takes."""
    if of.scaling is None:
        stream, y, rstd = FORWARD(x, residual, norm_weight, eps)
    else:
        stream, *y, rstd = FORWARD_FP8(x, residual, norm_weight, eps, of.scaling == "rowwise")
        y = Scaled(*y)
    return stream, linear.forward(y, matrix, x.dtype), rstd


def normed_product_backward(
    dout: Matrix, dstream: Tensor | None, stream: Tensor, norm_weight: Tensor, rstd: Tensor, weight: Sequence[Tensor],
    of: Layer, wanted: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of the stream, of the norm's weight and, if `wanted`, of the matrix; `weight` is as it was saved."""
    given = linear.dx(dout, weight, stream.dtype), dstream, stream, norm_weight, rstd
    if of.scaling is None or not wanted:
        dx, y, dnorm = BACKWARD(*given, wanted)
    else:
        dx, *y, dnorm = BACKWARD_FP8(*given, of.scaling == "rowwise")
        y = Scaled(*y)
    return dx, dnorm, linear.dweight(dout, y, of) if wanted else None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor, matrix: Matrix,
        of: Layer,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        stream, out, rstd = normed_product(x, residual, norm_weight, eps, matrix, of)
        ctx.adds, ctx.of = residual is not None, of
        ctx.save_for_backward(stream if ctx.adds else x, norm_weight, rstd, *linear.saved_for_dx(matrix))
        ctx.set_materialize_grads(False)
        return stream if ctx.adds else None, out

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return dstream, dstream if ctx.adds else None, *(None,) * 5
        *saved, wanted = *ctx.saved_tensors, ctx.needs_input_grad[4]
        dout = linear.gradient_matrix(dout, ctx.of.scaling, True, wanted)
        dx, dnorm, dweight = normed_product_backward(dout, dstream, *saved[:3], saved[3:], ctx.of, wanted)
        return dx, dx if ctx.adds else None, dnorm, None, dweight, None, None


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor,
    scaling: Scaling | None = None, copy: Matrix | None = None, total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rms_norm`, then `linear`; the backward pass recomputes the normalised rows.

    With a weight `(out, C)` it gives `(stream, y @ weight.T)`: `(..., C)` and `(..., out)`.
    """
    refuse_mismatch(x, residual, norm_weight)
    layer = linear.layer(weight, x.dtype, scaling, copy, total)
    stream, out = _NormLinear.apply(x, residual, norm_weight, eps, *layer)
    return x if stream is None else stream, out
