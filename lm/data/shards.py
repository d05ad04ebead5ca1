"""Parquet shards as blocks of tokens: which shards a source has, how many tokens, and one block at a time.

The first stop of a batch; `data/sampler` is next and says which window of which block a sample is. Anyone's Parquet
with a column of token ids is read as it is (`data/parquet` decodes it). Of a folder that `lm data prepare` made, the
manifest says how many tokens there are; of other shards, their footers do.

A *block* is a run of row groups of one shard, or of several small ones, read at once; a *window* is `seq_len + 1`
consecutive tokens of a block, at a stride of `seq_len`, so that each token is a target once. Windows do not cross
blocks: less than `seq_len` tokens at the end of each are in none, which `Shards.left_over` counts. Where documents were
packed (`data/packing`), each row is a window, and what fills it up is no target.
"""

import errno
import logging
import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from lm.data.cache import BlockCache
from lm.data.packing import PackedRows
from lm.data.parquet import (
    COLUMN,
    DAMAGE,
    IGNORED,
    LABELS,
    LAYOUT,
    PACKED_KEY,
    TOKENIZER_KEY,
    BadBlock,
    Column,
    Encrypted,
    Tokens,
    footer_digest,
    parse_footer,
    read_footer,
)
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError, RunError, first_line
from lm.system.files import parse_json
from lm.system.process import reader_pool
from lm.system.remote import (
    PATIENCE,
    file_identity,
    is_denied,
    is_remote,
    list_files,
    open_file,
    unreadable,
    with_retries,
)
from lm.system.units import plural

log = logging.getLogger(__name__)

BLOCK_TOKENS = 2**20  # long enough to be read at full speed, short enough for a quick first batch
FOOTERS_KEPT = 256  # parsed footers of files in use: parsing one takes a tenth of the time of reading a block
FOOTER_THREADS = 16
DECODED_TOKENS = 2**18  # to learn how many bytes of text they stand for
SUFFIX = re.compile(r"\.(parquet|pq)$", re.IGNORECASE)
NOT_SHARDS = re.compile(r"(\.(npy|bin|csv|tsv|txt|json|jsonl))$", re.IGNORECASE)
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
    modified: int | str | None  # ns, or what a store calls the content; None where the file system does not say
    patience: float  # seconds for all attempts of one read, where it is remote
    column: Column  # how its token ids are read
    row_groups: tuple[int, ...] = ()  # tokens of each
    digest: str | None = None  # of its footer; None where the manifest has none
    labels: bool = False  # beside the ids, which say what is a target
    text_ratio: float | None = None  # bytes of the text over those of `Tokenizer.token_bytes`, where a manifest says it
    targets: bool = True  # there may be some
    packed: PackedRows | None = None  # what its rows are; None where they are documents
    padding: int | None = None  # tokens that fill packed rows up, where a manifest says it

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
                footer = parse_footer(content)
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
    if listing.kind == "file" and (other := NOT_SHARDS.search(source)):
        raise RequestError(
            f"{source} is a {other[1]} file, and training reads Parquet: `lm data prepare --input {source} --output "
            "data/NAME` makes it"
        )
    shards = [
        Shard(
            listing.name(file), name, listing.filesystem, file.path, file.size, file.modified, patience, column
        )
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
            str(one["file"]): (one["size"], tuple(map(int, one["row_groups"])), one.get("digest"), one.get("padding"))
            for one in manifest["splits"][split]["shards"]
        }
        stored, tokens = sum(sum(counts) for _, counts, *_ in entries.values()), manifest["splits"][split]["tokens"]
        packed = PackedRows(*map(int, manifest["packed"])) if manifest.get("packed") else None
        if stored < tokens if packed else stored != tokens:
            raise ValueError("row groups do not add up to the tokens of the split")
        counted = manifest["splits"][split].get("token_bytes")
        text_ratio = manifest["splits"][split]["bytes"] / counted if counted else None
        tokenizer, vocab_size, made = str(manifest["tokenizer"]), int(manifest["vocab_size"]), manifest["column"]
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{place} is damaged ({error!r}); {anew}") from error
    if made != column.name:
        raise RequestError(f"{place}: the token column is {made!r}, not {column.name!r}; set data.column")
    _check_tokenizer(source, tokenizer, tokenizer_sha256)
    found = {f"{split}/{shard.name}": shard for shard in shards}
    complete = []
    for file, (size, counts, digest, padding) in entries.items():
        if file not in found:
            raise RequestError(f"{place} lists {file!r}, which is missing; fetch it, or {anew}")
        shard = replace(
            found[file], row_groups=counts, digest=digest, text_ratio=text_ratio, packed=packed, padding=padding
        )
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
        facts = parquet.metadata.metadata or {}
        made_with, packed = facts.get(TOKENIZER_KEY), facts.get(PACKED_KEY)
        if made_with is not None:
            _check_tokenizer(shard.file, made_with.decode(errors="replace"), tokenizer_sha256)
        try:
            counts = tuple(column.count(parquet, shard.file))
        except BadBlock as error:  # bad rows that are found before any work are a wrong request
            raise RequestError(str(error)) from error
        return replace(
            shard, row_groups=counts, digest=digest, labels=LABELS in column.beside(parquet.schema_arrow),
            targets=column.has_targets(parquet), packed=PackedRows(*parse_json(packed)) if packed else None,
        )  # fmt: skip


@contextmanager
def _readable(shard: Shard) -> Iterator[None]:
    """Name a file that cannot be read."""
    try:
        yield
    except RunError as error:
        if is_denied(error.__cause__):  # by a remote store; what it may answer later is no wrong request
            raise RequestError(str(error)) from error
        raise
    except Encrypted as error:
        raise RequestError(f"shard {shard.file} is encrypted; write it again without encryption") from error
    except DAMAGE as error:
        if getattr(error, "errno", None) not in (None, errno.EIO):
            raise RequestError(str(unreadable(f"shard {shard.file}", error))) from error
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


class Part(NamedTuple):
    """Consecutive row groups of one shard: at most BLOCK_TOKENS, or one larger row group."""

    file: str
    row_groups: range
    tokens: int

    def __str__(self) -> str:
        first, last = self.row_groups[0], self.row_groups[-1]
        return f"shard {self.file}, row group{f's {first} to {last}' if first < last else f' {first}'}"


class Block(NamedTuple):
    """What is read at once: a part of a shard, or parts of consecutive shards."""

    parts: tuple[Part, ...]
    tokens: int

    def __str__(self) -> str:
        return str(self.parts[0]) + (f", up to {self.parts[-1]}" if len(self.parts) > 1 else "")

    def file_of(self, token: int) -> str:
        """The file in which a token of the block stands."""
        ends = np.cumsum([part.tokens for part in self.parts])
        return self.parts[int(np.searchsorted(ends, token, side="right"))].file


class Shards:
    """All shards of a source; `Shards.open` makes one. Safe to use from several threads, and picklable.

    Attributes:
        by_file: every Shard by its path or URL.
        blocks: every Block, in the order of the files.
        tokens: of all blocks.
        labels: whether some tokens may be no targets.
        packed: what the rows are, where documents were packed into them; else None.
    """

    def __init__(
        self, shards: Sequence[Shard], column: Column, source: str, cache: BlockCache | None = None,
        block_tokens: int | None = None,
    ) -> None:
        self.column, self.source, self.cache = column, source, cache
        self.blocks = list(_blocks(shards, min(block_tokens or BLOCK_TOKENS, BLOCK_TOKENS)))
        self.tokens = sum(block.tokens for block in self.blocks)
        self.packed = _packed(shards, source) if shards else None
        self.labels = self.packed is not None or any(shard.labels for shard in shards)
        self.by_file = {shard.file: shard for shard in shards}
        self._footers: dict[str, pq.FileMetaData] = {}

    @classmethod
    def open(
        cls, source: str | Sequence[str], column: str = COLUMN, vocab_size: int | None = None,
        tokenizer_sha256: str | None = None, cache: BlockCache | None = None, patience: float = PATIENCE,
        pad_id: int | None = None, eos_id: int | None = None, block_tokens: int | None = None,
    ) -> "Shards":
        """Find shards and learn their token counts; tokens are read only where the footers do not tell.

        A file that is named twice, by whatever paths, counts once.

        Args:
            source: folders, globs, files or URLs. The split folder (`DIR/train`) of a folder that `lm data prepare`
                made is checked against its manifest.
            column: the column of token ids.
            vocab_size: ids must be below it; None takes the manifests', or else 2**31.
            tokenizer_sha256: of the tokenizer in use; shards that another one made are refused.
            cache: keeps blocks of remote shards on this machine.
            patience: seconds for all attempts of one read of a remote shard.
            pad_id: the id that rows are filled up with; all shards are read to count the others.
            eos_id: the end-of-text token, which stays once at the end of a row where it is the `pad_id` too.
            block_tokens: parts of several shards become one block of at most so many tokens; BLOCK_TOKENS if not given.

        Raises:
            RequestError: nothing there, no such column, a wrong type, a damaged file, another tokenizer, or shards
                that are not what their manifest says; names the file.
            RunError: a remote source failed again and again.
        """
        sources = [source] if isinstance(source, str) else list(source)
        if not sources:
            raise RequestError("no shards were named; give a folder, a glob, a file or a URL")
        found = [
            find_shards(one, Column(column, vocab_size, pad_id, eos_id), tokenizer_sha256, patience) for one in sources
        ]
        if vocab_size is None and all(size for _, size in found):
            vocab_size = max(size for _, size in found)
        once: dict[Hashable, Shard] = {}
        for shard in (shard for shards, _ in found for shard in shards):
            first = once.setdefault(file_identity(shard.file), shard)
            if first is not shard and not first.filesystem.equals(shard.filesystem):
                raise RequestError(f"shard {shard.file} is in two stores, which its URL does not tell apart")
            if first is not shard:
                log.info("shard %s is %s again, and counts once", shard.file, first.file)
        reading = Column(column, vocab_size, pad_id, eos_id)
        shards = [replace(shard, column=reading) for shard in once.values()]
        return cls(shards, reading, ", ".join(sources), cache, block_tokens)

    @classmethod
    def join(cls, sources: Mapping[str, "Shards"]) -> "Shards":
        """The shards of several sources as one, their blocks one source after the other.

        Args:
            sources: name -> its shards, all with the same vocabulary.

        Raises:
            RequestError: a file is in two of them.
        """
        first, *others = sources.values()
        if not others:
            return first
        joined = cls([], first.column, ", ".join(shards.source for shards in sources.values()), first.cache)
        holders: dict[Hashable, str] = {}  # by whatever path they name a file
        for name, shards in sources.items():
            for file in shards.by_file:
                other = holders.setdefault(file_identity(file), name)
                if other != name:
                    raise RequestError(
                        f"data.sources {other} and {name} both hold {file}: name it in one of them; a larger weight "
                        "repeats it more often"
                    )
            joined.blocks += shards.blocks
            joined.by_file |= shards.by_file
        joined.tokens = sum(block.tokens for block in joined.blocks)
        joined.labels = any(shards.labels for shards in sources.values())
        joined.packed = _packed(joined.by_file.values(), joined.source)
        return joined

    def windows(self, seq_len: int) -> np.ndarray:
        """How many windows each block has: (blocks,) int64, `max(0, (tokens - 1) // seq_len)`, or its packed rows."""
        tokens = np.array([block.tokens for block in self.blocks], dtype=np.int64)
        stride = self.stride(seq_len)
        return np.maximum(0, (tokens - (stride == seq_len)) // stride)

    def stride(self, seq_len: int) -> int:
        """Tokens between the beginnings of windows.

        Raises:
            RequestError: documents were packed for windows of another length.
        """
        if self.packed is None:
            return seq_len
        if self.packed.seq_len != seq_len:
            raise RequestError(
                f"{self.source}: documents were packed for samples of {self.packed.seq_len:,} tokens, and data.seq_len "
                f"(model.decoder.max_position_embeddings) is {seq_len:,}: give --data.seq_len {self.packed.seq_len}, "
                f"or run `lm data prepare` again with --seq_len {seq_len} and another --output"
            )
        return seq_len + 1

    def token_bytes(self, tokenizer: Tokenizer) -> np.ndarray:
        """Bytes of text that each token stands for in these shards, on average: (V,) float64.

        `Tokenizer.token_bytes` times a factor, with which the tokens of shards that `lm data prepare` made add up to
        the bytes of the text itself, and others to what some of them decode to.
        """
        sizes = tokenizer.token_bytes().astype(np.float64)
        weights = [sum(shard.row_groups) for shard in self.by_file.values()]
        ratios = [shard.text_ratio for shard in self.by_file.values()]
        if None not in ratios and any(weights):
            return sizes * np.average(ratios, weights=weights)
        if tokenizer.byte_level:
            return sizes
        ids = self.beginning()[:DECODED_TOKENS]
        return sizes * (tokenizer.text_bytes(ids) / max(1, sizes[ids].sum()))

    def beginning(self) -> np.ndarray:
        """The tokens of the first block that is not damaged."""
        for index in range(len(self.blocks)):
            with suppress(BadBlock):  # whoever reads it next will say so
                return self.read(index)
        return np.empty(0, self.column.dtype)

    def require_buffer(self, shuffle_buffer: int) -> None:
        """Refuse a buffer that does not hold the largest block.

        Raises:
            RequestError: names the block.
        """
        if self.largest.tokens > shuffle_buffer:
            raise RequestError(
                f"{self.largest}: {self.largest.tokens} tokens in one piece, more than data.shuffle_buffer "
                f"({shuffle_buffer}); raise data.shuffle_buffer, or write the shard again with smaller row groups "
                "(`lm data prepare`)"
            )

    def require_windows(self, seq_len: int) -> int:
        """The number of windows.

        Raises:
            RequestError: there is none; says how many tokens there are and how many it takes, or why the shards hold
                none. Or no token is a target.
        """
        if not any(shard.targets for shard in self.by_file.values()):
            raise RequestError(f"{self.source}: every label is {IGNORED}, so no token is a target; leave `labels` out")
        if not self.tokens:
            self._refuse_empty()
        total = int(self.windows(seq_len).sum())
        if total == 0:
            longest = max((block.tokens for block in self.blocks), default=0)
            raise RequestError(
                f"{self.source}: {self.tokens} tokens, at most {longest} of them in one block, but a window takes "
                f"{seq_len + 1} (seq_len + 1): give more data or lower data.seq_len"
            )
        return total

    def require_targets(self, seq_len: int, limit: int | None = None) -> None:
        """Refuse labels by which the first `limit` windows, or all, have no target: their loss would be NaN.

        Raises:
            RequestError: no token is a target; names the first file.
        """
        counts, stride = self.windows(seq_len).tolist(), self.stride(seq_len)
        left = total = min(limit or self.tokens, sum(counts))
        for index, count in enumerate(counts):
            if not self.labels or left <= 0:
                break
            with suppress(BadBlock):  # whoever reads it next will say so
                targets = self.read_tokens(index).targets
                if targets is None or targets[1 : min(left, count) * stride + 1].any():
                    return
            left -= count
        if self.labels:
            raise RequestError(
                f"shard {self.blocks[0].parts[0].file}: each label of the first {plural(total, 'window')} is "
                f"{IGNORED}: a validation has no loss; take more tokens, name other files, or leave `labels` out"
            )

    def _refuse_empty(self) -> NoReturn:
        shards = list(self.by_file.values())
        with _readable(shards[0]), shards[0].open() as (parquet, _):
            why = shards[0].column.why_empty(parquet)
        others = f", and no other of {self.source} has a token" * (len(shards) > 1)
        raise RequestError(f"shard {shards[0].file} {why}{others}: write it again, or name other files")

    def left_over(self, seq_len: int) -> int:
        """How many tokens are in no window: less than `seq_len` at the end of each block."""
        windows, stride = self.windows(seq_len), self.stride(seq_len)
        return self.tokens - int((windows * stride + ((windows > 0) & (stride == seq_len))).sum())

    @property
    def document_tokens(self) -> int:
        """`tokens`; of packed rows without the first of each, and without what fills them up, where that is known."""
        if self.packed is None:
            return self.tokens
        filling = sum(shard.padding or 0 for shard in self.by_file.values())
        return self.tokens - self.tokens // (self.packed.seq_len + 1) - filling

    @property
    def filled_up(self) -> float | None:
        """The fraction of the targets of packed rows that only fill them up; None where it is not known."""
        counts = [shard.padding for shard in self.by_file.values()]
        if self.packed is None or None in counts or not self.tokens:
            return None
        return sum(counts) / (self.tokens / (self.packed.seq_len + 1) * self.packed.seq_len)

    @property
    def largest(self) -> Block:
        """The block with the most tokens."""
        return max(self.blocks, key=lambda block: block.tokens)

    def read(self, index: int) -> np.ndarray:
        """Read the ids of one block of `blocks`; `read_tokens` says more."""
        return self.read_tokens(index).ids

    def pieces(self, stop: int | None = None) -> Iterator[np.ndarray]:
        """The first `stop` tokens of all shards laid end to end, or all of them, in pieces (n,).

        Of packed rows without the first token of each, which is context alone, and without what fills them up.
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

    def read_tokens(self, index: int) -> Tokens:
        """Read one block of `blocks`.

        Returns:
            The ids, uint16 where the vocabulary has at most 65536 ids, else uint32, all of them inside the vocabulary;
            and which of them are targets.

        Raises:
            BadBlock: nulls, ids outside the vocabulary, damaged bytes, or a number of tokens or content that is not
                what the footer or manifest said; names the file, row group and row.
            RunError: a file cannot be opened or read at all.
        """
        parts = self.blocks[index].parts
        if len(parts) > 1 and is_remote(parts[0].file):  # small files take as long to ask for as to read
            with reader_pool(FOOTER_THREADS) as pool:
                tokens = _join(list(pool.map(self.read_part, parts)))
        else:
            tokens = _join([self.read_part(part) for part in parts])
        if self.packed is None:
            return tokens
        return tokens._replace(targets=self.packed.targets(tokens.ids))

    def read_part(self, part: Part) -> Tokens:
        """Read a part of a block; a file of a store goes through the cache."""
        if not is_remote(part.file):
            return self._decode(part)
        shard = self.by_file[part.file]
        column = shard.column
        kept = np.dtype([("id", column.dtype), ("target", bool)]) if shard.labels else column.dtype
        if self.cache is None or not self.cache.fits(part.tokens * kept.itemsize):
            return self._fetch(part)
        padding = () if column.pad_id is None else (column.pad_id, column.eos_id)
        key = BlockCache.key(
            shard.file, shard.size, shard.modified, shard.digest, tuple(part.row_groups), column.name,
            column.dtype.name, *padding,
        )
        tokens = self._kept(part, key, kept)
        if tokens is not None:
            return tokens
        with self.cache.reserve(key, shard.patience):
            tokens = self._kept(part, key, kept)  # by another reader, while this one waited
            if tokens is None:
                tokens = self._fetch(part)
                entry = tokens.ids
                if shard.labels:
                    entry = np.empty(part.tokens, kept)
                    entry["id"], entry["target"] = tokens.ids, True if tokens.targets is None else tokens.targets
                self.cache.put(key, entry)
        return tokens

    def _kept(self, part: Part, key: str, kept: np.dtype) -> Tokens | None:
        """What the cache has of a part, if it fits the vocabulary in use."""
        entry = self.cache.get(key, kept)
        if entry is None or entry.shape != (part.tokens,):
            return None
        tokens = Tokens(entry["id"].copy(), entry["target"].copy()) if kept.names else Tokens(entry)
        return tokens if self.by_file[part.file].column.holds(tokens.ids) else None

    def _fetch(self, part: Part) -> Tokens:
        """Read a part of a remote shard."""
        try:
            return self._decode(part)
        except BadBlock:  # perhaps it was damaged on the way: fetch it once more
            self._footers.pop(part.file, None)
            return self._decode(part)

    def _decode(self, part: Part) -> Tokens:
        """Read a part, row group by row group, so that a bad one is named."""
        shard, where, groups = self.by_file[part.file], str(part), []
        try:
            with shard.open(self._footers.get(shard.file)) as (parquet, _):
                self._keep_footer(shard.file, parquet.metadata)
                for group in part.row_groups:
                    where = f"shard {part.file}, row group {group}"
                    groups.append(shard.column.decode(parquet, group, part.file))
                    if len(groups[-1].ids) != shard.row_groups[group]:
                        raise BadBlock(
                            f"{where} holds {len(groups[-1].ids)} tokens where its footer or manifest says "
                            f"{shard.row_groups[group]}: it was changed or badly written; write it again"
                        )
        except DAMAGE as error:
            raise _not_readable(where, error) from error
        return _join(groups)

    def _keep_footer(self, file: str, footer: pq.FileMetaData) -> None:
        if len(self._footers) >= FOOTERS_KEPT:
            self._footers.clear()
        self._footers[file] = footer

    def fingerprint(self) -> list["Fingerprint"]:
        """Name below its source, bytes, tokens and content of every shard, in order, and its place in its block."""
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


def _packed(shards: Collection[Shard], source: str) -> PackedRows | None:
    """What the rows of shards are; None where they are documents.

    Raises:
        RequestError: shards differ, or there is a `data.pad_id`.
    """
    first, *others = shards
    for other in others:
        if other.packed != first.packed:
            were = [f"{shard.file} {_describe_packing(shard)}" for shard in (first, other)]
            raise RequestError(f"{source}: {' and '.join(were)}; prepare them with the same --packing and --seq_len")
    if first.packed is not None and first.column.pad_id is not None:
        raise RequestError(f"{source}: data.pad_id is for rows that somebody else filled up; leave it out: documents "
                           "were packed by `lm data prepare`, and what fills their rows up is known")  # fmt: skip
    return first.packed


def _describe_packing(shard: Shard) -> str:
    if shard.packed is None:
        return "is a stream of documents"
    return f"has documents packed for samples of {shard.packed.seq_len:,} tokens"


def _blocks(shards: Sequence[Shard], block_tokens: int) -> Iterator[Block]:
    """Join parts of consecutive shards for as long as they stay within `block_tokens`."""
    parts, held = [], 0
    for part in (part for shard in shards for part in _parts(shard)):
        if parts and held + part.tokens > block_tokens:
            yield Block(tuple(parts), held)
            parts, held = [], 0
        parts.append(part)
        held += part.tokens
    if parts:
        yield Block(tuple(parts), held)


def _parts(shard: Shard) -> Iterator[Part]:
    """Group row groups for as long as they stay within BLOCK_TOKENS."""
    first, held = 0, 0
    for group, tokens in enumerate(shard.row_groups):
        if group > first and held + tokens > BLOCK_TOKENS:
            yield Part(shard.file, range(first, group), held)
            first, held = group, 0
        held += tokens
    if shard.row_groups:
        yield Part(shard.file, range(first, len(shard.row_groups)), held)


def _join(parts: Sequence[Tokens]) -> Tokens:
    """Tokens end to end."""
    if len(parts) == 1:
        return parts[0]
    targets = None
    if any(part.targets is not None for part in parts):
        targets = np.concatenate([np.ones(len(part.ids), bool) if part.targets is None else part.targets
                                  for part in parts])  # fmt: skip
    return Tokens(np.concatenate([part.ids for part in parts]), targets)


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


def common_file(train: Shards, val: Shards) -> tuple[str, str] | None:
    """A file that both hold, by its paths in each: the same file, or a copy of it; None: there is none.

    Raises:
        RunError: files that seem to be copies cannot be read.
    """
    by_identity = {file_identity(shard.file): shard for shard in train.by_file.values()}
    by_content = defaultdict(list)
    for shard in train.by_file.values():
        by_content[shard.digest, shard.size].append(shard)
    for shard in val.by_file.values():
        if not sum(shard.row_groups):
            continue
        if same := by_identity.get(file_identity(shard.file)):
            return same.file, shard.file
        alike = by_content.get((shard.digest, shard.size), []) if shard.digest is not None else []
        for same in alike:  # a footer holds no more than the bounds of the ids; in shards of ours a digest of them all
            if np.array_equal(train.read_part(next(_parts(same))).ids, val.read_part(next(_parts(shard))).ids):
                return same.file, shard.file
    return None


# ---- fingerprint -----------------------------------------------------------------------------------------------------


class Fingerprint(NamedTuple):
    """What must not change of a shard between a stop and a resume."""

    name: str
    size: int
    tokens: int
    digest: str | None = None  # of its content; None where it is not known
    offset: int = 0  # tokens of other shards before it in the block in which it begins


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
    if not lines and [entry.offset for entry in old] != [entry.offset for entry in new]:
        lines = ["the same shards, cut into other windows than by the lm of that time"]
    more = [f"and {len(lines) - 3} more"] if len(lines) > 3 else []
    return ", ".join(sorted(lines)[:3] + more)
