"""Output projection and cross-entropy in one op, in chunks of tokens: all logits never exist at once.

The forward pass also computes the gradients. Each chunk's logits are overwritten by their gradient, and two matrix
products turn it into the gradients of the hidden states and of the output matrix. The backward pass only scales them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lm.kernels import runtime
from lm.kernels.linear import add_product
from lm.kernels.runtime import define

CHUNK_BYTES = 2**30  # of logits; fewer, larger chunks read and write the sum of the matrix's gradient less often
Results = tuple[Tensor, Tensor, Tensor]  # losses (N), dx (N, C), dweight (V, C)


def _chunked(overwrite: Callable[..., None], x: Tensor, weight: Tensor, labels: Tensor, gradient: bool) -> Results:
    """The op, with `overwrite(logits, labels, losses)` computing the softmax of a chunk.

    `logits` is a view `(chunk, V)` whose rows are aligned to 16 bytes. With `gradient`, `overwrite` replaces it by
    their gradient.
    """
    x, weight = x.contiguous(), weight.contiguous()
    tokens, vocab = x.shape[0], weight.shape[0]
    stride = _stride(vocab, x.dtype)
    rows = max(1, min(tokens, CHUNK_BYTES // (stride * x.element_size())))
    rows = rows // 128 * 128 if 128 <= rows < tokens else rows  # whole tiles of a matrix product
    logits = x.new_empty((rows, stride))
    logits[:, vocab:] = 0  # oneDNN's bf16 product with AMX reads past a row and multiplies by 0: a NaN would stay
    losses = x.new_empty(tokens, dtype=torch.float32)
    dx = torch.empty_like(x) if gradient else x.new_empty(0)
    dweight = weight.new_zeros(weight.shape if gradient else 0, dtype=torch.float32)
    for start in range(0, tokens, rows):
        part = slice(start, min(start + rows, tokens))
        chunk = logits[: part.stop - start, :vocab]  # (chunk, V)
        torch.mm(x[part], weight.t(), out=chunk)
        overwrite(chunk, labels[part], losses[part])
        if gradient:
            torch.mm(chunk, weight, out=dx[part])  # (chunk, C)
            add_product(dweight, chunk, x[part])
    return losses, dx, dweight


def _stride(vocab: int, dtype: torch.dtype) -> int:
    """Elements from one row of logits to the next: the first multiple of 16 bytes that holds a row."""
    return -(-vocab * dtype.itemsize // 16) * 16 // dtype.itemsize


def _cpu(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, gradient: bool) -> Results:
    def overwrite(logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        counted = labels != ignore_index  # (chunk,)
        target = labels.where(counted, 0)[:, None]  # (chunk, 1)
        log_p = logits.log_softmax(-1, dtype=torch.float32)  # (chunk, V)
        losses.copy_((-log_p.gather(-1, target)[:, 0]).where(counted, 0.0))
        if gradient:
            d = log_p.exp_()  # in place: half the time here is that of the memory
            d.scatter_add_(-1, target, d.new_full(target.shape, -1))
            logits.copy_(d.mul_(counted[:, None]))

    return _chunked(overwrite, x, weight, labels, gradient)


def constants(dtype: torch.dtype, vocab: int, gradient: bool) -> dict[str, Any]:
    """Preprocessor constants of the kernel for rows of `vocab` logits, with or without the gradient."""
    vec, stride = 16 // dtype.itemsize, _stride(vocab, dtype)
    warps = runtime.warps(stride // vec, 4)  # few enough for two rows per multiprocessor
    return dict(T=runtime.TYPES[dtype], VOCAB=vocab, STRIDE=stride, VEC=vec, WARPS=warps, GRADIENT=int(gradient))


def _cuda(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, gradient: bool) -> Results:
    def overwrite(logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        rows, vocab = logits.shape
        chosen = constants(logits.dtype, vocab, gradient)
        run = runtime.program("cross_entropy", logits.device, **chosen)
        run("cross_entropy", rows, chosen["WARPS"] * 32, logits, labels, losses, ignore_index)

    return _chunked(overwrite, x, weight, labels.contiguous(), gradient)


FORWARD = define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor labels, int ignore_index, bool gradient)"
    " -> (Tensor, Tensor, Tensor)",
    cpu=_cpu,
    cuda=_cuda,
    fake=lambda x, weight, labels, ignore_index, gradient: (
        x.new_empty(x.shape[0], dtype=torch.float32),
        x.new_empty(x.shape if gradient else 0),
        weight.new_empty(weight.shape if gradient else 0, dtype=torch.float32),
    ),
)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, copy: Tensor | None, weight_grad: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, Tensor]:
        losses, dx, dweight = FORWARD(x, weight.to(x.dtype) if copy is None else copy, *arguments)
        ctx.save_for_backward(dx, dweight)
        ctx.weight_dtype, ctx.weight_grad = weight.dtype, weight_grad
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, dlosses: Tensor) -> tuple:
        dx, dweight = ctx.saved_tensors
        scale = dtotal.view(1)  # shape (1): a 0-dim tensor would first be rounded to the precision of dx
        dx = (dx * scale).to(dx.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            dweight = None
        elif ctx.weight_grad is not None:
            ctx.weight_grad.addcmul_(dweight, scale)
            dweight = None
        else:
            dweight = (dweight * scale).to(ctx.weight_dtype)
        return dx, dweight, *(None,) * 5


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    copy: Tensor | None = None,
    weight_grad: Tensor | None = None,
    *,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of the logits `x @ weight.T`, without holding all of them at once.

    The gradients are computed with the loss, unscaled, so that fp16 does not underflow; the gradient of `weight` is
    summed in fp32.

    Args:
        x: hidden states, `(..., C)` in bf16, fp16 or fp32.
        weight: the output matrix, `(V, C)`; its gradient has its precision.
        labels: `(...)` int64, each below V or `ignore_index`; on a GPU any other makes the loss NaN.
        copy: a copy of `weight` in the precision of `x`; None: it is made here.
        weight_grad: the weight's `.grad`, `(V, C)` in fp32, if the backward pass is to add the gradient to it itself.

    Returns:
        `total`, a scalar in fp32 and differentiable: the sum of `losses`; and `losses`,
        `(...)` in fp32 and not differentiable: each token's cross-entropy in nats, 0 where it is ignored.
    """
    gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    arguments = labels.flatten(), ignore_index, gradient
    total, losses = _LinearCrossEntropy.apply(x.flatten(0, -2), weight, copy, weight_grad, *arguments)
    return total, losses.view(labels.shape)
