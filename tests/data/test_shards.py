"""Shards: anyone's layout is read to the same tokens, or refused by file, row group and row."""

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import write_folder, write_manifest, write_rows, write_tokens

from lm.data import shards as shards_module
from lm.data.parquet import ShardWriter
from lm.data.shards import BadBlock, Shards, describe_difference
from lm.errors import RequestError, RunError

INTEGERS = [pa.uint8(), pa.int8(), pa.uint16(), pa.int16(), pa.uint32(), pa.int32(), pa.uint64(), pa.int64()]


def all_tokens(shards):
    return np.concatenate([shards.read(i) for i in range(len(shards.blocks))])


rows_of_ids = st.lists(st.lists(st.integers(0, 99), max_size=7), min_size=1, max_size=20)


@given(
    rows_of_ids, st.sampled_from(INTEGERS), st.sampled_from(["list", "large_list", "strict", "fixed"]),
    st.integers(1, 9), st.booleans(), st.sampled_from(["none", "lz4", "zstd", "snappy"]), st.booleans(), st.booleans(),
    st.sampled_from(["1.0", "2.0"]),
)
@settings(max_examples=200, deadline=None)
def test_every_layout_reads_to_the_same_tokens(
    tmp_path_factory, rows, integer, layout, group, statistics, compression, dictionary, extra, page
):
    """Whatever the list type, integer type, row groups, encoding, and with or without statistics; empty rows too."""
    if layout == "fixed":
        rows = [(row * 3 + [1, 2, 3])[:3] for row in rows]
    kind = {
        "list": pa.list_(integer), "large_list": pa.large_list(integer), "fixed": pa.list_(integer, 3),
        "strict": pa.list_(pa.field("element", integer, nullable=False)),
    }[layout]
    path = tmp_path_factory.mktemp("shard") / "a.parquet"
    write_rows(
        path, rows, kind, group, write_statistics=statistics, compression=compression, use_dictionary=dictionary,
        extra=extra, data_page_version=page,
    )
    for vocab_size, dtype in ((100, np.uint16), (2**16 + 1, np.uint32)):
        shards = Shards.open(str(path), vocab_size=vocab_size)
        tokens = all_tokens(shards)
        assert tokens.tolist() == [token for row in rows for token in row] and tokens.dtype == dtype
        assert shards.tokens == len(tokens) and all(block.tokens <= 2**20 for block in shards.blocks)


def test_blocks_group_row_groups_up_to_their_size(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "BLOCK_TOKENS", 100)
    tokens = np.arange(1000, dtype=np.uint16)
    write_tokens(tmp_path / "small.parquet", tokens, row=10, row_groups=25)  # 40 tokens each: two fit
    write_tokens(tmp_path / "tall.parquet", tokens, row=10, row_groups=5)  # 200 tokens each: one is too many
    shards = Shards.open([str(tmp_path / "small.parquet"), str(tmp_path / "tall.parquet")], vocab_size=1000)
    assert [block.tokens for block in shards.blocks] == [80] * 12 + [40] + [200] * 5
    assert all_tokens(shards).tolist() == tokens.tolist() * 2
    assert shards.windows(79).tolist() == [1] * 12 + [0] + [2] * 5


def test_one_thousand_shards_open_without_a_footer(tmp_path):
    """With a manifest, only names and sizes are looked at: even files that are not Parquet open."""
    write_folder(tmp_path / "train", [50])
    manifest = write_manifest(tmp_path)
    [entry] = manifest["splits"]["train"]["shards"]
    content = (tmp_path / "train/00000.parquet").read_bytes()
    shards = [entry | {"file": f"train/{i:05d}.parquet"} for i in range(1000)]
    for shard in shards:
        (tmp_path / shard["file"]).write_bytes(b"\0" * len(content))
    (tmp_path / "train/00999.parquet").write_bytes(content)
    manifest["splits"]["train"] |= {"shards": shards, "tokens": 50_000}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    opened = Shards.open(str(tmp_path / "train"), block_tokens=1)
    assert opened.tokens == 50_000 and opened.column.vocab_size == 1000
    assert len(opened.read(999)) == 50
    with pytest.raises(BadBlock, match="00007.parquet, row groups 0 to 1: cannot be decoded"):
        opened.read(7)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m, f: m["splits"]["train"]["shards"][0].update(file="../x.parquet"), "which is missing"),
        (lambda m, f: m["splits"]["train"]["shards"][0].update(file="/etc/x.parquet"), "which is missing"),
        (lambda m, f: m["splits"]["train"]["shards"][0].update(file="train/../../x"), "which is missing"),
        (lambda m, f: m["splits"]["train"]["shards"][0].update(size=12), "where the manifest says 12"),
        (lambda m, f: m["splits"]["train"]["shards"][0].pop("size"), "damaged"),
        (lambda m, f: m["splits"]["train"]["shards"][0].update(row_groups="many"), "damaged"),
        (lambda m, f: m.update(layout=2), "layout 2"),
        (lambda m, f: m.update(column="ids"), "token column is 'ids'"),
        (lambda m, f: (f / "train/00001.parquet").unlink(), "'train/00001.parquet', which is missing"),
        (lambda m, f: write_folder(f / "train", [5, 5, 5]), "00002.parquet is not in its manifest|bytes where"),
        (lambda m, f: m.update(tokenizer="cd" * 32), "another tokenizer"),
    ],
)
def test_a_folder_that_is_not_what_its_manifest_says_is_refused(tmp_path, change, message):
    write_folder(tmp_path / "train", [50, 60])
    manifest = write_manifest(tmp_path)
    change(manifest, tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RequestError, match=message):
        Shards.open(str(tmp_path / "train"), tokenizer_sha256="ab" * 32)


def test_a_manifest_with_a_wrong_count_is_found_when_read(tmp_path):
    write_folder(tmp_path / "train", [50])
    manifest = write_manifest(tmp_path)
    manifest["splits"]["train"]["shards"][0]["row_groups"][1] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RequestError, match="manifest.json is damaged .*do not add up to the tokens of the split"):
        Shards.open(str(tmp_path / "train"))
    manifest["splits"]["train"]["tokens"] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="00000.parquet, row group 1 holds 22 tokens where .* manifest says 23"):
        Shards.open(str(tmp_path / "train")).read(0)


ROWS = [[1, 2], [3], [4, 5], [6], [7, 8], [9]]


def spoil(row, value):
    return [value if i == row else ids for i, ids in enumerate(ROWS)]


@pytest.mark.parametrize(
    "rows, kind, message",
    [
        (spoil(3, [6, 12]), pa.list_(pa.uint16()), "row group 1, row 1: token id 12 is outside the vocabulary of 10"),
        (spoil(5, [-1]), pa.list_(pa.int64()), "row group 2, row 1: token id -1 is outside the vocabulary of 10"),
        (spoil(4, [2**40]), pa.large_list(pa.int64()), "row group 2, row 0: token id 1099511627776 is outside"),
        (spoil(2, [4, None]), pa.list_(pa.int32()), "row group 1, row 0: a token id is null"),
        (spoil(1, None), pa.list_(pa.int32()), "row group 0, row 1: the row is null"),
        ([[1, 2], [3, 4], None], pa.list_(pa.int32(), 2), "row group 1, row 0: the row is null"),
        ([[], [], [1], [11]], pa.list_(pa.int8()), "row group 1, row 1: token id 11"),
    ],
)
@pytest.mark.parametrize("statistics", [True, False])
def test_bad_ids_name_file_row_group_and_row(tmp_path, rows, kind, message, statistics):
    """With the statistics' help before any work, otherwise at the latest when the block is read."""
    path = write_rows(tmp_path / "bad.parquet", rows, kind, row_group_rows=2, write_statistics=statistics)
    with pytest.raises((RequestError, RunError), match=f"bad.parquet, {message}") as caught:
        Shards.open(str(path), vocab_size=10).read(0)
    assert "\n" not in str(caught.value)
    if "token id" in message and "null" not in message:
        assert caught.type is RequestError, "known from the footer or the count, so before any work"


def test_ids_outside_the_vocabulary_behind_a_manifest_are_found_when_read(tmp_path):
    write_rows(tmp_path / "train/0.parquet", [[1], [2, 999]], pa.list_(pa.uint16()))
    write_manifest(tmp_path, vocab_size=500)
    with pytest.raises(RunError, match="group 0, row 1: token id 999 is outside the vocabulary of 500; was it made"):
        Shards.open(str(tmp_path / "train")).read(0)


def test_other_columns_are_named(tmp_path):
    path = write_rows(tmp_path / "a.parquet", ROWS, extra=True)
    with pytest.raises(RequestError, match="no column 'tokens'; it has text, input_ids; set data.column"):
        Shards.open(str(path), column="tokens")
    with pytest.raises(RequestError, match="'text' is string, not a list of integers; tokenize it first"):
        Shards.open(str(path), column="text")
    floats = write_rows(tmp_path / "b.parquet", [[0.5]], pa.list_(pa.float32()))
    with pytest.raises(RequestError, match="b.parquet: column 'input_ids' is list<.*float>, not a list of integers"):
        Shards.open(str(floats))


def test_damaged_files_are_named(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 1000, 100_000).astype(np.uint16)
    path = write_tokens(tmp_path / "a.parquet", tokens, row_groups=4)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"PAR1 not at all PAR1", whole[:-4]):
        path.write_bytes(content)
        with pytest.raises(RequestError, match="a.parquet is not a readable Parquet file"):
            Shards.open(str(path))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x10  # one bit of a page: found by its checksum
    path.write_bytes(flipped)
    with pytest.raises(BadBlock, match="a.parquet, row group 1: cannot be decoded"):
        Shards.open(str(path)).read(0)
    shards = Shards.open(str(path))
    path.unlink()
    with pytest.raises(RunError, match="a.parquet.*cannot be read .*put it back") as caught:
        shards.read(0)
    assert caught.type is RunError, "a folder that is not there is nothing to skip"


def test_no_flipped_byte_and_no_cut_of_a_shard_goes_unseen(tmp_path):
    """Each byte of a shard as `lm data prepare` writes it: the right tokens, or an error of ours, never others."""
    tokens = np.random.default_rng(0).integers(0, 1000, 300).astype(np.uint16)
    path = tmp_path / "train/00000.parquet"
    path.parent.mkdir()
    writer = ShardWriter(path, tokens.dtype, "ab" * 32)
    writer.write(tokens, np.array([100, 0, 150, 50]))
    writer.close()
    manifest = write_manifest(tmp_path)
    manifest["splits"]["train"]["shards"][0]["digest"] = writer.digest
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    whole, seen = path.read_bytes(), 0
    for place in range(len(whole)):
        for bit in (0x01, 0x80):
            changed = bytearray(whole)
            changed[place] ^= bit
            path.write_bytes(changed)
            try:
                assert np.array_equal(Shards.open(str(path.parent)).read(0), tokens), (place, bit)
            except (RequestError, BadBlock) as error:
                assert "00000.parquet" in str(error) and "\n" not in str(error)
                seen += 1
    assert seen > len(whole) / 2
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(RequestError, match="where the manifest says"):
            Shards.open(str(path.parent))


def test_a_shard_that_was_replaced_by_one_as_long_is_found(tmp_path):
    """Before any work where its time tells, at the latest when it is first read; in anyone's folder by its footer."""
    one = np.random.default_rng(0).integers(0, 2**16, 300).astype(np.uint16)
    other = one[::-1].copy()
    (tmp_path / "train").mkdir()
    paths = [tmp_path / "train/00000.parquet", tmp_path / "other.parquet"]
    digests = []
    for path, tokens in zip(paths, (one, other), strict=True):
        writer = ShardWriter(path, tokens.dtype, "ab" * 32)
        writer.write(tokens, np.array([300]))
        writer.close()
        digests.append(writer.digest)
    assert paths[0].stat().st_size == paths[1].stat().st_size
    manifest = write_manifest(tmp_path, vocab_size=2**16)
    manifest["splits"]["train"]["shards"][0]["digest"] = digests[0]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    before = Shards.open(str(tmp_path / "train")).fingerprint()
    by_footer = Shards.open(str(paths[0])).fingerprint()
    paths[1].rename(paths[0])
    old = (tmp_path / "manifest.json").stat().st_mtime_ns - 10**9
    os.utime(paths[0], ns=(old, old))
    with pytest.raises(BadBlock, match="00000.parquet.*its footer is not the one"):
        Shards.open(str(tmp_path / "train")).read(0)
    os.utime(paths[0])
    with pytest.raises(RequestError, match="00000.parquet.*its footer is not the one"):
        Shards.open(str(tmp_path / "train"))
    difference = describe_difference(by_footer, Shards.open(str(paths[0])).fingerprint())
    assert difference == "00000.parquet is as long as it was and holds something else"
    manifest["splits"]["train"]["shards"][0]["digest"] = digests[1]  # prepared again, from other texts
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert "holds something else" in describe_difference(before, Shards.open(str(tmp_path / "train")).fingerprint())


def test_nothing_there_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    for source, message in [
        (tmp_path / "absent", "absent: no such file or folder"),
        (tmp_path / "empty", "empty: the folder holds no .parquet file"),
        (tmp_path / "*.parquet", r"\*.parquet: no file matches"),
        ("nowhere://a/b", "nowhere://a/b: cannot be opened"),
        (tmp_path / "a**.parquet", "is no pattern of files"),
    ]:
        with pytest.raises(RequestError, match=message):
            Shards.open(str(source))
    with pytest.raises(RequestError, match="no shards were named"):
        Shards.open([])
    write_rows(tmp_path / "a.parquet", ROWS)
    shards = Shards.open(str(tmp_path))
    with pytest.raises(RequestError, match=r"9 tokens, at most 9 .* one block, but a window takes 10 \(seq_len"):
        shards.require_windows(9)
    assert shards.require_windows(8) == 1


def test_the_prepared_folder_itself_is_not_a_source(tmp_path):
    write_folder(tmp_path / "train", [50])
    write_manifest(tmp_path)
    with pytest.raises(RequestError, match="is a prepared folder: give it as data.path"):
        Shards.open(str(tmp_path))


def test_shards_that_another_tokenizer_made_are_refused(tmp_path):
    path = write_tokens(tmp_path / "a.parquet", np.zeros(9, np.uint16), metadata={"lm.tokenizer": "ab" * 32})
    assert Shards.open(str(path), tokenizer_sha256="ab" * 32).tokens == 9
    with pytest.raises(RequestError, match="a.parquet was made with another tokenizer .SHA-256 abababababab"):
        Shards.open(str(path), tokenizer_sha256="cd" * 32)


def test_globs_and_folders_find_what_people_mean(tmp_path):
    for name in ["a/x-0", "a/x-1", "a/b/x-2", "c/y", "a/.hidden", "_temporary/z"]:
        write_rows(tmp_path / f"{name}.parquet", [[1, 2]])
    write_rows(tmp_path / "d/1.PARQUET", [[1, 2]])
    write_rows(tmp_path / "d/2.pq", [[1, 2]])
    (tmp_path / "a/notes.txt").write_text("no shard")

    def found(source):
        return [shard.name for shard in Shards.open(source).fingerprint()]

    assert found(f"{tmp_path}/a/*.parquet")[-2:] == ["x-0.parquet", "x-1.parquet"]
    assert found(f"{tmp_path}/a") == found(f"{tmp_path}/a/") == ["b/x-2.parquet", "x-0.parquet", "x-1.parquet"]
    assert found(f"{tmp_path}/d") == ["1.PARQUET", "2.pq"]
    assert found(f"{tmp_path}/**/x-*.parquet") == ["a/b/x-2.parquet", "a/x-0.parquet", "a/x-1.parquet"]
    assert found(f"{tmp_path}/*/x-[!0].parquet") == ["a/x-1.parquet"]
    assert found(f"{tmp_path}/a/x-?.parquet") == ["x-0.parquet", "x-1.parquet"]
    assert found([f"{tmp_path}/c", f"{tmp_path}/a/x-0.parquet"]) == ["y.parquet", "x-0.parquet"]


def test_a_relative_path_works_from_the_working_directory(tmp_path, monkeypatch):
    write_folder(tmp_path / "data/train", [50])
    write_manifest(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert Shards.open("data/train").blocks[0].file_of(0) == "data/train/00000.parquet"
    monkeypatch.chdir(tmp_path / "data/train")
    assert Shards.open("00000.parquet").tokens == Shards.open(".").tokens == Shards.open("*.parquet").tokens == 50


def test_a_fingerprint_tells_changed_shards_and_survives_moving_them(tmp_path):
    write_folder(tmp_path / "one", [50, 60, 70])
    old = Shards.open(str(tmp_path / "one"))
    (tmp_path / "one").rename(tmp_path / "two")
    moved = Shards.open(str(tmp_path / "two"))
    assert moved.fingerprint() == old.fingerprint()
    assert describe_difference(old.fingerprint(), moved.fingerprint()) == ""
    saved = json.loads(json.dumps(old.fingerprint()))
    write_folder(tmp_path / "two", [50, 61])
    (tmp_path / "two/00002.parquet").rename(tmp_path / "two/00003.parquet")
    new = Shards.open(str(tmp_path / "two"))
    difference = describe_difference(saved, new.fingerprint())
    for part in ("00002.parquet is gone", "00003.parquet is new", "00001.parquet had", "60 tokens, now"):
        assert part in difference


def test_any_number_of_threads_may_read(tmp_path):
    tokens = write_folder(tmp_path, [3000] * 20, row_groups=3)
    shards = pickle.loads(pickle.dumps(Shards.open(str(tmp_path), vocab_size=1000, block_tokens=1)))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert np.array_equal(np.concatenate(list(pool.map(shards.read, range(20)))), tokens)
    assert pq.read_metadata(tmp_path / "00000.parquet").num_row_groups == 3
