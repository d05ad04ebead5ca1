"""Test equipment: flash attention over sequences of unequal length, spelled out for a CPU.

It goes under torch's own `varlen_attn`, whose registration, shapes and backward pass stay what they are on a GPU.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lm.model import attention
from lm.model.attention import kernel_for


def _weights(q: Tensor, k: Tensor, starts: Tensor, scale: float, left: int) -> Tensor:
    """`(H, tokens, tokens)`; keys of the query's own sequence, up to `left` before it or all if that is negative."""
    time = torch.arange(len(q), dtype=starts.dtype)
    sequence = torch.searchsorted(starts, time, right=True)
    before = time[:, None] - time
    seen = (before >= 0) & (sequence[:, None] == sequence) & ((before <= left) | (left < 0))
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf).softmax(-1)


def _spelled(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in tensors]


def _forward(q, k, v, starts, starts_k, longest, longest_k, dropout, causal, debug, *, scale, window_size_left, **rest):
    k, v = _spelled(q, k, v)
    out = torch.einsum("hqk,khd->qhd", _weights(q, k, starts, scale, window_size_left), v).contiguous()
    statistics = q.new_zeros((q.shape[1], len(q)), dtype=torch.float32)
    return out, statistics, q.new_zeros(2, dtype=torch.uint64), q.new_zeros(()), q.new_empty(0)


def _backward(dout, q, k, v, out, statistics, starts, starts_k, longest, longest_k, dropout, causal, state, unused, *,
              scale, window_size_left, **rest):  # fmt: skip
    groups = k.shape[1]
    k, v = _spelled(q, k, v)
    weights = _weights(q, k, starts, scale, window_size_left)
    dweights = torch.einsum("qhd,khd->hqk", dout, v)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("hqk,khd->qhd", dscores, k).contiguous()
    dk, dv = torch.einsum("hqk,qhd->khd", dscores, q), torch.einsum("hqk,qhd->khd", weights, dout)
    return dq, *(tensor.unflatten(1, (groups, -1)).sum(2) for tensor in (dk, dv))


@pytest.fixture
def flash_on_cpu(monkeypatch) -> Iterator[None]:
    """Attention takes the way that it takes on a GPU in half precision."""
    monkeypatch.setattr(
        attention,
        "kernel_for",
        lambda device, capability, dtype, *mask: kernel_for("cuda", (8, 0), torch.bfloat16, *mask),
    )
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    yield
    library._destroy()
