"""A matrix in FP8 and its transpose, with scales from its largest values.

A matrix is divided by a scale and rounded to eight bits. Scales follow from the largest value of the matrix
(`tensorwise`) or of each of its rows (`rowwise`), where an outlier costs only its own row precision. They stay on the
device, so nothing waits for it. They are powers of two, which round nothing, so that eager and compiled code agree to
the bit; torchao's rowwise recipe does the same.

`kernels/linear` multiplies these matrices. Its backward pass sums over what are columns in the forward pass, and tensor
cores take FP8 only where neighbours in memory are summed: hence the transpose, whose rows have scales of their own.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lm.kernels import runtime
from lm.kernels.runtime import define

Scaling = Literal["tensorwise", "rowwise"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 2.0**-100  # a largest value below it counts as this, so that no scale is zero
Results = tuple[Tensor, Tensor, Tensor, Tensor]  # values (rows, K), scale, transposed (K, rows), its scale


class Scaled(NamedTuple):
    """A matrix in FP8."""

    values: Tensor  # (..., K) in FP8, contiguous
    scale: Tensor  # () or (rows) in fp32: the divisor


class Float8(NamedTuple):
    """A matrix in FP8 for each of its products; None where it was not asked for."""

    matrix: Scaled | None  # (..., K)
    transpose: Scaled | None  # (K, rows)


def _as_rows(x: Tensor) -> Tensor:
    """A copy whose rows are neighbours; `contiguous` would leave the strides of a single row or column as they are."""
    return x.clone(memory_format=torch.contiguous_format)


def _scaled(x: Tensor, dtype: torch.dtype, rowwise: bool) -> tuple[Tensor, Tensor]:
    """A matrix `(rows, K)` in FP8, its largest values near the end of the format's range, and its scale."""
    least, most = x.aminmax(dim=-1) if rowwise else x.aminmax()  # (rows) or ()
    scale = _power_of_two(torch.maximum(most, -least).float(), dtype)
    return _as_rows((x.float() / scale[..., None]).to(dtype)), scale


def _power_of_two(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The least power of two that brings these values into the range of a format; infinite where they are not finite.

    Both formats end at 1.75 times a power of two. So a value is rounded up to a power of two if its mantissa is above
    1.75, else down; adding the bits that are missing from there to 2 lets just those carry into the exponent.
    """
    bits = largest.clamp(min=SMALLEST).nan_to_num(nan=torch.inf, posinf=torch.inf).view(torch.int32)
    carried = (bits + 0x1FFFFF) & 0x7F800000  # 23 bits of mantissa, cut off
    return carried.view(torch.float32) / top(dtype)


def top(dtype: torch.dtype) -> int:
    """The largest power of two in a format."""
    return int(torch.finfo(dtype).max / 1.75)


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix `(..., K)` in e4m3 with a scale for each row, `(rows)`, by plain PyTorch."""
    values, scale = _scaled(x.flatten(0, -2), E4M3, True)
    return values.view(x.shape), scale


def empty_rows(x: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Memory for a matrix of this shape in e4m3 with a scale for each row, where `x` is."""
    return x.new_empty(shape, dtype=E4M3), x.new_empty(math.prod(shape[:-1]), dtype=torch.float32)


def _cpu(x: Tensor, dtype: torch.dtype, rowwise: bool, matrix: bool, transpose: bool) -> Results:
    nothing = (x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32))
    if rowwise:
        return (*(_scaled(x, dtype, True) if matrix else nothing),
                *(_scaled(x.t(), dtype, True) if transpose else nothing))  # fmt: skip
    values, scale = _scaled(x, dtype, False)
    return values if matrix else nothing[0], scale, _as_rows(values.t()) if transpose else nothing[0], nothing[1]


def _empty(x: Tensor, dtype: torch.dtype, rowwise: bool, matrix: bool, transpose: bool) -> Results:
    rows, width = x.shape
    return (
        x.new_empty((rows, width) if matrix else 0, dtype=dtype),
        x.new_empty(() if not rowwise else rows if matrix else 0, dtype=torch.float32),
        x.new_empty((width, rows) if transpose else 0, dtype=dtype),
        x.new_empty(width if rowwise and transpose else 0, dtype=torch.float32),
    )


def constants(
    dtype: torch.dtype, float8: torch.dtype, rows: int, width: int, vec: int, rowwise: bool
) -> dict[str, object]:
    """Preprocessor constants of the kernels for rows of this width, loaded in vectors of `vec` elements."""
    return dict(T=runtime.TYPES[dtype], F="e4m3" if float8 == E4M3 else "e5m2", TOP=top(float8), WIDTH=width, VEC=vec,
                ROWWISE=int(rowwise), TRANSPOSED_VEC=1 if rows % 16 else 16,
                WARPS=runtime.warps(width // vec, max(1, 16 // vec)))  # fmt: skip


def _cuda(x: Tensor, dtype: torch.dtype, rowwise: bool, matrix: bool, transpose: bool) -> Results:
    x, (rows, width) = x.contiguous(), x.shape
    vec = runtime.vector(width, x)
    chosen = constants(x.dtype, dtype, rows, width, vec, rowwise)
    run = runtime.program("fp8", x.device, **chosen)
    values, scale, transposed, transposed_scale = results = _empty(x, dtype, rowwise, matrix, transpose)
    if rowwise and not transpose:
        run("fp8_rows", rows, chosen["WARPS"] * 32, x, values, scale)
        return results
    tiles = -(-rows // 128) * -(-width // (8 * vec))
    if rowwise:
        largest, parts = x.new_zeros(rows + width, dtype=torch.int32), 0
        run("fp8_largest_of_rows_and_columns", tiles, 256, x, largest, rows)
    else:
        parts = min(2 * runtime.multiprocessors(x.device), -(-x.numel() // (1024 * vec)))
        largest = x.new_empty(parts, dtype=torch.int32)
        run("fp8_largest", parts, 1024, x, largest, x.numel() // vec)
    run("fp8_quantize", tiles, 256, x, largest, values if matrix else None, scale, transposed if transpose else None,
        transposed_scale, rows, parts)  # fmt: skip
    return results


QUANTIZE = define(
    "fp8(Tensor x, ScalarType dtype, bool rowwise, bool matrix, bool transpose) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu,
    cuda=_cuda,
    fake=_empty,
)


def quantize(
    x: Tensor, scaling: Scaling, *, gradient: bool = False, matrix: bool = True, transpose: bool = False
) -> Float8:
    """A matrix in FP8, its largest values near the end of the format's range and none beyond it.

    Formats are those of Micikevicius et al. (2022, arXiv:2209.05433): e4m3, and e5m2 for gradients, whose values spread
    wider. With a scale for each row the spread is less and a third bit of mantissa is worth more: gradients are e4m3,
    too, as in torchao's rowwise recipe and in DeepSeek-V3 (2024, arXiv:2412.19437, section 3.3.2).

    `x` is `(..., K)` in bf16, fp16 or fp32, all but the last dimension its rows. Where a value is infinite or NaN, the
    scale is infinite: no product hides it. `matrix` and `transpose` select what is computed.
    """
    dtype, rowwise = E5M2 if gradient and scaling == "tensorwise" else E4M3, scaling == "rowwise"
    values, scale, transposed, transposed_scale = QUANTIZE(x.flatten(0, -2), dtype, rowwise, matrix, transpose)
    return Float8(
        Scaled(values.view(x.shape), scale) if matrix else None,
        Scaled(transposed, transposed_scale if rowwise else scale) if transpose else None,
    )
