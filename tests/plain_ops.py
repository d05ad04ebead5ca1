"""The fused ops in plain PyTorch, for any device and precision: what tests and benchmarks compare them with.

Arguments and results are those of the ops in `lm/kernels`. `results` computes what is compared.
"""

import torch
import torch.nn.functional as F

from lm.kernels.linear import Weight, linear
from lm.model.decoder import Rotary, rotate, upcast


def normalised(x, weight, eps):
    """In fp32 or fp64."""
    x_upcast = upcast(x)
    return F.rms_norm(x_upcast, x.shape[-1:], weight.to(x_upcast.dtype), eps)


def rms_norm_plain(x, residual, weight, eps):
    stream = x if residual is None else x + residual
    return stream, normalised(stream, weight, eps).to(x.dtype)


def plain_linear(x, weight):
    return F.linear(x, weight.parameter.to(x.dtype)) if weight.scaling is None else linear(x, weight)


def norm_linear_plain(x, residual, norm_weight, eps, weight):
    stream, y = rms_norm_plain(x, residual, norm_weight, eps)
    return stream, plain_linear(y, weight)


def norm_mlp_plain(x, residual, norm_weight, eps, up, down):
    stream, gate_up = norm_linear_plain(x, residual, norm_weight, eps, up)
    gate, up = gate_up.chunk(2, -1)
    return stream, plain_linear(F.silu(gate) * up, down)


def of_weights(op):
    """An op of tensors in the place of `Weight`s."""
    return lambda x, residual, norm_weight, eps, *weights: op(x, residual, norm_weight, eps, *map(Weight, weights))


def qk_norm_rope_plain(qkv, q_weight, k_weight, cos, sin, positions, heads, kv_heads, eps):
    packed = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))  # (B, T, H + 2 KV, D)
    q, k, v = packed.split((heads, kv_heads, kv_heads), dim=2)
    if q_weight is not None:
        q, k = normalised(q, q_weight, eps), normalised(k, k_weight, eps)
    q, k = (rotate(x, Rotary(cos, sin, positions)).to(qkv.dtype) for x in (q, k))
    return q, k, v.contiguous()


def linear_cross_entropy_plain(x, weight, labels, *, ignore_index=-100):
    logits = upcast(F.linear(x, weight.to(x.dtype))).flatten(0, -2)  # (N, V)
    targets = labels.flatten()
    losses = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")  # (N)
    return losses.sum(), losses.detach().view(labels.shape)


def results(function, inputs, dtype=None):
    """Outputs, and the gradients of inputs that take one, for always the same gradients of the outputs; all in another
    precision if one is given."""
    inputs = [t.detach().to(dtype or t.dtype).requires_grad_() if isinstance(t, torch.Tensor) and t.requires_grad
              else t for t in inputs]  # fmt: skip
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(0)
    loss = sum((t * torch.randn(t.shape).to(t)).sum() for t in outputs if t.requires_grad)
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    return [*(t.detach() for t in outputs), *torch.autograd.grad(loss, wanted, allow_unused=True)]


def traced(function):
    """The function as one graph of `torch.compile`, in both passes."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")
