"""Quantise a matrix and its transpose to FP8, with scales from the largest values.

A matrix is divided by a scale and rounded to eight bits. Scales follow from the largest value of the matrix
(`tensorwise`) or of each row (`rowwise`), so that an outlier costs precision only in its own row. They stay on the
device, so there is no synchronization. They are powers of two, which cause no rounding, so that eager and compiled code
are bitwise identical; torchao's rowwise recipe does the same.

`fp8/linear` multiplies these matrices. Its backward pass sums over the columns of the forward pass, and tensor cores
take FP8 only if summed elements are contiguous: hence the transpose, whose rows have their own scales.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lm.kernels import runtime
from lm.kernels.runtime import define

Scaling = Literal["tensorwise", "rowwise"]
Source = Literal["MATRIX", "NORMED", "SWIGLU"]  # quantise x, the rows that a norm makes of it, or SwiGLU of it
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIN_LARGEST = 2.0**-100  # lower bound on the largest value, so that no scale is zero
Results = tuple[Tensor, Tensor, Tensor, Tensor]  # values (rows, K), scale, transposed (K, rows), its scale


class Scaled(NamedTuple):
    values: Tensor  # (..., K) in FP8, contiguous
    scale: Tensor  # () or (rows) in fp32: the divisor


class Float8(NamedTuple):
    """A matrix in FP8 for each of its products; a field is None if it was not requested."""

    matrix: Scaled | None  # (..., K)
    transpose: Scaled | None  # (K, rows)


# ---- the reference, in plain PyTorch; results that were not requested are empty --------------------------------------


def quantize_on_cpu(
    x: Tensor,
    dtype: torch.dtype,
    source: Source = "MATRIX",
    *norm: Tensor,
    rowwise: bool,
    matrix: bool,
    transpose: bool,
) -> Results:
    if source == "NORMED":
        weight, rstd = norm
        x = (x.float() * rstd.flatten()[:, None] * weight.float()).to(x.dtype)
    elif source == "SWIGLU":
        x = torch.ops.lm.swiglu(x)
    rows, nothing = x.flatten(0, -2), (x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32))
    values, scale = _scaled(rows, dtype, rowwise=rowwise) if matrix or not rowwise else nothing
    transposed_values, transposed_scale = _scaled(rows.t(), dtype, rowwise=rowwise) if transpose else nothing
    values = values.view(x.shape) if matrix else nothing[0]
    return values, scale, transposed_values, transposed_scale if rowwise else nothing[1]


def _scaled(x: Tensor, dtype: torch.dtype, *, rowwise: bool) -> tuple[Tensor, Tensor]:
    """Quantise a matrix `(rows, K)`, with its largest values near the end of the format's range; also its scale."""
    low, high = x.aminmax(dim=-1) if rowwise else x.aminmax()  # (rows) or ()
    scale = _power_of_two(torch.maximum(high, -low).float(), dtype)
    values = (x.float() / scale[..., None]).to(dtype)
    # A clone has contiguous rows; `contiguous` would keep the strides of a single row or column.
    return values.clone(memory_format=torch.contiguous_format), scale


def _power_of_two(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two that scales these values into the range of a format; infinite if they are not finite.

    Both formats end at 1.75 times a power of two. So a value rounds up to a power of two if its mantissa is above
    1.75, otherwise down: adding 2 - 1.75 in units of the mantissa carries into the exponent only above it.
    """
    bits = largest.clamp(min=MIN_LARGEST).nan_to_num(nan=torch.inf, posinf=torch.inf).view(torch.int32)
    carried = (bits + 0x1FFFFF) & 0x7F800000  # 23 bits of mantissa, cut off
    return carried.view(torch.float32) / int(torch.finfo(dtype).max / 1.75)


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def constants(
    dtype: torch.dtype,
    float8: torch.dtype,
    rows: int,
    width: int,
    vec: int,
    source: str = "MATRIX",
    weight_dtype: torch.dtype = torch.float32,
    *,
    rowwise: bool,
) -> dict[str, Any]:
    """Preprocessor constants of the kernels for rows of this width, loaded in vectors of `vec` elements."""
    return {
        "T": runtime.TYPES[dtype],
        "W": runtime.TYPES[weight_dtype],
        "F": "e4m3" if float8 == E4M3 else "e5m2",
        "SOURCE": source,
        "WIDTH": width,
        "VEC": vec,
        "ROWWISE": int(rowwise),
        "TRANSPOSED_VEC": 1 if rows % 16 else 16,
        "WARPS": runtime.warps(width // vec, max(1, 16 // vec)),
    }


def _cuda(x: Tensor, dtype: torch.dtype, source: Source = "MATRIX", *norm: Tensor, **requested: bool) -> Results:
    """The keywords are those of `quantize_on_cpu`."""
    results = empty(x, dtype, source, **requested)
    launch(source, results, x.contiguous(), None, *norm, rowwise=requested["rowwise"])
    return results


def launch(
    source: str,
    results: tuple[Tensor, ...],
    x: Tensor,
    dz: Tensor | None = None,
    weight: Tensor | None = None,
    rstd: Tensor | None = None,
    *,
    rowwise: bool,
) -> None:
    """Quantise what `csrc/fp8.cu` computes as `source` from these tensors into `results`: `Results`, and for SwiGLU's
    gradient also the transpose of `z` and its scale. Empty results are not computed.
    """
    width = x.shape[-1] // (2 if source.startswith("SWIGLU") else 1)  # of gate or up, as in the source
    rows, vec = x.numel() // x.shape[-1], runtime.vector(width, x, dz, weight)
    weight_dtype = torch.float32 if weight is None else weight.dtype
    chosen = constants(x.dtype, results[0].dtype, rows, width, vec, source, weight_dtype, rowwise=rowwise)
    run, inputs = runtime.program("fp8", x.device, **chosen), (x, dz, weight, rstd)
    outputs = [result if result.numel() else None for result in results]
    if rowwise and outputs[2] is None:  # no transpose
        run("fp8_rows", rows, chosen["WARPS"] * 32, *inputs, *outputs[:2])
        return
    tiles = -(-rows // 128) * -(-width // (8 * vec))
    if rowwise:
        largest, blocks = x.new_zeros(rows + (3 if len(outputs) > 4 else 1) * width, dtype=torch.int32), 0
        run("fp8_largest_of_rows_and_columns", tiles, 256, *inputs, largest, rows)
    else:
        blocks = min(2 * runtime.multiprocessors(x.device), -(-rows * width // (1024 * vec)))
        largest = x.new_empty(2 * blocks, dtype=torch.int32)
        run("fp8_largest", blocks, 1024, *inputs, largest, rows)
    run("fp8_quantize", tiles, 256, *inputs, largest, *(*outputs, None, None)[:6], rows, blocks)


def empty(
    x: Tensor,
    dtype: torch.dtype,
    source: Source = "MATRIX",
    *norm: Tensor,
    rowwise: bool,
    matrix: bool,
    transpose: bool,
) -> Results:
    width = x.shape[-1] // (2 if source == "SWIGLU" else 1)
    rows = x.numel() // x.shape[-1]
    scales = (rows if matrix else 0) if rowwise else ()
    return (
        x.new_empty((*x.shape[:-1], width) if matrix else 0, dtype=dtype),
        x.new_empty(scales, dtype=torch.float32),
        x.new_empty((width, rows) if transpose else 0, dtype=dtype),
        x.new_empty(width if rowwise and transpose else 0, dtype=torch.float32),
    )


# ---- registration ----------------------------------------------------------------------------------------------------

QUANTIZE = define(
    "fp8(Tensor x, ScalarType dtype, str source='MATRIX', Tensor? weight=None, Tensor? rstd=None, *,"
    " bool rowwise, bool matrix, bool transpose) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=quantize_on_cpu,
    cuda=_cuda,
    fake=empty,
)


def transposed(results: Results) -> tuple[Tensor, Tensor]:
    """The transpose in the results and its scale; without rowwise scales, this is the matrix's scale."""
    _, scale, values, transposed_scale = results
    return values, transposed_scale if transposed_scale.numel() else scale


def quantize(
    x: Tensor,
    scaling: Scaling,
    source: Source = "MATRIX",
    *norm: Tensor,
    gradient: bool = False,
    matrix: bool = True,
    transpose: bool = False,
) -> Float8:
    """Quantise a matrix to FP8, its largest values near the end of the format's range and none beyond it.

    Formats are those of Micikevicius et al. (2022, arXiv:2209.05433): e4m3, and e5m2 for gradients, whose values have a
    wider range. With a scale per row the range is smaller and a third bit of mantissa helps more: gradients are e4m3,
    too, as in torchao's rowwise recipe and in DeepSeek-V3 (2024, arXiv:2412.19437, section 3.3.2).

    `x` is `(..., K)` in bf16, fp16 or fp32, all but the last dimension being rows. If a value is infinite or NaN, its
    scale is infinite, so that products show it. `matrix` and `transpose` select what is computed. With the source
    `NORMED`, which needs `norm`, its weight and `1 / rms`, or `SWIGLU`, the result of that op on `x` is quantised.
    """
    dtype, rowwise = E5M2 if gradient and scaling == "tensorwise" else E4M3, scaling == "rowwise"
    rows = x.flatten(0, -2)
    results = QUANTIZE(rows, dtype, source, *norm, rowwise=rowwise, matrix=matrix, transpose=transpose)
    return Float8(
        Scaled(results[0].view(*x.shape[:-1], -1), results[1]) if matrix else None,
        Scaled(*transposed(results)) if transpose else None,
    )
