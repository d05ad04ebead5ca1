"""SwiGLU on the packed gate and up projection, fused with the norm and the linear layers around it: an MLP.

The activation is not saved unless the caller says so; the backward pass recomputes it while it reads gate and up
anyway. In FP8 its gradients are quantised as they are computed, which is why one function has both linear layers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels import fp8, linear, runtime
from lm.kernels.fp8 import E4M3, E5M2, Float8, Scaled, quantize
from lm.kernels.linear import Layer, Matrix
from lm.kernels.rms_norm import check_shapes_and_dtypes, normed_product, normed_product_backward, saved_if
from lm.kernels.runtime import define


def _cpu_forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.contiguous().float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _cpu_backward(dz: Tensor, gate_up: Tensor, recompute: bool = True) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.contiguous().float().chunk(2, -1)
    d, s = dz.contiguous().float(), torch.sigmoid(gate)
    silu = gate * s
    dgate_up = torch.cat((d * up * (s + silu * (1 - s)), d * silu), -1)
    z = (silu * up).to(gate_up.dtype) if recompute else gate_up.new_empty(0)
    return dgate_up.to(gate_up.dtype), z


def _cpu_backward_fp8(dz: Tensor, gate_up: Tensor, rowwise: bool) -> tuple[Tensor, ...]:
    dgate_up, z = _cpu_backward(dz, gate_up)
    gradient = fp8.on_cpu(dgate_up, E4M3 if rowwise else E5M2, rowwise, True, True)
    return *gradient, *fp8.transposed(fp8.on_cpu(z, E4M3, rowwise, False, True))


def constants(dtype: torch.dtype, width: int, vec: int) -> dict[str, Any]:
    """Preprocessor constants of the kernels for results of this width, loaded in vectors of `vec` elements."""
    return dict(T=runtime.TYPES[dtype], WIDTH=width, VEC=vec)


def _run(name: str, gate_up: Tensor, *tensors: Tensor | None) -> None:
    """Launch a kernel on gate and up `(..., 2 I)` and the other tensors."""
    width = gate_up.shape[-1] // 2
    vec = runtime.vector(width, gate_up, *tensors)
    pieces = gate_up.numel() // 2 // vec
    run = runtime.program("swiglu", gate_up.device, **constants(gate_up.dtype, width, vec))
    run(name, -(-pieces // 256), 256, gate_up, *tensors, pieces)


def _cuda_forward(gate_up: Tensor) -> Tensor:
    z = _half(gate_up)
    _run("swiglu_forward", gate_up.contiguous(), z)
    return z


def _cuda_backward(dz: Tensor, gate_up: Tensor, recompute: bool = True) -> tuple[Tensor, Tensor]:
    dgate_up, z = _empty_backward(dz, gate_up, recompute)
    _run("swiglu_backward", gate_up.contiguous(), dz.contiguous(), dgate_up, z if recompute else None)
    return dgate_up, z


def _empty_backward(dz: Tensor, gate_up: Tensor, recompute: bool = True) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), dz.new_empty(dz.shape if recompute else 0)


def _half(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _cuda_backward_fp8(dz: Tensor, gate_up: Tensor, rowwise: bool) -> tuple[Tensor, ...]:
    results = _empty_fp8(dz, gate_up, rowwise)
    return fp8.launch("SWIGLU_GRADIENT", results, rowwise, gate_up.contiguous(), dz.contiguous())


def _empty_fp8(dz: Tensor, gate_up: Tensor, rowwise: bool) -> tuple[Tensor, ...]:
    gradient = fp8.empty(gate_up, E4M3 if rowwise else E5M2, rowwise, True, True)
    return *gradient, *fp8.transposed(fp8.empty(dz, E4M3, rowwise, False, True))


FORWARD = define("swiglu(Tensor gate_up) -> Tensor", cpu=_cpu_forward, cuda=_cuda_forward, fake=_half)
BACKWARD = define(  # the gradient of gate and up, and z, which is empty without `recompute`
    "swiglu_backward(Tensor dz, Tensor gate_up, bool recompute=True) -> (Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=_cuda_backward,
    fake=_empty_backward,
)
BACKWARD_FP8 = define(  # results in FP8: the gradient, its transpose, and the transpose of z
    "swiglu_backward_fp8(Tensor dz, Tensor gate_up, bool rowwise) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu_backward_fp8,
    cuda=_cuda_backward_fp8,
    fake=_empty_fp8,
)


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, store: bool,
        up_weight: Tensor, up_matrix: Matrix, up: Layer, down_weight: Tensor, down_matrix: Matrix, down: Layer,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        stream, y, gate_up, rstd = normed_product(x, residual, norm_weight, eps, up_matrix, up)
        z = FORWARD(gate_up) if down.scaling is None else quantize(gate_up, down.scaling, "SWIGLU").matrix
        stored = (saved_if(store, y), saved_if(store, z))
        ctx.adds, ctx.up, ctx.down = residual is not None, up, down
        weights = *linear.saved_for_dx(up_matrix), *linear.saved_for_dx(down_matrix)
        ctx.save_for_backward(stream if ctx.adds else x, norm_weight, rstd, gate_up, *stored, *weights)
        ctx.set_materialize_grads(False)
        return stream if ctx.adds else None, linear.forward(z, down_matrix, x.dtype)

    @staticmethod
    def backward(ctx: Any, dstream: Tensor | None, dout: Tensor) -> tuple[Tensor | None, ...]:
        (stream, norm_weight, rstd, gate_up, y, z, *weights), up, down = ctx.saved_tensors, ctx.up, ctx.down
        up_wanted, down_wanted = ctx.needs_input_grad[5], ctx.needs_input_grad[8]
        dbranch = linear.gradient_matrix(dout, down.scaling, True, down_wanted)
        dz = linear.dx(dbranch, weights[2:], gate_up.dtype)  # (..., I)
        if up.scaling == down.scaling is not None:
            *gradient, z, scale = BACKWARD_FP8(dz, gate_up, up.scaling == "rowwise")
            dgate_up = Float8(Scaled(*gradient[:2]), Scaled(*fp8.transposed(gradient)))
            z = Scaled(z, scale)
        else:
            dgate_up, recomputed = BACKWARD(dz, gate_up, z is None)  # (..., 2 I), (..., I)
            z = recomputed if z is None else z
            dgate_up = linear.gradient_matrix(dgate_up, up.scaling, True, up_wanted)
            z = linear.input_matrix(z, down.scaling, True) if down_wanted else z
        ddown = linear.dweight(dbranch, z, down) if down_wanted else None  # (out, I)
        dx, dnorm, dup = normed_product_backward(
            dgate_up, dstream, stream, norm_weight, rstd, y, weights[:2], up, up_wanted
        )
        return dx, dx if ctx.adds else None, dnorm, None, None, dup, None, None, ddown, None, None


def norm_mlp(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, up: tuple, down: tuple, *, store: bool = False
) -> tuple[Tensor, Tensor]:
    """`norm_linear`, `silu(gate) * up` (Shazeer, 2020, arXiv:2002.05202) in fp32 with one rounding at its end, and
    `linear`: `(stream, z @ down.T)`, `(..., C)` each.

    `up` and `down` are the last arguments of `linear`, from the weight on: `(2 I, C)`, gate above up, and `(C, I)`.
    With `store` the normalised rows and `z` are saved for the backward pass, where it would recompute them; not in FP8.
    """
    check_shapes_and_dtypes(x, residual, norm_weight)
    layers = *linear.layer(up[0], x.dtype, *up[1:]), *linear.layer(down[0], x.dtype, *down[1:])
    stream, out = _NormMlp.apply(x, residual, norm_weight, eps, store, *layers)
    return x if stream is None else stream, out
