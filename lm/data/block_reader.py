"""Reads the tokens of a block (`data/blocks`) from its files, which `data/parquet` decodes.

Blocks of remote shards go through a cache (`data/cache`). `data/loader` reads in several threads.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq

from lm.data.blocks import Block, Part
from lm.data.catalog import FOOTER_THREADS, Shard, explain_damage
from lm.data.parquet import DAMAGE, BadBlock, Tokens
from lm.system.files import is_remote
from lm.system.process import reader_pool

if TYPE_CHECKING:
    from lm.data.cache import BlockCache

MAX_FOOTERS = 256  # parsed footers of files in use: parsing one takes a tenth of the time of reading a block


class BlockReader:
    """Reads blocks of some shards, given by their files. Safe to use from several threads, and picklable."""

    def __init__(self, by_file: Mapping[str, Shard], cache: "BlockCache | None" = None) -> None:
        self.by_file, self.cache = by_file, cache
        self._footers: dict[str, pq.FileMetaData] = {}

    def read(self, block: Block) -> Tokens:
        """Read a block; all ids are inside the vocabulary.

        BadBlock names the file, row group and row of nulls, ids outside the vocabulary, damaged bytes, or tokens that
        differ from the footer or manifest. A file that cannot be opened or read at all raises another RunError.
        """
        parts = block.parts
        if len(parts) > 1 and is_remote(parts[0].file):  # requesting a small file takes as long as reading it
            with reader_pool(FOOTER_THREADS) as pool:
                return _join(list(pool.map(self.read_part, parts)))
        return _join([self.read_part(part) for part in parts])

    def read_part(self, part: Part) -> Tokens:
        if self.cache is None or not is_remote(part.file):
            return self._decode(part)
        return self._read_cached(part, self.cache)

    def _decode(self, part: Part) -> Tokens:
        """Read a part, row group by row group, so that errors name the damaged one."""
        shard, where = self.by_file[part.file], str(part)
        groups: list[Tokens] = []
        try:
            with shard.open(self._footers.get(shard.file)) as (parquet, _):
                if len(self._footers) >= MAX_FOOTERS:
                    self._footers.clear()
                self._footers[shard.file] = parquet.metadata
                for group in part.row_groups:
                    where = f"shard {part.file}, row group {group}"
                    groups.append(shard.column.decode(parquet, group, part.file))
                    if len(groups[-1].ids) != shard.row_groups[group]:
                        raise BadBlock(
                            f"{where} holds {len(groups[-1].ids)} tokens where its footer or manifest says "
                            f"{shard.row_groups[group]}: it was changed or badly written; write it again"
                        )
        except DAMAGE as error:
            raise explain_damage(where, error) from error
        return _join(groups)

    # ---- cache of remote parts: entries are ids, or records of ids and targets --------------------------------------

    def _read_cached(self, part: Part, cache: "BlockCache") -> Tokens:
        shard = self.by_file[part.file]
        column, dtype = shard.column, shard.column.dtype
        if shard.labels:
            dtype = np.dtype([("id", dtype), ("target", bool)])
        if not cache.fits(part.tokens * dtype.itemsize):
            return self._decode(part)
        padding = () if column.pad_id is None else (column.pad_id, column.eos_id)
        content = (shard.file, shard.size, shard.modified, shard.digest, tuple(part.row_groups))
        key = cache.key(*content, column.name, column.dtype.name, *padding)

        def find() -> Tokens | None:
            """The cached tokens, if they fit the vocabulary in use; otherwise None."""
            entry = cache.get(key, dtype)
            if entry is None or entry.shape != (part.tokens,):
                return None
            tokens = Tokens(entry["id"].copy(), entry["target"].copy()) if shard.labels else Tokens(entry)
            return tokens if column.holds(tokens.ids) else None

        if (tokens := find()) is not None:
            return tokens
        with cache.reserve(key, shard.patience):
            if (tokens := find()) is not None:  # another reader has stored it while this one waited
                return tokens
            tokens = self._decode(part)
            entry = tokens.ids
            if shard.labels:
                entry = np.empty(part.tokens, dtype)
                entry["id"] = tokens.ids
                entry["target"] = True if tokens.targets is None else tokens.targets
            cache.put(key, entry)
        return tokens


def _join(parts: Sequence[Tokens]) -> Tokens:
    if len(parts) == 1:
        return parts[0]
    targets = None
    if any(part.targets is not None for part in parts):
        marks = [np.ones(len(part.ids), bool) if part.targets is None else part.targets for part in parts]
        targets = np.concatenate(marks)
    return Tokens(np.concatenate([part.ids for part in parts]), targets)
