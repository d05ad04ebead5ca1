"""How long the calls of an op take on a device, so that neither caches nor the host flatter or spoil the figure.

`bench_kernels` measures with it; `kernel_cases` says what is called.
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lm.kernels import launch, swiglu

COPY_BYTES = 2**30  # of the copy whose rate is the yardstick; less where a sixteenth of the memory is less
TURN_SECONDS = 0.02  # what a contender's turn should last, so that the clock's grain does not count
MOST_CALLS = 40  # of a turn: few enough that all of them fit the device's queue
CACHE_TURNOVER = 4  # times the L2 cache that one round over the inputs should move

Calls = Sequence[Callable[[], Any]]


class Turn(NamedTuple):
    """What a contender's turn found."""

    seconds: float  # a call, on the device
    fed: bool  # the host queued the calls faster than the device worked them off


class Stopwatch:
    """Times calls on one device.

    On a GPU a turn is timed by events, behind copies that keep the device busy until all its calls are queued: what
    the host needs for a call is then not in the figure. On a CPU the clock is read.

    Args:
        device: where the calls work.

    Attributes:
        cache_bytes: the device's L2 cache; None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = COPY_BYTES if device.type == "cuda" else 2**26
        self.cache_bytes: int | None = None
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self.cache_bytes = found.L2_cache_size
            size = min(size, found.total_memory // 16)
        self._source = torch.randint(2**31, (size // 8,), device=device)  # random int64: zeros may run faster
        self._target = torch.empty_like(self._source)
        self._copy = lambda: self._target.copy_(self._source)
        self._copy_seconds = 0.0
        self._copy_seconds = self.median({"copy": [self._copy]}, 7)["copy"].seconds

    @property
    def copy_bytes(self) -> int:
        """Bytes that the copy reads and writes."""
        return 2 * self._source.nbytes

    @property
    def copy_rate(self) -> float:
        """Bytes a second of a large copy on the device, read and written ones counted."""
        return self.copy_bytes / self._copy_seconds

    def sets(self, moved: int) -> int:
        """How many sets of inputs to go round, so that none is still in the cache when it comes again.

        Args:
            moved: bytes that one call reads and writes.
        """
        return 2 if self.cache_bytes is None else max(1, -(-CACHE_TURNOVER * self.cache_bytes // max(moved, 1)))

    def median(self, contenders: dict[str, Calls], rounds: int) -> dict[str, Turn]:
        """Let contenders take turns, and take the median of each one's.

        Args:
            contenders: name -> the calls of a round over its inputs; one that has none is not measured.
            rounds: turns of each.
        """
        counts = {name: self._warm(calls) for name, calls in contenders.items()}
        turns: dict[str, list[Turn]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, calls in contenders.items():
                turns[name].append(self._turn(calls, counts[name]))
        return {
            name: Turn(statistics.median(turn.seconds for turn in taken), all(turn.fed for turn in taken))
            for name, taken in turns.items()
        }

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """The most memory that a call needs beside what is there before it; None on a CPU."""
        if self.device.type != "cuda":
            return None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self._wait()
        return torch.cuda.max_memory_allocated(self.device) - before

    def launch_seconds(self, rounds: int) -> float:
        """What the host needs to start one of our kernels, with next to nothing to do for it. On a GPU only."""
        x, z = (torch.randn(1, width, device=self.device) for width in (16, 8))
        run = launch.program("swiglu", self.device, **swiglu.constants(x.dtype, width=8, vec=1))
        count = 200
        found = []
        for _ in range(rounds + 1):  # the first warms up
            self._wait()
            begun = time.perf_counter()
            for _ in range(count):
                run("swiglu_forward", 1, 256, x, z, 8)
            found.append((time.perf_counter() - begun) / count)
        self._wait()
        return statistics.median(found[1:])

    def _warm(self, calls: Calls) -> int:
        """Call everything, so that nothing is compiled or allocated for the first time later; the calls of a turn."""
        for call in [*calls, *calls]:
            call()
        self._wait()
        begun = time.perf_counter()
        for call in calls:
            call()
        self._wait()
        once = (time.perf_counter() - begun) / len(calls)
        return min(MOST_CALLS, max(1, round(TURN_SECONDS / once)))

    def _turn(self, calls: Calls, count: int) -> Turn:
        if self.device.type == "cuda":
            return self._cuda_turn(calls, count)
        begun = time.perf_counter()
        self._run(calls, count)
        return Turn((time.perf_counter() - begun) / count, True)

    def _cuda_turn(self, calls: Calls, count: int) -> Turn:
        begun = time.perf_counter()
        self._run(calls, count)
        head_start = time.perf_counter() - begun
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            self._wait()
            if self._copy_seconds:
                for _ in range(1 + int(1.5 * head_start / self._copy_seconds)):
                    self._copy()
            start.record()
            self._run(calls, count)
            end.record()
            fed = not start.query()  # the copies still run, so the device has not begun on the calls
            self._wait()
            if fed:
                break
            head_start *= 2
        return Turn(start.elapsed_time(end) / 1e3 / count, fed)

    def _run(self, calls: Calls, count: int) -> None:
        # Results live for one round, so that the next ones are written elsewhere and not into the cache.
        kept: deque[Any] = deque(maxlen=len(calls))
        for call in itertools.islice(itertools.cycle(calls), count):
            kept.append(call())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
