"""The MLP with the norm before it, in FP8: SwiGLU's result and its gradient are quantised as they are computed.

That is why one function has both linear layers.
"""

from typing import Any

import torch
from torch import Tensor

from lm.kernels import rms_norm, swiglu
from lm.kernels.fp8 import quantization
from lm.kernels.fp8.linear import product, weight_gradient
from lm.kernels.fp8.norm_linear import normed_rows
from lm.kernels.fp8.quantization import E4M3, E5M2, Float8, Scaled, Scaling, quantize, transposed
from lm.kernels.runtime import define

# ---- SwiGLU's backward pass: the gradient of gate and up, its transpose, the transpose of z, each with its scale -----


def _cpu_backward(dz: Tensor, gate_up: Tensor, *, rowwise: bool) -> tuple[Tensor, ...]:
    dgate_up, z = swiglu.BACKWARD(dz, gate_up)
    dtype = E4M3 if rowwise else E5M2
    gradient = quantization.quantize_on_cpu(dgate_up, dtype, rowwise=rowwise, matrix=True, transpose=True)
    return *gradient, *transposed(quantization.quantize_on_cpu(z, E4M3, rowwise=rowwise, matrix=False, transpose=True))


def _cuda_backward(dz: Tensor, gate_up: Tensor, *, rowwise: bool) -> tuple[Tensor, ...]:
    results = _empty_backward(dz, gate_up, rowwise=rowwise)
    quantization.launch("SWIGLU_GRADIENT", results, gate_up.contiguous(), dz.contiguous(), rowwise=rowwise)
    return results


def _empty_backward(dz: Tensor, gate_up: Tensor, *, rowwise: bool) -> tuple[Tensor, ...]:
    dtype = E4M3 if rowwise else E5M2
    gradient = quantization.empty(gate_up, dtype, rowwise=rowwise, matrix=True, transpose=True)
    return *gradient, *transposed(quantization.empty(dz, E4M3, rowwise=rowwise, matrix=False, transpose=True))


BACKWARD = define(
    "swiglu_backward_fp8(Tensor dz, Tensor gate_up, *, bool rowwise)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=_cuda_backward,
    fake=_empty_backward,
)


# ---- the MLP ---------------------------------------------------------------------------------------------------------


class NormMlpFp8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        up_weight: Tensor,
        up: Float8,
        down_weight: Tensor,
        down: Float8,
        scaling: Scaling,
    ) -> tuple[Tensor | None, Tensor]:
        stream, y, rstd = normed_rows(x, residual, norm_weight, eps, scaling)
        gate_up = product(y, up.matrix, x.dtype)  # (..., 2 I)
        z = quantize(gate_up, scaling, "SWIGLU").matrix  # (..., I)
        ctx.adds, ctx.scaling = residual is not None, scaling
        ctx.up_dtype, ctx.down_dtype = up_weight.dtype, down_weight.dtype
        ctx.save_for_backward(stream, norm_weight, rstd, gate_up, *(up.transpose or ()), *(down.transpose or ()))
        ctx.set_materialize_grads(False)
        return stream if ctx.adds else None, product(z, down.matrix, x.dtype)

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:  # nothing uses it
            return dstream, dstream, *(None,) * 7
        (stream, norm_weight, rstd, gate_up, *weights), scaling = ctx.saved_tensors, ctx.scaling
        needs_up, needs_down = ctx.needs_input_grad[4], ctx.needs_input_grad[6]
        gradient = quantize(dout, scaling, gradient=True, transpose=needs_down)
        dz = product(gradient.matrix, Scaled(*weights[2:]), gate_up.dtype)  # (..., I)
        *dgate_up, z, z_scale = BACKWARD(dz, gate_up, rowwise=scaling == "rowwise")
        ddown = weight_gradient(gradient.transpose, Scaled(z, z_scale), ctx.down_dtype) if needs_down else None
        dy = product(Scaled(*dgate_up[:2]), Scaled(*weights[:2]), stream.dtype)  # (..., C)
        dx, _, dnorm = rms_norm.BACKWARD(dy, dstream, stream, norm_weight, rstd, recompute=False)
        dup = None
        if needs_up:
            y = quantize(stream, scaling, "NORMED", norm_weight, rstd, matrix=False, transpose=True).transpose
            dup = weight_gradient(Scaled(*transposed(dgate_up)), y, ctx.up_dtype)  # (2 I, C)
        return dx, dx if ctx.adds else None, dnorm, None, dup, None, ddown, None, None
