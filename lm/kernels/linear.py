"""A linear layer's three matrix products, one forward and two backward, in the activations' precision or in FP8.

`rms_norm` and `swiglu` join them with the op before; `linear` is the linear layer alone.

In FP8 both factors are divided by a scale, rounded to eight bits and multiplied; the product is scaled back. Scales
follow from the largest value of the matrix (`tensorwise`) or of each of its rows (`rowwise`), where an outlier costs
only its own row precision. They stay on the device, so nothing waits for it. They are powers of two, which round
nothing, so that eager and compiled code agree to the bit; torchao's rowwise recipe does the same.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Scaling = Literal["tensorwise", "rowwise"]
MULTIPLE = 16  # tensor cores take multiples of it: both dimensions of a matrix, and the tokens of a gradient
SMALLEST = 2.0**-100  # a largest value below it counts as this, so that no scale is zero


class Scaled(NamedTuple):
    """A matrix in FP8."""

    values: Tensor  # (rows, K) in FP8, contiguous
    scale: Tensor  # () or (rows) in fp32: the divisor


def product(a: Tensor, b: Tensor, scaling: Scaling, *, gradient: bool = False) -> Tensor:
    """`a @ b.T`, both factors in FP8.

    Formats are those of Micikevicius et al. (2022, arXiv:2209.05433): e4m3, and e5m2 for gradients, whose values spread
    wider. With a scale for each row the spread is less and a third bit of mantissa is worth more: gradients are e4m3,
    too, as in torchao's rowwise recipe and in DeepSeek-V3 (2024, arXiv:2412.19437, section 3.3.2).

    On a GPU it is torch's scaled product; with fast accumulation, which keeps fewer digits of the sum, in the forward
    pass and wherever rows have scales, as in torchao. On a CPU the same values are multiplied in a wider format.

    Args:
        a: `(M, K)` in bf16 or fp32; K is a multiple of 16.
        b: `(N, K)`, alike; N is a multiple of 16.
        scaling: one scale for the matrix, or one for each row.
        gradient: `a` is the gradient of an output.

    Returns:
        `(M, N)`, like `a`. An infinity or a NaN is not hidden: all values with the same scale become NaN.
    """
    left = scaled(a, torch.float8_e5m2 if gradient and scaling == "tensorwise" else torch.float8_e4m3fn, scaling)
    right = scaled(b, torch.float8_e4m3fn, scaling)
    scales = left.scale[..., None], right.scale[None]  # (M, 1) and (1, N), or one element each
    if a.device.type == "cpu":
        exact = left.values.float() @ right.values.float().t()
        return (exact * scales[0] * scales[1]).to(a.dtype)
    fast = scaling == "rowwise" or not gradient
    # Where rows have scales, only Hopper with cuBLAS 12.9 can give fp32; every device gives bf16.
    out_dtype = torch.bfloat16 if scaling == "rowwise" else a.dtype
    # Not by its public name, torch.nn.functional.scaled_mm, which torch 2.11 cannot compile.
    out = torch._scaled_mm(left.values, right.values.t(), *scales, out_dtype=out_dtype, use_fast_accum=fast)
    return out.to(a.dtype)


def scaled(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> Scaled:
    """A matrix `(rows, K)` in FP8, its largest values near the end of the format's range and none beyond it.

    Args:
        x: in bf16 or fp32, with any strides.
        dtype: e4m3 or e5m2.
        scaling: one scale for the matrix, or one for each row.
    """
    least, most = x.aminmax() if scaling == "tensorwise" else x.aminmax(dim=-1)  # () or (rows)
    scale = _power_of_two(torch.maximum(most, -least).float(), dtype)
    values = x / scale[..., None].to(x.dtype)  # exact, in bf16 too
    return Scaled(values.to(dtype).contiguous(), scale)


def _power_of_two(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The least power of two that brings these values into the range of a format; infinite where they are not finite.

    Both formats end at 1.75 times a power of two. So a value is rounded up to a power of two if its mantissa is above
    1.75, else down; adding the bits that are missing from there to 2 lets just those carry into the exponent.
    """
    bits = largest.clamp(min=SMALLEST).view(torch.int32)
    carried = (bits + 0x1FFFFF) & 0x7F800000  # 23 bits of mantissa, cut off
    return carried.view(torch.float32) / (torch.finfo(dtype).max / 1.75)


def forward(x: Tensor, weight: Tensor, scaling: Scaling | None) -> Tensor:
    """`x @ weight.T`: `(..., in)` and `(out, in)` to `(..., out)`; in FP8 if there is a `scaling`."""
    if scaling is None:
        return F.linear(x, weight)
    return product(x.flatten(0, -2), weight, scaling).view(*x.shape[:-1], -1)


def dx(dout: Tensor, weight: Tensor, scaling: Scaling | None) -> Tensor:
    """The gradient of `x`: `(..., out)` and `(out, in)` to `(..., in)`."""
    if scaling is None:
        return dout @ weight
    return product(dout.flatten(0, -2), weight.t(), scaling, gradient=True).view(*dout.shape[:-1], -1)


def dweight(dout: Tensor, x: Tensor, scaling: Scaling | None, dtype: torch.dtype) -> Tensor:
    """The gradient of `weight`, in its `dtype`: `(..., out)` and `(..., in)` to `(out, in)`.

    The product of half-precision factors is written in fp32 as it is summed, without a rounding in between.
    """
    dout, x = dout.flatten(0, -2), x.flatten(0, -2)  # (tokens, out), (tokens, in)
    if scaling is not None:
        return product(dout.t(), x.t(), scaling, gradient=True).to(dtype)
    if dtype == x.dtype:
        return dout.t() @ x
    if x.device.type == "cpu":  # which has no such product
        return dout.t().to(dtype) @ x.to(dtype)
    return torch.mm(dout.t(), x, out_dtype=dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling | None, copy: Tensor | None) -> Tensor:
        ctx.weight_dtype, ctx.scaling = weight.dtype, scaling
        weight = weight.to(x.dtype) if copy is None else copy
        ctx.save_for_backward(x, weight)
        return forward(x, weight, scaling)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (
            dx(dout, weight, ctx.scaling) if ctx.needs_input_grad[0] else None,
            dweight(dout, x, ctx.scaling, ctx.weight_dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


def linear(x: Tensor, weight: Tensor, scaling: Scaling | None = None, copy: Tensor | None = None) -> Tensor:
    """`x @ weight.T`.

    Args:
        x: `(..., in)`.
        weight: `(out, in)`; its gradient has its precision.
        scaling: how FP8 products are scaled; None: no FP8.
        copy: of `weight`, in the precision of `x`; None: made here.

    Returns:
        `(..., out)`.
    """
    return _Linear.apply(x, weight, scaling, copy)
