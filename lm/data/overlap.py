"""How much of the validation text is in the training text too, where the model may learn it by heart.

`lm data prepare` compares whole documents. Short spans of tokens are compared too, in what it has made, in other
shards, which may have cut the documents anywhere, and in the sources of a mixture, which may have each other's texts.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from lm.data.blocks import cut_parts
from lm.data.parquet import BadBlock
from lm.data.shards import Shards
from lm.errors import RequestError
from lm.system.files import is_remote
from lm.system.sources import file_identity

SPAN = 32  # tokens that two texts hardly share by chance; of bytes or characters
LONG_SPAN, SMALL_VOCABULARY = 128, 1024
FEW_IDS = 5  # different ones in a span: padding, or a line of a table
SPANS = 512  # of validation, that are looked for
VALIDATION_BLOCKS, SEARCHED_BLOCKS = 4, 64  # that are read, spread evenly: up to 67M tokens of training
WARNING, ERROR = 0.01, 0.5  # fractions; any corpus repeats licences, headers and quotations


def common_file(train: Shards, val: Shards) -> tuple[str, str] | None:
    """The paths in each split of a file that both contain: the same file, or a copy of it; None if there is none."""
    by_identity = {file_identity(shard.file): shard for shard in train.by_file.values()}
    by_content = defaultdict(list)
    for shard in train.by_file.values():
        by_content[shard.digest, shard.size].append(shard)
    for shard in val.by_file.values():
        if not sum(shard.row_groups):
            continue
        if same := by_identity.get(file_identity(shard.file)):
            return same.file, shard.file
        same_shape = by_content[shard.digest, shard.size] if shard.digest is not None else []
        for same in same_shape:  # the footers of files of others have only the bounds of the ids
            first, other = (cut_parts(each.file, each.row_groups)[0] for each in (same, shard))
            if np.array_equal(train.reader.read_part(first).ids, val.reader.read_part(other).ids):
                return same.file, shard.file
    return None


def shared_spans(train: Shards, val: Shards, eos_id: int) -> tuple[int, int]:
    """Of a sample of spans of validation, how many are in the training data; and how many were looked for.

    In an object store nothing is looked for, since that reads 100 MB.
    """
    if any(is_remote(file) for shards in (train, val) for file in shards.by_file):
        return 0, 0
    length = SPAN if train.column.vocab_size is None or train.column.vocab_size >= SMALL_VOCABULARY else LONG_SPAN
    hashes = []
    count = SPANS // min(VALIDATION_BLOCKS, len(val.index.blocks))
    for ids in _read(val, VALIDATION_BLOCKS):
        starts = np.linspace(0, max(0, len(ids) - length), count, dtype=np.int64)
        spans = [ids[start : start + length] for start in starts]
        spans = [span for span in spans if eos_id not in span and len(np.unique(span)) > FEW_IDS]
        hashes += [_hashes(span, length) for span in spans]
    targets = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]))  # (n,)
    likely = np.zeros(2**16, bool)  # by the upper bits of a hash
    likely[targets >> np.uint64(48)] = True
    matches = np.zeros(len(targets), bool)
    for ids in _read(train, SEARCHED_BLOCKS) if len(targets) else ():
        candidates = _hashes(ids, length)
        matches |= np.isin(targets, candidates[likely[candidates >> np.uint64(48)]])
    return int(matches.sum()), len(targets)


def _read(shards: Shards, limit: int) -> Iterator[np.ndarray]:
    """The ids (n,) of at most `limit` blocks, evenly spread; damaged ones are left to the next reader."""
    for index in np.unique(np.linspace(0, len(shards.index.blocks) - 1, limit, dtype=np.int64)).tolist():
        with suppress(BadBlock):
            yield shards.read(index)


def _hashes(ids: np.ndarray, length: int) -> np.ndarray:
    """(n - length + 1,) of each span: a polynomial of its ids modulo 2^64; `length` is a power of two."""
    hashes, done = ids.astype(np.uint64) + np.uint64(1), 1
    while done < length:
        hashes = hashes[:-done] * np.uint64(pow(0x9E3779B97F4A7C15, done, 2**64)) + hashes[done:]
        done *= 2
    return hashes


def describe_shared(train: Shards, val: Shards, eos_id: int) -> str | None:
    """How much of validation is in the training data, in words; None where it is too little to matter.

    Raises RequestError where it is so much that the validation loss would mean nothing.
    """
    count, total = shared_spans(train, val, eos_id)
    fraction = count / max(1, total)
    if fraction < WARNING:
        return None
    problem = f"{count:,} of {total:,} passages of the validation data, {fraction:.1%}, are in the training data too"
    if fraction >= ERROR:
        raise RequestError(f"{problem}: take them out of one of the two, or hold out other text")
    return f"{problem}, so its loss is too low"
