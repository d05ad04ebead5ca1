"""The catalog of a source: which Parquet shards it has, and how many tokens are in each row group.

Anyone's Parquet with a column of token ids will do. Of a folder that `lm data prepare` made, the manifest says how many
tokens there are; of other shards, their footers do. `data/shards` opens them.
"""

import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from errno import EIO
from typing import NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from lm.data.parquet import (
    DAMAGE,
    LABELS,
    LAYOUT,
    PACKED_KEY,
    TOKENIZER_KEY,
    BadBlock,
    Column,
    PackedRows,
    footer_digest,
    read_footer,
)
from lm.errors import RequestError, RunError, first_line
from lm.system.files import PATIENCE, is_remote
from lm.system.parsing import parse_json
from lm.system.sources import find_entries, list_files, open_file
from lm.system.units import listed

MANIFEST = "manifest.json"  # in a folder that `lm data prepare` made
INDEX = "_index.json"  # in a folder of other shards that `lm data index` indexed; readers of Parquet leave it out
FOOTER_THREADS = 16
SUFFIX = re.compile(r"\.(parquet|pq)$", re.IGNORECASE)
HIDDEN = re.compile(r"(^|/)[._]")


@dataclass(frozen=True)
class Shard:
    file: str  # its path or URL, for messages
    name: str  # its path below the source, which stays the same when the folder is moved
    filesystem: pafs.FileSystem
    path: str  # there
    size: int  # bytes
    modified: int | str | None  # ns, or what a store calls the content; None where the file system does not know it
    patience: float  # seconds for all attempts of one read, where it is remote
    column: Column  # how its token ids are read
    row_groups: tuple[int, ...] = ()  # tokens of each
    digest: str | None = None  # of its footer; None where the manifest has none
    labels: bool = False  # whether it has a column of them, which marks the targets
    text_ratio: float | None = None  # bytes of the text over those of `Tokenizer.token_bytes`, if a manifest has them
    packed: PackedRows | None = None  # what its rows are; None where they are documents
    padding: int | None = None  # tokens of padding in packed rows, where a manifest has their number

    @contextmanager
    def open(self, footer: pq.FileMetaData | None = None) -> Iterator[tuple[pq.ParquetFile, str | None]]:
        """The open file, with checksums verified, and the digest of its footer; a footer that is given is not read."""
        with open_file(self.filesystem, self.path, f"shard {self.file}", self.patience) as handle:
            digest = None
            if footer is None:
                content = read_footer(handle)
                digest = footer_digest(content)
                if self.digest not in (None, digest):  # never parsed: Arrow does not survive all damage to a footer
                    raise pa.ArrowInvalid("its footer is not the one that it had when it was written")
                footer = pq.read_metadata(pa.BufferReader(content))
            yield pq.ParquetFile(handle, metadata=footer, page_checksum_verification=True), digest


def find_shards(
    source: str, column: Column, tokenizer_sha256: str | None = None, patience: float = PATIENCE, use_index: bool = True
) -> tuple[list[Shard], int | None]:
    """The shards of a source, as for `Shards.open`, with their token counts; the vocabulary's size, where it is known.

    The counts are those of a manifest, or of an index of `lm data index`, or else of the footers.
    """
    listing = list_files(source, patience)
    files, manifest = listing.files, None
    if listing.is_folder:
        files = {name: file for name, file in files.items() if SUFFIX.search(name) and not HIDDEN.search(name)}
        manifest = _read_manifest(source, listing.filesystem, listing.path, patience)
        if not files and manifest is None:
            command = f"`lm data prepare --input {source} --output data/NAME`"
            raise RequestError(
                f"{source}: the folder holds no .parquet file; {command} makes some of text or token ids"
            )
    shards = [
        Shard(listing.name(file), name, listing.filesystem, file.path, file.size, file.modified, patience, column)
        for name, file in files.items()
    ]
    if manifest is not None:
        try:
            return _from_manifest(manifest, source, posixpath.basename(listing.path), shards, tokenizer_sha256)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RequestError(f"the manifest.json of {source} is damaged ({error!r}): prepare it again") from error
    if listing.is_folder and use_index and (index := listing.files.get(INDEX)):
        from lm.data.shard_index import read_index

        with open_file(listing.filesystem, index.path, source, patience) as file:
            return read_index(file.read(), source, shards, column, tokenizer_sha256)
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return list(pool.map(lambda shard: _from_footer(shard, tokenizer_sha256), shards)), None


def common_packing(shards: Collection[Shard], source: str) -> PackedRows | None:
    """How the rows of shards are packed, the same for all shards; None if the rows are documents."""
    first, *others = shards
    for other in others:
        if other.packed != first.packed:
            raise RequestError(
                f"{source}: documents were packed differently in {first.file} and {other.file}: prepare them with the "
                "same --packing and --seq_len"
            )
    if first.packed is not None and first.column.pad_id is not None:
        raise RequestError(f"{source}: data.pad_id is for rows that another program padded: leave it out")
    return first.packed


# ---- by the manifest -------------------------------------------------------------------------------------------------


def _read_manifest(source: str, filesystem: pafs.FileSystem, path: str, patience: float) -> dict | None:
    """The manifest beside a split folder; None where there is none, or another program wrote it."""
    folder, split = posixpath.split(path)
    if is_remote(source) and not folder:  # a bucket has no parent
        return None
    for place, inside in ((posixpath.join(folder, MANIFEST), False), (f"{path}/{MANIFEST}", True)):
        try:
            place, kind, entries = find_entries(filesystem, place, False, source, patience)
        except FileNotFoundError:  # beside a repository of the Hub
            continue
        if kind != pafs.FileType.File:
            continue
        try:
            with open_file(filesystem, place, source, patience) as file:
                manifest = parse_json(file.read())
        except ValueError as error:
            raise RequestError(
                f"{place} is damaged ({first_line(error)}); remove its folder and run `lm data prepare` again"
            ) from error
        splits = manifest.get("splits") if isinstance(manifest, dict) and "layout" in manifest else None
        if isinstance(splits, dict) and inside:
            hint = f"name one split, {path}/train or {path}/val; in a fit give the folder as data.path"
            raise RequestError(f"{source} is a prepared folder: {hint}")
        if isinstance(splits, dict) and split in splits:
            return {**manifest, "modified": entries[0].modified or 0}
    return None


def _from_manifest(
    manifest: dict, source: str, split: str, shards: list[Shard], tokenizer_sha256: str | None
) -> tuple[list[Shard], int]:
    """The shards with the manifest's token counts, once these are the files that it lists."""
    folder = posixpath.dirname(source.rstrip("/")) or "."
    place, start_again = f"{folder}/manifest.json", f"remove {folder} and run `lm data prepare` again"
    if manifest["layout"] != LAYOUT:
        raise RequestError(f"{place}: layout {manifest['layout']!r} is not {LAYOUT}; made by another version of lm?")
    facts = manifest["splits"][split]
    entries = {entry["file"]: entry for entry in facts["shards"]}
    packed = PackedRows(*manifest["packed"]) if manifest.get("packed") else None
    stored = sum(sum(entry["row_groups"]) for entry in facts["shards"])
    if stored < facts["tokens"] or packed is None and stored > facts["tokens"]:  # packed rows have padding too
        raise RequestError(f"{place} is damaged: its row groups have not the tokens of the split; {start_again}")
    text_ratio = facts["bytes"] / counted if (counted := facts.get("token_bytes")) else None
    known = {"text_ratio": text_ratio, "packed": packed, "labels": manifest.get("labels", False)}
    files = {f"{split}/{shard.name}": replace(shard, **known) for shard in shards}
    if missing := entries.keys() - files.keys():
        raise RequestError(f"{place} lists {min(missing)!r}, which is missing; fetch it, or {start_again}")
    if others := files.keys() - entries.keys():
        raise RequestError(f"shard {files[min(others)].file} is not in its manifest; move it away")
    column = shards[0].column
    if manifest["column"] != column.name:
        raise RequestError(f"{place}: the token column is {manifest['column']!r}, not {column.name!r}; set `column`")
    _check_tokenizer(source, manifest["tokenizer"], tokenizer_sha256)
    eos_id = manifest.get("eos_id")
    if None not in (eos_id, column.eos_id) and eos_id != column.eos_id:
        raise RequestError(
            f"{place}: documents end with token {eos_id}, and those of the tokenizer in use with {column.eos_id}: use "
            f"the tokenizer in {folder}, or prepare the text again with the same --eos_token"
        )
    complete = []
    for file, entry in entries.items():
        counts, digest, padding = tuple(entry["row_groups"]), entry.get("digest"), entry.get("padding")
        shard = replace(files[file], row_groups=counts, digest=digest, padding=padding)
        if shard.size != entry["size"]:
            raise RequestError(
                f"shard {shard.file} has {shard.size} bytes where the manifest says {entry['size']}: "
                f"it is truncated or was changed; fetch it, or {start_again}"
            )
        complete.append(shard)
    if not is_remote(source):
        _check_newer(complete, manifest["modified"])
    return complete, manifest["vocab_size"]


def _check_newer(shards: list[Shard], written: int) -> None:
    """Look at the footers of shards that changed after the manifest was written, which is written last."""

    def check(shard: Shard) -> None:
        with _readable(shard), shard.open():
            pass

    newer = [shard for shard in shards if shard.digest and isinstance(shard.modified, int) and shard.modified > written]
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        list(pool.map(check, newer))


def _check_tokenizer(place: str, made_with: str, in_use: str | None) -> None:
    if in_use is not None and made_with != in_use:
        raise RequestError(
            f"{place} was made with another tokenizer (SHA-256 {made_with[:12]}..., yours is {in_use[:12]}...); "
            "use the tokenizer.json beside the shards, or prepare them again"
        )


# ---- by the footers --------------------------------------------------------------------------------------------------


def _from_footer(shard: Shard, tokenizer_sha256: str | None) -> Shard:
    """The shard with the token counts of its row groups."""
    with _readable(shard), shard.open() as (parquet, digest):
        schema, facts = parquet.schema_arrow, parquet.metadata.metadata or {}
        shard.column.check_type(schema, shard.file)
        if TOKENIZER_KEY in facts:
            _check_tokenizer(shard.file, facts[TOKENIZER_KEY].decode(errors="replace"), tokenizer_sha256)
        packed = PackedRows(*parse_json(facts[PACKED_KEY])) if PACKED_KEY in facts else None
        counts = tuple(shard.column.count(parquet, shard.file))
        return replace(
            shard, row_groups=counts, digest=digest, labels=LABELS in shard.column.beside(schema), packed=packed
        )


@contextmanager
def _readable(shard: Shard) -> Iterator[None]:
    """Before any work, a shard that cannot be read is a wrong request; not what a store may answer later."""
    try:
        yield
    except BadBlock as error:
        raise RequestError(str(error)) from error
    except DAMAGE as error:
        raise RequestError(str(explain_damage(f"shard {shard.file}", error))) from error


def explain_damage(where: str, error: Exception) -> RunError:
    """What a failed read means: damage, a file that is not there, or a machine that could not read it."""
    reason = first_line(error)
    if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) not in (None, EIO):
        return RunError(f"{where}: cannot be read ({reason})")
    if isinstance(error, MemoryError):  # never skipped: the next time there may be enough
        return RunError(f"{where}: not enough memory to decode it ({reason}), unless the file is damaged")
    return BadBlock(
        f"{where}: cannot be decoded ({reason}); is it Parquet? If so, it is truncated, damaged or was changed: fetch "
        "or write it again; of texts, and of other token ids, `lm data prepare` makes Parquet"
    )


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
    return listed(sorted(lines), 3)
