"""A linear layer's three matrix products, one forward and two backward, in the activations' precision or in FP8.

`rms_norm` and `swiglu` join them with the op before; `linear` is the linear layer alone. In FP8 both factors of a
product are quantised (`kernels/fp8`) and the product is scaled back. Each matrix is read for that as seldom as can be:
a weight once for all products of a forward and a backward pass, an output's gradient once for its two, and an
activation once in each pass, so that it need not be kept.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels.fp8 import E4M3, Float8, Scaled, Scaling, quantize
from lm.kernels.torch_private import scaled_mm

MULTIPLE = 16  # tensor cores take multiples of it: both dimensions of a matrix, and the tokens of a gradient
Matrix = Tensor | Float8  # as a product takes it


def product(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """`a @ b.T`, both factors in FP8: `(..., K)` and `(N, K)` to `(..., N)` in bf16 or fp32; K and N multiples of 16.

    On a GPU it is torch's scaled product; with fast accumulation, which keeps fewer digits of the sum, in the forward
    pass and wherever rows have scales, as in torchao. On a CPU the same values are multiplied in a wider format. An
    infinity or a NaN is not hidden: all values with the same scale become NaN.
    """
    scales = a.scale[..., None], b.scale[None]  # (M, 1) and (1, N), or one element each
    # Where rows have scales, only Hopper with cuBLAS 12.9 can give fp32; every device gives bf16.
    out_dtype = torch.bfloat16 if a.scale.ndim else dtype
    values = a.values.flatten(0, -2)  # (M, K)
    if values.device.type == "cpu":
        out = (values.float() @ b.values.float().t() * scales[0] * scales[1]).to(out_dtype)
    else:
        fast = a.values.dtype == E4M3
        out = scaled_mm(values, b.values.t(), *scales, out_dtype=out_dtype, use_fast_accum=fast)
    # The view comes last: torch 2.11 loses the gradient of a traced function that ends with a `to` without effect.
    return out.to(dtype).view(*a.values.shape[:-1], -1)


def weight_matrix(weight: Tensor, dtype: torch.dtype, scaling: Scaling | None, copy: Matrix | None = None) -> Matrix:
    """A weight `(out, in)` for the products of a forward pass and, where gradients are wanted, for `dx`.

    `dtype` is that of the activations; `copy` is what this returned before, if the weight has not changed since.
    """
    if copy is not None:
        return copy
    weight = weight.detach()
    return weight.to(dtype) if scaling is None else quantize(weight, scaling, transpose=torch.is_grad_enabled())


def saved_for_dx(weight: Matrix) -> tuple[Tensor, ...]:
    """The tensors of a weight that `dx` needs."""
    return (weight,) if isinstance(weight, Tensor) else weight.transpose or ()


def gradient_matrix(dout: Tensor, scaling: Scaling | None, for_dx: bool, for_dweight: bool) -> Matrix:
    """The gradient of an output, `(..., out)`, for `dx` and for `dweight`."""
    if scaling is None or not (for_dx or for_dweight):
        return dout
    return quantize(dout, scaling, gradient=True, matrix=for_dx, transpose=for_dweight)


def forward(x: Tensor, weight: Matrix, scaling: Scaling | None) -> Tensor:
    """`x @ weight.T`: `(..., in)` and `(out, in)` to `(..., out)`."""
    if scaling is None:
        return F.linear(x, weight)
    return product(quantize(x, scaling).matrix, weight.matrix, x.dtype)


def dx(dout: Matrix, saved: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The gradient of `x`, in its `dtype`: `(..., out)` and a weight `(out, in)`, as it was saved, to `(..., in)`."""
    return dout @ saved[0] if isinstance(dout, Tensor) else product(dout.matrix, Scaled(*saved), dtype)


def dweight(
    dout: Matrix, x: Tensor, scaling: Scaling | None, dtype: torch.dtype, total: Tensor | None = None
) -> Tensor | None:
    """The gradient of `weight`, in its `dtype`: `(..., out)` and `(..., in)` to `(out, in)`.

    The product of half-precision factors is written in fp32 as it is summed, without a rounding in between. With a
    `total` it is added to that as it is written, and nothing is returned; not in FP8.
    """
    if total is not None:
        return add_product(total, dout.flatten(0, -2), x.flatten(0, -2))
    if scaling is not None:
        return product(dout.transpose, quantize(x, scaling, matrix=False, transpose=True).transpose, dtype)
    dout, x = dout.flatten(0, -2), x.flatten(0, -2)  # (tokens, out), (tokens, in)
    if dtype == x.dtype:
        return dout.t() @ x
    if x.device.type == "cpu":  # which has no such product
        return dout.t().to(dtype) @ x.to(dtype)
    return torch.mm(dout.t(), x, out_dtype=dtype)


def add_product(total: Tensor, dout: Tensor, x: Tensor) -> None:
    """`total += dout.T @ x` in the precision of `total`, by the product itself: `(N, out)` and `(N, in)`."""
    if x.dtype == total.dtype:
        total.addmm_(dout.t(), x)
    elif x.device.type == "cpu":
        total.addmm_(dout.t().to(total.dtype), x.to(total.dtype))
    elif _adds_in_place(x.dtype, x.device):
        torch.addmm(total, dout.t(), x, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(dout.t(), x, out_dtype=total.dtype)


@functools.cache
def _adds_in_place(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch's matrix product adds half-precision factors to an fp32 sum; some versions refuse."""
    total, ones = torch.ones(16, 16, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, matrix: Matrix, scaling: Scaling | None, total: Tensor | None
    ) -> Tensor:  # fmt: skip
        ctx.weight_dtype, ctx.scaling, ctx.total = weight.dtype, scaling, total
        ctx.save_for_backward(x, *saved_for_dx(matrix))
        return forward(x, matrix, scaling)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, *weight = ctx.saved_tensors
        for_dx, for_dweight, *_ = ctx.needs_input_grad
        matrix = gradient_matrix(dout, ctx.scaling, for_dx, for_dweight)
        return (
            dx(matrix, weight, x.dtype) if for_dx else None,
            dweight(matrix, x, ctx.scaling, ctx.weight_dtype, ctx.total) if for_dweight else None,
            *(None,) * 3,
        )


def linear(
    x: Tensor, weight: Tensor, scaling: Scaling | None = None, copy: Matrix | None = None, total: Tensor | None = None
) -> Tensor:  # fmt: skip
    """`x @ weight.T`: `(..., in)` and `(out, in)`, whose gradient has its precision, to `(..., out)`.

    Without a `scaling` there is no FP8; `copy` is as for `weight_matrix`. `total` is the weight's `.grad`, if the
    backward pass is to add the gradient to it by itself: autograd then has none, which saves one pass over memory.
    """
    return _Linear.apply(x, weight, weight_matrix(weight, x.dtype, scaling, copy), scaling, total)
