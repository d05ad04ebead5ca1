"""Parquet shards as blocks of tokens: which shards a source has, how many tokens, and one block at a time.

The first stop of a batch; `data/sampler` is next and says which window of which block a sample is. Anyone's Parquet
with a column of token ids is read as it is (`data/parquet` decodes it). Of a folder that `lm data prepare` made, the
manifest says how many tokens there are; of other shards, their footers do.

A *block* is a run of row groups of one shard, read at once; a *window* is `seq_len + 1` consecutive tokens of a block,
at a stride of `seq_len`, so that each token is a target once. Windows do not cross blocks.
"""

import errno
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from lm.data.parquet import COLUMN, DAMAGE, LAYOUT, TOKENIZER_KEY, BadBlock, Column, footer_digest, read_footer
from lm.data.remote import PATIENCE, BlockCache, is_remote, list_files, open_file, unreadable, with_retries
from lm.errors import RequestError, RunError, first_line
from lm.system.files import parse_json

BLOCK_TOKENS = 2**20  # long enough to be read at full speed, short enough for a quick first batch
FOOTERS_KEPT = 256  # parsed footers of files in use: parsing one takes a tenth of the time of reading a block
FOOTER_THREADS = 16
SUFFIX = re.compile(r"\.(parquet|pq)$", re.IGNORECASE)
HIDDEN = re.compile(r"(^|/)[._]")

# ---- which shards there are ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One Parquet file."""

    file: str  # its path or URL, for messages
    name: str  # its path below the source, which stays the same when the folder is moved
    filesystem: pafs.FileSystem
    path: str  # there
    size: int  # bytes
    modified: int | None  # ns; None where the file system does not say
    patience: float  # seconds for all attempts of one read, where it is remote
    row_groups: tuple[int, ...] = ()  # tokens of each
    digest: str | None = None  # of its footer; None where the manifest has none

    @contextmanager
    def open(self, footer: pq.FileMetaData | None = None) -> Iterator[tuple[pq.ParquetFile, str | None]]:
        """The open file, with checksums verified, and the digest of its footer; a footer that is given is not read.

        Raises:
            pyarrow.ArrowInvalid: the footer is not the one in the manifest. Arrow never parses such a footer, since it
                does not survive all damage to one.
        """
        with open_file(self.filesystem, self.path, f"shard {self.file}", self.patience) as handle:
            digest = None
            if footer is None:
                content = read_footer(handle)
                digest = footer_digest(content)
                if self.digest not in (None, digest):
                    raise pa.ArrowInvalid("its footer is not the one that it had when it was written")
                footer = pq.read_metadata(pa.BufferReader(content))
            yield pq.ParquetFile(handle, metadata=footer, page_checksum_verification=True), digest


def find_shards(
    source: str, column: Column, tokenizer_sha256: str | None = None, patience: float = PATIENCE
) -> tuple[list[Shard], int | None]:
    """The shards of a folder, glob, file or URL with their token counts, and the manifest's size of the vocabulary.

    The size is None where there is no manifest. `Shards.open` says what the arguments are, and what is raised.
    """
    listing = list_files(source, patience)
    files = listing.files
    if listing.kind == "folder":
        files = {name: file for name, file in files.items() if SUFFIX.search(name) and not HIDDEN.search(name)}
    if not files:
        raise RequestError(f"{source}: the folder holds no .parquet file")
    shards = [
        Shard(listing.prefix + file.path, name, listing.filesystem, file.path, file.size, file.mtime_ns, patience)
        for name, file in files.items()
    ]
    manifest = None
    if listing.kind == "folder":
        try:
            manifest = with_retries(lambda: _read_manifest(source, listing.filesystem, listing.path), source, patience)
        except OSError as error:
            raise RequestError(f"{source}: its manifest cannot be read ({first_line(error)})") from error
    if manifest is not None:
        return _from_manifest(manifest, source, posixpath.basename(listing.path), shards, column, tokenizer_sha256)
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return list(pool.map(lambda shard: _from_footer(shard, column, tokenizer_sha256), shards)), None


def _read_manifest(source: str, filesystem: pafs.FileSystem, path: str) -> dict | None:
    """The manifest beside a split folder; None where there is none, or it is none of ours."""
    folder, split = posixpath.split(path)
    if is_remote(source) and not folder:  # a bucket has no parent
        return None
    for place, inside in ((posixpath.join(folder, "manifest.json"), False), (f"{path}/manifest.json", True)):
        info = filesystem.get_file_info(place)
        if info.type != pafs.FileType.File:
            continue
        try:
            with filesystem.open_input_stream(place) as stream:
                manifest = parse_json(stream.read())
        except ValueError as error:
            raise RequestError(
                f"{place} is damaged ({first_line(error)}); remove its folder and run `lm data prepare` again"
            ) from error
        splits = manifest.get("splits") if isinstance(manifest, dict) and "layout" in manifest else None
        if isinstance(splits, dict) and inside:
            raise RequestError(f"{source} is a prepared folder: give it as data.path, or name one split: {path}/train")
        if isinstance(splits, dict) and split in splits:
            return {**manifest, "modified": info.mtime_ns or 0}
    return None


def _from_manifest(
    manifest: dict, source: str, split: str, shards: list[Shard], column: Column, tokenizer_sha256: str | None
) -> tuple[list[Shard], int]:
    """The shards with the manifest's token counts, once these are the files that it lists."""
    folder = posixpath.dirname(source.rstrip("/")) or "."
    place, anew = f"{folder}/manifest.json", f"remove {folder} and run `lm data prepare` again"
    if manifest["layout"] != LAYOUT:
        raise RequestError(f"{place}: layout {manifest['layout']!r} is not {LAYOUT}; made by another version of lm?")
    try:
        entries = {
            str(one["file"]): (one["size"], tuple(map(int, one["row_groups"])), one.get("digest"))
            for one in manifest["splits"][split]["shards"]
        }
        if sum(sum(counts) for _, counts, _ in entries.values()) != manifest["splits"][split]["tokens"]:
            raise ValueError("row groups do not add up to the tokens of the split")
        tokenizer, vocab_size, made = str(manifest["tokenizer"]), int(manifest["vocab_size"]), manifest["column"]
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{place} is damaged ({error!r}); {anew}") from error
    if made != column.name:
        raise RequestError(f"{place}: the token column is {made!r}, not {column.name!r}; set data.column")
    _check_tokenizer(source, tokenizer, tokenizer_sha256)
    found = {f"{split}/{shard.name}": shard for shard in shards}
    complete = []
    for file, (size, counts, digest) in entries.items():
        if file not in found:
            raise RequestError(f"{place} lists {file!r}, which is missing; fetch it, or {anew}")
        shard = replace(found[file], row_groups=counts, digest=digest)
        if shard.size != size:
            raise RequestError(
                f"shard {shard.file} has {shard.size} bytes where the manifest says {size}: "
                f"it is truncated or was changed; fetch it, or {anew}"
            )
        complete.append(shard)
    for file in found.keys() - entries.keys():
        raise RequestError(f"shard {found[file].file} is not in its manifest; move it away")
    if not is_remote(source):
        _check_newer(complete, manifest["modified"])
    return complete, vocab_size


def _check_newer(shards: list[Shard], written: int) -> None:
    """Look at the footers of shards that changed after the manifest was written, which is written last."""

    def check(shard: Shard) -> None:
        with _readable(shard), shard.open():
            pass

    newer = [shard for shard in shards if shard.digest is not None and (shard.modified or 0) > written]
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        list(pool.map(check, newer))


def _from_footer(shard: Shard, column: Column, tokenizer_sha256: str | None) -> Shard:
    """The shard with the token counts of its row groups."""
    with _readable(shard), shard.open() as (parquet, digest):
        column.check_type(parquet.schema_arrow, shard.file)
        made_with = (parquet.metadata.metadata or {}).get(TOKENIZER_KEY)
        if made_with is not None:
            _check_tokenizer(shard.file, made_with.decode(errors="replace"), tokenizer_sha256)
        try:
            counts = tuple(column.count(parquet, shard.file))
        except BadBlock as error:  # bad rows that are found before any work are a wrong request
            raise RequestError(str(error)) from error
        return replace(shard, row_groups=counts, digest=digest)


@contextmanager
def _readable(shard: Shard) -> Iterator[None]:
    """Name a file that cannot be read."""
    try:
        yield
    except DAMAGE as error:
        raise RequestError(
            f"shard {shard.file} is not a readable Parquet file ({first_line(error)}); is it truncated, damaged or "
            "another one?"
        ) from error


def _check_tokenizer(place: str, made_with: str, wanted: str | None) -> None:
    if wanted is not None and made_with != wanted:
        raise RequestError(
            f"{place} was made with another tokenizer (SHA-256 {made_with[:12]}..., yours is {wanted[:12]}...); "
            "use the tokenizer.json beside the shards, or prepare them again"
        )


# ---- blocks ----------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Consecutive row groups of one shard, read at once: at most BLOCK_TOKENS, or one larger row group."""

    file: str
    row_groups: range
    tokens: int

    def __str__(self) -> str:
        first, last = self.row_groups[0], self.row_groups[-1]
        return f"shard {self.file}, row group{f's {first} to {last}' if first < last else f' {first}'}"


class Shards:
    """All shards of a source; `Shards.open` makes one. Safe to use from several threads, and picklable.

    Attributes:
        blocks: every Block, in the order of the files.
        tokens: of all blocks.
    """

    def __init__(self, shards: Sequence[Shard], column: Column, source: str, cache: BlockCache | None = None) -> None:
        self.column, self.source, self.cache = column, source, cache
        self.blocks = [block for shard in shards for block in _blocks(shard)]
        self.tokens = sum(block.tokens for block in self.blocks)
        self._shards = {shard.file: shard for shard in shards}
        self._footers: dict[str, pq.FileMetaData] = {}

    @classmethod
    def open(
        cls, source: str | Sequence[str], column: str = COLUMN, vocab_size: int | None = None,
        tokenizer_sha256: str | None = None, cache: BlockCache | None = None, patience: float = PATIENCE,
    ) -> "Shards":
        """Find shards and learn their token counts; tokens are read only where the footers have no statistics.

        Args:
            source: folders, globs, files or URLs. The split folder (`DIR/train`) of a folder that `lm data prepare`
                made is checked against its manifest.
            column: the column of token ids.
            vocab_size: ids must be below it; None takes the manifests', or else 2**31.
            tokenizer_sha256: of the tokenizer in use; shards that another one made are refused.
            cache: keeps blocks of remote shards on this machine.
            patience: seconds for all attempts of one read of a remote shard.

        Raises:
            RequestError: nothing there, no such column, a wrong type, a damaged file, another tokenizer, or shards
                that are not what their manifest says; names the file.
            RunError: a remote source failed again and again.
        """
        sources = [source] if isinstance(source, str) else list(source)
        if not sources:
            raise RequestError("no shards were named; give a folder, a glob, a file or a URL")
        found = [find_shards(one, Column(column, vocab_size), tokenizer_sha256, patience) for one in sources]
        if vocab_size is None and all(size for _, size in found):
            vocab_size = max(size for _, size in found)
        shards = [shard for shards, _ in found for shard in shards]
        file, times = Counter(shard.file for shard in shards).most_common(1)[0]
        if times > 1:
            raise RequestError(f"shard {file} is named {times} times, but an epoch has each window once")
        return cls(shards, Column(column, vocab_size), ", ".join(sources), cache)

    def windows(self, seq_len: int) -> np.ndarray:
        """How many windows each block has: (blocks,) int64, `max(0, (tokens - 1) // seq_len)`."""
        tokens = np.array([block.tokens for block in self.blocks], dtype=np.int64)
        return np.maximum(0, (tokens - 1) // seq_len)

    def require_windows(self, seq_len: int) -> int:
        """The number of windows.

        Raises:
            RequestError: there is none; says how many tokens there are and how many it takes.
        """
        total = int(self.windows(seq_len).sum())
        if total == 0:
            longest = max((block.tokens for block in self.blocks), default=0)
            raise RequestError(
                f"{self.source}: {self.tokens} tokens, at most {longest} of them in one block, but a window takes "
                f"{seq_len + 1} (seq_len + 1): give more data or lower data.seq_len"
            )
        return total

    @property
    def largest(self) -> Block:
        """The block with the most tokens."""
        return max(self.blocks, key=lambda block: block.tokens)

    def read(self, index: int) -> np.ndarray:
        """Read one block of `blocks`.

        Returns:
            (tokens,) uint16 where the vocabulary has at most 65536 ids, else uint32; all ids inside the vocabulary.

        Raises:
            BadBlock: nulls, ids outside the vocabulary, damaged bytes, or a number of tokens or content that is not
                what the footer or manifest said; names the file, row group and row.
            RunError: the file cannot be opened or read at all.
        """
        block = self.blocks[index]
        if not is_remote(block.file):
            return self._decode(block)
        shard, column = self._shards[block.file], self.column
        key = BlockCache.key(
            shard.file, shard.size, shard.modified, shard.digest, tuple(block.row_groups), column.name,
            column.dtype.name,
        )
        tokens = self.cache.get(key, column.dtype) if self.cache else None
        if tokens is None or tokens.shape != (block.tokens,) or not column.holds(tokens):
            try:
                tokens = self._decode(block)
            except BadBlock:  # perhaps it was damaged on the way: fetch it once more
                self._footers.pop(block.file, None)
                tokens = self._decode(block)
            if self.cache:
                self.cache.put(key, tokens)
        return tokens

    def _decode(self, block: Block) -> np.ndarray:
        """Read a block, row group by row group, so that a bad one is named."""
        shard, where, parts = self._shards[block.file], str(block), []
        try:
            with shard.open(self._footers.get(shard.file)) as (parquet, _):
                self._keep_footer(shard.file, parquet.metadata)
                for group in block.row_groups:
                    where = f"shard {block.file}, row group {group}"
                    parts.append(self.column.decode(parquet, group, block.file))
                    if len(parts[-1]) != shard.row_groups[group]:
                        raise BadBlock(
                            f"{where} holds {len(parts[-1])} tokens where its footer or manifest says "
                            f"{shard.row_groups[group]}: it was changed or badly written; write it again"
                        )
        except DAMAGE as error:
            raise _not_readable(where, error) from error
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _keep_footer(self, file: str, footer: pq.FileMetaData) -> None:
        if len(self._footers) >= FOOTERS_KEPT:
            self._footers.clear()
        self._footers[file] = footer

    def fingerprint(self) -> list["Fingerprint"]:
        """Name below its source, bytes, tokens and content of every shard, in order."""
        return [
            Fingerprint(shard.name, shard.size, sum(shard.row_groups), shard.digest) for shard in self._shards.values()
        ]


def _blocks(shard: Shard) -> Iterator[Block]:
    """Group row groups for as long as they stay within BLOCK_TOKENS."""
    first, held = 0, 0
    for group, tokens in enumerate(shard.row_groups):
        if group > first and held + tokens > BLOCK_TOKENS:
            yield Block(shard.file, range(first, group), held)
            first, held = group, 0
        held += tokens
    if shard.row_groups:
        yield Block(shard.file, range(first, len(shard.row_groups)), held)


def _not_readable(where: str, error: Exception) -> RunError:
    """What a failed read means: damage, a file that is not there, or a machine that could not read it."""
    reason = first_line(error)
    if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) not in (None, errno.EIO):
        return unreadable(where, error)
    if isinstance(error, MemoryError):  # never skipped: the next time there may be enough
        return RunError(f"{where}: not enough memory to decode it ({reason}), unless the file is damaged")
    return BadBlock(
        f"{where}: cannot be decoded ({reason}); the file is truncated, damaged or was changed: fetch or write it again"
    )


# ---- fingerprint -----------------------------------------------------------------------------------------------------


class Fingerprint(NamedTuple):
    """What must not change of a shard between a stop and a resume."""

    name: str
    size: int
    tokens: int
    digest: str | None = None  # of its content; None where it is not known


def describe_difference(old: Sequence, new: Sequence) -> str:
    """How two fingerprints, or their JSON, differ, in one line; empty if they are equal."""
    old, new = [Fingerprint(*entry) for entry in old], [Fingerprint(*entry) for entry in new]
    before, after = {entry.name: entry for entry in old}, {entry.name: entry for entry in new}
    lines = [f"{name} is gone" for name in before.keys() - after.keys()]
    lines += [f"{name} is new" for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        was, now = before[name], after[name]
        if was[:3] != now[:3]:
            lines.append(f"{name} had {was.size} bytes and {was.tokens} tokens, now {now.size} and {now.tokens}")
        elif was.digest != now.digest and None not in (was.digest, now.digest):
            lines.append(f"{name} is as long as it was and holds something else")
    if not lines and [entry[:3] for entry in old] != [entry[:3] for entry in new]:
        lines = ["the same shards in another order"]
    more = [f"and {len(lines) - 3} more"] if len(lines) > 3 else []
    return ", ".join(sorted(lines)[:3] + more)
