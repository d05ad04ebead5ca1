"""The shards of a source, opened: its blocks of tokens by number.

Input: the catalog of a source (`data/catalog`); output: blocks of ids. `data/blocks` says which blocks and windows
there are, `data/block_reader` reads them. `data/sampler` is next: it maps samples to windows of blocks.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lm.data.block_reader import BlockReader
from lm.data.blocks import BLOCK_TOKENS, Block, BlockIndex, cut_blocks
from lm.data.catalog import Fingerprint, Shard, common_packing, find_shards
from lm.data.parquet import COLUMN, BadBlock, Column, Tokens
from lm.errors import RequestError
from lm.system.files import PATIENCE
from lm.system.sources import file_identity

if TYPE_CHECKING:
    from lm.data.cache import BlockCache


class Shards:
    """All shards of a source; `Shards.open` makes one. Safe to use from several threads, and picklable."""

    def __init__(
        self,
        shards: Collection[Shard],
        blocks: Sequence[Block],
        column: Column,
        source: str,
        cache: "BlockCache | None" = None,
    ) -> None:
        self.column, self.source = column, source
        self.by_file = {shard.file: shard for shard in shards}
        self.packed = common_packing(shards, source)  # None: rows are documents
        self.index = BlockIndex(blocks, overlap=1 if self.packed is None else 0)
        self.reader = BlockReader(self.by_file, cache)

    @classmethod
    def open(
        cls,
        source: str | Sequence[str],
        column: str = COLUMN,
        vocab_size: int | None = None,
        tokenizer_sha256: str | None = None,
        cache: "BlockCache | None" = None,
        patience: float = PATIENCE,
        pad_id: int | None = None,
        eos_id: int | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> "Shards":
        """Find shards and learn their token counts; tokens are read only if the footers are not enough.

        `source` is folders, globs, files or URLs; a file named twice, even by different paths, counts once. `Column`
        explains `column`, `vocab_size`, `pad_id` and `eos_id`. Without `vocab_size`, the manifests' is used; with a
        `pad_id` all shards are read to count the other ids. `patience` is seconds for all attempts of one remote read.
        Parts of several shards are joined into blocks of at most `block_tokens`.
        """
        sources = [source] if isinstance(source, str) else list(source)
        if not sources:
            raise RequestError("no shards were named; give a folder, a glob, a file or a URL")
        ids = Column(column, vocab_size, pad_id, eos_id)
        catalogs = [find_shards(name, ids, tokenizer_sha256, patience) for name in sources]
        if vocab_size is None and all(size for _, size in catalogs):
            ids = Column(column, max(size for _, size in catalogs), pad_id, eos_id)
        distinct: dict[Hashable, Shard] = {}
        for shard in (shard for shards, _ in catalogs for shard in shards):
            distinct.setdefault(file_identity(shard.file), shard)
        shards = [replace(shard, column=ids) for shard in distinct.values()]
        blocks = cut_blocks({shard.file: shard.row_groups for shard in shards}, block_tokens)
        return cls(shards, blocks, ids, ", ".join(sources), cache)

    @classmethod
    def join(cls, sources: Mapping[str, "Shards"]) -> "Shards":
        """Join the shards of several sources with one vocabulary, by name; their blocks follow source by source."""
        first, *others = sources.values()
        if not others:
            return first
        shards = [shard for source in sources.values() for shard in source.by_file.values()]
        blocks = [block for source in sources.values() for block in source.index.blocks]
        cache = next((source.reader.cache for source in sources.values() if source.reader.cache is not None), None)
        return cls(shards, blocks, first.column, ", ".join(source.source for source in sources.values()), cache)

    def check_seq_len(self, seq_len: int) -> None:
        """RequestError if documents were packed for windows of another length."""
        if self.packed is not None and self.packed.seq_len != seq_len:
            raise RequestError(
                f"{self.source}: documents were packed for samples of {self.packed.seq_len:,} tokens, and data.seq_len "
                f"(model.decoder.max_position_embeddings) is {seq_len:,}: give --data.seq_len {self.packed.seq_len}, "
                f"or run `lm data prepare` again with --seq_len {seq_len} and another --output"
            )

    def check_windows(self, seq_len: int) -> int:
        """The number of windows; RequestError if it is 0."""
        self.check_seq_len(seq_len)
        total = int(self.index.windows(seq_len).sum())
        if not total:
            largest = max((block.tokens for block in self.index.blocks), default=0)
            raise RequestError(
                f"{self.source}: {self.index.tokens} tokens, at most {largest} of them in one block, but a window "
                f"takes {seq_len + 1}, a sample and the next token: give more data, or lower data.seq_len or "
                "model.decoder.max_position_embeddings"
            )
        return total

    def block(self, index: int) -> Block:
        return self.index.blocks[index]

    def file_of(self, index: int, token: int) -> str:
        return self.block(index).file_of(token)

    def read_tokens(self, index: int) -> Tokens:
        """Read a block, as `BlockReader.read` does; of packed rows, with the ids that are targets."""
        tokens = self.reader.read(self.index.blocks[index])
        if self.packed is None or tokens.targets is not None:  # labels say it, too
            return tokens
        return tokens._replace(targets=self.packed.targets(tokens.ids))

    def read(self, index: int) -> np.ndarray:
        return self.read_tokens(index).ids

    def beginning(self) -> np.ndarray:
        """The tokens of the first undamaged block."""
        for index in range(len(self.index.blocks)):
            with suppress(BadBlock):  # the next read will report it
                return self.read(index)
        return np.empty(0, self.column.dtype)

    def fingerprint(self) -> list[Fingerprint]:
        """Of every shard, in order: name below its source, bytes, tokens, digest, and offset in its block."""
        offsets: dict[str, int] = {}
        for block in self.index.blocks:
            offset = 0
            for part in block.parts:
                offsets.setdefault(part.file, offset)
                offset += part.tokens
        return [
            Fingerprint(shard.name, shard.size, sum(shard.row_groups), shard.digest, offsets.get(shard.file, 0))
            for shard in self.by_file.values()
        ]
