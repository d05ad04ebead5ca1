"""RMSNorm with the residual addition before it, alone or fused with the linear layer after it.

When fused, the normalised activations are not saved unless the caller says so; the backward pass recomputes them while
it reads the stream anyway. `swiglu` does the same for the MLP's second linear layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lm.kernels import fp8, linear, runtime
from lm.kernels.fp8 import E4M3, Scaled, Scaling, quantize
from lm.kernels.linear import Layer, Matrix
from lm.kernels.runtime import define

BLOCKS_PER_MULTIPROCESSOR = 8  # of the backward pass: enough to hide latency, few enough for short partial sums
LANE_ELEMENTS = 16  # of a row, in registers of a lane; half in the backward pass, which has three values of each
Forward = tuple[Tensor, Tensor, Tensor, Tensor]  # stream, y, 1 / rms, scale; see `FORWARD`


def _cpu_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, scaling: Scaling | None = None
) -> Forward:  # fmt: skip
    total = x.contiguous() if residual is None else x.contiguous() + residual.contiguous()
    stream, y, rstd, scale = _empty_forward(x, residual, weight, eps, scaling)
    wide = total.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    if scaling != "tensorwise":
        y = (wide * rstd[..., None] * weight.float()).to(x.dtype)
    if scaling == "rowwise":
        y, scale, *_ = fp8.on_cpu(y, E4M3, True, True, False)
    return stream if residual is None else total, y, rstd, scale


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
) -> dict[str, Any]:  # fmt: skip
    """Preprocessor constants of the kernels for rows of this width, loaded in vectors of `vec` elements.

    With `float8` the forward pass returns e4m3, with a scale per row.
    """
    forward, backward = (runtime.warps(width // vec, max(1, held // vec))
                         for held in (LANE_ELEMENTS, LANE_ELEMENTS // 2))  # fmt: skip
    return dict(T=runtime.TYPES[dtype], W=runtime.TYPES[weight_dtype], WIDTH=width, VEC=vec, FORWARD_WARPS=forward,
                BACKWARD_WARPS=backward, FP8=int(float8))  # fmt: skip


def _program(
    width: int, float8: bool, x: Tensor, weight: Tensor, *tensors: Tensor | None
) -> tuple[runtime.Program, int, int]:
    """The kernels for rows of this width, and the numbers of threads of a forward and a backward block."""
    chosen = constants(x.dtype, weight.dtype, width, runtime.vector(width, x, weight, *tensors), float8)
    run = runtime.program("rms_norm", x.device, **chosen)
    return run, chosen["FORWARD_WARPS"] * 32, chosen["BACKWARD_WARPS"] * 32


def _empty_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, scaling: Scaling | None = None
) -> Forward:  # fmt: skip
    y, scale, *_ = fp8.empty(x, E4M3, True, scaling == "rowwise", False)
    y = x.new_empty(x.shape) if scaling is None else y
    return x.new_empty(0 if residual is None else x.shape), y, x.new_empty(x.shape[:-1], dtype=torch.float32), scale


def _cuda_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, scaling: Scaling | None = None
) -> Forward:  # fmt: skip
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    stream, y, rstd, scale = results = _empty_forward(x, residual, weight, eps, scaling)
    run, threads, _ = _program(x.shape[-1], scaling == "rowwise", x, weight, residual)
    run(
        "rms_norm_forward",
        rstd.numel(),
        threads,
        x,
        residual,
        weight,
        None if residual is None else stream,
        None if scaling == "tensorwise" else y,
        scale,
        rstd,
        eps,
    )
    return results


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
    run(
        "rms_norm_backward",
        blocks,
        threads,
        dy,
        dstream,
        stream,
        weight,
        rstd,
        dx,
        y if recompute else None,
        partial,
        rows,
    )
    run("rms_norm_weight", -(-width // 32), 256, partial, dweight, blocks)
    return dx, y, dweight


# An op returns only new tensors: without a residual the stream is `x`, and an empty tensor is returned for it.
# With `rowwise` scaling, `y` is e4m3 with a scale per row, as in `fp8`; with `tensorwise`, `y` is empty.
FORWARD = define(
    "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, str? scaling=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu_forward,
    cuda=_cuda_forward,
    fake=_empty_forward,
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
        stream, y, rstd, _ = FORWARD(x, residual, weight, eps)
        ctx.adds = residual is not None
        ctx.save_for_backward(stream if ctx.adds else x, weight, rstd)
        ctx.set_materialize_grads(False)
        return stream if ctx.adds else None, y  # without a residual, `x` is the stream

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, _, dweight = BACKWARD(dy, dstream, *ctx.saved_tensors, False)
        return dx, dx if ctx.adds else None, dweight, None


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`stream = x + residual` and `y = stream / rms(stream) * weight` (Zhang and Sennrich, 2019, arXiv:1910.07467).

    `x`, the output of a branch, is `(..., C)` in bf16, fp16 or fp32, like the residual stream (without one, the stream
    is `x`) and both results; `weight` is `(C)` in any of these precisions. The statistics are computed in fp32 from the
    stream as it is stored.
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


# ---- the norm and a linear layer -------------------------------------------------------------------------------------


def normed_product(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, matrix: Matrix, of: Layer
) -> tuple[Tensor, Tensor | Scaled, Tensor, Tensor]:
    """The stream, or an empty tensor without a residual; the factor `y`; `y @ weight.T`; `1 / rms` for `BACKWARD`."""
    stream, y, rstd, scale = FORWARD(x, residual, norm_weight, eps, of.scaling)
    if of.scaling == "rowwise":
        y = Scaled(y, scale)
    elif of.scaling == "tensorwise":  # the scale needs all of `y` first
        y = quantize(x if residual is None else stream, of.scaling, "NORMED", norm_weight, rstd).matrix
    return stream, y, linear.forward(y, matrix, x.dtype), rstd


def saved_if(store: bool, value: Tensor | Scaled) -> Tensor | None:
    """What is saved for the backward pass of a product's factor: nothing in FP8, where the pass needs its transpose."""
    return value if store and isinstance(value, Tensor) else None


def normed_product_backward(
    dout: Matrix, dstream: Tensor | None, stream: Tensor, norm_weight: Tensor, rstd: Tensor, y: Tensor | None,
    weight: Sequence[Tensor | None], of: Layer, wanted: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of the stream, of the norm's weight and, if `wanted`, of the matrix; `y` and `weight` are what was
    saved."""
    dy = linear.dx(dout, weight, stream.dtype)  # (..., C)
    recompute = wanted and of.scaling is None and y is None
    dx, recomputed, dnorm = BACKWARD(dy, dstream, stream, norm_weight, rstd, recompute)
    if not wanted:
        return dx, dnorm, None
    y = recomputed if y is None else y
    if of.scaling is not None:
        y = quantize(stream, of.scaling, "NORMED", norm_weight, rstd, matrix=False, transpose=True).transpose
    return dx, dnorm, linear.dweight(dout, y, of)  # (out, C)


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, store: bool, weight: Tensor,
        matrix: Matrix, of: Layer,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        stream, y, out, rstd = normed_product(x, residual, norm_weight, eps, matrix, of)
        ctx.adds, ctx.of = residual is not None, of
        saved = (stream if ctx.adds else x, norm_weight, rstd, saved_if(store, y), *linear.saved_for_dx(matrix))
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return stream if ctx.adds else None, out

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dout: Tensor) -> tuple[Tensor | None, ...]:
        (stream, norm_weight, rstd, y, *weight), wanted = ctx.saved_tensors, ctx.needs_input_grad[5]
        gradient = linear.gradient_matrix(dout, ctx.of.scaling, True, wanted)
        dx, dnorm, dweight = normed_product_backward(
            gradient, dstream, stream, norm_weight, rstd, y, weight, ctx.of, wanted
        )
        return dx, dx if ctx.adds else None, dnorm, None, None, dweight, None, None


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor, *options: Any,
    store: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rms_norm`, then `linear` with `options`; the backward pass recomputes the normalised rows.

    With a weight `(out, C)` it returns `(stream, y @ weight.T)`: `(..., C)` and `(..., out)`. With `store` the rows are
    saved for the backward pass instead; not in FP8.
    """
    check_shapes_and_dtypes(x, residual, norm_weight)
    stream, out = _NormLinear.apply(x, residual, norm_weight, eps, store, *linear.layer(weight, x.dtype, *options))
    return x if stream is None else stream, out
