"""Parquet files of token ids: how one is written, checked and decoded.

Beside a batch's way: `data/prepare` writes shards with this, `data/shards` reads them with it.
"""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm.errors import RequestError, RunError

# ---- pages -----------------------------------------------------------------------------------------------------------
# The pages of our own layout, straight into numpy: three times as fast as through Arrow's nested lists.
#
# Beside the batch's way, under `data/parquet`. In a shard that `lm data prepare` wrote, the ids of a row group are
# byte-stream-split pages without nulls or empty rows, so all rows are laid end to end without knowing where one ends.
# `read_tokens` reads just that; of anything else it says None, and `data/parquet` asks Arrow, which reads every layout
# and says what is wrong with damaged ones.
#
# The format: https://github.com/apache/parquet-format, `src/main/thrift/parquet.thrift` (PageHeader) and `Encodings.md`
# (BYTE_STREAM_SPLIT); Thrift's compact protocol: `doc/specs/thrift-compact-protocol.md` of apache/thrift.

LAYOUT = 1
LAYOUT_KEY = b"lm.layout"  # Parquet metadata of our own shards: how their pages are written
FOOTER_BYTES = 2**16  # most footers have fewer, so one request to an object store gets all of it
CODEC = "lz4_raw"  # in that layout; to ask a damaged footer for the codec makes Arrow abort the process
# What reading damaged bytes leads to, in Arrow and around it; a failing disk or network is an OSError, too.
DAMAGE = (
    LookupError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError, SystemError, OSError,
    pa.ArrowException,
)  # fmt: skip
# Fields of a PageHeader, and of the DataPageHeader inside it
TYPE, SIZE, COMPRESSED_SIZE, CHECKSUM, DATA_PAGE = 1, 2, 3, 4, 5
VALUES = 1


def read_tokens(
    handle: pa.NativeFile, footer: pq.FileMetaData, group: int, leaf: int, dtype: np.dtype
) -> np.ndarray | None:
    """Read the ids of one row group.

    Args:
        handle: the open file.
        footer: of that file.
        group: the row group.
        leaf: index of the column among the leaves of the schema.
        dtype: uint16 or uint32.

    Returns:
        (tokens,) of `dtype`; None if this is not our layout, has an id that `dtype` cannot hold, or is damaged.
    """
    if not is_ours(footer, group, leaf):
        return None
    chunk = footer.row_group(group).column(leaf)
    data = memoryview(handle.read_at(chunk.total_compressed_size, chunk.data_page_offset))
    tokens = np.empty(chunk.num_values, dtype=dtype)
    try:
        return tokens if _decode(data, tokens) else None
    except DAMAGE:
        return None  # the read itself stands outside, so a failing disk or network is heard


def is_ours(footer: pq.FileMetaData, group: int, leaf: int) -> bool:
    """Whether a row group is in our own layout."""
    if (footer.metadata or {}).get(LAYOUT_KEY) != str(LAYOUT).encode():
        return False
    chunk = footer.row_group(group).column(leaf)
    nested = footer.schema.column(leaf).max_repetition_level == 1
    return nested and chunk.physical_type == "INT32" and set(chunk.encodings) == {"RLE", "BYTE_STREAM_SPLIT"}


def _decode(data: memoryview, tokens: np.ndarray) -> bool:
    """Fill `tokens` from the pages of a column chunk; False if a page is not as expected."""
    place = done = 0
    while done < len(tokens):
        header, place = _read_struct(data, place)
        page = data[place : place + header[COMPRESSED_SIZE]]
        place += header[COMPRESSED_SIZE]
        about = header[DATA_PAGE]
        if header[TYPE] != 0 or CHECKSUM in header and zlib.crc32(page) != header[CHECKSUM] % 2**32:
            return False
        page = memoryview(pa.Codec(CODEC).decompress(page, header[SIZE])).cast("B")
        count = about[VALUES]
        if count < 1:  # or a damaged header could turn in circles
            return False
        if not _join_bytes(_skip_levels(page), tokens[done : done + count]):
            return False
        done += count
    return done == len(tokens)


def _skip_levels(page: memoryview) -> memoryview:
    """The values of a page, without the levels before them.

    Those tell rows apart, which is not asked, and say where a row is empty or null. Such a row has no value, so the
    values are then fewer than the page's header counts, and `_join_bytes` fails.
    """
    repetition, place = _read_length(page, 0)
    definition, place = _read_length(page, place + repetition)
    return page[place + definition :]


def _join_bytes(values: memoryview, tokens: np.ndarray) -> bool:
    """Put the ids together again: first the low bytes of all of them, then the next ones ..."""
    streams = np.frombuffer(values, dtype=np.uint8).reshape(4, len(tokens))
    size = tokens.dtype.itemsize
    if streams[size:].max(initial=0):
        return False
    tokens[:] = streams[size - 1]
    for stream in streams[: size - 1][::-1]:
        tokens <<= 8
        tokens |= stream
    return True


def _read_length(data: memoryview, place: int) -> tuple[int, int]:
    return int.from_bytes(data[place : place + 4], "little"), place + 4


def _read_varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:  # or damaged bytes could make a number of megabytes
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
    raise ValueError("a number of more than 64 bits")


def _read_zigzag(data: memoryview, place: int) -> tuple[int, int]:
    value, place = _read_varint(data, place)
    return (value >> 1) ^ -(value & 1), place


def _read_struct(data: memoryview, place: int) -> tuple[dict, int]:
    """A struct of Thrift's compact protocol as field id -> value, and where it ends."""
    fields, field = {}, 0
    while data[place]:
        step, kind = data[place] >> 4, data[place] & 0x0F
        place += 1
        if step:
            field += step
        else:
            field, place = _read_zigzag(data, place)
        if kind in (1, 2):  # true, false
            fields[field] = kind == 1
        elif kind in (4, 5, 6):  # i16, i32, i64
            fields[field], place = _read_zigzag(data, place)
        elif kind == 8:  # bytes
            size, place = _read_varint(data, place)
            fields[field], place = bytes(data[place : place + size]), place + size
        elif kind == 12:
            fields[field], place = _read_struct(data, place)
        else:
            raise ValueError(f"field type {kind} is not one of a page header")
    return fields, place + 1


def read_footer(handle: pa.NativeFile) -> bytes:
    """The footer of a Parquet file, up to the end of the file.

    Raises:
        pyarrow.ArrowInvalid: this is no Parquet file, or not the whole of it.
    """
    size = handle.size()
    first = max(0, size - FOOTER_BYTES)
    end = handle.read_at(size - first, first)
    length = int.from_bytes(end[-8:-4], "little") + 8
    if end[-4:] != b"PAR1" or length > size - 4:
        raise pa.ArrowInvalid("it has no Parquet footer at its end")
    return end[-length:] if length <= len(end) else handle.read_at(length, size - length)


def footer_digest(footer: bytes) -> str:
    """What tells one content of a shard from another, in 32 hex digits: the footer has places, sizes and least and
    greatest ids of all row groups, and in our own shards a digest of all tokens.
    """
    return blake2b(footer, digest_size=16).hexdigest()


# ---- column ----------------------------------------------------------------------------------------------------------
# The token column of one Parquet file: its type, its counts, its tokens, and who is to blame when it is bad.
#
# Beside the batch's way, under `data/shards`, which knows the files and calls this for each. Pages in our own layout go
# straight to numpy (`data/parquet`), others through Arrow's value buffers; only a column that turned out bad is looked
# at row by row.

LARGEST_ID = 2**31  # without a vocabulary: what an int32 tensor can carry
TOKENIZER_KEY = b"lm.tokenizer"  # Parquet metadata of our own shards: the SHA-256 of the tokenizer they were made with


@dataclass(frozen=True)
class Column:
    """How token ids are asked for.

    Args:
        name: the column.
        vocab_size: ids are in [0, vocab_size); None if not known.
    """

    name: str
    vocab_size: int | None = None

    @property
    def limit(self) -> int:
        return LARGEST_ID if self.vocab_size is None else self.vocab_size

    @property
    def dtype(self) -> np.dtype:
        """uint16 where the vocabulary fits, else uint32."""
        return np.dtype(np.uint16 if self.limit <= 2**16 else np.uint32)

    def check_type(self, schema: pa.Schema, file: str) -> None:
        """Refuse a file that has no such column, or one that does not hold lists of integers.

        Raises:
            RequestError: names the file and what it holds instead.
        """
        if self.name not in schema.names:
            raise RequestError(
                f"shard {file} has no column {self.name!r}; it has {', '.join(schema.names) or 'none'}; set data.column"
            )
        kind = schema.field(self.name).type
        if not _holds_ids(kind):
            text = "; tokenize it first with `lm data prepare`" if pa.types.is_string(kind) else ""
            raise RequestError(f"shard {file}: column {self.name!r} is {kind}, not a list of integers{text}")

    def count(self, handle: pa.NativeFile, parquet: pq.ParquetFile, file: str) -> list[int]:
        """Tokens of every row group, from the footer's statistics where it has them, else by decoding.

        An empty or null list is one null leaf value, so the tokens are the leaf's values less its nulls. Statistics
        that show ids outside of the vocabulary are not believed either: decoding finds the row.

        Raises:
            RunError: a row group that had to be decoded holds bad ids.
            pyarrow.ArrowException, OSError: it cannot be decoded.
        """
        leaf = self._leaf(parquet.metadata)

        def count_one(group: int) -> int:
            chunk = parquet.metadata.row_group(group).column(leaf)
            sound = chunk.physical_type == parquet.schema.column(leaf).physical_type  # or Arrow aborts the process
            facts = chunk.statistics if sound else None
            if facts is not None and facts.has_null_count:
                if not facts.has_min_max or (facts.min >= 0 and facts.max < self.limit):
                    return chunk.num_values - facts.null_count
            return len(self.decode(handle, parquet, [group], file))

        return [count_one(group) for group in range(parquet.metadata.num_row_groups)]

    def _leaf(self, footer: pq.FileMetaData) -> int:
        """Where the column's values stand among all leaves of the schema.

        Raises:
            pyarrow.ArrowInvalid: there is no such column, though there was: the footer is damaged or another.
        """
        paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
        leaf = next((i for i, path in enumerate(paths) if path.startswith(self.name + ".")), None)
        if leaf is None:
            raise pa.ArrowInvalid(f"there is no column {self.name!r} of lists")
        return leaf

    def decode(self, handle: pa.NativeFile, parquet: pq.ParquetFile, groups, file: str) -> np.ndarray:
        """All tokens of some row groups, end to end.

        Args:
            handle: the open file.
            parquet: Arrow's reader of it.
            groups: row groups, in order.
            file: its name, for the messages.

        Returns:
            (tokens,) of `dtype`, every id inside the vocabulary; memory of its own.

        Raises:
            RunError: nulls, or ids outside the vocabulary; names row group and row.
            pyarrow.ArrowException, OSError: bytes that cannot be read or decoded.
        """
        leaf = self._leaf(parquet.metadata)
        values = [read_tokens(handle, parquet.metadata, group, leaf, self.dtype) for group in groups]
        if any(part is None or not self.holds(part) for part in values):
            try:
                values = [_values(chunk) for chunk in self._chunks(parquet, groups)]
            except OSError as error:  # as Arrow also calls damage; but our own pages were read a moment ago
                if all(is_ours(parquet.metadata, group, leaf) for group in groups):
                    raise pa.ArrowInvalid(str(error)) from error
                raise
        if any(part is None or not self.holds(part) for part in values):
            raise RunError(self._blame(parquet, groups, file))
        if len(values) == 1 and values[0].dtype == self.dtype and values[0].flags.owndata:
            return values[0]
        tokens = np.empty(sum(map(len, values)), dtype=self.dtype)
        return np.concatenate(values, out=tokens, casting="unsafe") if values else tokens

    def holds(self, tokens: np.ndarray) -> bool:
        """Whether every id is inside the vocabulary."""
        if not tokens.size or (tokens.dtype.kind == "u" and np.iinfo(tokens.dtype).max < self.limit):
            return True
        return int(tokens.max()) < self.limit and (tokens.dtype.kind == "u" or int(tokens.min()) >= 0)

    def _chunks(self, parquet: pq.ParquetFile, groups) -> list[pa.Array]:
        table = parquet.read_row_groups(list(groups), columns=[self.name], use_threads=False)
        column = table.column(self.name)  # of a damaged footer there may be none, or another kind
        if not _holds_ids(column.type):
            raise pa.ArrowInvalid(f"column {self.name!r} is {column.type}, not a list of integers")
        return column.chunks

    def _blame(self, parquet: pq.ParquetFile, groups, file: str) -> str:
        """Say what is wrong with row groups that hold bad ids, with the first bad row group and row."""
        for group in groups:
            first = 0
            for chunk in self._chunks(parquet, [group]):
                wrong = self._blame_rows(chunk)
                if wrong is not None:
                    row, reason = wrong
                    return f"shard {file}, row group {group}, row {first + row}: {reason}"
                first += len(chunk)
        return f"shard {file}: row groups {list(groups)} held bad ids at first, but do not now; is the storage healthy?"

    def _blame_rows(self, rows: pa.Array) -> tuple[int, str] | None:
        """The first bad row of an array of lists, and what is wrong with it."""
        found = []
        nulls = np.flatnonzero(rows.is_null().to_numpy(zero_copy_only=False))
        if nulls.size:
            found.append((int(nulls[0]), "the row is null; leave such rows out"))
        ends = np.cumsum(pc.fill_null(pc.list_value_length(rows), 0).to_numpy(zero_copy_only=False))
        values = rows.flatten()
        holes = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
        if holes.size:
            row = int(np.searchsorted(ends, holes[0], side="right"))
            found.append((row, "a token id is null; leave nulls out"))
        ids = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
        outside = np.flatnonzero((ids < 0) | (ids >= self.limit))
        if outside.size:
            row = int(np.searchsorted(ends, outside[0], side="right"))
            vocabulary = f"the vocabulary of {self.limit}" if self.vocab_size is not None else "any vocabulary"
            reason = f"token id {ids[outside[0]]} is outside {vocabulary}; was it made with another tokenizer?"
            found.append((row, reason))
        return min(found, default=None)


def _holds_ids(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)


def _values(rows: pa.Array) -> np.ndarray | None:
    """The values of an array of lists without a copy; None if there are nulls among them."""
    if rows.null_count:
        return None
    values = rows.flatten()  # respects slices and offsets, and copies nothing while no row is null
    return None if values.null_count else values.to_numpy(zero_copy_only=True)


# ---- writer ----------------------------------------------------------------------------------------------------------
# Shards as they are written: Parquet files of token ids, in the layout that was measured fastest to read.
#
# The last step of `lm data prepare`; a batch's way begins where it ends, at `data/shards`. Elements are declared not
# null, without dictionary, byte-stream-split and lz4: about 1.9 bytes a token, decoded at a few hundred million tokens
# a second (zstd: 1.4 bytes, three quarters of the speed).

COLUMN = "input_ids"
DIGEST_KEY = "lm.digest"  # in the footer: of all tokens, so that no two contents have the same one
ROW_GROUP_TOKENS = 2**20  # what the loader reads at once


class ShardWriter:
    """Writes one shard, complete or not at all.

    Every row group but the last has exactly ROW_GROUP_TOKENS; a row that passes a border goes on in the next one.

    Args:
        path: of the Parquet file.
        dtype: of the ids, uint16 or uint32.
        tokenizer_sha256: kept in the file.
    """

    def __init__(self, path: Path, dtype: np.dtype, tokenizer_sha256: str) -> None:
        self.path = path
        self.row_groups: list[int] = []  # tokens of each
        self.digest = ""  # of the footer, once it is written
        self._tokens_digest = blake2b(digest_size=16)
        self._tokens: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._held = 0
        element = pa.field("element", pa.from_numpy_dtype(dtype), nullable=False)
        about = {TOKENIZER_KEY: tokenizer_sha256.encode(), LAYOUT_KEY: str(LAYOUT).encode()}
        self._schema = pa.schema([pa.field(COLUMN, pa.list_(element), nullable=False)], metadata=about)
        self._temporary = _temporary(path)
        self._parquet = pq.ParquetWriter(
            self._temporary, self._schema, compression="lz4", use_dictionary=False,
            use_byte_stream_split=[f"{COLUMN}.list.element"], write_statistics=True, write_page_checksum=True,
        )  # fmt: skip

    def write(self, tokens: np.ndarray, rows: np.ndarray) -> None:
        """Add rows.

        Args:
            tokens: (n,) ids of all rows.
            rows: (r,) tokens of each row; their sum is n.
        """
        while len(tokens) > 0:
            room = ROW_GROUP_TOKENS - self._held
            ends = np.cumsum(rows)
            whole = int(np.searchsorted(ends, room, side="right"))  # rows that fit
            taken = rows[:whole]
            rows = rows[whole:]
            if whole < len(ends) and (part := room - int(taken.sum())) > 0:
                taken = np.append(taken, part)
                rows = np.concatenate([rows[:1] - part, rows[1:]])
            count = int(taken.sum())
            self._tokens.append(tokens[:count])
            self._rows.append(taken)
            self._held += count
            tokens = tokens[count:]
            if self._held == ROW_GROUP_TOKENS:
                self._flush()

    def _flush(self) -> None:
        tokens, rows = np.concatenate(self._tokens), np.concatenate(self._rows)
        offsets = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)  # (rows + 1,)
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens), type=self._schema.field(0).type)
        self._parquet.write_table(pa.table([column], schema=self._schema), row_group_size=max(1, len(rows)))
        self._tokens_digest.update(tokens)
        self.row_groups.append(len(tokens))
        self._tokens, self._rows, self._held = [], [], 0

    def close(self) -> int:
        """Finish the file and give it its name.

        Returns:
            Bytes of the file.
        """
        if self._held:
            self._flush()
        self._parquet.add_key_value_metadata({DIGEST_KEY: self._tokens_digest.hexdigest()})
        self._parquet.close()
        with pa.OSFile(str(self._temporary)) as file:
            self.digest = footer_digest(read_footer(file))
        with open(self._temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, self.path)
        _sync_folder(self.path.parent)
        return self.path.stat().st_size


@contextmanager
def replacing(path: Path) -> Iterator:
    """A binary file to write to that takes its name, whole and on the disk, when the block ends well."""
    temporary = _temporary(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text; a reader sees the old or the new one, also after a power cut."""
    with replacing(path) as file:
        file.write(text.encode())


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
