"""What is kept of the tokens that a decoder has read, so that writing one more token reads that one alone.

`lm/generation` makes a cache and hands a `Continuation` of it to `model/decoder` at every step; training has none.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lm.kernels.attention import Past, Reach
from lm.model.config import DecoderConfig
from lm.model.layers import Rotary, rotary_table


class Continuation(NamedTuple):
    """Tokens that go on from what was read before."""

    rotary: Rotary  # of where they stand
    reaches: list[Reach]  # what they see in each layer
    last: Tensor  # (B,) which of a row's tokens is its last


class Cache:
    """Keys and values of every layer, for rows of unequal length.

    The slot of a token is its position, so positions alone say who sees whom. Rows are filled up at their ends: what
    fills a shorter one takes slots that its tokens do not see, and that those which follow overwrite.

    Args:
        config: of the decoder.
        rows: B.
        slots: S, the most tokens that a row is to hold, with what fills it up.
        device: where the decoder is.
        dtype: the precision of the computation.
    """

    def __init__(self, config: DecoderConfig, rows: int, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.windows = config.windows
        self.table = rotary_table(slots, config.head_dim, config.rope_theta, device)
        shape = (len(self.windows), 2, rows, slots, config.num_key_value_heads, config.head_dim)
        self.layers = torch.zeros(shape, dtype=dtype, device=device)  # keys, then values
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # (B,), tokens of each row
        self.used = 0  # slots that may hold something, the same for all rows

    def extend(self, length: int, counts: Tensor) -> Continuation:
        """Where the next tokens stand and what they see. The decoder is then to be called with them, once.

        Args:
            length: T, with what fills up the shorter rows.
            counts: `(B,)`, how many of them are a row's own, at least one.
        """
        self.used += length
        return self.place(length, counts, self.used)

    def place(self, length: int, counts: Tensor, slots: int) -> Continuation:
        """The same for tokens that are counted in `used` already, with more slots in sight than are used.

        What it computes has one shape however many tokens there were, so that it can be compiled or recorded.

        Args:
            length, counts: as for `extend`.
            slots: S, at least `used`.
        """
        device = self.lengths.device
        positions = self.lengths[:, None] + torch.arange(length, device=device)  # (B, T)
        self.lengths += counts
        behind = positions[:, :, None] - torch.arange(slots, device=device)  # (B, T, S), how far back a slot is
        masks = {None: (behind >= 0)[:, None]}  # (B, 1, T, S)
        for window in set(self.windows) - {None}:
            masks[window] = masks[None] & (behind < window)[:, None]
        reaches = [
            Reach(window, None, masks[window], Past(keys, values, positions))
            for window, (keys, values) in zip(self.windows, self.layers, strict=True)
        ]
        return Continuation(Rotary(*self.table, positions.int()), reaches, counts - 1)
