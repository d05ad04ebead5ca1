"""Queries, keys and values out of the packed projection: right for every shape of heads, with and without the norm."""

import pytest
import torch
from plain_ops import qk_norm_rope_plain, results, traced
from torch.library import opcheck

from lm.kernels import qk_norm_rope
from lm.kernels.qk_norm_rope import BACKWARD, FORWARD
from lm.model.decoder import rotary_table

DTYPES = [torch.float32, torch.bfloat16]  # to a kernel fp16 is bf16 with another conversion, so it takes one shape
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}  # of the norm of the exact values
EPS = 1e-5


def inputs(dtype, batch, length, heads, kv_heads, dim, norm=True, documents=False):
    qkv = torch.randn(batch, length, (heads + 2 * kv_heads) * dim).to(dtype)
    weights = [1 + 0.2 * torch.randn(dim) for _ in range(2)] if norm else [None, None]  # fp32, as in mixed precision
    positions = torch.randint(length, (batch, length), dtype=torch.int32) if documents else None
    return qkv, *weights, *rotary_table(length, dim, 10000.0), positions


def exact(inputs, heads, kv_heads, gradients):
    """q, k, v and the gradients of the projection and the weights, in float64."""
    qkv, q_weight, k_weight, cos, sin, positions = inputs
    wide = [None if t is None else t.double().requires_grad_() for t in (qkv, q_weight, k_weight)]
    outputs = qk_norm_rope_plain(*wide, cos.double(), sin.double(), positions, heads, kv_heads, EPS)
    torch.autograd.backward(outputs, [g.double() for g in gradients])
    return [t.detach() for t in outputs], [None if t is None else t.grad for t in wide]


def close(mine, true, tolerance):
    error = (mine.double() - true).norm() / true.norm().clamp(min=1e-12)
    assert mine.shape == true.shape and error <= tolerance, error.item()


SHAPES = {  # batch, length, heads, kv heads, width of a head
    "one token": (1, 1, 1, 1, 64), "prime": (2, 13, 4, 2, 64), "narrow": (3, 7, 2, 2, 2), "6": (1, 5, 3, 1, 6),
    "80": (2, 5, 2, 1, 80), "256": (1, 3, 2, 1, 256), "250": (1, 3, 1, 1, 250),
}  # fmt: skip
CASES = [(dtype, name, torch.float32) for dtype in DTYPES for name in SHAPES]  # weights, or None without a norm
CASES += [(dtype, name, None) for dtype in DTYPES for name in ("prime", "250")]
CASES += [(torch.float16, "prime", torch.float32), *((half, "prime", half) for half in (torch.bfloat16, torch.float16))]


@pytest.mark.parametrize("dtype, shape, weights", CASES, ids=str)
def test_the_kernels_equal_float64(emulated, dtype, shape, weights):
    batch, length, heads, kv_heads, dim = shape = SHAPES[shape]
    qkv, *norms, cos, sin, positions = inputs(dtype, *shape, norm=weights is not None, documents=length > 10)
    norms = [norm if norm is None else norm.to(weights) for norm in norms]
    given = (qkv, *norms, cos, sin, positions)
    gradients = [torch.randn(batch, length, n, dim).to(dtype) for n in (heads, kv_heads, kv_heads)]
    true, true_gradients = exact(given, heads, kv_heads, gradients)
    for mine, theirs in zip(qk_norm_rope._cuda_forward(*given, heads, kv_heads, EPS), true, strict=True):
        close(mine, theirs, TOLERANCE[dtype])
    dqkv, dweights = qk_norm_rope._cuda_backward(*gradients, qkv if weights else None, *given[1:], EPS)
    close(dqkv, true_gradients[0], 2 * TOLERANCE[dtype])
    if weights is None:
        assert dweights.numel() == 0
        return
    assert dweights.dtype == weights
    tolerance = 2 * TOLERANCE[dtype] if dtype == torch.float32 else max(TOLERANCE[weights], 1e-5)
    close(dweights, torch.stack(true_gradients[1:]), tolerance)


def test_gradients_may_lie_as_attention_left_them(emulated):
    """Heads before tokens, or not neighbours at all: the strides are followed, or a copy is made."""
    given = inputs(torch.bfloat16, 2, 5, 4, 2, 32)
    neat = [torch.randn(2, 5, n, 32).bfloat16() for n in (4, 2, 2)]
    turned = [g.transpose(1, 2).contiguous().transpose(1, 2) for g in neat]
    scattered = [g.transpose(1, 3).contiguous().transpose(1, 3) for g in neat]
    spread = [g[..., None].repeat(1, 1, 1, 1, 8)[..., 0] for g in neat]  # every eighth value of aligned rows
    results = [qk_norm_rope._cuda_backward(*g, *given, EPS) for g in (neat, turned, scattered, spread)]
    for dqkv, dweights in results[1:]:
        assert torch.equal(dqkv, results[0][0]) and torch.equal(dweights, results[0][1])


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "bare"])
def test_a_projection_and_positions_may_have_tokens_first(emulated, norm):
    """Rows that are no neighbours are not taken for such, in either pass."""
    qkv, q_weight, k_weight, cos, sin, positions = inputs(torch.float32, 5, 3, 4, 2, 16, norm, documents=True)
    turned = qkv.transpose(0, 1), q_weight, k_weight, cos, sin, positions.transpose(0, 1)
    gradients = [torch.randn(5, 3, n, 16).transpose(0, 1) for n in (4, 2, 2)]
    found = *qk_norm_rope._cuda_forward(*turned, 4, 2, EPS), *qk_norm_rope._cuda_backward(*gradients, *turned, EPS)
    plain = *qk_norm_rope._cpu_forward(*turned, 4, 2, EPS), *qk_norm_rope._cpu_backward(*gradients, *turned, EPS)
    for mine, expected in zip(found, plain, strict=True):
        close(mine, expected.double(), 2 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("size", [1e-20, 1e4])
def test_tiny_and_huge_heads_stay_finite(emulated, size):
    given = inputs(torch.float32, 1, 3, 2, 1, 64)
    given = (given[0] * size, *given[1:])
    gradients = [torch.ones(1, 3, n, 64) for n in (2, 1, 1)]
    true, _ = exact(given, 2, 1, gradients)
    for mine, theirs in zip(qk_norm_rope._cuda_forward(*given, 2, 1, EPS), true, strict=True):
        close(mine, theirs, 1e-5)
    assert all(torch.isfinite(t).all() for t in qk_norm_rope._cuda_backward(*gradients, *given, EPS))


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "bare"])
@pytest.mark.parametrize("documents", [True, False])
def test_torch_accepts_both_ops(norm, documents):
    dtype = torch.bfloat16
    qkv, q_weight, k_weight, *tables = inputs(dtype, 2, 5, 4, 2, 8, norm, documents)
    opcheck(FORWARD, (qkv, q_weight, k_weight, *tables, 4, 2, EPS))
    gradients = [torch.randn(2, 5, n, 8).to(dtype) for n in (4, 2, 2)]
    opcheck(BACKWARD, (*gradients, qkv if norm else None, q_weight, k_weight, *tables, EPS))


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "bare"])
@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_plain_pytorch(norm, documents, compiled):
    """In eager mode, and traced without a break."""
    given = *inputs(torch.float32, 2, 5, 4, 2, 8, norm, documents), 4, 2, EPS
    for leaf in given[: 3 if norm else 1]:
        leaf.requires_grad_()
    found = results(traced(qk_norm_rope.qk_norm_rope) if compiled else qk_norm_rope.qk_norm_rope, given)
    torch.testing.assert_close(found, results(qk_norm_rope_plain, given), atol=1e-5, rtol=1e-5)


def test_values_do_not_keep_the_projection():
    """Attention saves them; without the norm the packed projection can go as soon as it was split."""
    qkv, *rest = inputs(torch.float32, 2, 5, 4, 2, 8, norm=False)
    for value in qk_norm_rope.qk_norm_rope(qkv.requires_grad_(), *rest, 4, 2, EPS):
        assert value.untyped_storage().nbytes() == value.nbytes
