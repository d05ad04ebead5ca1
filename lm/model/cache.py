"""The KV cache: keys and values of the tokens that a decoder has read, so that each new token is computed alone.

`inference/generation` makes a `Cache` and passes a `Continuation` of it to the decoder at every step; training has
none.
"""

import torch
from torch import Tensor

from lm.model.attention import AttentionMask, Past
from lm.model.config import DecoderConfig
from lm.model.decoder import Continuation, Rotary, rotary_table


class Cache:
    """Keys and values of every layer, for rows of unequal length.

    A token's slot is its position, so a mask follows from positions alone. Shorter rows are padded at the end: padding
    takes slots that the row's own tokens do not attend to, and the next tokens overwrite them.

    Args:
        config: of the decoder.
        rows: B.
        slots: S, the most tokens of a row, with its padding.
        device: of the decoder.
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
        """Reserve slots for the next tokens. The decoder must then be called once with the result.

        Args:
            length: T, with the padding of shorter rows.
            counts: `(B,)`, tokens of each row without its padding, at least one.
        """
        self.used += length
        return self.place(length, counts, self.used)

    def place(self, length: int, counts: Tensor, slots: int) -> Continuation:
        """Like `extend`, for tokens that `used` counts already, with a mask over a given number of slots.

        The shapes do not depend on the number of tokens so far, so the step can be compiled or captured as a graph.

        Args:
            length, counts: as for `extend`.
            slots: S, at least `used`.
        """
        device = self.lengths.device
        positions = self.lengths[:, None] + torch.arange(length, device=device)  # (B, T)
        self.lengths += counts
        distance = positions[:, :, None] - torch.arange(slots, device=device)  # (B, T, S), from a slot to a token
        dense = {None: (distance >= 0)[:, None]}  # (B, 1, T, S)
        for window in set(self.windows) - {None}:
            dense[window] = dense[None] & (distance < window)[:, None]
        masks = [
            AttentionMask(window, None, dense[window], Past(keys, values, positions))
            for window, (keys, values) in zip(self.windows, self.layers, strict=True)
        ]
        return Continuation(Rotary(*self.table, positions.int()), masks, counts - 1)
