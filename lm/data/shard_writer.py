"""Writes shards: Parquet files of token ids, which `data/parquet` reads. `data/encode` decides what is in each."""

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.data.parquet import COLUMN, PACKED_KEY, TOKENIZER_KEY, PackedRows, footer_digest, read_footer

DIGEST_KEY = "lm.digest"  # in the footer: digest of all tokens, so that different contents have different footers
ROW_GROUP_TOKENS = 2**20  # the loader reads whole row groups


class ShardWriter:
    """Writes one shard: `list<uint16 not null>`, or uint32, with byte-stream-split and lz4, and no dictionary.

    This takes about 1.9 bytes a token, and is the fastest layout of lists to read (zstd: 1.5 bytes, 0.85 of the
    speed). Every row group but the last has exactly ROW_GROUP_TOKENS; rows that cross a border are cut there. Packed
    rows are not cut: a row group has as many as fit.
    """

    def __init__(self, path: Path, dtype: np.dtype, tokenizer_sha256: str, packed: PackedRows | None = None) -> None:
        self.path, self.dtype = path, dtype
        row = 1 if packed is None else packed.seq_len + 1
        self._group_tokens = max(1, ROW_GROUP_TOKENS // row) * row
        self.row_groups: list[int] = []  # tokens of each
        self.digest = ""  # of the footer, after `close`
        self._tokens_digest = blake2b(digest_size=16)
        self._tokens, self._ends = np.empty(0, dtype), np.empty(0, np.int64)  # not yet written; where rows end in them
        element = pa.field("element", pa.from_numpy_dtype(dtype), nullable=False)
        field = pa.field(COLUMN, pa.list_(element), nullable=False)
        facts = {TOKENIZER_KEY: tokenizer_sha256.encode()}
        facts |= {PACKED_KEY: json.dumps(packed).encode()} if packed else {}
        self._schema = pa.schema([field], metadata=facts)
        self._parquet = pq.ParquetWriter(
            path,
            self._schema,
            compression="lz4",
            use_dictionary=False,
            use_byte_stream_split=[f"{COLUMN}.list.element"],
            data_page_version="2.0",
            write_page_checksum=True,
        )

    def write(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        """Append (n,) ids and (r,) ends of rows among them; if the last row does not end, the next ids continue it."""
        self._ends = np.concatenate([self._ends, len(self._tokens) + ends])
        self._tokens = np.concatenate([self._tokens, tokens])
        while len(self._tokens) >= self._group_tokens:
            self._write_group(self._group_tokens)

    def close(self) -> int:
        """Finish the file; returns its size in bytes."""
        if len(self._tokens):
            self._write_group(len(self._tokens))
        self._parquet.add_key_value_metadata({DIGEST_KEY: self._tokens_digest.hexdigest()})
        self._parquet.close()
        with pa.OSFile(str(self.path)) as file:
            self.digest = footer_digest(read_footer(file))
        return self.path.stat().st_size

    def _write_group(self, count: int) -> None:
        tokens, ends = self._tokens[:count], self._ends[self._ends < count]
        offsets = np.concatenate([[0], ends, [count]]).astype(np.int32)
        rows = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens), type=self._schema.field(0).type)
        self._parquet.write_table(pa.table([rows], schema=self._schema), row_group_size=len(rows))
        self._tokens_digest.update(tokens)
        self.row_groups.append(count)
        self._tokens, self._ends = self._tokens[count:], self._ends[self._ends > count] - count
