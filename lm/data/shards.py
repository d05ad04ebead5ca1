"""Shards as blocks of tokens: the number of windows of each block, and the tokens of one block.

Input: the catalog of a source (`data/catalog`); output: blocks of ids, which `data/parquet` decodes. `data/sampler` is
next: it maps samples to windows of blocks.

A *block* is a run of row groups of one shard, or of several small ones, read at once; a *window* is `seq_len + 1`
consecutive tokens of a block, at a stride of `seq_len`, so that each token is a target once. Windows do not cross
blocks: fewer than `seq_len` tokens at the end of each block are in no window (`Shards.left_over`). If documents were
packed (`data/packing`), each row is a window, and its padding is not a target.
"""

import logging
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from lm.data.catalog import FOOTER_THREADS, Fingerprint, Shard, explain_damage, find_shards
from lm.data.parquet import COLUMN, DAMAGE, IGNORED, BadBlock, Column, PackedRows, Tokens, runs_within
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError
from lm.system.files import PATIENCE, is_remote
from lm.system.process import reader_pool
from lm.system.sources import file_identity
from lm.system.units import plural

if TYPE_CHECKING:
    from lm.data.cache import BlockCache

log = logging.getLogger(__name__)

BLOCK_TOKENS = 2**20  # long enough to be read at full speed, short enough for a quick first batch
FOOTERS_KEPT = 256  # parsed footers of files in use: parsing one takes a tenth of the time of reading a block
DECODED_TOKENS = 2**18  # decoded to measure the bytes of text that tokens stand for


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
        self.column, self.source, self.cache, self.blocks = column, source, cache, list(blocks)
        self.tokens = sum(block.tokens for block in blocks)
        self.packed = _packed(shards, source)
        self.labels = self.packed is not None or any(shard.labels for shard in shards)  # False: all are targets
        self.by_file = {shard.file: shard for shard in shards}
        self._footers: dict[str, pq.FileMetaData] = {}

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
        block_tokens: int | None = None,
    ) -> "Shards":
        """Find shards and learn their token counts; tokens are read only if the footers are not enough.

        `source` is folders, globs, files or URLs; a file named twice, even by different paths, counts once. `Column`
        explains `column`, `vocab_size`, `pad_id` and `eos_id`. Without `vocab_size`, the manifests' is used; with a
        `pad_id` all shards are read to count the other ids. `patience` is seconds for all attempts of one remote read.
        Parts of several shards are joined into blocks of at most `block_tokens` (default: BLOCK_TOKENS).
        """
        sources = [source] if isinstance(source, str) else list(source)
        if not sources:
            raise RequestError("no shards were named; give a folder, a glob, a file or a URL")
        reading = Column(column, vocab_size, pad_id, eos_id)
        found = [find_shards(one, reading, tokenizer_sha256, patience) for one in sources]
        if vocab_size is None and all(size for _, size in found):
            reading = Column(column, max(size for _, size in found), pad_id, eos_id)
        once: dict[Hashable, Shard] = {}
        for shard in (shard for shards, _ in found for shard in shards):
            first = once.setdefault(file_identity(shard.file), shard)
            if first is not shard:
                log.info("shard %s is %s again, and counts once", shard.file, first.file)
        shards = [replace(shard, column=reading) for shard in once.values()]
        blocks = list(_blocks(shards, min(block_tokens or BLOCK_TOKENS, BLOCK_TOKENS)))
        return cls(shards, blocks, reading, ", ".join(sources), cache)

    @classmethod
    def join(cls, sources: Mapping[str, "Shards"]) -> "Shards":
        """Join the shards of several sources with one vocabulary, by name; their blocks follow source by source."""
        first, *others = sources.values()
        if not others:
            return first
        holders: dict[Hashable, str] = {}  # file, whatever its path -> the source that holds it
        for name, file in ((name, file) for name, shards in sources.items() for file in shards.by_file):
            other = holders.setdefault(file_identity(file), name)
            if other != name:
                raise RequestError(
                    f"data.sources {other} and {name} both hold {file}: name it in one of them; a larger weight "
                    "repeats it more often"
                )
        shards = [shard for one in sources.values() for shard in one.by_file.values()]
        blocks = [block for one in sources.values() for block in one.blocks]
        cache = next((one.cache for one in sources.values() if one.cache is not None), None)
        return cls(shards, blocks, first.column, ", ".join(one.source for one in sources.values()), cache)

    def windows(self, seq_len: int) -> np.ndarray:
        """Number of windows of each block: (blocks,) int64, `max(0, (tokens - 1) // seq_len)`, or its packed rows."""
        tokens = np.array([block.tokens for block in self.blocks], dtype=np.int64)
        stride = self.stride(seq_len)
        return np.maximum(0, (tokens - (stride == seq_len)) // stride)

    def stride(self, seq_len: int) -> int:
        """Tokens from one window to the next; RequestError if documents were packed for windows of another length."""
        if self.packed is None:
            return seq_len
        if self.packed.seq_len != seq_len:
            raise RequestError(
                f"{self.source}: documents were packed for samples of {self.packed.seq_len:,} tokens, and data.seq_len "
                f"(model.decoder.max_position_embeddings) is {seq_len:,}: give --data.seq_len {self.packed.seq_len}, "
                f"or run `lm data prepare` again with --seq_len {seq_len} and another --output"
            )
        return seq_len + 1

    def block(self, index: int) -> Block:
        return self.blocks[index]

    def read_tokens(self, index: int) -> Tokens:
        """Read one block of `blocks`, all ids inside the vocabulary.

        BadBlock names the file, row group and row of nulls, ids outside the vocabulary, damaged bytes, or tokens that
        differ from the footer or manifest. A file that cannot be opened or read at all raises another RunError.
        """
        parts = self.blocks[index].parts
        if len(parts) > 1 and is_remote(parts[0].file):  # requesting a small file takes as long as reading it
            with reader_pool(FOOTER_THREADS) as pool:
                tokens = _join(list(pool.map(self.read_part, parts)))
        else:
            tokens = _join([self.read_part(part) for part in parts])
        if self.packed is None:
            return tokens
        return tokens._replace(targets=self.packed.targets(tokens.ids))

    def read(self, index: int) -> np.ndarray:
        """The ids of `read_tokens`."""
        return self.read_tokens(index).ids

    def read_part(self, part: Part) -> Tokens:
        """Read a part of a block; a remote file goes through the cache."""
        if not is_remote(part.file):
            return self._decode(part)
        shard = self.by_file[part.file]
        column = shard.column
        kept = np.dtype([("id", column.dtype), ("target", bool)]) if shard.labels else column.dtype
        if self.cache is None or not self.cache.fits(part.tokens * kept.itemsize):
            return self._fetch(part)
        padding = () if column.pad_id is None else (column.pad_id, column.eos_id)
        content = (shard.file, shard.size, shard.modified, shard.digest, tuple(part.row_groups))
        key = self.cache.key(*content, column.name, column.dtype.name, *padding)
        tokens = self._kept(part, key, kept)
        if tokens is not None:
            return tokens
        with self.cache.reserve(key, shard.patience):
            tokens = self._kept(part, key, kept)  # another reader may have stored it while this one waited
            if tokens is None:
                tokens = self._fetch(part)
                entry = tokens.ids
                if shard.labels:
                    entry = np.empty(part.tokens, kept)
                    entry["id"], entry["target"] = tokens.ids, True if tokens.targets is None else tokens.targets
                self.cache.put(key, entry)
        return tokens

    def _kept(self, part: Part, key: str, kept: np.dtype) -> Tokens | None:
        """The cached tokens of a part, if they fit the vocabulary in use; otherwise None."""
        entry = self.cache.get(key, kept)
        if entry is None or entry.shape != (part.tokens,):
            return None
        tokens = Tokens(entry["id"].copy(), entry["target"].copy()) if kept.names else Tokens(entry)
        return tokens if self.by_file[part.file].column.holds(tokens.ids) else None

    def _fetch(self, part: Part) -> Tokens:
        try:
            return self._decode(part)
        except BadBlock:  # it may have been damaged in transit: fetch it once more
            self._footers.pop(part.file, None)
            return self._decode(part)

    def _decode(self, part: Part) -> Tokens:
        """Read a part, row group by row group, so that errors name the damaged one."""
        shard, where, groups = self.by_file[part.file], str(part), []
        try:
            with shard.open(self._footers.get(shard.file)) as (parquet, _):
                if len(self._footers) >= FOOTERS_KEPT:
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

    def pieces(self, stop: int | None = None) -> Iterator[np.ndarray]:
        """Yield the first `stop` tokens (default: all) of all shards end to end, in pieces (n,).

        Packed rows are without the first token of each, which is only context, and without padding.
        """
        left = self.tokens if stop is None else stop
        for index in range(len(self.blocks)):
            if left <= 0:
                return
            ids = self.read(index)
            if self.packed is not None:
                ids = ids[self.packed.targets(ids)]
            yield ids[:left]
            left -= len(ids)

    def beginning(self) -> np.ndarray:
        """The tokens of the first undamaged block."""
        for index in range(len(self.blocks)):
            with suppress(BadBlock):  # the next read will report it
                return self.read(index)
        return np.empty(0, self.column.dtype)

    def file_of(self, index: int, token: int) -> str:
        """The file that contains a token of a block."""
        return self.block(index).file_of(token)

    @property
    def largest(self) -> Block:
        return max(self.blocks, key=lambda block: block.tokens)

    def left_over(self, seq_len: int) -> int:
        """Number of tokens in no window: fewer than `seq_len` at the end of each block."""
        windows, stride = self.windows(seq_len), self.stride(seq_len)
        return self.tokens - int((windows * stride + ((windows > 0) & (stride == seq_len))).sum())

    @property
    def document_tokens(self) -> int:
        """`tokens`; for packed rows, without the first token of each row and without padding, as far as it is known."""
        if self.packed is None:
            return self.tokens
        filling = sum(shard.padding or 0 for shard in self.by_file.values())
        return self.tokens - self.tokens // (self.packed.seq_len + 1) - filling

    @property
    def padding_fraction(self) -> float | None:
        """Padding as a fraction of the targets of packed rows; None if not known."""
        counts = [shard.padding for shard in self.by_file.values() if shard.padding is not None]
        if self.packed is None or len(counts) < len(self.by_file) or not self.tokens:
            return None
        return sum(counts) / (self.tokens / (self.packed.seq_len + 1) * self.packed.seq_len)

    def token_bytes(self, tokenizer: Tokenizer) -> np.ndarray:
        """Average bytes of text that each token stands for in these shards: (V,) float64.

        `Tokenizer.token_bytes` times a factor, so that the sum over all tokens equals the bytes of the text for shards
        made by `lm data prepare`, and the bytes of decoded text, measured on some tokens, for others.
        """
        sizes = tokenizer.token_bytes().astype(np.float64)
        weights = [sum(shard.row_groups) for shard in self.by_file.values()]
        ratios = [shard.text_ratio for shard in self.by_file.values() if shard.text_ratio is not None]
        if len(ratios) == len(weights) and any(weights):
            return sizes * np.average(ratios, weights=weights)
        if tokenizer.byte_level:
            return sizes
        ids = self.beginning()[:DECODED_TOKENS]
        return sizes * (tokenizer.text_bytes(ids) / max(1, sizes[ids].sum()))

    def fingerprint(self) -> list[Fingerprint]:
        """Of every shard, in order: name below its source, bytes, tokens, digest, and offset in its block."""
        places: dict[str, int] = {}
        for block in self.blocks:
            before = 0
            for part in block.parts:
                places.setdefault(part.file, before)
                before += part.tokens
        return [
            Fingerprint(shard.name, shard.size, sum(shard.row_groups), shard.digest, places.get(shard.file, 0))
            for shard in self.by_file.values()
        ]

    def require_buffer(self, shuffle_buffer: int) -> None:
        if self.largest.tokens > shuffle_buffer:
            raise RequestError(
                f"{self.largest}: {self.largest.tokens} tokens in one piece, more than data.shuffle_buffer "
                f"({shuffle_buffer}); raise data.shuffle_buffer, or write the shard again with smaller row groups "
                "(`lm data prepare`)"
            )

    def require_windows(self, seq_len: int, limit: int | None = None) -> int:
        """The number of windows; RequestError if it is 0, or if the first `limit` windows (or all) have no target."""
        if not self.tokens:
            raise RequestError(f"{self.source} holds no token: it has no rows, or all of them are empty or padding "
                               "(`attention_mask` 0, data.pad_id)")  # fmt: skip
        windows = self.windows(seq_len)
        if not windows.any():
            raise RequestError(
                f"{self.source}: {self.tokens} tokens, at most {self.largest.tokens} of them in one block, but a "
                f"window takes {seq_len + 1} (seq_len + 1): give more data or lower data.seq_len"
            )
        total = int(windows.sum())
        given = any(shard.labels for shard in self.by_file.values())  # otherwise each window has targets
        if given and not self._has_target(windows, self.stride(seq_len), limit or total):
            raise RequestError(
                f"{self.source}: each label of the first {plural(min(limit or total, total), 'window')} is {IGNORED}, "
                "so there is no loss; take more tokens, name other files, or leave `labels` out"
            )
        return total

    def _has_target(self, windows: np.ndarray, stride: int, limit: int) -> bool:
        """Whether one of the first `limit` windows has a target, ignoring blocks that cannot be read."""
        for index, count in enumerate(windows.tolist()):
            if limit <= 0:
                return False
            with suppress(BadBlock):  # the next read will report it
                targets = self.read_tokens(index).targets
                if targets is None or targets[1 : min(limit, count) * stride + 1].any():
                    return True
            limit -= count
        return False


def _packed(shards: Collection[Shard], source: str) -> PackedRows | None:
    """How the rows of shards are packed, the same for all shards; None if the rows are documents."""
    first, *others = shards
    for other in others:
        if other.packed != first.packed:
            raise RequestError(f"{source}: documents were packed differently in {first.file} and {other.file}: prepare "
                               "them with the same --packing and --seq_len")  # fmt: skip
    if first.packed is not None and first.column.pad_id is not None:
        raise RequestError(f"{source}: data.pad_id is for rows that another program padded; leave it out: the "
                           "padding of documents that `lm data prepare` packed is known")  # fmt: skip
    return first.packed


def _blocks(shards: Sequence[Shard], block_tokens: int) -> Iterator[Block]:
    """Join parts of consecutive shards into blocks of at most `block_tokens`."""
    parts = [part for shard in shards for part in parts_of(shard)]
    for run in runs_within([part.tokens for part in parts], block_tokens):
        joined = tuple(parts[run.start : run.stop])
        yield Block(joined, sum(part.tokens for part in joined))


def parts_of(shard: Shard) -> Iterator[Part]:
    """Join consecutive row groups into parts of at most BLOCK_TOKENS."""
    for groups in runs_within(shard.row_groups, BLOCK_TOKENS):
        yield Part(shard.file, groups, sum(shard.row_groups[groups.start : groups.stop]))


def _join(parts: Sequence[Tokens]) -> Tokens:
    if len(parts) == 1:
        return parts[0]
    targets = None
    if any(part.targets is not None for part in parts):
        targets = np.concatenate([np.ones(len(part.ids), bool) if part.targets is None else part.targets
                                  for part in parts])  # fmt: skip
    return Tokens(np.concatenate([part.ids for part in parts]), targets)
