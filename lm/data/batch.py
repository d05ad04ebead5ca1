"""What a training step receives: rows of tokens, and a cursor that says which samples they are.

Third stop of a batch (`data/shards -> data/order -> data/batch -> data/datamodule`). Tokens travel as small as they
are stored, through pinned memory and over the bus, and become int64 on the device that needs them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # the label that a loss leaves out


@dataclass(frozen=True)
class Cursor:
    """Where a batch stands in the endless sequence of samples; a few integers, so it rides along with the batch.

    After the last micro-batch of an optimizer step, training goes on at sample `end`: however far the loader has
    read ahead, this is what was trained on.

    Args:
        start: first sample of the optimizer step.
        end: one past the last sample of the optimizer step.
        micro: which micro-batch of that step this is on this rank, from 0.
    """

    start: int
    end: int
    micro: int


class Batch:
    """Rows of T + 1 consecutive tokens: the first T are inputs, the last T their targets.

    No dataclass: Lightning takes those apart, field by field, for every micro-batch.

    Args:
        tokens: (B, T + 1) uint16 or int32, on any device.
        cursor: which samples these are; None outside of training.
        mask: (B, T) bool, False where a target does not count; None when all of them count.
        bad: what is wrong with the shards of rows that could not be read and do not count, an entry a row.
    """

    def __init__(
        self, tokens: Tensor, cursor: Cursor | None = None, mask: Tensor | None = None, bad: tuple[str, ...] = ()
    ) -> None:
        self.tokens = tokens
        self.cursor = cursor
        self.mask = mask
        self.bad = bad

    @property
    def input_ids(self) -> Tensor:
        """(B, T) int64."""
        return _widen(self.tokens[:, :-1])

    @property
    def labels(self) -> Tensor:
        """(B, T) int64: the token after each input, -100 where the mask is False."""
        labels = _widen(self.tokens[:, 1:])
        return labels if self.mask is None else labels.masked_fill_(~self.mask, IGNORED)

    @property
    def num_tokens(self) -> int:
        """How many targets count. Without a mask this is a shape, so no device is waited for."""
        if self.mask is None:
            return self.tokens.shape[0] * (self.tokens.shape[1] - 1)
        return int(self.mask.sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on another device; `non_blocking` from pinned memory overlaps the copy with compute."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory, from which a GPU can copy by itself."""
        return self._each(Tensor.pin_memory)

    def _each(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(function(self.tokens), self.cursor, None if self.mask is None else function(self.mask), self.bad)


def _widen(tokens: Tensor) -> Tensor:
    """int64 copy of uint16 or int32 tokens, on their device."""
    if tokens.dtype == torch.uint16:  # few CUDA kernels know uint16: read the bits as int16 and drop the sign's copies
        return tokens.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    return tokens.to(torch.int64, copy=True)
