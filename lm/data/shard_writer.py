"""Writes shards: Parquet files of token ids, which `data/parquet` reads. `data/encode` decides what is in each."""

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.data.parquet import COLUMN, LABELS, PACKED_KEY, TOKENIZER_KEY, PackedRows, footer_digest, read_footer

DIGEST_KEY = "lm.digest"  # in the footer: digest of all tokens, so that different contents have different footers
ROW_GROUP_TOKENS = 2**20  # the loader reads whole row groups


class ShardWriter:
    """Writes one shard: `list<uint16 not null>`, or uint32, with byte-stream-split and lz4, and no dictionary.

    This takes about 1.9 bytes a token, and is the fastest layout of lists to read (zstd: 1.5 bytes, 0.85 of the
    speed). Every row group but the last has exactly ROW_GROUP_TOKENS; rows that cross a border are cut there. Packed
    rows are not cut: a row group has as many as fit. With labels there is a second column, `list<int32 not null>`.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype,
        tokenizer_sha256: str,
        packed: PackedRows | None = None,
        with_labels: bool = False,
    ) -> None:
        self.path, self.dtype, self.with_labels = path, dtype, with_labels
        row = 1 if packed is None else packed.seq_len + 1
        self._group_tokens = max(1, ROW_GROUP_TOKENS // row) * row
        self.row_groups: list[int] = []  # tokens of each
        self.digest = ""  # of the footer, after `close`
        self._tokens_digest = blake2b(digest_size=16)
        columns = {COLUMN: dtype}
        if with_labels:
            columns[LABELS] = np.dtype("<i4")
        self._columns = [np.empty(0, kind) for kind in columns.values()]  # not yet written: tokens, labels
        self._ends = np.empty(0, np.int64)  # where rows end in them
        fields = []
        for name, kind in columns.items():
            element = pa.field("element", pa.from_numpy_dtype(kind), nullable=False)
            fields.append(pa.field(name, pa.list_(element), nullable=False))
        facts = {TOKENIZER_KEY: tokenizer_sha256.encode()}
        facts |= {PACKED_KEY: json.dumps(packed).encode()} if packed else {}
        self._schema = pa.schema(fields, metadata=facts)
        self._parquet = pq.ParquetWriter(
            path,
            self._schema,
            compression="lz4",
            use_dictionary=False,
            use_byte_stream_split=[f"{name}.list.element" for name in columns],
            data_page_version="2.0",
            write_page_checksum=True,
        )

    def write(self, tokens: np.ndarray, ends: np.ndarray, labels: np.ndarray | None = None) -> None:
        """Append (n,) ids and (r,) ends of rows among them; if the last row does not end, the next ids continue it.

        A shard with labels takes those of the ids: (n,) int32.
        """
        self._ends = np.concatenate([self._ends, len(self._columns[0]) + ends])
        new = [tokens] if labels is None else [tokens, labels]
        self._columns = [np.concatenate(pair) for pair in zip(self._columns, new, strict=True)]
        while len(self._columns[0]) >= self._group_tokens:
            self._write_group(self._group_tokens)

    def close(self) -> int:
        """Finish the file; returns its size in bytes."""
        if len(self._columns[0]):
            self._write_group(len(self._columns[0]))
        self._parquet.add_key_value_metadata({DIGEST_KEY: self._tokens_digest.hexdigest()})
        self._parquet.close()
        with pa.OSFile(str(self.path)) as file:
            self.digest = footer_digest(read_footer(file))
        return self.path.stat().st_size

    def _write_group(self, count: int) -> None:
        ends = self._ends[self._ends < count]
        offsets = pa.array(np.concatenate([[0], ends, [count]]).astype(np.int32))
        columns = []
        for values, field in zip(self._columns, self._schema, strict=True):
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(values[:count]), type=field.type))
            self._tokens_digest.update(values[:count])
        self._parquet.write_table(pa.table(columns, schema=self._schema), row_group_size=len(columns[0]))
        self.row_groups.append(count)
        self._columns, self._ends = [values[count:] for values in self._columns], self._ends[self._ends > count] - count
