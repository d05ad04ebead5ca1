"""Which source is sample `i` of a mixture, and which sample of that source: pure functions, like `data/sampler`.

Weights become whole *shares* of a *period*, such as 7, 2 and 1 of 10 samples. Inside a period the sources take turns so
that after every single sample each source has had its part, to less than one sample:

    shares 7 2 1    A A B A A A C A B A | A A B A ...

So the shares are right at every optimizer step, and no counter has to be kept: how often a source came before sample
`i` follows from `i`. Every source goes through its own shuffled epochs, as if it were alone.

A *phase* begins at a sample, with other weights; its periods are counted from there.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from lm.data.config import PhaseConfig, SourceConfig
from lm.data.sampler import Order

MAX_PERIOD = 2**16  # samples; weights without a smaller common unit are rounded to this part of their sum


class Phase(NamedTuple):
    start: int
    shares: tuple[int, ...]  # of each source; 0 leaves it out


def merge_phases(sources: Sequence[SourceConfig], phases: Sequence[PhaseConfig], seq_len: int) -> list[Phase]:
    """The phases of a run; the first has the weights of the sources. Neighbours with the same shares are one phase."""
    changes = [(0, {source.name: source.weight for source in sources})]
    changes += [(phase.tokens, phase.weights) for phase in phases]
    merged: list[Phase] = []
    for tokens, weights in changes:
        shares = whole_shares([weights.get(source.name, 0) for source in sources])
        if not merged or shares != merged[-1].shares:
            merged.append(Phase(-(-tokens // seq_len), shares))
    return merged


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportion of the weights, a decimal taken as it is written: 0.7, 0.3 -> 7, 3.

    Weights that need a sum above `MAX_PERIOD` are rounded to it, and none to 0 that is not.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    shares = [int(weight * unit) for weight in exact]
    divisor = math.gcd(*shares)
    shares = [share // divisor for share in shares]
    if (total := sum(shares)) > MAX_PERIOD:
        shares = [max(1, round(Fraction(share * MAX_PERIOD, total))) if share else 0 for share in shares]
        return whole_shares(shares) if math.gcd(*shares) > 1 else tuple(shares)
    return tuple(shares)


@lru_cache(maxsize=16)
def turns(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each sample of a period, and how often it occurred before in the period: two (period,) arrays.

    Source k's turn `j` lies in the samples from floor(j P / s_k) to ceil((j + 1) P / s_k) of a period P, where the
    turn with the earliest end goes first. All turns fit (Baruah et al., 1996, "Proportionate progress", Algorithmica
    15), so after n samples a source has had between n s_k / P - 1 and n s_k / P + 1 of them, both excluded.
    """
    period = sum(shares)
    sources = np.empty(period, dtype=np.int64)
    earlier = np.empty(period, dtype=np.int64)
    count = [0] * len(shares)  # turns that each source has had
    for sample in range(period):
        # The ends of the turns that have begun; the earliest goes first.
        ends = [
            (-(-(count[source] + 1) * period // share), source)
            for source, share in enumerate(shares)
            if share and count[source] * period // share <= sample
        ]
        _, source = min(ends)
        sources[sample], earlier[sample] = source, count[source]
        count[source] += 1
    return sources, earlier


def source_counts(phases: Sequence[Phase], samples: int) -> np.ndarray:
    """How many of the first `samples` samples are of each source: (sources,) int64."""
    total = np.zeros(len(phases[0].shares), dtype=np.int64)
    ends = [phase.start for phase in phases[1:]] + [samples]
    for phase, end in zip(phases, ends):
        length = max(0, min(end, samples) - phase.start)
        periods, remainder = divmod(length, sum(phase.shares))
        total += periods * np.array(phase.shares)
        total += np.bincount(turns(phase.shares)[0][:remainder], minlength=len(total))
    return total


def continued_mixture(before: Mapping[str, Any], after: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The config values `sources` and `phases` of a run that changes its mixture after `tokens` tokens.

    Before that point they are those of `before`, so that each source continues with its first unused sample. A source
    that `after` does not have stays, with a weight of 0.
    """
    weights = [{source["name"]: source["weight"] for source in data["sources"]} for data in (before, after)]
    phases = after["phases"] or []
    begun = [phase["weights"] for phase in phases if phase["tokens"] <= tokens]
    now = begun[-1] if begun and weights[0] == weights[1] else weights[1]
    by_name = {source["name"]: source for source in after["sources"]}
    sources = [by_name.get(source["name"], source) | {"weight": source["weight"]} for source in before["sources"]]
    sources += [source | {"weight": 0.0} for name, source in by_name.items() if name not in weights[0]]
    past = [phase for phase in before["phases"] or [] if phase["tokens"] < tokens]
    later = [phase for phase in phases if phase["tokens"] > tokens]
    return {"sources": sources, "phases": [*past, {"tokens": tokens, "weights": now}, *later]}


def describe_change(before: dict, now: dict, samples: int) -> tuple[str, str]:
    """What changed of a mixture, `{"sources": names, "phases": [[start, shares], ...]}`, after so many samples.

    Two texts, which may be empty: why the run cannot be resumed, and what is different from here on.
    """
    names, others = list(before["sources"]), list(now["sources"])
    if others[: len(names)] != names:
        return f"its sources were {', '.join(names)}, and are {', '.join(others)}: new ones go to the end", ""

    def padded(phases: list) -> list[Phase]:
        return [Phase(start, (*shares, *[0] * (len(others) - len(shares)))) for start, shares in phases]

    old, new = padded(before["phases"]), padded(now["phases"])
    old_seen, new_seen = ([phase for phase in phases if phase.start < samples] for phases in (old, new))
    if old_seen != new_seen:
        changed = f"the weights of {', '.join(others)} were {_in_words(old_seen)}, and are {_in_words(new_seen)}"
        return f"of {samples:,} samples seen, {changed}: only those of later phases may change", ""
    if old == new:
        return "", ""
    later = [phase for phase in new if phase.start >= samples or phase is new[-1]]
    later = [phase._replace(start=max(phase.start, samples)) for phase in later]
    return "", f"the weights of {', '.join(others)} to come were changed: {_in_words(later)}"


def _in_words(phases: Sequence[Phase]) -> str:
    return "; ".join(f"{':'.join(map(str, phase.shares))} from sample {phase.start:,}" for phase in phases)


class Mixture:
    """The order of the samples of several sources, whose blocks are numbered one source after the other, as `Order`."""

    def __init__(self, orders: Sequence[Order], phases: Sequence[Phase]) -> None:
        self.orders, self.phases = list(orders), list(phases)
        counts = [len(order.windows) for order in orders]
        self.first_block = np.cumsum([0, *counts[:-1]])  # (sources,)
        self.lanes = sum(order.lanes for order in orders)
        self._starts = [phase.start for phase in phases]
        self._before = [source_counts(phases, phase.start) for phase in phases]  # samples of each source

    def epochs(self, samples: int) -> np.ndarray:
        """How often each source's windows were taken in the first `samples` samples: (sources,) fp64."""
        return source_counts(self.phases, samples) / np.array([order.total for order in self.orders])

    def sources(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample, and which sample of that source it is: two (n,) int64 arrays."""
        samples = np.asarray(samples, dtype=np.int64)
        sources, indices = np.empty_like(samples), np.empty_like(samples)
        phases = np.searchsorted(self._starts, samples, side="right") - 1
        for number in np.unique(phases).tolist():
            in_phase, phase = phases == number, self.phases[number]
            periods, places = np.divmod(samples[in_phase] - phase.start, sum(phase.shares))
            turn, earlier = turns(phase.shares)
            sources[in_phase] = turn[places]
            shares = np.array(phase.shares)[turn[places]]
            indices[in_phase] = self._before[number][turn[places]] + periods * shares + earlier[places]
        return sources, indices

    def source_of(self, samples: np.ndarray) -> np.ndarray:
        return self.sources(samples)[0]

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The block of each sample among those of all sources, and its window in that block: two (n,) int64 arrays."""
        sources, indices = self.sources(samples)
        blocks, windows = np.empty_like(sources), np.empty_like(sources)
        for source in np.unique(sources).tolist():
            of_source = sources == source
            blocks[of_source], windows[of_source] = self.orders[source].locate(indices[of_source])
            blocks[of_source] += self.first_block[source]
        return blocks, windows
