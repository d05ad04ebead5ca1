"""Parquet shards as blocks of tokens: what there is, and one block at a time.

First stop of a batch; `data/sampler` is next and says which window of which block a sample is. Anyone's Parquet with a
column of token ids is read as it is (`data/shards` finds it, `data/parquet` decodes it).

A *block* is a run of row groups of one shard, and it is what is read at once; a *window* is `seq_len + 1` consecutive
tokens of a block, at a stride of `seq_len`, so that each token is a target once. Windows do not cross blocks.
"""

import errno
import hashlib
import json
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

from lm.data.parquet import DAMAGE, LAYOUT, TOKENIZER_KEY, Column, footer_digest, read_footer
from lm.data.remote import (
    PATIENCE,
    BlockCache,
    first_line,
    glob_expression,
    is_remote,
    open_filesystem,
    split_glob,
    with_retries,
)
from lm.errors import RequestError, RunError
from lm.system.files import parse_json

# ---- catalog ---------------------------------------------------------------------------------------------------------
# Which files a source means, and how many tokens each of their row groups has.
#
# Before a batch's first stop: `data/shards` asks this module what there is. A folder that `lm data prepare` made is
# taken at its manifest's word once the file sizes agree, so no footer is opened; of anyone else's shards the footers
# are read, many at a time.

MODIFIED = "modified"  # when the manifest that was read was written, ns
FOOTER_THREADS = 16


@dataclass(frozen=True)
class Shard:
    """One Parquet file.

    Args:
        file: its name in messages: the path or URL.
        name: its name in a fingerprint, which survives moving the folder: the path below the source.
        filesystem: where it lies.
        path: its path there.
        size: bytes.
        modified: when it last changed, ns; None where the file system does not say.
        row_groups: tokens of each row group.
        digest: of its footer, as `footer_digest` finds it; None where the manifest does not say.
    """

    file: str
    name: str
    filesystem: pafs.FileSystem
    path: str
    size: int
    modified: int | None
    row_groups: tuple[int, ...] = ()
    digest: str | None = None

    @contextmanager
    def open(self, footer: pq.FileMetaData | None = None) -> Iterator[tuple[pa.NativeFile, pq.ParquetFile]]:
        """The open file, and Arrow's reader of it, which verifies checksums; a known footer is not read again.

        Raises:
            pyarrow.ArrowInvalid: its footer is another; Arrow does not survive all damage to one, so it never sees it.
        """
        with self.filesystem.open_input_file(self.path) as handle:
            if footer is None:
                read = read_footer(handle)
                if self.digest is not None and footer_digest(read) != self.digest:
                    raise pa.ArrowInvalid("its footer is not the one that it had when it was written")
                footer = pq.read_metadata(pa.BufferReader(read))  # the very bytes that were looked at
            yield handle, pq.ParquetFile(
                handle, metadata=footer, pre_buffer=is_remote(self.file), page_checksum_verification=True
            )


@dataclass(frozen=True)
class Catalog:
    """The shards of one source, with token counts; `vocab_size` is the manifest's, None where there is no manifest."""

    shards: list[Shard]
    vocab_size: int | None = None


def find_shards(
    source: str, column: Column, tokenizer_sha256: str | None = None, patience: float = PATIENCE
) -> Catalog:
    """Find the shards of a folder, glob, file or URL, and count their tokens without reading them.

    Args:
        source: what was asked for.
        column: the column of token ids.
        tokenizer_sha256: of the tokenizer in use; None does not compare.
        patience: seconds that a read of a remote one is tried again.

    Raises:
        RequestError: nothing there, or it is not what it should be; names the file.
        RunError: a remote file system failed again and again.
    """
    base, pattern = split_glob(source)
    filesystem, path, prefix = open_filesystem(base)
    path = path.rstrip("/") or path

    def look() -> tuple[list[Shard], dict | None]:
        shards = _list(source, filesystem, path, prefix, pattern)
        return shards, None if pattern else _read_manifest(source, filesystem, path)

    try:
        shards, manifest = with_retries(look, source, patience) if is_remote(source) else look()
    except OSError as error:
        raise RequestError(f"{source}: cannot be listed ({first_line(error)})") from error
    if manifest is not None:
        return _from_manifest(manifest, source, posixpath.basename(path), shards, column, tokenizer_sha256)
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return Catalog(list(pool.map(lambda shard: _from_footer(shard, column, tokenizer_sha256, patience), shards)))


# ---- files -----------------------------------------------------------------------------------------------------------


def _list(source: str, filesystem: pafs.FileSystem, path: str, prefix: str, pattern: str | None) -> list[Shard]:
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.NotFound:
        raise RequestError(f"{source}: no such file or folder")
    if info.type == pafs.FileType.File and pattern is None:
        files, root = [info], posixpath.dirname(path)
    else:
        recursive = pattern is None or "/" in pattern or "**" in pattern
        files, root = filesystem.get_file_info(pafs.FileSelector(path, recursive=recursive)), path
    name = {file.path: posixpath.relpath(file.path, root or ".") for file in files}
    if pattern is not None:
        matching = glob_expression(pattern)
        files = [file for file in files if matching.fullmatch(name[file.path])]
    elif info.type != pafs.FileType.File:
        files = [f for f in files if f.extension == "parquet" and not re.search(r"(^|/)[._]", name[f.path])]
    shards = [
        Shard(prefix + file.path, name[file.path], filesystem, file.path, file.size, file.mtime_ns)
        for file in sorted(files, key=lambda file: name[file.path])
        if file.type == pafs.FileType.File
    ]
    if not shards:
        nothing = "no file matches" if pattern else "the folder holds no .parquet file"
        raise RequestError(f"{source}: {nothing}")
    return shards


# ---- our own folders -------------------------------------------------------------------------------------------------


def _read_manifest(source: str, filesystem: pafs.FileSystem, path: str) -> dict | None:
    """The manifest beside a split folder; None where there is none, or it speaks of other things."""
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
            raise RequestError(f"{place} is damaged ({first_line(error)}); run `lm data prepare` again") from error
        splits = manifest.get("splits") if isinstance(manifest, dict) and "layout" in manifest else None
        if isinstance(splits, dict) and inside:
            raise RequestError(f"{source} is a prepared folder: give it as data.path, or name one split: {path}/train")
        if isinstance(splits, dict) and split in splits:
            return {**manifest, MODIFIED: info.mtime_ns or 0}
    return None


def _from_manifest(
    manifest: dict, source: str, split: str, shards: list[Shard], column: Column, tokenizer_sha256: str | None
) -> Catalog:
    """Token counts as the manifest says, once it is sure that these are the files that it speaks of."""
    place = f"{source.rstrip('/')}/../manifest.json"
    if manifest["layout"] != LAYOUT:
        raise RequestError(f"{place}: layout {manifest['layout']!r} is not {LAYOUT}; made by another version of lm?")
    try:
        listed = manifest["splits"][split]["shards"]
        entries = {
            str(one["file"]): (one["size"], tuple(map(int, one["row_groups"])), one.get("digest")) for one in listed
        }
        tokenizer, vocab_size, made = str(manifest["tokenizer"]), int(manifest["vocab_size"]), manifest["column"]
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{place} is damaged ({error!r}); run `lm data prepare` again") from error
    if made != column.name:
        raise RequestError(f"{place}: the token column is {made!r}, not {column.name!r}; set data.column")
    _check_tokenizer(source, tokenizer, tokenizer_sha256)
    found = {f"{split}/{shard.name}": shard for shard in shards}
    for file, (size, _, _) in entries.items():
        if file.startswith("/") or ".." in file.split("/"):
            raise RequestError(f"{place} lists {file!r}, which is outside of its folder")
        if file not in found:
            raise RequestError(f"{place} lists {file!r}, which is missing; fetch it, or prepare the folder again")
        if found[file].size != size:
            raise RequestError(
                f"shard {found[file].file} has {found[file].size} bytes where the manifest says {size}: "
                "it is truncated or was changed; fetch it, or prepare the folder again"
            )
    for file in found.keys() - entries.keys():
        stray = found[file].file
        raise RequestError(f"shard {stray} is not in its manifest; move it away, or prepare the folder again")
    complete = [
        replace(found[file], row_groups=counts, digest=digest) for file, (_, counts, digest) in entries.items()
    ]
    if not is_remote(source):
        _check_newer(complete, manifest[MODIFIED])
    return Catalog(complete, vocab_size)


def _check_newer(shards: list[Shard], written: int) -> None:
    """Look at the footers of shards that changed after the manifest was written, which is written last."""

    def check(shard: Shard) -> None:
        with _readable(shard), shard.open():
            pass

    newer = [shard for shard in shards if shard.digest is not None and (shard.modified or 0) > written]
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        list(pool.map(check, newer))


# ---- anyone's files -------------------------------------------------------------------------------------------------


def _from_footer(shard: Shard, column: Column, tokenizer_sha256: str | None, patience: float) -> Shard:
    """The shard with the token counts of its row groups."""

    def read() -> Shard:
        with shard.open() as (handle, parquet):
            column.check_type(parquet.schema_arrow, shard.file)
            made_with = (parquet.metadata.metadata or {}).get(TOKENIZER_KEY)
            if made_with is not None:
                _check_tokenizer(shard.file, made_with.decode(errors="replace"), tokenizer_sha256)
            try:
                counts = tuple(column.count(handle, parquet, shard.file))
            except RunError as error:  # bad rows that are found before any work are a wrong request
                raise RequestError(str(error)) from error
            return replace(shard, row_groups=counts, digest=footer_digest(read_footer(handle)))

    with _readable(shard):
        return with_retries(read, shard.file, patience) if is_remote(shard.file) else read()


@contextmanager
def _readable(shard: Shard) -> Iterator[None]:
    """A file that cannot be read is told by its name."""
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


# ---- shards ----------------------------------------------------------------------------------------------------------

BLOCK_TOKENS = 2**20  # long enough to be read at full speed, short enough for a quick first batch
FOOTERS_KEPT = 256  # of the files in use: parsing a footer takes a tenth of the time of reading a block


class Block(NamedTuple):
    """Consecutive row groups of one shard, read at once: at most BLOCK_TOKENS, or one larger row group."""

    file: str
    row_groups: range
    tokens: int

    def __str__(self) -> str:
        first, last = self.row_groups[0], self.row_groups[-1]
        return f"shard {self.file}, row group{f's {first} to {last}' if first < last else f' {first}'}"


class BadBlock(RunError):
    """The file is there, and what is in it cannot be used: damaged, changed, or ids outside of the vocabulary."""


class Fingerprint(NamedTuple):
    """What must not change of a shard between a stop and a resume."""

    name: str
    size: int
    tokens: int
    digest: str | None = None  # of its content; None where it is not known


class Shards:
    """All shards of a source; `Shards.open` makes one. Safe to share between threads, and picklable.

    Attributes:
        blocks: every Block, in the order of the files.
        tokens: of all blocks.
    """

    def __init__(
        self, shards: Sequence[Shard], column: Column, source: str, cache: BlockCache | None = None,
        patience: float = PATIENCE,
    ):
        self.column, self.source, self.cache, self.patience = column, source, cache, patience
        self.blocks = [block for shard in shards for block in _blocks(shard)]
        self.tokens = sum(block.tokens for block in self.blocks)
        self._shards = {shard.file: shard for shard in shards}
        self._footers: dict[str, pq.FileMetaData] = {}

    @classmethod
    def open(
        cls,
        source: str | Sequence[str],
        column: str = "input_ids",
        vocab_size: int | None = None,
        tokenizer_sha256: str | None = None,
        cache: BlockCache | None = None,
        patience: float = PATIENCE,
    ) -> "Shards":
        """Find shards and learn their token counts; tokens are read only where the footers have no statistics.

        Args:
            source: folders, globs, files or URLs. The split folder (`DIR/train`) of a folder that `lm data prepare`
                made is checked against its manifest.
            column: the column of token ids.
            vocab_size: ids must be below it; None takes the manifests', or else 2**31.
            tokenizer_sha256: of the tokenizer in use; shards that say that another one made them are refused.
            cache: keeps blocks of remote shards on this machine.
            patience: seconds that a read of a remote shard is tried again.

        Raises:
            RequestError: nothing there, no such column, a wrong type, a damaged file, another tokenizer, or shards
                that are not what their manifest says; names the file.
            RunError: a remote source failed again and again.
        """
        sources = [source] if isinstance(source, str) else list(source)
        if not sources:
            raise RequestError("no shards were named; give a folder, a glob, a file or a URL")
        catalogs = [find_shards(one, Column(column, vocab_size), tokenizer_sha256, patience) for one in sources]
        if vocab_size is None and all(catalog.vocab_size for catalog in catalogs):
            vocab_size = max(catalog.vocab_size for catalog in catalogs)
        shards = [shard for catalog in catalogs for shard in catalog.shards]
        file, times = Counter(shard.file for shard in shards).most_common(1)[0]
        if times > 1:
            raise RequestError(f"shard {file} is named {times} times, but an epoch has each window once")
        return cls(shards, Column(column, vocab_size), ", ".join(sources), cache, patience)

    def windows(self, seq_len: int) -> np.ndarray:
        """How many windows each block has: (blocks,) int64, `max(0, (tokens - 1) // seq_len)`."""
        tokens = np.fromiter((block.tokens for block in self.blocks), dtype=np.int64, count=len(self.blocks))
        return np.maximum(0, (tokens - 1) // seq_len)

    def require_windows(self, seq_len: int) -> int:
        """The number of windows.

        Raises:
            RequestError: there is not one; says how many tokens there are and how many it takes.
        """
        total = int(self.windows(seq_len).sum())
        if total == 0:
            longest = max((block.tokens for block in self.blocks), default=0)
            raise RequestError(
                f"{self.source}: {self.tokens} tokens in {len(self._shards)} shards, at most {longest} of them in one "
                f"run, but a window takes {seq_len + 1} (seq_len + 1): give more data or lower data.seq_len"
            )
        return total

    @property
    def largest(self) -> Block:
        """The block with the most tokens."""
        return max(self.blocks, key=lambda block: block.tokens)

    def read(self, index: int) -> np.ndarray:
        """Read one block.

        Args:
            index: into `blocks`.

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
        tokens = self.cache.get(key) if self.cache else None
        if tokens is None or tokens.shape != (block.tokens,) or not column.holds(tokens):
            try:
                tokens = with_retries(lambda: self._fetch(block), str(block), self.patience)
            except OSError as error:  # one that trying again cannot cure
                raise RunError(f"{block}: cannot be read ({first_line(error)}); was it moved or deleted?") from error
            if self.cache:
                self.cache.put(key, tokens)
        return tokens

    def _fetch(self, block: Block) -> np.ndarray:
        """A remote block. What comes damaged may have been damaged on the way, so it is fetched once more."""
        try:
            return self._decode(block)
        except BadBlock:
            self._footers.pop(block.file, None)
            return self._decode(block)

    def _decode(self, block: Block) -> np.ndarray:
        shard = self._shards[block.file]
        try:
            with shard.open(self._footers.get(shard.file)) as (handle, parquet):
                self._keep_footer(shard.file, parquet.metadata)
                tokens = self._decode_groups(handle, parquet, block, block.row_groups)
                if len(tokens) != block.tokens:
                    raise BadBlock(self._miscounted(handle, parquet, block))
                return tokens
        except DAMAGE as error:
            if _may_be_the_network(error, block):
                raise
            raise _not_readable(str(block), error) from error

    def _decode_groups(
        self, handle: pa.NativeFile, parquet: pq.ParquetFile, block: Block, groups: Sequence[int]
    ) -> np.ndarray:
        """The tokens of row groups; where several cannot be decoded, the first bad one is named."""
        try:
            return self.column.decode(handle, parquet, groups, block.file)
        except RunError as error:
            raise BadBlock(str(error)) from error
        except DAMAGE as error:
            if _may_be_the_network(error, block):
                raise
            for group in groups if len(groups) > 1 else ():
                self._decode_groups(handle, parquet, block, [group])
            where = f"shard {block.file}, row group {groups[0]}" if len(groups) == 1 else str(block)
            raise _not_readable(where, error) from error

    def _keep_footer(self, file: str, footer: pq.FileMetaData) -> None:
        if len(self._footers) >= FOOTERS_KEPT:
            self._footers.clear()
        self._footers[file] = footer

    def _miscounted(self, handle: pa.NativeFile, parquet: pq.ParquetFile, block: Block) -> str:
        counts = self._shards[block.file].row_groups
        for group in block.row_groups:
            held = len(self.column.decode(handle, parquet, [group], block.file))
            if held != counts[group]:
                break
        return (
            f"shard {block.file}, row group {group} holds {held} tokens where its footer or manifest says "
            f"{counts[group]}: it was changed or badly written; write it again"
        )

    def fingerprint(self) -> list[Fingerprint]:
        """Name below its source, bytes, tokens and content of every shard, in order."""
        return [
            Fingerprint(shard.name, shard.size, sum(shard.row_groups), shard.digest) for shard in self._shards.values()
        ]

    @property
    def digest(self) -> str:
        """The fingerprint in 16 hex digits."""
        return hashlib.blake2b(json.dumps(self.fingerprint()).encode(), digest_size=8).hexdigest()


def _may_be_the_network(error: Exception, block: Block) -> bool:
    """Then the read is tried again."""
    return isinstance(error, OSError) and is_remote(block.file)


def _not_readable(where: str, error: Exception) -> RunError:
    """What to say of a failed read: damage, or else a file that is not there, or a machine that could not read it."""
    if isinstance(error, OSError) and error.errno is not None and error.errno != errno.EIO:
        return RunError(f"{where}: cannot be read ({first_line(error)}); put it back, and `--ckpt_path auto` goes on")
    if isinstance(error, MemoryError):  # never skipped: the next time there may be enough
        return RunError(f"{where}: not enough memory to decode it ({first_line(error)}), unless the file is damaged")
    return BadBlock(
        f"{where}: cannot be decoded ({first_line(error)}); the file is truncated, damaged or was changed: "
        "fetch or write it again"
    )


def describe_difference(old, new, most: int = 3) -> str:
    """Say how two fingerprints differ.

    Args:
        old, new: fingerprints, or what they became in JSON.
        most: how many differences to spell out.

    Returns:
        One line; empty if they are equal.
    """
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
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return ", ".join(sorted(lines)[:most] + more)


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
