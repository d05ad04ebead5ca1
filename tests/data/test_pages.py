"""Pages of our own layout read straight into numpy: the same tokens as through Arrow, or nothing."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import OURS, write_rows, write_tokens

from lm.data.parquet import ROW_GROUP_TOKENS, ShardWriter, read_tokens


def read(path, group=0, dtype=np.uint16):
    with pa.OSFile(str(path)) as handle:
        return read_tokens(handle, pq.read_metadata(path), group, 0, np.dtype(dtype))


@pytest.mark.parametrize("dtype, top", [(np.uint16, 2**16), (np.uint32, 2**31)])
def test_what_prepare_writes_is_read_this_way(tmp_path, dtype, top):
    """Several pages a row group, rows that go on over a border, both widths."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, top, ROW_GROUP_TOKENS + 4321).astype(dtype)
    rows = random.multinomial(len(tokens) - 700_000, np.ones(900) / 900)
    (path := tmp_path / "a.parquet").touch()
    writer = ShardWriter(path, np.dtype(dtype), "ab" * 32)
    writer.write(tokens, np.append(rows, 700_000))
    writer.close()
    assert np.array_equal(np.concatenate([read(path, group, dtype) for group in range(2)]), tokens)


def agree(path, dtype):
    """Every row group is as Arrow reads it, or left to Arrow; how many were read."""
    counted = 0
    for group in range(pq.read_metadata(path).num_row_groups):
        expected = pq.ParquetFile(path).read_row_group(group).column(0).combine_chunks().flatten()
        tokens = read(path, group, dtype)
        if tokens is not None:
            counted += 1
            assert tokens.dtype == dtype and tokens.tolist() == expected.to_pylist()
    return counted


@given(
    st.lists(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 1)), max_size=5), min_size=1, max_size=12),
    st.booleans(), st.booleans(), st.sampled_from(["none", "lz4", "zstd", "snappy", "gzip"]),
    st.sampled_from(["BYTE_STREAM_SPLIT", "PLAIN", "DELTA_BINARY_PACKED"]), st.sampled_from(["1.0", "2.0"]),
    st.sampled_from([np.uint16, np.uint32]),
)
@settings(max_examples=300, deadline=None)
def test_never_other_tokens_than_arrows(
    tmp_path_factory, rows, strict, nulls, compression, encoding, page, dtype
):
    """Empty rows, nulls, ids too large for the type, other encodings: left to Arrow, not guessed."""
    kind = pa.list_(pa.field("element", pa.int32(), nullable=not strict))
    rows = [None, *rows] if nulls else rows
    path = write_rows(
        tmp_path_factory.mktemp("pages") / "a.parquet", rows, kind, row_group_rows=5, use_dictionary=False,
        compression=compression, column_encoding=encoding, data_page_version=page, data_page_size=16, metadata=OURS,
    )
    read_this_way = agree(path, dtype)
    simple = all(rows) and encoding == "BYTE_STREAM_SPLIT" and compression == "lz4" and page == "1.0"
    if simple and (dtype == np.uint32 or max(map(max, rows)) < 2**16):
        assert read_this_way == pq.read_metadata(path).num_row_groups
    if nulls or encoding != "BYTE_STREAM_SPLIT":
        assert read_this_way < pq.read_metadata(path).num_row_groups


def test_damaged_pages_are_left_to_arrow(tmp_path):
    """Whatever byte is damaged: other tokens never come out unnoticed."""
    tokens = np.random.default_rng(0).integers(0, 500, 3000).astype(np.uint16)
    path = write_tokens(tmp_path / "a.parquet", tokens, row=100)
    whole, footer = path.read_bytes(), pq.read_metadata(path)
    chunk = footer.row_group(0).column(0)
    random = np.random.default_rng(1)
    for place in random.integers(chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size, 400):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(random.integers(8))
        handle = pa.BufferReader(bytes(damaged))
        found = read_tokens(handle, footer, 0, 0, np.dtype(np.uint16))
        assert found is None or np.array_equal(found, tokens)
    assert read_tokens(pa.BufferReader(whole[:500]), footer, 0, 0, np.dtype(np.uint16)) is None
