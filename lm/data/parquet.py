"""Parquet files of token ids: how a shard is written, and how a column of ids is checked and decoded.

`data/encode` writes shards with `ShardWriter`; `data/shards` reads them, and anyone's, with `Column`.
"""

from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.errors import RequestError, RunError
from lm.system.files import sync

LARGEST_ID = 2**31  # ids are below it where no vocabulary is known: what an int32 tensor can hold
TOKENIZER_KEY = b"lm.tokenizer"  # in the footers of our shards: SHA-256 of the tokenizer that made them
FOOTER_BYTES = 2**16  # most footers are shorter, so one request to an object store gets all of it
# What reading damaged bytes raises, in Arrow and around it; a failing disk or network is an OSError, too.
DAMAGE = (
    LookupError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError, SystemError, OSError,
    pa.ArrowException,
)  # fmt: skip


class BadBlock(RunError):
    """The file is there, and its content cannot be used: damaged, changed, null, or ids outside the vocabulary."""


# ---- footer ----------------------------------------------------------------------------------------------------------


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
    """A digest that differs where the content of a shard does, in 32 hex digits.

    A footer holds place, size, smallest and largest id of every row group, and in our shards a digest of all tokens.
    """
    return blake2b(footer, digest_size=16).hexdigest()


# ---- reading ---------------------------------------------------------------------------------------------------------


class Column:
    """The column of token ids in Parquet files: [0, vocab_size), or [0, 2^31) where the vocabulary is not known.

    Attributes:
        dtype: of decoded ids: uint16 where they fit, else uint32.
    """

    def __init__(self, name: str, vocab_size: int | None = None) -> None:
        self.name, self.vocab_size = name, vocab_size
        self.limit = LARGEST_ID if vocab_size is None else vocab_size
        self.dtype = np.dtype(np.uint16 if self.limit <= 2**16 else np.uint32)

    def check_type(self, schema: pa.Schema, file: str) -> None:
        """Refuse a file without this column, or where it does not hold lists of integers.

        Raises:
            RequestError: names the file and what it holds instead.
        """
        if self.name not in schema.names:
            raise RequestError(
                f"shard {file} has no column {self.name!r}; it has {', '.join(schema.names) or 'none'}; set data.column"
            )
        kind = schema.field(self.name).type
        if not _is_list_of_integers(kind):
            text = "; tokenize it first with `lm data prepare`" if pa.types.is_string(kind) else ""
            raise RequestError(f"shard {file}: column {self.name!r} is {kind}, not a list of integers{text}")

    def count(self, parquet: pq.ParquetFile, file: str) -> list[int]:
        """Tokens of every row group, from the footer's statistics where it has them, else by decoding.

        An empty or null list is one null leaf value, so the tokens are the leaf values less their nulls. Where the
        statistics show ids outside the vocabulary, decoding finds the row.

        Raises:
            BadBlock: a row group that had to be decoded holds bad ids.
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
            return len(self.decode(parquet, group, file))

        return [count_one(group) for group in range(parquet.metadata.num_row_groups)]

    def decode(self, parquet: pq.ParquetFile, group: int, file: str) -> np.ndarray:
        """All tokens of a row group, end to end: (tokens,) of `dtype`, every id inside the vocabulary.

        Raises:
            BadBlock: nulls, or ids outside the vocabulary; names row group and row.
            pyarrow.ArrowException, OSError: bytes that cannot be read or decoded.
        """
        rows = parquet.read_row_group(group, columns=[self.name], use_threads=False).column(self.name)
        parts = [self._ids(chunk) for chunk in rows.chunks]
        if any(part is None for part in parts):
            raise BadBlock(self._describe_bad_ids(parquet, group, file))
        tokens = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])
        return tokens.astype(self.dtype, copy=False)

    def holds(self, ids: np.ndarray) -> bool:
        """Whether every id is inside the vocabulary."""
        if not ids.size or (ids.dtype.kind == "u" and np.iinfo(ids.dtype).max < self.limit):
            return True
        return int(ids.max()) < self.limit and (ids.dtype.kind == "u" or int(ids.min()) >= 0)

    def _leaf(self, footer: pq.FileMetaData) -> int:
        """The index of the column's values among all leaves of the schema.

        Raises:
            pyarrow.ArrowInvalid: there is no such column, though there was: the footer is damaged or another.
        """
        paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
        leaf = next((i for i, path in enumerate(paths) if path.startswith(self.name + ".")), None)
        if leaf is None:
            raise pa.ArrowInvalid(f"there is no column {self.name!r} of lists")
        return leaf

    def _ids(self, rows: pa.Array) -> np.ndarray | None:
        """The ids of an array of lists without a copy; None if there are nulls or ids outside the vocabulary."""
        if not _is_list_of_integers(rows.type):
            raise pa.ArrowInvalid(f"column {self.name!r} is {rows.type}, not a list of integers")
        values = rows.flatten()
        if rows.null_count or values.null_count:
            return None
        ids = values.to_numpy(zero_copy_only=True)
        return ids if self.holds(ids) else None

    def _describe_bad_ids(self, parquet: pq.ParquetFile, group: int, file: str) -> str:
        """The first bad row of a row group, and what is wrong with it."""
        row = 0
        for batch in parquet.iter_batches(row_groups=[group], columns=[self.name], use_threads=False):
            for ids in batch.column(0).to_pylist():
                if reason := self._fault(ids):
                    return f"shard {file}, row group {group}, row {row}: {reason}"
                row += 1
        return f"shard {file}, row group {group} held bad ids at first, but does not now; is the storage healthy?"

    def _fault(self, row: list[int | None] | None) -> str | None:
        """What is wrong with a row of ids."""
        if row is None:
            return "the row is null; leave such rows out"
        if None in row:
            return "a token id is null; leave nulls out"
        bad = next((token for token in row if not 0 <= token < self.limit), None)
        vocabulary = "any vocabulary" if self.vocab_size is None else f"the vocabulary of {self.vocab_size}"
        return bad and f"token id {bad} is outside {vocabulary}; was it made with another tokenizer?"


def _is_list_of_integers(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)


# ---- writing ---------------------------------------------------------------------------------------------------------

LAYOUT = 1  # in the manifest; raised when shards are written in a way that older versions cannot read
COLUMN = "input_ids"
DIGEST_KEY = "lm.digest"  # in the footer: of all tokens, so that no two contents have the same footer
ROW_GROUP_TOKENS = 2**20  # the loader reads a row group at once


class ShardWriter:
    """Writes one shard: `list<uint16 not null>`, or uint32, with byte-stream-split and lz4, and no dictionary.

    That is about 1.9 bytes a token, and the fastest to read of all layouts of lists (zstd: 1.5 bytes, 0.85 of the
    speed). Every row group but the last has exactly ROW_GROUP_TOKENS; a row that crosses a border is cut there.

    Args:
        path: of the Parquet file, which is whole after `close`.
        dtype: of the ids, uint16 or uint32.
        tokenizer_sha256: kept in the file.

    Attributes:
        row_groups: tokens of each.
        digest: of the footer, after `close`.
    """

    def __init__(self, path: Path, dtype: np.dtype, tokenizer_sha256: str) -> None:
        self.path = path
        self.row_groups: list[int] = []
        self.digest = ""
        self._tokens_digest = blake2b(digest_size=16)
        self._tokens, self._ends = np.empty(0, dtype), np.empty(0, np.int64)  # not yet written; where rows end in them
        element = pa.field("element", pa.from_numpy_dtype(dtype), nullable=False)
        field = pa.field(COLUMN, pa.list_(element), nullable=False)
        self._schema = pa.schema([field], metadata={TOKENIZER_KEY: tokenizer_sha256.encode()})
        self._parquet = pq.ParquetWriter(
            path, self._schema, compression="lz4", use_dictionary=False,
            data_page_version="2.0", use_byte_stream_split=[f"{COLUMN}.list.element"], write_page_checksum=True,
        )  # fmt: skip

    def write(self, tokens: np.ndarray, rows: np.ndarray) -> None:
        """Add rows: (n,) ids of all of them, and (r,) how many tokens each has."""
        self._ends = np.concatenate([self._ends, len(self._tokens) + np.cumsum(rows)])
        self._tokens = np.concatenate([self._tokens, tokens])
        while len(self._tokens) >= ROW_GROUP_TOKENS:
            self._write_group(ROW_GROUP_TOKENS)

    def close(self) -> int:
        """Finish the file, which is on the disk then; returns its bytes."""
        if len(self._tokens):
            self._write_group(len(self._tokens))
        self._parquet.add_key_value_metadata({DIGEST_KEY: self._tokens_digest.hexdigest()})
        self._parquet.close()
        with pa.OSFile(str(self.path)) as file:
            self.digest = footer_digest(read_footer(file))
        sync(self.path)
        return self.path.stat().st_size

    def _write_group(self, count: int) -> None:
        """Write the first `count` tokens as a row group."""
        tokens, ends = self._tokens[:count], self._ends[self._ends < count]
        offsets = np.concatenate([[0], ends, [count]]).astype(np.int32)
        rows = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens), type=self._schema.field(0).type)
        self._parquet.write_table(pa.table([rows], schema=self._schema), row_group_size=len(rows))
        self._tokens_digest.update(tokens)
        self.row_groups.append(count)
        self._tokens, self._ends = self._tokens[count:], self._ends[self._ends > count] - count
