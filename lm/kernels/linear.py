"""A linear layer's three matrix products, one forward and two backward, in the precision of the activations.

`norm_linear` and `mlp` join them with the ops before. `fp8/linear` has the same products in FP8.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels.fp8.linear import LinearFp8
from lm.kernels.fp8.quantization import Float8, Scaling, quantize


class Weight(NamedTuple):
    """The weight of a linear layer, and how its products are computed."""

    parameter: Tensor  # (out, in); its gradient has its dtype
    scaling: Scaling | None = None  # of FP8; None: products in the activations' dtype
    copy: Tensor | Float8 | None = None  # of the parameter, as the products take it; None: it is made for each call
    # The parameter's `.grad`, if the backward pass is to add the gradient to it itself: autograd then gets none, which
    # saves a pass over memory. Not in FP8.
    total: Tensor | None = None


def factor(weight: Weight, dtype: torch.dtype) -> Tensor | Float8:
    """The weight as products with activations of this dtype take it; in FP8 with the transpose, for the backward pass,
    if gradients are enabled."""
    if weight.copy is not None:
        return weight.copy
    parameter = weight.parameter.detach()
    if weight.scaling is None:
        return parameter.to(dtype)
    return quantize(parameter, weight.scaling, transpose=torch.is_grad_enabled())


def weight_gradient(dout: Tensor, x: Tensor, dtype: torch.dtype, total: Tensor | None) -> Tensor | None:
    """The gradient of a weight of this dtype: `(..., out)` and `(..., in)` to `(out, in)`.

    The product of half-precision factors is accumulated and written in fp32, without rounding in between. With a
    `total`, the product is added to it in place, and None is returned.
    """
    dout, x = dout.flatten(0, -2), x.flatten(0, -2)  # (tokens, out), (tokens, in)
    if total is not None:
        return add_product(total, dout, x)
    if dtype == x.dtype:
        return dout.t() @ x
    if x.device.type == "cpu":  # a CPU has no such product
        return dout.t().to(dtype) @ x.to(dtype)
    return torch.mm(dout.t(), x, out_dtype=dtype)


def add_product(total: Tensor, dout: Tensor, x: Tensor) -> None:
    """`total += dout.T @ x` in the precision of `total`, in one product: `(N, out)` and `(N, in)`."""
    if x.dtype == total.dtype:
        total.addmm_(dout.t(), x)
    elif x.device.type == "cpu":
        total.addmm_(dout.t().to(total.dtype), x.to(total.dtype))
    elif adds_in_place(x.dtype, x.device):
        torch.addmm(total, dout.t(), x, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(dout.t(), x, out_dtype=total.dtype)


@functools.cache
def adds_in_place(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's matrix product can add half-precision factors to an fp32 sum on a GPU; some versions cannot."""
    total, ones = torch.ones(16, 16, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matrix: Tensor, total: Tensor | None) -> Tensor:
        ctx.dtype, ctx.total = weight.dtype, total
        ctx.save_for_backward(x, matrix)
        return F.linear(x, matrix)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        dx = dout @ matrix if needs_dx else None  # (..., in)
        dweight = weight_gradient(dout, x, ctx.dtype, ctx.total) if needs_dweight else None  # (out, in)
        return dx, dweight, None, None


def linear(x: Tensor, weight: Weight) -> Tensor:
    """`x @ weight.T`: `(..., in)` and `(out, in)` to `(..., out)`, in the dtype of `x`."""
    matrix = factor(weight, x.dtype)
    if weight.scaling is not None:
        return LinearFp8.apply(x, weight.parameter, matrix, weight.scaling)
    return _Linear.apply(x, weight.parameter, matrix, weight.total)
