"""The MLP with the norm before it: norm, gate and up, SwiGLU, down.

SwiGLU's result is not saved; the backward pass recomputes it while it reads gate and up anyway.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels.fp8.mlp import NormMlpFp8
from lm.kernels.linear import Weight, factor, linear, weight_gradient
from lm.kernels.norm_linear import norm_linear
from lm.kernels.rms_norm import check_shapes_and_dtypes
from lm.kernels.swiglu import BACKWARD, FORWARD, Swiglu


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, matrix: Tensor, total: Tensor | None) -> Tensor:
        z = FORWARD(gate_up)  # (..., I)
        ctx.dtype, ctx.total = weight.dtype, total
        ctx.save_for_backward(gate_up, matrix)
        return F.linear(z, matrix)  # (..., C)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, matrix = ctx.saved_tensors
        dz = dout @ matrix  # (..., I)
        dgate_up, z = BACKWARD(dz, gate_up)  # (..., 2 I), (..., I)
        dweight = weight_gradient(dout, z, ctx.dtype, ctx.total) if ctx.needs_input_grad[1] else None  # (C, I)
        return dgate_up, dweight, None, None


def norm_mlp(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, up: Weight, down: Weight
) -> tuple[Tensor, Tensor]:
    """`norm_linear`, SwiGLU (Shazeer, 2020, arXiv:2002.05202) and `linear`: the stream and the result, `(..., C)` each.

    `up` is `(2 I, C)`, gate above up, and `down` `(C, I)`. SwiGLU, `silu(gate) * up`, is computed in fp32 and rounded
    once.
    """
    if up.scaling is not None and up.scaling == down.scaling:
        check_shapes_and_dtypes(x, residual, norm_weight)
        weights = up.parameter, factor(up, x.dtype), down.parameter, factor(down, x.dtype)
        stream, out = NormMlpFp8.apply(x, residual, norm_weight, eps, *weights, up.scaling)
        return x if stream is None else stream, out
    stream, gate_up = norm_linear(x, residual, norm_weight, eps, up)
    if down.scaling is not None:
        return stream, linear(Swiglu.apply(gate_up), down)
    return stream, _SwigluLinear.apply(gate_up, down.parameter, factor(down, gate_up.dtype), down.total)
