"""Blocks and windows: where the samples lie in the tokens of a source. Nothing here reads a file.

A *block* is a run of row groups of one shard, or of several small ones, which `data/block_reader` reads at once. A
*window* is `seq_len + 1` consecutive tokens of a block: `seq_len` inputs, and their targets one token later. The first
token of a window is the last one of the window before, an overlap of 1, so that each token is a target once:

    block       0 1 2 3 4 5 6 7      seq_len 3, overlap 1
    window 0    0 1 2 3
    window 1          3 4 5 6        token 7 is left over: windows do not cross blocks

If documents were packed (`data/packing`), each row of `seq_len + 1` tokens is a window: the overlap is 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

BLOCK_TOKENS = 2**20  # long enough to be read at full speed, short enough for a quick first batch


class Part(NamedTuple):
    """Consecutive row groups of one shard: at most BLOCK_TOKENS, or one larger row group."""

    file: str
    row_groups: range
    tokens: int

    def __str__(self) -> str:
        first, last = self.row_groups[0], self.row_groups[-1]
        return f"shard {self.file}, row group{f's {first} to {last}' if first < last else f' {first}'}"


class Block(NamedTuple):
    """The unit of reading: a part of a shard, or parts of consecutive shards."""

    parts: tuple[Part, ...]
    tokens: int

    def __str__(self) -> str:
        return str(self.parts[0]) + (f", up to {self.parts[-1]}" if len(self.parts) > 1 else "")

    def file_of(self, token: int) -> str:
        """The file that contains a token of the block, given by its index."""
        ends = np.cumsum([part.tokens for part in self.parts])
        return self.parts[int(np.searchsorted(ends, token, side="right"))].file


class BlockIndex:
    """The blocks of a source and the number of windows in each; `overlap` is 1, or 0 for packed rows."""

    def __init__(self, blocks: Sequence[Block], overlap: int = 1) -> None:
        self.blocks, self.overlap = list(blocks), overlap
        self.tokens = sum(block.tokens for block in blocks)

    @property
    def largest(self) -> Block:
        return max(self.blocks, key=lambda block: block.tokens)

    def stride(self, seq_len: int) -> int:
        """Tokens from the start of one window to the start of the next."""
        return seq_len + 1 - self.overlap

    def windows(self, seq_len: int) -> np.ndarray:
        """Number of windows of each block: (blocks,) int64."""
        tokens = np.array([block.tokens for block in self.blocks], dtype=np.int64)
        return np.maximum(0, (tokens - self.overlap) // self.stride(seq_len))

    def left_over(self, seq_len: int) -> int:
        """Number of tokens in no window: fewer than `seq_len` at the end of each block."""
        windows = self.windows(seq_len)
        covered = windows * self.stride(seq_len) + self.overlap * (windows > 0)
        return self.tokens - int(covered.sum())


def cut_parts(file: str, row_groups: Sequence[int]) -> list[Part]:
    """Join the row groups of a file, given by their numbers of tokens, into parts of at most BLOCK_TOKENS."""
    ranges = ranges_within(row_groups, BLOCK_TOKENS)
    return [Part(file, groups, sum(row_groups[groups.start : groups.stop])) for groups in ranges]


def cut_blocks(row_groups: Mapping[str, Sequence[int]], block_tokens: int) -> list[Block]:
    """Join parts of consecutive files into blocks of at most `block_tokens`, and at most BLOCK_TOKENS.

    `row_groups` has the numbers of tokens of each file.
    """
    parts = [part for file, tokens in row_groups.items() for part in cut_parts(file, tokens)]
    blocks = []
    for indices in ranges_within([part.tokens for part in parts], min(block_tokens, BLOCK_TOKENS)):
        joined = tuple(parts[indices.start : indices.stop])
        blocks.append(Block(joined, sum(part.tokens for part in joined)))
    return blocks


def ranges_within(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Ranges of consecutive indices whose sizes sum to at most `limit`; a larger size gets a range of its own."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            yield range(first, index)
            first, total = index, 0
        total += size
    if sizes:
        yield range(first, len(sizes))
