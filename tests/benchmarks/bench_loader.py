"""Tokens a second of the loader, beside nanoGPT's memory map and litdata: `python tests/benchmarks/bench_loader.py`.

A batch is timed up to `data/loader`; nothing of the model is in it. litdata takes part where it is installed
(`pip install litdata`, in an environment of its own).
"""

import gc
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]  # lm, which may not be installed; tests

from shard_files import write_manifest

from lm.data.blocks import BLOCK_TOKENS
from lm.data.datamodule import SOURCES_IN_BUFFER
from lm.data.loader import Batch, Stream
from lm.data.mixture import Mixture, Phase
from lm.data.sampler import BLOCKS_AHEAD, Order, lanes_for
from lm.data.shard_writer import ShardWriter
from lm.data.shards import Shards
from lm.errors import RequestError
from lm.system.arguments import call
from lm.system.units import Count

VOCABULARY = 50257
ROWS, SEQ_LEN = 16, 2048
SHUFFLE_BUFFER = 96 * 2**20  # tokens, at most
MANY_SHARDS = 1000
MIXTURES = (1, 4, 16)  # sources


def loader(tokens: Count = Count(200_000_000), rounds: int = 7) -> None:
    """Measure the loader: tokens a second, time to the first batch, memory; prints one JSON object.

    Random tokens with word-like frequencies are written to a temporary folder, as shards in the layout of
    `lm data prepare`, as the flat file that nanoGPT reads, and as litdata's chunks. Our shuffled stream, a memory map
    as in nanoGPT, litdata's TokensLoader with shuffling, and mixtures of the same shards as 1, 4 and 16 sources with
    the weights 1, 2, 3 ... then give batches of 16 x 2048, in turns, in one process. A ratio is the median of the
    rounds' ratios.

    Args:
        tokens: Tokens to write; two to four bytes of disk each.
        rounds: How often each loader takes its turn.
    """
    torch.set_num_threads(1)  # small copies on more threads are slower, and at the mercy of any neighbour
    with tempfile.TemporaryDirectory(prefix="lm-bench-") as folder:
        _write(Path(folder), int(tokens))
        found = {
            "date": time.strftime("%Y-%m-%d"), "tokens": int(tokens), "rows": ROWS, "seq_len": SEQ_LEN,
            "rounds": rounds, "cpus": os.cpu_count(), "python": platform.python_version(),
            "torch": torch.__version__, "pyarrow": pa.__version__,
            "litdata": metadata.version("litdata") if find_spec("litdata") else None,
            "bytes_per_token": sum(path.stat().st_size for path in Path(folder, "train").iterdir()) / tokens,
        }  # fmt: skip
        found |= _memory(Path(folder))
        found |= _first_batch(Path(folder), rounds)
        found |= _speed(Path(folder), rounds)
    print(json.dumps(found, indent=1))


def _write(folder: Path, tokens: int) -> None:
    """`flat.bin`; the same tokens as `train/` in shards of at most 20 row groups; 1000 shards as `many/train/`."""
    random = np.random.default_rng(0)
    for name in ("train", "many/train"):
        (folder / name).mkdir(parents=True)
    step = max(1, min(20 * BLOCK_TOKENS, -(-tokens // max(MIXTURES))))
    with open(folder / "flat.bin", "wb") as flat:
        for number, first in enumerate(range(0, tokens, step)):
            # rank r with probability about 1 / r, as words have it
            ids = (VOCABULARY ** random.random(min(step, tokens - first), dtype=np.float32)).astype(np.uint16)
            np.minimum(ids, VOCABULARY - 1, out=ids)
            flat.write(ids.tobytes())
            _write_shard(folder / f"train/{number:05d}.parquet", ids)
    _write_shard(folder / "many/train/00000.parquet", ids[:BLOCK_TOKENS])
    for number in range(1, MANY_SHARDS):
        os.link(folder / "many/train/00000.parquet", folder / f"many/train/{number:05d}.parquet")
    for place in (folder, folder / "many"):
        write_manifest(place, vocab_size=VOCABULARY)


def _write_shard(path: Path, ids: np.ndarray) -> None:
    writer = ShardWriter(path, ids.dtype, "")
    writer.write(ids, np.append(np.arange(777, len(ids), 777), len(ids)))  # documents of 777 tokens
    writer.close()


def _buffer(shards: Shards) -> int:
    """Tokens of the shuffle buffer: never all of the data, or later epochs would be read from memory."""
    return max(shards.index.largest.tokens, min(SHUFFLE_BUFFER, shards.index.tokens // 3))


def _stream(shards: Shards) -> Iterator[Batch]:
    return _batches(shards, Order(shards.index.windows(SEQ_LEN), seed=1, lanes=_lanes(shards)))


def _mixture(folder: Path, count: int) -> Iterator[Batch]:
    """The stream of the shards divided into so many sources."""
    files = sorted(map(str, (folder / "train").iterdir()))
    parts = {str(number): Shards.open(files[number::count], vocab_size=VOCABULARY) for number in range(count)}
    shards = Shards.join(parts)
    lanes = _lanes(shards, SOURCES_IN_BUFFER)  # as the DataModule has it
    orders = [Order(part.index.windows(SEQ_LEN), seed, lanes=lanes) for seed, part in enumerate(parts.values())]
    return _batches(shards, Mixture(orders, [Phase(0, tuple(range(1, count + 1)))]))


def _lanes(shards: Shards, parts: int = 1) -> int:
    return lanes_for(shards.index.largest.tokens, _buffer(shards) // parts)


def _batches(shards: Shards, order: Order | Mixture) -> Iterator[Batch]:
    buffer = max(_buffer(shards), (order.lanes + BLOCKS_AHEAD) * shards.index.largest.tokens)
    return iter(Stream(shards, order, seq_len=SEQ_LEN, start=0, global_batch=ROWS, shuffle_buffer=buffer))


def _memory(folder: Path) -> dict:
    """How much anonymous memory one epoch adds."""
    shards = Shards.open(str(folder / "train"))
    gc.collect()
    before, most = _anonymous_memory(), 0
    batches = _stream(shards)
    for number, _ in enumerate(islice(batches, shards.check_windows(SEQ_LEN) // ROWS)):
        if number % 64 == 0:
            most = max(most, _anonymous_memory() - before)
    batches.close()
    return {"memory_growth_bytes": most, "shuffle_buffer_bytes": _buffer(shards) * shards.column.dtype.itemsize}


def _anonymous_memory() -> int:
    """Bytes of this process that no file backs."""
    memory = psutil.Process().memory_info()
    return memory.rss - getattr(memory, "shared", 0)


def _first_batch(folder: Path, rounds: int) -> dict:
    """Seconds from a path to the first batch, with the files in the page cache."""

    def seconds() -> float:
        begun = time.perf_counter()
        batches = _stream(Shards.open(str(folder / "many/train"), vocab_size=VOCABULARY))
        next(batches)
        spent = time.perf_counter() - begun
        batches.close()
        return spent

    manifest = [seconds() for _ in range(rounds)]
    shutil.move(folder / "many/manifest.json", folder / "manifest-of-many.json")
    footers = [seconds() for _ in range(rounds)]
    return {
        "first_batch_shards": MANY_SHARDS, "first_batch_s": statistics.median(manifest),
        "first_batch_footers_s": statistics.median(footers),
    }  # fmt: skip


def _speed(folder: Path, rounds: int) -> dict:
    """Tokens a second of each loader, in turns."""
    batches = _stream(Shards.open(str(folder / "train")))

    def widened() -> None:
        batch = next(batches)
        batch.input_ids, batch.labels  # noqa: B018

    litdata = _litdata(folder)
    mixtures = {count: _mixture(folder, count) for count in MIXTURES}
    loaders = {
        "memory_map": (lambda: _memory_map(folder / "flat.bin"), 300, 0),
        **({"litdata": (lambda: next(litdata), 1000, 128)} if litdata else {}),
        "stream": (lambda: next(batches), 2000, 128),
        "stream_int64": (widened, 2000, 128),
        **{f"mixture_{count}": (partial(next, mixture), 2000, 128) for count, mixture in mixtures.items()},
    }
    rates = {name: [] for name in loaders}
    for _ in range(rounds):
        for name, (take, count, before) in loaders.items():
            rates[name].append(_rate(take, count, before))
    for opened in (batches, *mixtures.values()):
        opened.close()
    ratios = {
        name: statistics.median(ours / theirs for ours, theirs in zip(rates[loader], rates["memory_map"]))
        for name, loader in (("ratio", "stream"), ("ratio_int64", "stream_int64"), ("ratio_litdata", "litdata"))
        if loader in rates
    } | {
        f"ratio_mixture_{count}": statistics.median(
            mixed / one for mixed, one in zip(rates[f"mixture_{count}"], rates["stream"]))
        for count in MIXTURES
    }  # fmt: skip
    return {f"{name}_tokens_per_s": statistics.median(found) for name, found in rates.items()} | ratios


def _rate(take: Callable[[], object], count: int, before: int) -> float:
    """Tokens a second over `count` batches, once `before` batches have used up what was decoded in the pause."""
    time.sleep(0.3)  # until the threads of the stream are done with reading ahead and leave the machine to the others
    for _ in range(before):
        take()
    begun = time.perf_counter()
    for _ in range(count):
        take()
    return count * ROWS * SEQ_LEN / (time.perf_counter() - begun)


def _memory_map(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as nanoGPT makes it: a fresh map each time, random places, int64 inputs and targets."""
    flat = np.memmap(path, dtype=np.uint16, mode="r")
    places = torch.randint(len(flat) - SEQ_LEN, (ROWS,))
    inputs = torch.stack([torch.from_numpy(flat[at : at + SEQ_LEN].astype(np.int64)) for at in places])
    targets = torch.stack([torch.from_numpy(flat[at + 1 : at + 1 + SEQ_LEN].astype(np.int64)) for at in places])
    return inputs, targets


def _litdata(folder: Path) -> Iterator[torch.Tensor] | None:
    """litdata's batches of the same tokens, (16, 2049) uint16, without end; None where litdata is not installed."""
    if not find_spec("litdata"):
        return None
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming import Cache

    flat = np.memmap(folder / "flat.bin", dtype=np.uint16, mode="r")
    cache = Cache(str(folder / "litdata"), chunk_size=20 * BLOCK_TOKENS, item_loader=TokensLoader())
    for index, first in enumerate(range(0, len(flat), BLOCK_TOKENS)):
        cache[index] = torch.from_numpy(np.array(flat[first : first + BLOCK_TOKENS]))
    cache.done()
    cache.merge()

    def batches() -> Iterator[torch.Tensor]:
        while True:
            data = StreamingDataset(
                str(folder / "litdata"), item_loader=TokensLoader(SEQ_LEN + 1), shuffle=True, drop_last=True
            )
            yield from StreamingDataLoader(data, batch_size=ROWS, num_workers=0)

    return batches()


if __name__ == "__main__":
    try:
        call(loader, sys.argv[1:], prog="bench_loader.py")
    except RequestError as error:
        print(f"bench_loader.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
