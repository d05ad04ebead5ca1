"""Shards: anyone's layout is read to the same tokens, or refused by file, row group and row."""

import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import all_tokens, write_folder, write_manifest, write_rows, write_shard, write_tokens

from lm.data.catalog import describe_difference
from lm.data.overlap import common_file
from lm.data.parquet import BadBlock
from lm.data.shards import Shards
from lm.errors import RequestError, RunError

INTEGERS = [pa.uint8(), pa.int8(), pa.uint16(), pa.int16(), pa.uint32(), pa.int32(), pa.uint64(), pa.int64()]
IDS = pa.list_(pa.int32())


def refuses(message, source, **options):
    """Before any work and in one line."""
    with pytest.raises(RequestError, match=message) as caught:
        Shards.open(str(source), **options)
    assert "\n" not in str(caught.value)


rows_of_ids = st.lists(st.lists(st.integers(0, 99), max_size=7), min_size=1, max_size=20)


@given(
    rows_of_ids,
    st.sampled_from(INTEGERS),
    st.sampled_from(["list", "large_list", "strict", "fixed", "list_view", "large_list_view"]),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from(["none", "lz4", "zstd", "snappy"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["1.0", "2.0"]),
)
@settings(max_examples=120, deadline=None)
def test_every_layout_reads_to_the_same_tokens(
    tmp_path_factory, rows, integer, layout, group, statistics, compression, dictionary, extra, page
):
    if layout == "fixed":
        rows = [(row * 3 + [1, 2, 3])[:3] for row in rows]
    kind = {
        "list": pa.list_(integer),
        "large_list": pa.large_list(integer),
        "fixed": pa.list_(integer, 3),
        "strict": pa.list_(pa.field("element", integer, nullable=False)),
        "list_view": pa.list_view(integer),
        "large_list_view": pa.large_list_view(integer),
    }[layout]
    path = write_rows(
        tmp_path_factory.mktemp("shard") / "a.parquet", rows, kind, group, {"text": ["x"] * len(rows)} if extra else {},
        write_statistics=statistics, compression=compression, use_dictionary=dictionary, data_page_version=page,
    )  # fmt: skip
    for vocab_size, dtype in ((100, np.uint16), (2**16 + 1, np.uint32)):
        shards = Shards.open(str(path), vocab_size=vocab_size)
        tokens = all_tokens(shards)
        assert tokens.tolist() == [token for row in rows for token in row] and tokens.dtype == dtype
        assert shards.index.tokens == len(tokens) and all(block.tokens <= 2**20 for block in shards.index.blocks)


def test_blocks_group_row_groups_up_to_their_size(tmp_path, monkeypatch):
    monkeypatch.setattr("lm.data.blocks.BLOCK_TOKENS", 100)
    tokens = np.arange(1000, dtype=np.uint16)
    write_tokens(tmp_path / "small.parquet", tokens, row=10, row_groups=25)  # 40 tokens each: two fit
    write_tokens(tmp_path / "tall.parquet", tokens, row=10, row_groups=5)  # 200 tokens each: one is too many
    shards = Shards.open([str(tmp_path / "small.parquet"), str(tmp_path / "tall.parquet")], vocab_size=1000)
    assert [block.tokens for block in shards.index.blocks] == [80] * 12 + [40] + [200] * 5
    assert all_tokens(shards).tolist() == tokens.tolist() * 2
    assert shards.index.windows(79).tolist() == [1] * 12 + [0] + [2] * 5


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
    assert opened.index.tokens == 50_000 and opened.column.vocab_size == 1000
    assert len(opened.read(999)) == 50
    with pytest.raises(BadBlock, match="00007.parquet, row groups 0 to 1: cannot be decoded"):
        opened.read(7)


def change_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest, manifest["splits"]["train"]["shards"])
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("change, message", [
    (lambda manifest, shards: shards[0].update(file="../x.parquet"), "which is missing"),
    (lambda manifest, shards: shards[0].update(size=12), "where the manifest says 12"),
    (lambda manifest, shards: manifest.update(layout=2), "layout 2"),
    (lambda manifest, shards: manifest.update(column="ids"), "token column is 'ids'"),
    (lambda manifest, shards: manifest.update(tokenizer="cd" * 32), "another tokenizer"),
    (lambda manifest, shards: manifest.update(eos_id=7), "documents end with token 7, and those .* in use with 0"),
    (lambda manifest, shards: shards[1].update(file="train/2.parquet"), "'train/2.parquet', which is missing"),
    (lambda manifest, shards: manifest["splits"]["train"].update(shards=shards[:1], tokens=50),
     "00001.parquet is not in its manifest"),
])  # fmt: skip
def test_a_folder_that_is_not_what_its_manifest_says_is_refused(tmp_path, change, message):
    write_folder(tmp_path / "train", [50, 60])
    write_manifest(tmp_path)
    change_manifest(tmp_path, change)
    refuses(message, tmp_path / "train", tokenizer_sha256="ab" * 32, eos_id=0)


def test_a_manifest_with_a_wrong_count_is_found_when_read(tmp_path):
    write_folder(tmp_path / "train", [50])
    write_manifest(tmp_path)
    change_manifest(tmp_path, lambda manifest, shards: shards[0].update(row_groups=[28, 23]))
    refuses("manifest.json is damaged: its row groups have not the tokens of the split", tmp_path / "train")
    change_manifest(tmp_path, lambda manifest, shards: manifest["splits"]["train"].update(tokens=51))
    with pytest.raises(RunError, match="00000.parquet, row group 1 holds 22 tokens where .* manifest says 23"):
        Shards.open(str(tmp_path / "train")).read(0)


ROWS = [[1, 2], [3], [4, 5], [6], [7, 8], [9]]


def spoil(row, value):
    return [value if i == row else ids for i, ids in enumerate(ROWS)]


@pytest.mark.parametrize("rows, kind, message", [
    (spoil(3, [6, 12]), pa.list_(pa.uint16()), "row group 1, row 1: token id 12 is outside the vocabulary of 10"),
    (spoil(5, [-1]), pa.list_(pa.int64()), "row group 2, row 1: token id -1 is outside the vocabulary of 10"),
    (spoil(4, [2**40]), pa.large_list(pa.int64()), "row group 2, row 0: token id 1099511627776 is outside"),
    (spoil(2, [4, None]), pa.list_(pa.int32()), "row group 1, row 0: a token id is null"),
    (spoil(1, None), pa.list_(pa.int32()), "row group 0, row 1: the row is null"),
    ([[1, 2], [3, 4], None], pa.list_(pa.int32(), 2), "row group 1, row 0: the row is null"),
    ([[], [], [1], [11]], pa.list_(pa.int8()), "row group 1, row 1: token id 11"),
])  # fmt: skip
@pytest.mark.parametrize("statistics", [True, False])
def test_bad_ids_name_file_row_group_and_row(tmp_path, rows, kind, message, statistics):
    """Before any work: the statistics show that something is wrong, and without them all is read."""
    path = write_rows(tmp_path / "bad.parquet", rows, kind, row_group_rows=2, write_statistics=statistics)
    refuses(f"bad.parquet, {message}", path, vocab_size=10)


def test_a_column_that_does_not_hold_ids_is_refused(tmp_path):
    path = write_rows(tmp_path / "a.parquet", ROWS, columns={"text": ["x"] * len(ROWS)})
    write_rows(tmp_path / "b.parquet", [[0.5]], pa.list_(pa.float32()))
    refuses("no column 'tokens'; it has text, input_ids; set `column`", path, column="tokens")
    refuses("'text' is string, not a list of integers; tokenize it first", path, column="text")
    refuses("b.parquet: column 'input_ids' is list<.*float>, not a list of integers", path.with_stem("b"))


def test_damaged_files_are_named(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 1000, 100_000).astype(np.uint16)
    path = write_tokens(tmp_path / "a.parquet", tokens, row_groups=4)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"PAR1 not at all PAR1", whole[:-4]):
        path.write_bytes(content)
        refuses("a.parquet: cannot be decoded .*is it Parquet.*fetch or write it again", path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x10  # one bit of a page: found by its checksum
    path.write_bytes(flipped)
    with pytest.raises(BadBlock, match="a.parquet, row group 1: cannot be decoded"):
        Shards.open(str(path)).read(0)
    shards = Shards.open(str(path))
    path.unlink()
    with pytest.raises(RunError, match="a.parquet.*cannot be read .*No such file") as caught:
        shards.read(0)
    assert caught.type is RunError, "a folder that is not there is nothing to skip"


def test_no_flipped_byte_and_no_cut_of_a_shard_goes_unseen(tmp_path):
    """Each byte of a shard as `lm data prepare` writes it: the right tokens, or an error of ours, never others."""
    tokens = np.random.default_rng(0).integers(0, 1000, 300).astype(np.uint16)
    path = tmp_path / "train/00000.parquet"
    write_manifest(tmp_path, digests=[write_shard(path, tokens, [100, 100, 250])])
    content, seen = path.read_bytes(), 0
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            assert np.array_equal(Shards.open(str(path.parent)).read(0), tokens), place
        except (RequestError, BadBlock) as error:
            assert "00000.parquet" in str(error) and "\n" not in str(error)
            seen += 1
    assert seen > len(content) / 4
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        refuses("where the manifest says", path.parent)


def test_a_shard_that_was_replaced_by_one_as_long_is_found(tmp_path):
    """Before any work where its time tells, at the latest when it is first read; in anyone's folder by its footer."""
    ids = np.random.default_rng(0).integers(0, 2**16, 300).astype(np.uint16)
    paths = [tmp_path / "train/00000.parquet", tmp_path / "other.parquet"]
    digests = [write_shard(path, tokens) for path, tokens in zip(paths, (ids, ids[::-1].copy()))]
    assert paths[0].stat().st_size == paths[1].stat().st_size
    write_manifest(tmp_path, 2**16, digests[:1])
    before = Shards.open(str(tmp_path / "train")).fingerprint()
    by_footer = Shards.open(str(paths[0])).fingerprint()
    paths[1].rename(paths[0])
    old = (tmp_path / "manifest.json").stat().st_mtime_ns - 10**9
    os.utime(paths[0], ns=(old, old))
    with pytest.raises(BadBlock, match="00000.parquet.*its footer is not the one"):
        Shards.open(str(tmp_path / "train")).read(0)
    os.utime(paths[0])
    refuses("00000.parquet.*its footer is not the one", tmp_path / "train")
    difference = describe_difference(by_footer, Shards.open(str(paths[0])).fingerprint())
    assert difference == "00000.parquet is as long as it was and holds something else"
    write_manifest(tmp_path, 2**16, digests[1:])  # prepared again, from other texts
    assert "holds something else" in describe_difference(before, Shards.open(str(tmp_path / "train")).fingerprint())


def test_a_source_without_shards_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "ids.npy", np.arange(9))
    write_folder(tmp_path / "made/train", [50])
    write_manifest(tmp_path / "made")
    for source, message in [
        (tmp_path / "made", "is a prepared folder: name one split, "),
        (tmp_path / "absent", "absent: no such file or folder"),
        (tmp_path / "empty", "empty: the folder holds no .parquet file"),
        (tmp_path / "*.parquet", r"\*.parquet: no file matches"),
        ("nowhere://a/b", "nowhere://a/b: cannot be opened"),
        (tmp_path / "ids.npy", r"ids.npy: cannot be decoded .it has no Parquet footer at its end.; is it Parquet\?"),
    ]:
        refuses(message, source)
    with pytest.raises(RequestError, match="no shards were named"):
        Shards.open([])
    shards = Shards.open(str(write_rows(tmp_path / "a.parquet", ROWS)))
    with pytest.raises(
        RequestError, match=r"9 tokens, at most 9 .* one block, but a window takes 10, a sample and the next"
    ):
        shards.check_windows(9)
    assert shards.check_windows(8) == 1


def test_shards_that_another_tokenizer_made_are_refused(tmp_path):
    path = write_tokens(tmp_path / "a.parquet", np.zeros(9, np.uint16), metadata={"lm.tokenizer": "ab" * 32})
    assert Shards.open(str(path), tokenizer_sha256="ab" * 32).index.tokens == 9
    refuses("a.parquet was made with another tokenizer .SHA-256 abababababab", path, tokenizer_sha256="cd" * 32)


def test_globs_and_folders_find_what_people_mean(tmp_path, monkeypatch):
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
    monkeypatch.chdir(tmp_path / "c")
    assert found("y.parquet") == found(".") == found("*.parquet") == found("../c") == ["y.parquet"]


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


# ---- short files -----------------------------------------------------------------------------------------------------
def test_windows_run_across_the_files_of_a_split(tmp_path):
    """At most `seq_len` tokens in a block are in no window, however short the files are; they are counted."""
    random = np.random.default_rng(0)
    runs = [random.integers(0, 1000, length).tolist() for length in random.integers(5, 90, 400)]
    for number, run in enumerate(runs):
        write_rows(tmp_path / f"{number:03d}.parquet", [run])
    tokens = np.concatenate(runs)
    shards = Shards.open(str(tmp_path), vocab_size=1000)
    assert np.array_equal(all_tokens(shards), tokens) and len(shards.index.blocks) == 1
    windows = shards.check_windows(64)
    assert windows == (len(tokens) - 1) // 64 and shards.index.left_over(64) == len(tokens) - 64 * windows - 1 <= 63
    names = np.repeat([f"{number:03d}" for number in range(400)], [shard.tokens for shard in shards.fingerprint()])
    for place in (0, 1, 100, len(tokens) // 2, len(tokens) - 1):
        assert shards.index.blocks[0].file_of(place).endswith(f"{names[place]}.parquet")
    cut = Shards.open(str(tmp_path), vocab_size=1000, block_tokens=500)
    assert max(block.tokens for block in cut.index.blocks) <= 500 and np.array_equal(all_tokens(cut), tokens)
    assert cut.index.left_over(64) == sum(b.tokens - 1 - (b.tokens - 1) // 64 * 64 for b in cut.index.blocks)
    assert str(cut.index.blocks[0]).startswith(f"shard {tmp_path}/000.parquet, row group 0, up to shard {tmp_path}/0")
    (tmp_path / "123.parquet").write_bytes(b"gone")
    with pytest.raises(BadBlock, match="123.parquet, row group 0: cannot be decoded"):
        shards.read(0)


# ---- which files are the same ----------------------------------------------------------------------------------------
def test_a_file_counts_once_by_whatever_path(tmp_path):
    """A folder and its files, links, hard links, another spelling; a copy is another file."""
    write_rows(tmp_path / "a/0.parquet", [[1, 2]])
    write_rows(tmp_path / "a/1.parquet", [[3, 4, 5]])
    (tmp_path / "a/2.parquet").symlink_to("1.parquet")
    os.link(tmp_path / "a/1.parquet", tmp_path / "a/3.parquet")
    (tmp_path / "b").symlink_to("a")
    for source in ("a", ["a", "a"], ["a", "a/0.parquet"], ["a/*.parquet", "a"], ["a", "b"], "*/*.parquet", ["a/../a"]):
        sources = [source] if isinstance(source, str) else source
        shards = Shards.open([f"{tmp_path}/{one}" for one in sources])
        assert sorted(all_tokens(shards).tolist()) == [1, 2, 3, 4, 5], source
    shutil.copy(tmp_path / "a/0.parquet", tmp_path / "a/4.parquet")
    assert Shards.open(f"file://{tmp_path}/a").index.tokens == 7


def test_a_link_to_a_folder_above_is_not_followed(tmp_path):
    """Neither one that leads above the source nor two that lead to each other; other links are followed.

    A shard that is a link to nothing, or to itself, is an error.
    """
    write_rows(tmp_path / "x/a/0.parquet", [[1]])
    write_rows(tmp_path / "x/b/1.parquet", [[2]])
    write_rows(tmp_path / "other/2.parquet", [[3]])
    write_rows(tmp_path / "above.parquet", [[4]])
    for place, target in {"x/a/up": "..", "x/up": "..", "x/a/side": "../b", "x/b/side": "../a", "x/on": "../other",
                          "x/gone": "nowhere", "x/self": "self"}.items():  # fmt: skip
        (tmp_path / place).symlink_to(target)
    assert sorted(all_tokens(Shards.open(str(tmp_path / "x"))).tolist()) == [1, 2, 3]
    assert [shard.name for shard in Shards.open(f"{tmp_path}/x/b/*.parquet").fingerprint()] == ["1.parquet"]
    for target in ("nowhere", "l.parquet"):
        (tmp_path / "x/l.parquet").symlink_to(target)
        refuses("shard .*x/l.parquet: cannot be read", tmp_path / "x")
        (tmp_path / "x/l.parquet").unlink()


def test_a_file_in_both_splits_is_found(tmp_path):
    """The same file, a link to it, a copy of it; not another one with the same bounds, and not an empty one."""
    for number in range(3):
        write_rows(tmp_path / f"train/{number}.parquet", [[number, 9, 0, 10, 5]])
    write_rows(tmp_path / "val/0.parquet", [[0, 5, 9, 0, 10]])  # the footer of train/0.parquet
    train = Shards.open(str(tmp_path / "train"))
    assert train.fingerprint()[0].digest == Shards.open(str(tmp_path / "val")).fingerprint()[0].digest
    assert common_file(train, Shards.open(str(tmp_path / "val"))) is None
    shutil.copy(tmp_path / "train/1.parquet", tmp_path / "val/copy.parquet")
    assert common_file(train, Shards.open(str(tmp_path / "val"))) == (
        f"{tmp_path}/train/1.parquet", f"{tmp_path}/val/copy.parquet"
    )  # fmt: skip
    (tmp_path / "link").symlink_to("train")
    files = common_file(train, Shards.open(str(tmp_path / "link/2.parquet")))
    assert files == (f"{tmp_path}/train/2.parquet", f"{tmp_path}/link/2.parquet")
    for split in ("train", "val2"):
        write_rows(tmp_path / split / "empty.parquet", [[], []])
    write_rows(tmp_path / "val2/0.parquet", [[7, 7, 7]])
    assert common_file(Shards.open(str(tmp_path / "train")), Shards.open(str(tmp_path / "val2"))) is None


# ---- masks and labels ------------------------------------------------------------------------------------------------
INTS = pa.list_(pa.int64())
MASK_TYPES = [pa.list_(pa.int8()), pa.list_(pa.int64()), pa.list_(pa.bool_()), pa.large_list(pa.uint8())]


marked_ids = st.tuples(st.integers(0, 99), st.booleans(), st.booleans())  # id, attention mask, whether a target


@given(
    st.lists(st.lists(marked_ids, max_size=6), min_size=1, max_size=12),
    st.sampled_from(MASK_TYPES),
    st.booleans(),
    st.booleans(),
    st.integers(1, 4),
)
@settings(max_examples=80, deadline=None)
def test_masks_and_labels_mean_what_they_mean_at_hugging_face(tmp_path_factory, rows, kind, masked, labelled, group):
    """What the mask leaves out is no token at all, and a label of -100 no target."""
    columns = {}
    if masked:
        number = bool if kind == pa.list_(pa.bool_()) else int
        columns["attention_mask"] = pa.array([[number(mask) for _, mask, _ in row] for row in rows], kind)
    if labelled:
        columns["labels"] = pa.array([[i if target else -100 for i, _, target in row] for row in rows], INTS)
    ids = [[i for i, *_ in row] for row in rows]
    path = write_rows(tmp_path_factory.mktemp("shard") / "a.parquet", ids, IDS, group, columns)
    expected = [(i, target or not labelled) for row in rows for i, mask, target in row if mask or not masked]
    shards = Shards.open(str(path), vocab_size=100)
    ids, targets = shards.read_tokens(0)
    assert ids.tolist() == [i for i, _ in expected] == shards.read(0).tolist() and shards.index.tokens == len(expected)
    assert ([True] * len(expected) if targets is None else targets.tolist()) == [target for _, target in expected]


def test_padding_outside_the_vocabulary_is_allowed_where_the_mask_leaves_it_out(tmp_path):
    masked = {"attention_mask": [[1, 1, 0], [1, 0, 0]]}
    path = write_rows(tmp_path / "a.parquet", [[1, 2, 100], [3, 100, 100]], columns=masked)
    assert Shards.open(str(path), vocab_size=100).read(0).tolist() == [1, 2, 3]
    path = write_rows(tmp_path / "b.parquet", [[1, 2], [3, 100]], columns={"attention_mask": [[0, 1]] * 2})
    refuses("b.parquet, row group 0, row 1: token id 100 is outside the vocabulary", path, vocab_size=100)


@pytest.mark.parametrize("name, values, kind, message", [
    ("attention_mask", [[1, 1], [1, 2]], INTS, "row group 0, row 1: 'attention_mask' holds 2, which is neither 0"),
    ("attention_mask", [[1, 1], [1]], INTS, "row group 0, row 1: 'attention_mask' has 1 values for 2 ids"),
    ("attention_mask", [[1, 0], [1, None]], INTS, "row 1: a value of 'attention_mask' is null"),
    ("attention_mask", [[1, 0], None], INTS, "row 1: the row is null; write it without 'attention_mask'"),
    ("attention_mask", [[0.5, 1], [1, 1]], pa.list_(pa.float32()), "column 'attention_mask' is list<.*float>, not"),
    ("attention_mask", [[[1], [1]]] * 2, pa.list_(INTS), "column 'attention_mask' is list<.*>, not a list"),
    ("labels", [[1, 2], [4, -100]], INTS, "row 1: 'labels' holds 4, which is neither the id nor -100"),
    ("labels", [[2, -100], [4, -100]], INTS, "row 0: 'labels' holds 2, .*: labels are not shifted"),
    ("labels", [1, 0], pa.int64(), "column 'labels' is int64, not a list of integers, one for each id"),
    ("labels", [[1, 2, 3], [3]], INTS, "row 0: 'labels' has 3 values for 2 ids"),
])  # fmt: skip
def test_masks_and_labels_of_another_kind_are_refused_before_any_work(tmp_path, name, values, kind, message):
    path = write_rows(tmp_path / "bad.parquet", [[1, 2], [3, 4]], columns={name: pa.array(values, kind)})
    refuses(f"bad.parquet.*{message}", path, vocab_size=10)


@pytest.mark.parametrize("rows, columns, pad_id", [
    ([[1, 2]], {"attention_mask": [[0, 0]]}, None), ([[0, 0]], {}, 0), ([], {}, None), ([[], []], {}, None),
])  # fmt: skip
def test_shards_without_a_token_are_refused(tmp_path, rows, columns, pad_id):
    write_rows(tmp_path / "a.parquet", rows, columns=columns)
    with pytest.raises(RequestError, match=f"{tmp_path}: 0 tokens, at most 0 of them"):
        Shards.open(str(tmp_path), pad_id=pad_id).check_windows(3)


PADDED = [[5, 6, 7, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8], [0, 9, 0, 4, 5, 0, 0, 0]]


def test_an_id_that_fills_rows_up_is_left_out_where_it_is_given(tmp_path):
    """Only then, only at the ends of rows, and an end-of-text token stays once; an error says which id to give."""
    path, left = (write_rows(tmp_path / f"{step}.parquet", [row[::step] for row in PADDED] * 3) for step in (1, -1))
    expected = [5, 6, 7, 5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 4, 5]
    for pad_id in (None, 9):
        assert Shards.open(str(path), vocab_size=10, pad_id=pad_id).index.tokens == 96
    assert Shards.open(str(path), vocab_size=10, pad_id=0).read(0).tolist() == expected * 3
    ends = Shards.open(str(path), vocab_size=10, pad_id=0, eos_id=0).read(0).tolist()
    assert ends == [5, 6, 7, 0, 5, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 4, 5, 0] * 3
    assert Shards.open(str(left), vocab_size=10, pad_id=0).read(0).tolist() == [
        7, 6, 5, 5, 8, 7, 6, 5, 4, 3, 2, 1, 5, 4, 0, 9] * 3  # fmt: skip
    negative = write_rows(tmp_path / "b.parquet", [[-1 if i == 0 else i for i in row] for row in PADDED[:3]], IDS)
    assert Shards.open(str(negative), vocab_size=10, pad_id=-1).index.tokens == 12
    refuses("b.parquet, row group 0, row 0: token id -1 .* padding: --data.pad_id -1$", negative, vocab_size=10)


# ---- what Arrow does not tell or takes for something else ------------------------------------------------------------
def test_a_column_is_not_taken_for_one_whose_name_begins_alike(tmp_path):
    columns = {"tokens.raw": [[9, 8, 7, 6]] * 3, "tokens": [[1, 2]] * 3, "s": [{"a": 1, "b": [2]}] * 3}
    for number, order in enumerate(itertools.permutations(columns)):
        pq.write_table(pa.table({name: columns[name] for name in order}), tmp_path / f"{number}.parquet")
        for name, expected in (("tokens", [1, 2]), ("tokens.raw", [9, 8, 7, 6])):
            shards = Shards.open(str(tmp_path / f"{number}.parquet"), column=name, vocab_size=10)
            assert shards.read(0).tolist() == expected * 3 and shards.index.tokens == len(expected) * 3


def test_denied_access_is_reported(tmp_path):
    """Before any work it is a wrong request, in mid-run a failure; it is never called damage."""
    folder = Path(tempfile.mkdtemp())  # that another user may enter
    folder.chmod(0o755)
    path = write_rows(folder / "a.parquet", ROWS)
    shards = Shards.open(str(path))
    path.chmod(0)
    try:
        if os.geteuid() == 0:  # who may read everything
            os.seteuid(65534)
        refuses("shard .*a.parquet: cannot be read .*Permission denied", path)
        with pytest.raises(RunError, match="a.parquet.*: cannot be read .*Permission denied") as caught:
            shards.read(0)
        assert not isinstance(caught.value, BadBlock), "which would be skipped"
    finally:
        os.seteuid(os.getuid())
        shutil.rmtree(folder)
