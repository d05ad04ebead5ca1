"""RMSNorm and the linear layer after it: the backward pass recomputes the normalised rows, which are not saved."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels.fp8.norm_linear import NormLinearFp8
from lm.kernels.linear import Weight, factor, weight_gradient
from lm.kernels.rms_norm import BACKWARD, FORWARD, check_shapes_and_dtypes


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        matrix: Tensor,
        total: Tensor | None,
    ) -> tuple[Tensor | None, Tensor]:
        stream, y, rstd = FORWARD(x, residual, norm_weight, eps)
        ctx.adds, ctx.dtype, ctx.total = residual is not None, weight.dtype, total
        ctx.save_for_backward(stream if ctx.adds else x, norm_weight, rstd, matrix)
        ctx.set_materialize_grads(False)
        return stream if ctx.adds else None, F.linear(y, matrix)  # (..., C), (..., out)

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:  # nothing uses it
            return dstream, dstream, *(None,) * 5
        stream, norm_weight, rstd, matrix = ctx.saved_tensors
        needs_dweight = ctx.needs_input_grad[4]
        dx, y, dnorm = BACKWARD(dout @ matrix, dstream, stream, norm_weight, rstd, recompute=needs_dweight)
        dweight = weight_gradient(dout, y, ctx.dtype, ctx.total) if needs_dweight else None  # (out, C)
        return dx, dx if ctx.adds else None, dnorm, None, dweight, None, None


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Weight
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, then `linear`: with a weight `(out, C)` it returns `(stream, y @ weight.T)`, `(..., C)` and
    `(..., out)`."""
    check_shapes_and_dtypes(x, residual, norm_weight)
    inputs = x, residual, norm_weight, eps, weight.parameter, factor(weight, x.dtype)
    if weight.scaling is not None:
        stream, out = NormLinearFp8.apply(*inputs, weight.scaling)
    else:
        stream, out = _NormLinear.apply(*inputs, weight.total)
    return x if stream is None else stream, out
