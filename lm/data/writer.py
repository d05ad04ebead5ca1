"""Shards as they are written: Parquet files of token ids, in the layout that was measured fastest to read.

The last step of `lm data prepare`; a batch's way begins where it ends, at `data/shards`. Elements are declared not
null, without dictionary, byte-stream-split and lz4: about 1.9 bytes a token, decoded at a few hundred million tokens a
second (zstd: 1.4 bytes, three quarters of the speed).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.data.column import TOKENIZER_KEY
from lm.data.pages import LAYOUT, LAYOUT_KEY, footer_digest, read_footer

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
