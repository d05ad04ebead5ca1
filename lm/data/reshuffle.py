"""Documents in another order in each epoch: a text that is repeated is never cut into the same samples.

Input: the shards of a run and the order of their windows (`data/shards`, `data/sampler`); output: the same two, in
which each epoch has blocks of its own, numbered on from those of the epoch before. A block of an epoch after the first
is the stored one with its documents in an order that depends on the seed, the epoch and the block alone, so that a
sample is still a pure function of the seed and its number.
"""

import numpy as np

from lm.data.blocks import Block
from lm.data.parquet import Tokens
from lm.data.sampler import Order, permutation
from lm.data.shards import Shards

DOCUMENTS = 0x646F6373  # makes the keys of these permutations others than those of `Order`


class ReshuffledOrder(Order):
    """As `Order`, for one source of `blocks` blocks in all."""

    def __init__(self, windows_per_block, seed: int, lanes: int, blocks: int) -> None:
        super().__init__(windows_per_block, seed, lanes)
        self._blocks_of_all = blocks

    def locate(self, samples) -> tuple[np.ndarray, np.ndarray]:
        blocks, windows = super().locate(samples)
        return blocks + np.asarray(samples, dtype=np.int64) // self.total * self._blocks_of_all, windows


class ReshuffledShards(Shards):
    """As the shards it is made of, with blocks of every epoch."""

    def __init__(self, shards: Shards, seed: int, eos_id: int) -> None:
        vars(self).update(vars(shards))
        self._seed, self._eos_id = seed, eos_id

    def block(self, index: int) -> Block:
        return super().block(index % len(self.index.blocks))

    def read_tokens(self, index: int) -> Tokens:
        epoch, block = divmod(int(index), len(self.index.blocks))
        tokens = super().read_tokens(block)
        if not epoch:
            return tokens
        places = self._places(tokens.ids, epoch, block)
        return Tokens(tokens.ids[places], None if tokens.targets is None else tokens.targets[places])

    def file_of(self, index: int, token: int) -> str:
        epoch, block = divmod(int(index), len(self.index.blocks))
        if epoch:
            token = int(self._places(super().read_tokens(block).ids, epoch, block)[token])
        return super().file_of(block, token)

    def _places(self, ids: np.ndarray, epoch: int, block: int) -> np.ndarray:
        """Where each token of a block in an epoch is stored: (n,) int64.

        Documents end with their end-of-text token; what follows the last one of the block stays at its end.
        """
        ends = np.flatnonzero(ids == self._eos_id) + 1  # (documents,)
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        shuffled = permutation(len(ends), self._seed, epoch, block, DOCUMENTS)
        lengths = (ends - starts)[shuffled]
        places = np.arange(len(ids))
        documents = np.repeat(starts[shuffled] - (np.cumsum(lengths) - lengths), lengths)
        places[: len(documents)] += documents
        return places
