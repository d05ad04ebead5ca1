"""SwiGLU on the packed gate and up projection, alone or joined with the linear layer after it.

Joined, its result is not saved for the backward pass, which recomputes it while it reads gate and up anyway.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels import linear, runtime
from lm.kernels.linear import Scaling
from lm.kernels.runtime import define

# ---- CPU implementation ----------------------------------------------------------------------------------------------


def _forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.contiguous().float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _backward(dz: Tensor, gate_up: Tensor, recompute: bool) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.contiguous().float().chunk(2, -1)
    d, s = dz.contiguous().float(), torch.sigmoid(gate)
    silu = gate * s
    dgate_up = torch.cat((d * up * (s + silu * (1 - s)), d * silu), -1).to(gate_up.dtype)
    return dgate_up, (silu * up).to(gate_up.dtype) if recompute else gate_up.new_empty(0)


# ---- CUDA implementation ---------------------------------------------------------------------------------------------


def _cuda_forward(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    z = _half(gate_up)
    run, pieces = _program(gate_up)
    run("swiglu_forward", -(-pieces // 256), 256, gate_up, z, pieces)
    return z


def _cuda_backward(dz: Tensor, gate_up: Tensor, recompute: bool) -> tuple[Tensor, Tensor]:
    dz, gate_up = dz.contiguous(), gate_up.contiguous()
    dgate_up, z = torch.empty_like(gate_up), torch.empty_like(dz) if recompute else dz.new_empty(0)
    run, pieces = _program(gate_up, dz)
    run("swiglu_backward", -(-pieces // 256), 256, dz, gate_up, dgate_up, z if recompute else None, pieces)
    return dgate_up, z


def constants(dtype: torch.dtype, width: int, vec: int) -> dict[str, object]:
    """Preprocessor constants of the kernels for results of this width, loaded in vectors of `vec` elements."""
    return dict(T=runtime.TYPES[dtype], WIDTH=width, VEC=vec)


def _program(gate_up: Tensor, *others: Tensor) -> tuple[runtime.Program, int]:
    width = gate_up.shape[-1] // 2
    vec = runtime.vector(width, gate_up, *others)
    run = runtime.program("swiglu", gate_up.device, **constants(gate_up.dtype, width, vec))
    return run, gate_up.numel() // 2 // vec


# ---- registration ----------------------------------------------------------------------------------------------------


def _half(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


FORWARD = define("swiglu(Tensor gate_up) -> Tensor", reference=_forward, cuda=_cuda_forward, fake=_half)
BACKWARD = define(
    "swiglu_backward(Tensor dz, Tensor gate_up, bool recompute) -> (Tensor, Tensor)",
    reference=_backward,
    cuda=_cuda_backward,
    fake=lambda dz, gate_up, recompute: (
        gate_up.new_empty(gate_up.shape), _half(gate_up) if recompute else gate_up.new_empty(0)),
)  # fmt: skip


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return FORWARD(gate_up)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        return BACKWARD(dz, *ctx.saved_tensors, False)[0]


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, scaling: Scaling | None) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.scaling = scaling
        return linear.forward(FORWARD(gate_up), weight, scaling)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        gate_up, weight = ctx.saved_tensors
        dgate_up, z = BACKWARD(linear.dx(dout, weight, ctx.scaling), gate_up, True)
        return dgate_up, linear.dweight(dout, z, ctx.scaling), None  # (..., 2 I), (out, I)


# ---- public functions ------------------------------------------------------------------------------------------------


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer, 2020, arXiv:2002.05202), in fp32 with one rounding at the end.

    Args:
        gate_up: gate and up side by side, `(..., 2 I)` in bf16, fp16 or fp32.

    Returns:
        `(..., I)`.
    """
    return _Swiglu.apply(gate_up)


def swiglu_linear(gate_up: Tensor, weight: Tensor, scaling: Scaling | None = None) -> Tensor:
    """`swiglu`, then a linear layer; the backward pass recomputes what lies between, it is not saved.

    Args:
        gate_up: as for `swiglu`.
        weight: `(out, I)`; converted to the precision of `gate_up`.
        scaling: how FP8 products are scaled; None: no FP8.

    Returns:
        `(..., out)`.
    """
    return _SwigluLinear.apply(gate_up, weight.to(gate_up.dtype), scaling)


# ---- references ------------------------------------------------------------------------------------------------------


def swiglu_plain(gate_up: Tensor) -> Tensor:
    """Reference of `swiglu`, for any device and precision."""
    gate, up = gate_up.chunk(2, -1)  # (..., I) each
    return F.silu(gate) * up


def swiglu_linear_plain(gate_up: Tensor, weight: Tensor, scaling: Scaling | None = None) -> Tensor:
    """Reference of `swiglu_linear`."""
    return linear.linear(swiglu_plain(gate_up), weight, scaling)
