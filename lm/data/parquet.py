"""Parquet files of token ids: check and decode columns of ids.

`data/catalog` and `data/block_reader` read shards with `Column`, those of `data/shard_writer` and others.
"""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm.errors import RequestError, RunError

LAYOUT = 1  # in the manifest; increased if older versions cannot read new shards
COLUMN = "input_ids"
LARGEST_ID = 2**31  # exclusive limit for ids without a known vocabulary: what int32 tensors can hold
TOKENIZER_KEY = b"lm.tokenizer"  # in the footers of our shards: SHA-256 of the tokenizer that made them
PACKED_KEY = b"lm.packed"  # in the footers of shards of packed rows: `PackedRows` as a JSON list
FOOTER_BYTES = 2**16  # most footers are shorter, so one request to an object store gets all of it
# What reading damaged bytes raises, in Arrow and around it; a failing disk or network is an OSError, too.
DAMAGE = (LookupError, TypeError, ValueError, ArithmeticError, MemoryError, SystemError, OSError, pa.ArrowException)
LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


class BadBlock(RunError):
    """A file whose content cannot be used: damaged, changed, null, or ids outside the vocabulary."""


class PackedRows(NamedTuple):
    seq_len: int  # tokens that a row predicts; it has one more
    eos_id: int  # of the end-of-text token

    def targets(self, ids: np.ndarray) -> np.ndarray:
        """Which ids (n,) of rows end to end are targets: (n,) bool; a row's first token and its padding are not."""
        ends = ids.reshape(-1, self.seq_len + 1) == self.eos_id  # (rows, seq_len + 1)
        targets = np.zeros_like(ends)
        targets[:, 1:] = ~(ends[:, 1:] & ends[:, :-1])
        return targets.ravel()


# ---- footer ----------------------------------------------------------------------------------------------------------


def read_footer(handle: pa.NativeFile) -> bytes:
    """Read the footer of a Parquet file, up to the end of the file."""
    size = handle.size()
    first = max(0, size - FOOTER_BYTES)
    end = handle.read_at(size - first, first)
    length = int.from_bytes(end[-8:-4], "little") + 8
    if end[-4:] != b"PAR1" or length > size - 4:
        raise pa.ArrowInvalid("it has no Parquet footer at its end")
    return end[-length:] if length <= len(end) else handle.read_at(length, size - length)


def footer_digest(footer: bytes) -> str:
    """A digest of a shard's content, in 32 hex digits, computed from its footer.

    A footer has offset, size, smallest and largest id of every row group, and in our shards a digest of all tokens.
    """
    return blake2b(footer, digest_size=16).hexdigest()


# ---- reading ---------------------------------------------------------------------------------------------------------

# Columns beside the ids, with the meaning of Hugging Face. Labels are not shifted: a row of labels repeats the ids.
MASK, LABELS = "attention_mask", "labels"
IGNORED = -100  # the label of targets that the loss ignores


class Tokens(NamedTuple):
    """Token ids end to end, and which of them may be targets."""

    ids: np.ndarray  # (tokens,) uint16 or uint32
    targets: np.ndarray | None = None  # (tokens,) bool; None: all of them


class Column:
    """The column of token ids in Parquet files: [0, vocab_size), or [0, 2^31) where the vocabulary is not known.

    Padding is left out: ids whose `attention_mask` is 0, and with `pad_id` the run of this id at both ends of a row. If
    it is the end-of-text token too, one of a run at the end is kept.
    """

    def __init__(
        self, name: str, vocab_size: int | None = None, pad_id: int | None = None, eos_id: int | None = None
    ) -> None:
        self.name, self.vocab_size, self.pad_id, self.eos_id = name, vocab_size, pad_id, eos_id
        self.limit = LARGEST_ID if vocab_size is None else vocab_size
        small = self.limit <= 2**16
        self.dtype = np.dtype("u2" if small else "u4")  # of decoded ids
        self.row_dtype = np.dtype("u2" if small else "i4")  # of the rows of batches, for torch

    def check_type(self, schema: pa.Schema, file: str) -> None:
        """RequestError if a file lacks this column, or if it or a column beside it does not hold lists of integers."""
        if self.name not in schema.names:
            raise RequestError(
                f"shard {file} has no column {self.name!r}; it has {', '.join(schema.names) or 'none'}; set `column`"
            )
        for name in (self.name, *self.beside(schema)):
            kind = schema.field(name).type
            if not is_list_of_integers(kind, boolean=name == MASK):
                fix = f", one for each id of {self.name!r}; leave that out"
                if name == self.name:
                    fix = "; tokenize it first with `lm data prepare`" if pa.types.is_string(kind) else ""
                raise RequestError(f"shard {file}: column {name!r} is {kind}, not a list of integers{fix}")

    def beside(self, schema: pa.Schema) -> list[str]:
        """The names of columns that mark padding or ids that are not targets."""
        return [name for name in (MASK, LABELS) if name in schema.names and name != self.name]

    def count(self, parquet: pq.ParquetFile, file: str) -> list[int]:
        """Number of tokens of every row group, from the footer's statistics if they are enough, otherwise by decoding.

        An empty or null list is stored as a null leaf value, so without nulls the leaf values are the tokens. Decoding
        finds null rows, and the row of ids outside the vocabulary. The first row group with labels is decoded in any
        case, so that wrong labels are found at the start.
        """
        beside, counts = self.beside(parquet.schema_arrow), []
        for group in range(parquet.metadata.num_row_groups):
            facts, values = self._statistics(parquet, group, self.name)
            known = (
                facts is not None
                and facts.has_null_count
                and not facts.null_count
                and (not facts.has_min_max or (facts.min >= 0 and facts.max < self.limit))
            )
            unpadded = self.pad_id is None and (MASK not in beside or self._is_all_ones(parquet, group, values))
            enough = known and unpadded and not (group == 0 and LABELS in beside)
            counts.append(values if enough else len(self.decode(parquet, group, file).ids))
        return counts

    def decode(self, parquet: pq.ParquetFile, group: int, file: str) -> Tokens:
        """Decode the tokens of a row group, end to end; BadBlock names the row of an id outside the vocabulary.

        Bytes that cannot be read or decoded raise errors of Arrow, which are in DAMAGE.
        """
        beside = self.beside(parquet.schema_arrow)
        if MASK in beside:
            _, values = self._statistics(parquet, group, self.name)
            beside = beside[1:] if self._is_all_ones(parquet, group, values) else beside
        # If a column is named `tokens.raw`, Arrow takes it for a part of `tokens`, and reads it too.
        table = parquet.read_row_group(group, columns=[self.name, *beside], use_threads=False)
        where = f"shard {file}, row group {group}"
        rows = table.column(self.name)
        ids = _values(rows, where, "a token id", "leave such rows out")
        keep = targets = None
        if beside or self.pad_id is not None:
            keep = self._keep(ids, rows)
        for name in beside:
            values = _values(table.column(name), where, f"a value of {name!r}", f"write it without {name!r}")
            other = _lengths(table.column(name))
            if not np.array_equal(_lengths(rows), other):
                row = int(np.flatnonzero(_lengths(rows) != other)[0])
                raise BadBlock(f"{where}, row {row}: {name!r} has {other[row]} values for {_lengths(rows)[row]} ids")
            if name == MASK:
                wrong, words = (values != 0) & (values != 1), "which is neither 0 nor 1"
                keep &= values == 1
            else:
                targets = values != IGNORED
                wrong = targets & (values != ids) & keep
                words = f"which is neither the id nor {IGNORED}: labels are not shifted, as at Hugging Face"
            if wrong.any():
                place = int(np.argmax(wrong))
                problem = f"row {_row_of(rows, place)}: {name!r} holds {values[place]}, {words}"
                raise BadBlock(f"{where}, {problem}; write it without that column")
        tokens = ids if keep is None else ids[keep]
        if not self.holds(tokens):
            place = int(np.argmax((tokens < 0) | (tokens >= self.limit)))
            place = place if keep is None else int(np.flatnonzero(keep)[place])
            vocabulary = "any vocabulary" if self.vocab_size is None else f"the vocabulary of {self.vocab_size}"
            row, token = _row_of(rows, place), ids[place]
            raise BadBlock(
                f"{where}, row {row}: token id {token} is outside {vocabulary}; was it made with another tokenizer? "
                f"If this id is padding: --data.pad_id {token}"
            )
        if targets is not None:
            targets = None if targets[keep].all() else targets[keep]
        return Tokens(tokens.astype(self.dtype, copy=False), targets)

    def holds(self, ids: np.ndarray) -> bool:
        """Whether every id is inside the vocabulary."""
        if not ids.size or (ids.dtype.kind == "u" and np.iinfo(ids.dtype).max < self.limit):
            return True
        return int(ids.max()) < self.limit and (ids.dtype.kind == "u" or int(ids.min()) >= 0)

    def _keep(self, ids: np.ndarray, rows: pa.ChunkedArray) -> np.ndarray:
        """Which ids are not in a run of `pad_id` at either end of their row: (n,) bool."""
        if self.pad_id is None:
            return np.ones(len(ids), bool)
        ends = np.cumsum(_lengths(rows))
        starts = np.concatenate([[0], ends[:-1]])
        others = np.append(np.flatnonzero(ids != self.pad_id), len(ids))
        before, after = np.searchsorted(others, starts), np.searchsorted(others, ends)
        empty = before == after  # nothing but padding
        first, last = np.where(empty, starts, others[before]), np.where(empty, starts, others[after - 1] + 1)
        if self.pad_id == self.eos_id:
            last = np.minimum(last + 1, ends)
        edges = np.zeros(len(ids) + 1, np.int8)
        np.add.at(edges, first, 1)
        np.add.at(edges, last, -1)
        return np.cumsum(edges[:-1], dtype=np.int8).astype(bool)

    def _statistics(self, parquet: pq.ParquetFile, group: int, name: str) -> tuple[pq.Statistics | None, int]:
        """The footer's statistics of a column (None if missing), and its number of leaf values."""
        fields = parquet.schema_arrow
        leaf = sum(_leaves(field.type) for field in list(fields)[: fields.names.index(name)])
        chunk = parquet.metadata.row_group(group).column(leaf)
        sound = chunk.physical_type == parquet.schema.column(leaf).physical_type  # otherwise Arrow aborts the process
        return chunk.statistics if sound else None, chunk.num_values

    def _is_all_ones(self, parquet: pq.ParquetFile, group: int, values: int) -> bool:
        """Whether the footer shows that the attention mask is 1 for all `values` ids."""
        facts, count = self._statistics(parquet, group, MASK)
        if facts is None or not facts.has_null_count or facts.null_count or not facts.has_min_max:
            return False
        return facts.min == facts.max == 1 and count == values


def _values(rows: pa.ChunkedArray, where: str, what: str, fix: str) -> np.ndarray:
    """The values of lists of integers, end to end, without a copy if there is one chunk; BadBlock for nulls."""
    if rows.null_count:
        raise BadBlock(f"{where}, row {pc.index(rows.is_null(), True).as_py()}: the row is null; {fix}")
    parts = [chunk.flatten() for chunk in rows.chunks]
    if any(part.null_count for part in parts):
        row = _row_of(rows, pc.index(pa.chunked_array(parts).is_null(), True).as_py())
        raise BadBlock(f"{where}, row {row}: {what} is null; leave nulls out")
    values = [part.to_numpy(zero_copy_only=not pa.types.is_boolean(part.type)) for part in parts]
    if len(values) == 1:
        return values[0]
    return np.concatenate([np.empty(0, rows.type.value_type.to_pandas_dtype()), *values])


def _lengths(rows: pa.ChunkedArray) -> np.ndarray:
    """Number of values in each row: (rows,) int64."""
    return pc.list_value_length(rows).to_numpy().astype(np.int64)


def _row_of(rows: pa.ChunkedArray, place: int) -> int:
    return int(np.searchsorted(np.cumsum(_lengths(rows)), place, side="right"))


def _leaves(kind: pa.DataType) -> int:
    """Number of leaf columns that a type has in a Parquet file."""
    kind = getattr(kind, "storage_type", kind)
    return sum(_leaves(kind.field(index).type) for index in range(kind.num_fields)) or 1


def is_list_of_integers(kind: pa.DataType, boolean: bool = False) -> bool:
    return isinstance(kind, LISTS) and (
        pa.types.is_integer(kind.value_type) or boolean and pa.types.is_boolean(kind.value_type)
    )
