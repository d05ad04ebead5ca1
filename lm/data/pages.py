"""The pages of our own layout, straight into numpy: three times as fast as through Arrow's nested lists.

Beside the batch's way, under `data/column`. In a shard that `lm data prepare` wrote, the ids of a row group are
byte-stream-split pages without nulls or empty rows, so all rows are laid end to end without knowing where one ends.
`read_tokens` reads just that; of anything else it says None, and `data/column` asks Arrow, which reads every layout
and says what is wrong with damaged ones.

The format: https://github.com/apache/parquet-format, `src/main/thrift/parquet.thrift` (PageHeader) and `Encodings.md`
(BYTE_STREAM_SPLIT); Thrift's compact protocol: `doc/specs/thrift-compact-protocol.md` of apache/thrift.
"""

import zlib
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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
