"""SwiGLU on the packed projection of gate and up, `z = silu(gate) * up`; `mlp` joins it with the layers around it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels import runtime
from lm.kernels.runtime import define

# ---- forward: gate and up (..., 2 I) to z (..., I) -------------------------------------------------------------------


def _cpu_forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.contiguous().float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _cuda_forward(gate_up: Tensor) -> Tensor:
    z = _empty_forward(gate_up)
    _launch("swiglu_forward", gate_up.contiguous(), z)
    return z


def _empty_forward(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


# ---- backward: the gradient of gate and up, and z again -----------------------------------------------------------


def _cpu_backward(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.contiguous().float().chunk(2, -1)
    d, s = dz.contiguous().float(), torch.sigmoid(gate)
    silu = gate * s
    dgate_up = torch.cat((d * up * (s + silu * (1 - s)), d * silu), -1)
    return dgate_up.to(gate_up.dtype), (silu * up).to(gate_up.dtype)


def _cuda_backward(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    dgate_up, z = _empty_backward(dz, gate_up)
    _launch("swiglu_backward", gate_up.contiguous(), dz.contiguous(), dgate_up, z)
    return dgate_up, z


def _empty_backward(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), torch.empty_like(dz)


# ---- registration ----------------------------------------------------------------------------------------------------


def constants(dtype: torch.dtype, width: int, vec: int) -> dict[str, Any]:
    """Preprocessor constants of the kernels for results of this width, loaded in vectors of `vec` elements."""
    return {"T": runtime.TYPES[dtype], "WIDTH": width, "VEC": vec}


def _launch(name: str, gate_up: Tensor, *tensors: Tensor | None) -> None:
    width = gate_up.shape[-1] // 2
    vec = runtime.vector(width, gate_up, *tensors)
    pieces = gate_up.numel() // 2 // vec
    run = runtime.program("swiglu", gate_up.device, **constants(gate_up.dtype, width, vec))
    run(name, -(-pieces // 256), 256, gate_up, *tensors, pieces)


FORWARD = define("swiglu(Tensor gate_up) -> Tensor", cpu=_cpu_forward, cuda=_cuda_forward, fake=_empty_forward)
BACKWARD = define(
    "swiglu_backward(Tensor dz, Tensor gate_up) -> (Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=_cuda_backward,
    fake=_empty_backward,
)


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return FORWARD(gate_up)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        return BACKWARD(dz, *ctx.saved_tensors)[0]
