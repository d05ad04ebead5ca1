"""The blocks' matrices in low precision: FP8 products, and weight copies that are made once an optimizer step.

`model/decoder.Linear` casts its weight for every product. Here the same modules, with the same parameters, get a
forward pass by `kernels/linear`, for `trainer.precision fp8-...` (`training/precision`) and for `WeightCopies`.
"""

import torch
from torch import Tensor, nn

from lm.kernels.fp8.quantization import Float8, Scaling, quantize
from lm.kernels.linear import Weight, linear
from lm.kernels.torch_private import foreach_copy_, has_gradient_hooks
from lm.model.decoder import Decoder, Linear


class LowPrecisionLinear(Linear):
    """A `Linear` whose product may be in FP8 or take a copy of the weight."""

    scaling: Scaling | None = None  # of FP8 products; None: no FP8
    copy: Tensor | Float8 | None = None  # of the weight, as the product takes it, while `WeightCopies` keeps one
    adds: bool = False  # while the backward pass adds the weight's gradient to `.grad` by itself

    @property
    def operand(self) -> Weight:
        """The weight as the ops in `kernels` take it."""
        return Weight(self.weight, self.scaling, self.copy, gradient_sum(self.weight) if self.adds else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scaling is None and self.copy is None:
            return super().forward(x)
        out = linear(x, self.operand)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def gradient_sum(weight: Tensor) -> Tensor | None:
    """The `.grad` to which a backward pass may add a weight's gradient by itself; None: autograd must get it."""
    return None if has_gradient_hooks(weight) else weight.grad


def use_low_precision(decoder: nn.Module) -> None:
    """Make every `Linear` of a decoder a `LowPrecisionLinear`, in place: a module changes its class, as with torch's
    `fully_shard`, and keeps its parameters, hooks and shards."""
    for part in decoder.modules():
        if type(part) is Linear:  # a subclass has a product of its own
            part.__class__ = LowPrecisionLinear


class WeightCopies:
    """Copies of a fused decoder's matrices as the products take them, in half precision or in FP8: made once an
    optimizer step, not once a micro-batch.

    `with copies:` brings them up to date and lets the forward passes inside use them. Gradients are those of the
    weights themselves. `dtype` is that of the activations.

    With `adds`, a product adds a weight's gradient to the `.grad` of earlier micro-batches by itself. That is for eager
    mode on one device: neither a traced backward pass nor DDP would see it.
    """

    def __init__(self, decoder: Decoder, dtype: torch.dtype, adds: bool = False) -> None:
        self.decoder, self.adds = decoder, adds
        matrices = [part for part in decoder.modules() if isinstance(part, LowPrecisionLinear)]
        self.float8 = [(matrix, _float8(matrix)) for matrix in matrices if matrix.scaling is not None]
        self.half = [matrix for matrix in matrices if matrix.scaling is None]
        self.weights = [matrix.weight.detach() for matrix in self.half] + [decoder.output_weight.detach()]
        self.copies = [torch.empty_like(weight, dtype=dtype) for weight in self.weights]

    def __enter__(self) -> None:
        foreach_copy_(self.copies, self.weights)
        *copies, self.decoder.output_copy = self.copies
        self.decoder.output_adds = self.adds
        for matrix, copy in zip(self.half, copies, strict=True):
            matrix.copy, matrix.adds = copy, self.adds
        for matrix, copy in self.float8:
            for old, new in zip(copy, _float8(matrix), strict=True):
                foreach_copy_(old, new)
            matrix.copy = copy

    def __exit__(self, *exception: object) -> None:
        for matrix in [*self.half, *(matrix for matrix, _ in self.float8)]:
            matrix.copy, matrix.adds = None, False
        self.decoder.output_copy, self.decoder.output_adds = None, False


def _float8(matrix: LowPrecisionLinear) -> Float8:
    return quantize(matrix.weight.detach(), matrix.scaling, transpose=True)
