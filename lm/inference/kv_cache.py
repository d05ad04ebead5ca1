"""The key-value cache: a decoder reads new tokens of rows without computing the tokens before them again.

A token's slot in the cache is its position in its row. Two prompts, `A B C` and `K`, and then a new token of each:

                                           slots   0  1  2  3
    prefill(ids [[A, B, C], [K, -, -]],    row 0   A  B  C       lengths [3, 1], used 3
            counts [3, 1])                 row 1   K  -  -       positions [[0, 1, 2], [0, 1, 2]], padding included
    advance(tokens [[D], [L]])             row 0   A  B  C  D    lengths [4, 2], used 4
                                           row 1   K  L  -       positions [[3], [1]]: L overwrites padding

A token attends to the slots up to its own, so never to padding, which comes after the row's own tokens.
`inference/steps` has other ways to do the same: for CUDA graphs, and for models without a cache.
"""

import torch
from torch import Tensor

from lm.model.attention import AttentionMask, Past
from lm.model.decoder import Continuation, Decoder, Rotary, rotary_table


class KVCache:
    """The keys and values of every layer."""

    def __init__(self, decoder: Decoder, rows: int, slots: int) -> None:
        config, weight = decoder.config, next(decoder.parameters())
        device, dtype = weight.device, weight.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        self.windows = decoder.windows  # of each layer
        shape = (config.num_hidden_layers, 2, rows, slots, int(config.num_key_value_heads), int(config.head_dim))
        self.layers = torch.zeros(shape, dtype=dtype, device=device)  # of each layer the keys, then the values

    def masks(self, positions: Tensor, slots: int) -> list[AttentionMask]:
        """What new tokens at `positions` `(B, T)` attend to in each layer: of the first S = `slots`, those up to their
        own, within the layer's window.

        The masks have views of the cache: `attend` writes the new keys and values into it, at `positions`.
        """
        distance = positions[:, :, None] - torch.arange(slots, device=positions.device)  # (B, T, S) from token to slot
        dense: dict[int | None, Tensor] = {None: (distance >= 0)[:, None]}  # (B, 1, T, S)
        for window in filter(None, set(self.windows)):
            dense[window] = dense[None] & (distance < window)[:, None]
        return [
            AttentionMask(window, None, dense[window], Past(keys, values, positions))
            for window, (keys, values) in zip(self.windows, self.layers, strict=True)
        ]


class CachedDecoder:
    """A decoder in evaluation mode, with the cache of rows of unequal length that it continues.

    Args:
        slots: for the longest row, with its padding.
    """

    def __init__(self, decoder: Decoder, rows: int, slots: int) -> None:
        self.decoder, self.cache = decoder, KVCache(decoder, rows, slots)
        config, device = decoder.config, self.cache.layers.device
        self.table = rotary_table(slots, config.head_dim, config.rope_theta, device, config.rope_scaling)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # (B,), tokens of each row
        self.ones = torch.ones_like(self.lengths)
        self.used = 0  # slots in use, padding included; the same number for all rows

    @torch.no_grad()
    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Append tokens `(B, T)` to the rows, of which `counts` `(B,)`, 1 or more, are not padding.

        Returns logits `(B, V)` in fp32 after each row's last token. Every call has a new shape, so compiled blocks run
        uncompiled.
        """
        self.used += ids.shape[1]
        with torch.compiler.set_stance("force_eager"):
            return self.compute(ids, counts, self.used)

    def advance(self, tokens: Tensor) -> Tensor:
        """As `prefill` with one token of each row `(B, 1)`."""
        return self.prefill(tokens, self.ones)

    def compute(self, ids: Tensor, counts: Tensor, slots: int) -> Tensor:
        """`prefill`, where the first `slots` are attended to: at least those in use, with the new ones.

        The shapes do not depend on the number of tokens so far, so this can be captured as a graph.
        """
        positions = self.lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)  # (B, T)
        self.lengths += counts
        masks = self.cache.masks(positions, slots)
        last = counts - 1  # (B,) index in `ids` of each row's last token, which padding may follow
        return self.decoder(ids, continuation=Continuation(Rotary(*self.table, positions.int()), masks, last)).float()
