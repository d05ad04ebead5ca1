"""A linear layer's three matrix products in FP8: both factors are quantised, and the product is scaled back.

Each matrix is read as rarely as possible: a weight once for all products of a forward and a backward pass, an output's
gradient once for its two, and an activation once in each pass, so that it need not be saved.
"""

from typing import Any

import torch
from torch import Tensor

from lm.kernels.fp8.quantization import E4M3, Float8, Scaled, Scaling, quantize
from lm.kernels.torch_private import scaled_mm


def product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool = True) -> Tensor:
    """`a @ b.T`, both factors in FP8: `(..., K)` and `(N, K)` to `(..., N)` in bf16 or fp32; K and N multiples of 16.

    On a GPU this is torch's scaled product. With `fast` and e4m3 on both sides, Hopper's tensor cores add up with fewer
    digits than fp32; the error grows with K. On a CPU the same values are multiplied in fp32. An infinity or a NaN
    stays visible: all values with the same scale become NaN.
    """
    scales = a.scale[..., None], b.scale[None]  # (M, 1) and (1, N), or one element each
    # With rowwise scales, only Hopper with cuBLAS 12.9 can give fp32; every device gives bf16.
    out_dtype = torch.bfloat16 if a.scale.ndim else dtype
    values = a.values.flatten(0, -2)  # (M, K)
    if values.device.type == "cpu":
        out = (values.float() @ b.values.float().t() * scales[0] * scales[1]).to(out_dtype)
    else:
        fast = fast and a.values.dtype == E4M3
        out = scaled_mm(values, b.values.t(), *scales, out_dtype=out_dtype, use_fast_accum=fast)
    # The view comes last: torch 2.11 loses the gradient of a traced function that ends with a `to` that has no effect.
    return out.to(dtype).view(*a.values.shape[:-1], -1)


def weight_gradient(dout: Scaled, x: Scaled, dtype: torch.dtype) -> Tensor:
    """The gradient of a weight of this dtype, from the transposes `(out, tokens)` and `(in, tokens)`: `(out, in)`."""
    return product(dout, x, dtype, fast=False)  # the sum is over all tokens of a micro-batch


class LinearFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matrix: Float8, scaling: Scaling) -> Tensor:
        ctx.dtype, ctx.scaling = weight.dtype, scaling
        ctx.save_for_backward(x, *(matrix.transpose or ()))
        return product(quantize(x, scaling).matrix, matrix.matrix, x.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x, *weight), scaling = ctx.saved_tensors, ctx.scaling
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        gradient = quantize(dout, scaling, gradient=True, matrix=needs_dx, transpose=needs_dweight)
        dx = product(gradient.matrix, Scaled(*weight), x.dtype) if needs_dx else None  # (..., in)
        dweight = None
        if needs_dweight:
            x = quantize(x, scaling, matrix=False, transpose=True).transpose
            dweight = weight_gradient(gradient.transpose, x, ctx.dtype)  # (out, in)
        return dx, dweight, None, None
