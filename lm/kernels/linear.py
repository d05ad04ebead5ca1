"""A matrix and its three products, one of the forward pass and two of the backward pass, in the activations' precision
or in FP8.

`rms_norm` and `swiglu` join them with what stands before; where nothing is joined, `linear` is called.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels import fp8
from lm.kernels.fp8 import Scaling


def forward(x: Tensor, weight: Tensor, scaling: Scaling | None) -> Tensor:
    """`x @ weight.T`: `(..., in)` and `(out, in)` to `(..., out)`; in FP8 if there is a `scaling`."""
    if scaling is None:
        return F.linear(x, weight)
    return fp8.product(x.flatten(0, -2), weight, scaling).view(*x.shape[:-1], -1)


def dx(dout: Tensor, weight: Tensor, scaling: Scaling | None) -> Tensor:
    """The gradient of `x`: `(..., out)` and `(out, in)` to `(..., in)`."""
    if scaling is None:
        return dout @ weight
    return fp8.product(dout.flatten(0, -2), weight.t(), scaling, gradient=True).view(*dout.shape[:-1], -1)


def dweight(dout: Tensor, x: Tensor, scaling: Scaling | None) -> Tensor:
    """The gradient of `weight`: `(..., out)` and `(..., in)` to `(out, in)`."""
    dout, x = dout.flatten(0, -2), x.flatten(0, -2)  # (tokens, out), (tokens, in)
    if scaling is None:
        return dout.t() @ x
    return fp8.product(dout.t(), x.t(), scaling, gradient=True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        return forward(x, weight, scaling)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return dx(dout, weight, ctx.scaling), dweight(dout, x, ctx.scaling), None


def linear(x: Tensor, weight: Tensor, scaling: Scaling | None = None) -> Tensor:
    """`x @ weight.T`.

    Args:
        x: `(..., in)`.
        weight: `(out, in)`; converted to the precision of `x`.
        scaling: how its products are scaled in FP8; None: they are in the precision of `x`.

    Returns:
        `(..., out)`.
    """
    weight = weight.to(x.dtype)
    return F.linear(x, weight) if scaling is None else _Linear.apply(x, weight, scaling)
