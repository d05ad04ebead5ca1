"""RMSNorm and the linear layer after it, in FP8.

With scales per row, the norm's kernel returns the normalised rows in FP8. With one scale for the matrix, which needs
all rows first, they are computed a second time while they are quantised.
"""

from typing import Any

import torch
from torch import Tensor

from lm.kernels import rms_norm
from lm.kernels.fp8.linear import product, weight_gradient
from lm.kernels.fp8.quantization import E4M3, Float8, Scaled, Scaling, quantize, quantize_on_cpu
from lm.kernels.runtime import define

Forward = tuple[Tensor, Tensor, Tensor, Tensor]  # stream, y in e4m3, 1 / rms, scale of y; see `FORWARD`


def _cpu_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, rowwise: bool) -> Forward:
    stream, y, rstd = rms_norm.FORWARD(x, residual, weight, eps)
    y, scale, *_ = quantize_on_cpu(y, E4M3, rowwise=True, matrix=rowwise, transpose=False)
    return stream, y, rstd, scale


def _cuda_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, rowwise: bool) -> Forward:
    stream, y, rstd, scale = _empty_forward(x, residual, weight, eps, rowwise=rowwise)
    rows, scales = (y, scale) if rowwise else (None, None)
    rms_norm.launch_forward(x, residual, weight, eps, stream=stream, y=rows, scale=scales, rstd=rstd)
    return stream, y, rstd, scale


def _empty_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, rowwise: bool) -> Forward:
    stream = x.new_empty(0 if residual is None else x.shape)
    y, rstd = x.new_empty(x.shape if rowwise else 0, dtype=E4M3), x.new_empty(x.shape[:-1], dtype=torch.float32)
    return stream, y, rstd, x.new_empty(rstd.numel() if rowwise else 0, dtype=torch.float32)


FORWARD = define(  # without `rowwise`, `y` and its scale are empty
    "rms_norm_fp8(Tensor x, Tensor? residual, Tensor weight, float eps, *, bool rowwise)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu_forward,
    cuda=_cuda_forward,
    fake=_empty_forward,
)


def normed_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, scaling: Scaling
) -> tuple[Tensor, Scaled, Tensor]:
    """The stream `(..., C)`, the normalised rows in FP8 and `1 / rms`."""
    stream, y, rstd, scale = FORWARD(x, residual, weight, eps, rowwise=scaling == "rowwise")
    stream = x if residual is None else stream
    rows: Any = Scaled(y, scale)
    if scaling == "tensorwise":
        rows = quantize(stream, scaling, "NORMED", weight, rstd).matrix
    return stream, rows, rstd


class NormLinearFp8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        matrix: Float8,
        scaling: Scaling,
    ) -> tuple[Tensor | None, Tensor]:
        stream, y, rstd = normed_rows(x, residual, norm_weight, eps, scaling)
        ctx.adds, ctx.dtype, ctx.scaling = residual is not None, weight.dtype, scaling
        ctx.save_for_backward(stream, norm_weight, rstd, *(matrix.transpose or ()))
        ctx.set_materialize_grads(False)
        return stream if ctx.adds else None, product(y, matrix.matrix, x.dtype)

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:  # nothing uses it
            return dstream, dstream, *(None,) * 5
        (stream, norm_weight, rstd, *weight), scaling = ctx.saved_tensors, ctx.scaling
        needs_dweight, dweight = ctx.needs_input_grad[4], None
        gradient = quantize(dout, scaling, gradient=True, transpose=needs_dweight)
        dy = product(gradient.matrix, Scaled(*weight), stream.dtype)  # (..., C)
        dx, _, dnorm = rms_norm.BACKWARD(dy, dstream, stream, norm_weight, rstd, recompute=False)
        if needs_dweight:
            y = quantize(stream, scaling, "NORMED", norm_weight, rstd, matrix=False, transpose=True).transpose
            dweight = weight_gradient(gradient.transpose, y, ctx.dtype)  # (out, C)
        return dx, dx if ctx.adds else None, dnorm, None, dweight, None, None
