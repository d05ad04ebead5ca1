"""SwiGLU on the packed gate and up projection, joined with the linear layer after it.

The activation is not saved for the backward pass, which recomputes it while it reads gate and up anyway.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels import linear, runtime
from lm.kernels.fp8 import E4M3, Scaled, Scaling, empty_rows, quantized_rows, top
from lm.kernels.linear import Matrix
from lm.kernels.runtime import define


def _cpu_forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.contiguous().float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _cpu_forward_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return quantized_rows(_cpu_forward(gate_up))


def _cpu_backward(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.contiguous().float().chunk(2, -1)
    d, s = dz.contiguous().float(), torch.sigmoid(gate)
    silu = gate * s
    dgate_up = torch.cat((d * up * (s + silu * (1 - s)), d * silu), -1)
    return dgate_up.to(gate_up.dtype), (silu * up).to(gate_up.dtype)


def constants(dtype: torch.dtype, width: int, vec: int) -> dict[str, object]:
    """Preprocessor constants of the kernels for results of this width, loaded in vectors of `vec` elements."""
    return dict(T=runtime.TYPES[dtype], WIDTH=width, VEC=vec)


def constants_fp8(dtype: torch.dtype, width: int, vec: int) -> dict[str, object]:
    """As `constants`, of the kernel that returns e4m3."""
    return constants(dtype, width, vec) | dict(WARPS=runtime.warps(width // vec, max(1, 16 // vec)), TOP=top(E4M3))


def _run(name: str, gate_up: Tensor, tensors: tuple[Tensor, ...], *loaded: Tensor) -> None:
    """Launch a kernel on these tensors, of which `gate_up` and `loaded` are read in vectors."""
    width = gate_up.shape[-1] // 2
    vec = runtime.vector(width, gate_up, *loaded)
    pieces = gate_up.numel() // 2 // vec
    run = runtime.program("swiglu", gate_up.device, **constants(gate_up.dtype, width, vec))
    run(name, -(-pieces // 256), 256, *tensors, pieces)


def _cuda_forward(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    z = _half(gate_up)
    _run("swiglu_forward", gate_up, (gate_up, z))
    return z


def _cuda_forward_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate_up = gate_up.contiguous()
    values, scale = _half_fp8(gate_up)
    width = values.shape[-1]
    chosen = constants_fp8(gate_up.dtype, width, runtime.vector(width, gate_up))
    runtime.program("swiglu_fp8", gate_up.device, **chosen)(
        "swiglu_fp8", scale.numel(), chosen["WARPS"] * 32, gate_up, values, scale)  # fmt: skip
    return values, scale


def _cuda_backward(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    dz, gate_up = dz.contiguous(), gate_up.contiguous()
    dgate_up, z = torch.empty_like(gate_up), torch.empty_like(dz)
    _run("swiglu_backward", gate_up, (dz, gate_up, dgate_up, z), dz)
    return dgate_up, z


def _half(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _half_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return empty_rows(gate_up, (*gate_up.shape[:-1], gate_up.shape[-1] // 2))


FORWARD = define("swiglu(Tensor gate_up) -> Tensor", cpu=_cpu_forward, cuda=_cuda_forward, fake=_half)
FORWARD_FP8 = define(  # in e4m3 with a scale for each row, as `fp8` makes it of what `swiglu` returns
    "swiglu_fp8(Tensor gate_up) -> (Tensor, Tensor)", cpu=_cpu_forward_fp8, cuda=_cuda_forward_fp8, fake=_half_fp8
)
BACKWARD = define(
    "swiglu_backward(Tensor dz, Tensor gate_up) -> (Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=_cuda_backward,
    fake=lambda dz, gate_up: (gate_up.new_empty(gate_up.shape), _half(gate_up)),
)


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weight: Tensor, matrix: Matrix, scaling: Scaling | None, total: Tensor | None
    ) -> Tensor:  # fmt: skip
        ctx.weight_dtype, ctx.scaling, ctx.total = weight.dtype, scaling, total
        ctx.save_for_backward(gate_up, *linear.saved_for_dx(matrix))
        if scaling == "rowwise":
            return linear.product(Scaled(*FORWARD_FP8(gate_up)), matrix.matrix, gate_up.dtype)
        return linear.forward(FORWARD(gate_up), matrix, scaling)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, *weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        dout = linear.gradient_matrix(dout, ctx.scaling, True, wanted)
        dgate_up, z = BACKWARD(linear.dx(dout, weight, gate_up.dtype), gate_up)  # (..., 2 I), (..., I)
        dweight = linear.dweight(dout, z, ctx.scaling, ctx.weight_dtype, ctx.total) if wanted else None  # (out, I)
        return dgate_up, dweight, *(None,) * 3


def swiglu_linear(
    gate_up: Tensor, weight: Tensor, scaling: Scaling | None = None, copy: Matrix | None = None,
    total: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`silu(gate) * up` (Shazeer, 2020, arXiv:2002.05202) in fp32 with one rounding at the end, then `linear`.

    Gate and up are side by side, `(..., 2 I)` in bf16, fp16 or fp32; a weight `(out, I)` makes `(..., out)` of them.
    """
    matrix = linear.weight_matrix(weight, gate_up.dtype, scaling, copy)
    return _SwigluLinear.apply(gate_up, weight, matrix, scaling, total)
