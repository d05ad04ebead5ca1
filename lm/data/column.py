"""The token column of one Parquet file: its type, its counts, its tokens, and who is to blame when it is bad.

Beside the batch's way, under `data/shards`, which knows the files and calls this for each. Pages
in our own layout go straight to numpy (`data/pages`), others through Arrow's value buffers; only a column that turned
out bad is looked at row by row.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lm.data.pages import is_ours, read_tokens
from lm.errors import RequestError, RunError

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
