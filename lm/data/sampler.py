"""The order of samples: which window is sample `i`, as a pure function of the seed, so runs can resume anywhere.

Input: the number of windows of each block (`data/shards`); output: the block and window of each sample, for
`data/loader`. A run stores one number, how many samples it was trained on, and resumes from it:

    >>> order = Order([3, 5, 4], seed=1, lanes=2)  # three blocks with 12 windows
    >>> def step(first, ranks=1):  # the (block, window) pairs that each rank reads in a step of four samples
    ...     parts = [order.locate(range(first + rank, first + 4, ranks)) for rank in range(ranks)]
    ...     return [list(zip(blocks.tolist(), windows.tolist())) for blocks, windows in parts]
    >>> step(0)
    [[(1, 1), (2, 3), (1, 0), (2, 2)]]
    >>> step(4)
    [[(1, 3), (2, 0), (1, 4), (0, 2)]]
    >>> order = Order([3, 5, 4], seed=1, lanes=2)  # another process resumes after 4 samples, on two ranks
    >>> step(4, ranks=2)
    [[(1, 3), (1, 4)], [(2, 0), (0, 2)]]
    >>> step(12) == step(0)  # the second epoch has another order
    False

The samples of an epoch are the windows of all blocks, each once. The blocks are shuffled and laid end to end, this
line is cut into equal *lanes*, and the lanes take turns; the windows inside a block are shuffled too:

    lane 0   | block 7      | block 2   |        samples 0, 4,  8 ...
    lane 1   | 2 | block 9          | 0 |        samples 2, 6, 10 ...
    lane 2   | block 0   | block 4      |        samples 1, 5,  9 ...
    lane 3   | block 5       | block 1  |        samples 3, 7, 11 ...

So neighbours in a batch come from distant blocks, and starting anywhere takes one block per lane. Turns are in
bit-reversed order, so a rank that takes every R-th sample has a range of lanes, and reads only the bytes of these.
"""

from functools import lru_cache

import numpy as np

MAX_LANES = 64
BLOCKS_AHEAD = 4  # blocks in the shuffle buffer beside one per lane: decoded before their first window is needed
GOLDEN = 0x9E3779B97F4A7C15  # of SplitMix64
U64 = (1 << 64) - 1


def lanes_for(largest_block: int, shuffle_buffer: int) -> int:
    """Number of lanes that fit a shuffle buffer, both sizes in tokens: a power of two from 1 to 64."""
    fitting = shuffle_buffer // max(1, largest_block) - BLOCKS_AHEAD
    return 1 << (min(MAX_LANES, max(1, fitting)).bit_length() - 1)


class Order:
    """The order of samples: `locate(i)` tells which window sample `i` is.

    Another number of `lanes`, a power of two, is another order. `shuffle=False`: stored order in every epoch.
    """

    def __init__(self, windows_per_block, seed: int, lanes: int = MAX_LANES, shuffle: bool = True):
        self.windows = np.asarray(windows_per_block, dtype=np.int64)  # (blocks,)
        self.total = int(self.windows.sum())
        self.seed, self.shuffle = seed, shuffle
        self.lanes = lanes if shuffle else 1
        bits = self.lanes.bit_length() - 1
        self._lane = np.array([int(f"{turn:0{bits}b}"[::-1], 2) for turn in range(self.lanes)])  # lane of each turn
        full, longer = divmod(self.total, self.lanes)
        sizes = np.full(self.lanes, full)
        sizes[self._lane[:longer]] += 1  # the last round of turns is incomplete
        self._lane_starts = np.cumsum(sizes) - sizes

    def locate(self, samples) -> tuple[np.ndarray, np.ndarray]:
        """The block of each sample, and its window in the block: two (n,) int64 arrays.

        Sample `epoch * total + j` is the j-th sample of epoch `epoch`.
        """
        epochs, places = np.divmod(np.asarray(samples, dtype=np.int64), self.total)
        blocks, windows = np.empty_like(places), np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            blocks[in_epoch], windows[in_epoch] = self._locate_in_epoch(epoch, places[in_epoch])
        return blocks, windows

    def source_of(self, samples) -> np.ndarray | None:
        """The source of each sample, (n,) int64, where there are several (`data/mixture`); None: there is one."""
        return None

    def _locate_in_epoch(self, epoch: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sequence = np.arange(len(self.windows))  # the blocks in the order of this epoch
        if self.shuffle:
            sequence = permutation(len(self.windows), self.seed, epoch, 0).astype(np.int64)
        starts = np.cumsum(self.windows[sequence]) - self.windows[sequence]  # of each block's first window, on the line
        position = self._lane_starts[self._lane[places % self.lanes]] + places // self.lanes
        slot = np.searchsorted(starts, position, side="right") - 1  # the last of equal starts: empty blocks are skipped
        blocks, windows = sequence[slot], position - starts[slot]
        if self.shuffle:
            by_block = np.argsort(blocks, kind="stable")
            for group in np.split(by_block, np.flatnonzero(np.diff(blocks[by_block])) + 1):
                if group.size:
                    block = int(blocks[group[0]])
                    windows[group] = permutation(int(self.windows[block]), self.seed, epoch, block + 1)[windows[group]]
        return blocks, windows


# Training runs are resumed under other versions of numpy, and numpy guarantees only the streams of its bit generators,
# not those of Generator.permutation (NEP 19). So the keys come from SplitMix64, and a stable sort makes a permutation.


def random_keys(size: int, state: int) -> np.ndarray:
    """The first `size` outputs of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) from a seed: (size,) uint64."""
    bits = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(state & U64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@lru_cache(maxsize=512)
def permutation(size: int, *key: int) -> np.ndarray:
    """A permutation of range(size) that depends only on `size` and `key`: (size,) uint32, read-only."""
    state = 0
    for part in key:
        state = int(random_keys(1, state ^ (part & U64))[0])
    shuffled = np.argsort(random_keys(size, state), kind="stable").astype(np.uint32)
    shuffled.setflags(write=False)
    return shuffled
