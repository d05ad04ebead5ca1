"""A linear layer's three matrix products, one forward and two backward, in the activations' precision or in FP8.

`rms_norm` and `swiglu` fuse them with the ops before; `linear` is the linear layer alone. In FP8 both factors of a
product are quantised (`kernels/fp8`) and the product is scaled back. Each matrix is read as rarely as possible:
a weight once for all products of a forward and a backward pass, an output's gradient once for its two, and an
activation once in each pass, so that it need not be saved.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels.fp8 import E4M3, Float8, Scaled, Scaling, quantize
from lm.kernels.torch_private import scaled_mm

MULTIPLE = 16  # required by tensor cores: of both dimensions of a matrix, and of the tokens of a gradient
Matrix = Tensor | Float8  # the factor of a product


class Layer(NamedTuple):
    """What the backward pass of a linear layer needs in addition to its saved tensors."""

    scaling: Scaling | None  # of FP8 products
    dtype: torch.dtype  # of the weight and its gradient
    total: Tensor | None  # to which the gradient is added; see `linear`


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


def layer(
    weight: Tensor, dtype: torch.dtype, scaling: Scaling | None = None, copy: Matrix | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Matrix, Layer]:  # fmt: skip
    """Prepare a weight `(out, in)` for the product of the forward pass and, if gradients are enabled, of `dx`.

    `dtype` is that of the activations; `copy` is the second result of an earlier call with the same weight.
    """
    if copy is None:
        copy = weight.detach()
        copy = copy.to(dtype) if scaling is None else quantize(copy, scaling, transpose=torch.is_grad_enabled())
    return weight, copy, Layer(scaling, weight.dtype, total)


def saved_for_dx(weight: Matrix) -> tuple[Tensor | None, Tensor | None]:
    """The tensors of a weight that `dx` needs: the weight itself, or its transpose in FP8 and the scale."""
    return (weight, None) if isinstance(weight, Tensor) else weight.transpose or (None, None)


def gradient_matrix(dout: Tensor, scaling: Scaling | None, for_dx: bool, for_dweight: bool) -> Matrix:
    """Prepare the gradient of an output, `(..., out)`, for `dx` and for `dweight`: quantise it if `scaling` is set."""
    if scaling is None or not (for_dx or for_dweight):
        return dout
    return quantize(dout, scaling, gradient=True, matrix=for_dx, transpose=for_dweight)


def input_matrix(x: Tensor, scaling: Scaling | None, for_dweight: bool = False) -> Tensor | Scaled:
    """Prepare the input of a layer, `(..., in)`, for `forward` or for `dweight`: quantise it if `scaling` is set."""
    if scaling is None:
        return x
    found = quantize(x, scaling, matrix=not for_dweight, transpose=for_dweight)
    return found.transpose if for_dweight else found.matrix


def forward(x: Tensor | Scaled, weight: Matrix, dtype: torch.dtype) -> Tensor:
    """`x @ weight.T`, in a `dtype`: `(..., in)` and `(out, in)` to `(..., out)`."""
    return F.linear(x, weight) if isinstance(x, Tensor) else product(x, weight.matrix, dtype)


def dx(dout: Matrix, saved: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """The gradient of `x`, in its `dtype`: `(..., out)` and a saved weight `(out, in)` to `(..., in)`."""
    return dout @ saved[0] if isinstance(dout, Tensor) else product(dout.matrix, Scaled(*saved), dtype)


def dweight(dout: Matrix, x: Tensor | Scaled, of: Layer) -> Tensor | None:
    """The gradient of `weight`, in its precision: `(..., out)` and `(..., in)` to `(out, in)`.

    The product of half-precision factors is accumulated and written in fp32, without rounding in between. With a
    `total`, the product is added to it in place, and None is returned; not in FP8.
    """
    if isinstance(x, Scaled):
        return product(dout.transpose, x, of.dtype, fast=False)  # the sum is over all tokens of a micro-batch
    dout, x = dout.flatten(0, -2), x.flatten(0, -2)  # (tokens, out), (tokens, in)
    if of.total is not None:
        return add_product(of.total, dout, x)
    if of.dtype == x.dtype:
        return dout.t() @ x
    if x.device.type == "cpu":  # a CPU has no such product
        return dout.t().to(of.dtype) @ x.to(of.dtype)
    return torch.mm(dout.t(), x, out_dtype=of.dtype)


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
    def forward(ctx: Any, x: Tensor, weight: Tensor, matrix: Matrix, of: Layer) -> Tensor:
        ctx.of = of
        ctx.save_for_backward(x, *saved_for_dx(matrix))
        return forward(input_matrix(x, of.scaling), matrix, x.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, *weight = ctx.saved_tensors
        for_dx, for_dweight, *_ = ctx.needs_input_grad
        matrix = gradient_matrix(dout, ctx.of.scaling, for_dx, for_dweight)
        return (
            dx(matrix, weight, x.dtype) if for_dx else None,
            dweight(matrix, input_matrix(x, ctx.of.scaling, True), ctx.of) if for_dweight else None,
            *(None,) * 2,
        )


def linear(
    x: Tensor, weight: Tensor, scaling: Scaling | None = None, copy: Matrix | None = None, total: Tensor | None = None
) -> Tensor:  # fmt: skip
    """`x @ weight.T`: `(..., in)` and `(out, in)`, with a gradient in its own precision, to `(..., out)`.

    Without `scaling` there is no FP8; `copy` is as in `layer`. `total` is the weight's `.grad`, if the
    backward pass is to add the gradient to it itself: autograd then gets none, which saves a pass over memory.
    """
    return _Linear.apply(x, *layer(weight, x.dtype, scaling, copy, total))
