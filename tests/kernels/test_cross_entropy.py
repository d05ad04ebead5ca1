"""The output matrix and the loss in chunks: right for every shape, and never all logits at once."""

import pytest
import torch
import torch.nn.functional as F
from plain_ops import linear_cross_entropy_plain, results, traced
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from lm.kernels import cross_entropy
from lm.kernels.cross_entropy import FORWARD, linear_cross_entropy

DTYPES = [torch.float32, torch.bfloat16]  # to the kernel fp16 is bf16 with another conversion, so it takes one shape
# Of the norm of the exact values; in fp32 it is the matrix product's long sum over the vocabulary, in the CPU's order.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
IGNORED = -100


def inputs(dtype, tokens, vocab, width, ignored=3):
    x, weight = torch.randn(tokens, width).to(dtype), torch.randn(vocab, width).to(dtype)
    labels = torch.randint(vocab, (tokens,))
    labels[1::ignored] = IGNORED
    return x, weight, labels


def exact(x, weight, labels, logits_dtype=None):
    """losses, dx, dweight in float64, of logits that are rounded as they are stored."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = x @ weight.t()
    if logits_dtype is not None:
        logits = logits + (logits.detach().to(logits_dtype).double() - logits.detach())
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    losses.sum().backward()
    return losses.detach(), x.grad, weight.grad


def close(got, true, tolerance):
    for name, mine, theirs in zip(("losses", "dx", "dweight"), got, true, strict=True):
        error = (mine.double() - theirs).norm() / theirs.norm().clamp(min=1e-12)
        assert error <= tolerance or (mine.double() - theirs).abs().max() < 1e-6, (name, error.item())


# ---- parity ---------------------------------------------------------------------------------------------------------
SHAPES = [(1, 1, 1), (5, 7, 8), (13, 260, 8), (6, 4099, 5), (2, 32768, 3), (2, 50257, 3)]  # tokens, vocabulary, width


CASES = [(dtype, *shape) for dtype in DTYPES for shape in SHAPES] + [(torch.float16, *SHAPES[2])]


@pytest.mark.parametrize("dtype, tokens, vocab, width", CASES, ids=str)
def test_the_kernel_equals_float64(emulated, dtype, tokens, vocab, width):
    x, weight, labels = inputs(dtype, tokens, vocab, width)
    got = cross_entropy._cuda(x, weight, labels, IGNORED, True)
    close(got, exact(x, weight, labels, dtype), TOLERANCE[dtype])
    assert torch.all(got[0][labels == IGNORED] == 0) and torch.all(got[1][labels == IGNORED] == 0)
    if vocab not in (260, 50257):  # a row that is kept in registers, and one that is read twice
        return
    alone = cross_entropy._cuda(x, weight, labels, IGNORED, False)
    assert torch.equal(alone[0], got[0]) and alone[1].numel() == alone[2].numel() == 0


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_add_up(emulated, monkeypatch, chunk):
    """Whatever the tokens of a chunk, also where the last one is shorter."""
    x, weight, labels = inputs(torch.float32, 14, 37, 8)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", chunk * 40 * 4)
    got = cross_entropy._cuda(x, weight, labels, IGNORED, True)
    close(got, exact(x, weight, labels), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_comes_from_memory_that_was_not_written(dtype):
    """Rows of logits may be longer than the vocabulary, and what lies there could be anything: here it is NaN."""
    x, weight, labels = inputs(dtype, 72, 53, 32)
    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        assert x.new_empty(8).isnan().all()
        got = cross_entropy._cpu(x, weight, labels, IGNORED, True)
    finally:
        torch.use_deterministic_algorithms(False)
    close(got, exact(x, weight, labels, logits_dtype=dtype), TOLERANCE[dtype])


def test_nothing_counts_where_all_is_ignored(emulated):
    x, weight, _ = inputs(torch.bfloat16, 6, 50, 8)
    for result in cross_entropy._cuda(x, weight, torch.full((6,), IGNORED), IGNORED, True):
        assert torch.all(result == 0)


@pytest.mark.parametrize("label", [50, -1, 2**40])
def test_a_label_that_is_no_token_makes_its_loss_nan_and_reads_nothing_else(emulated, label):
    x, weight, labels = inputs(torch.bfloat16, 6, 50, 8)
    labels[2] = label
    losses = cross_entropy._cuda(x, weight, labels, IGNORED, True)[0]
    assert losses.isnan().nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-7, 1e4])
def test_tiny_and_huge_logits_stay_finite(emulated, dtype, size):
    """One column of huge logits, of either sign: the loss is their distance, the gradient one-hot."""
    x, weight = torch.ones(2, 1).to(dtype), torch.zeros(9, 1).to(dtype)
    weight[4] = size
    weight[5] = -size
    labels = torch.tensor([4, 5])
    losses, dx, dweight = cross_entropy._cuda(x, weight, labels, IGNORED, True)
    true = exact(x, weight, labels)
    assert all(torch.isfinite(t).all() for t in (losses, dx, dweight))
    assert torch.allclose(losses.double(), true[0], rtol=1e-5, atol=1e-6)
    assert torch.allclose(dweight.double(), true[2], atol=1e-2)


def test_a_confident_row_keeps_the_digits_of_its_loss(emulated):
    """At logits near a thousand, fp32 counts in steps of 6e-5; the loss here is a tenth of one."""
    x, weight = torch.ones(1, 1), torch.full((3, 1), 1000.0 - 12.5)
    weight[1] = 1000.0
    losses, _, _ = cross_entropy._cuda(x, weight, torch.tensor([1]), IGNORED, False)
    assert losses.item() == pytest.approx(exact(x, weight, torch.tensor([1]))[0].item(), rel=1e-2)


# ---- through torch --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gradient", [True, False])
def test_torch_accepts_the_op(dtype, gradient):
    x, weight, labels = inputs(dtype, 6, 19, 8)
    opcheck(FORWARD, (x, weight, labels, IGNORED, gradient))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_plain_pytorch(compiled):
    """In eager mode, and traced without a break; the incoming gradient scales them."""
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(19, 8, requires_grad=True)
    given = x, weight, torch.tensor([[0, 18, IGNORED], [4, 4, 7]])
    found = results(traced(linear_cross_entropy) if compiled else linear_cross_entropy, given)
    torch.testing.assert_close(found, results(linear_cross_entropy_plain, given), atol=1e-5, rtol=1e-5)


def test_the_gradient_of_fp32_weights_is_not_rounded_to_half_precision():
    """Mixed precision: the matrix is converted for the product, its gradient is summed and handed out in fp32."""
    x, weight = torch.randn(64, 16).bfloat16(), torch.randn(33, 16, requires_grad=True)
    labels = torch.randint(33, (64,))
    linear_cross_entropy(x, weight, labels)[0].backward()
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())
    given, weight.grad = weight.grad, None
    linear_cross_entropy(x, weight, labels, weight.detach().bfloat16())[0].backward()  # with a copy made before
    assert torch.equal(weight.grad, given)


def test_small_gradients_survive_fp16():
    """The mean over many tokens under loss scaling: the gradient is scaled after it was summed, not before."""
    x = torch.randn(512, 8).half().requires_grad_()
    weight = (torch.randn(1000, 8) * 0.02).half().requires_grad_()
    labels = torch.randint(1000, (512,))
    (linear_cross_entropy(x, weight, labels)[0] / 2**24 * 2**16).backward()
    true = exact(x.detach(), weight.detach(), labels)[1] / 2**8
    assert (x.grad.double() - true).norm() / true.norm() < 5e-3


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_all_logits_are_never_there_at_once(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 128 * 512 * 4)
    x, weight, labels = inputs(torch.float32, 4096, 512, 4)
    with Largest() as largest:
        FORWARD(x, weight, labels, IGNORED, True)
    assert largest.elements <= 128 * 512
