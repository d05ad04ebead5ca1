"""Which files a source means, and how many tokens each of their row groups has.

Before a batch's first stop: `data/shards` asks this module what there is. A folder that `lm data prepare` made is
taken at its manifest's word once the file sizes agree, so no footer is opened; of anyone else's shards the footers
are read, many at a time.
"""

import posixpath
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from lm.data.column import TOKENIZER_KEY, Column
from lm.data.glob import glob_expression, split_glob
from lm.data.pages import DAMAGE, LAYOUT, footer_digest, read_footer
from lm.data.remote import PATIENCE, first_line, is_remote, open_filesystem, with_retries
from lm.documents import parse_json
from lm.errors import RequestError, RunError

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


# ---- files ----------------------------------------------------------------------------------------------------------


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


# ---- our own folders ------------------------------------------------------------------------------------------------


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
