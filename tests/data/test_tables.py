"""Tables of text: CSV, TSV, and folders of `datasets.save_to_disk`."""

import csv
import gzip

import pyarrow as pa
import pytest

from lm.data.documents import read_documents
from lm.data.text_files import find_files
from lm.errors import LmError

TEXTS = ["one, two", 'said "so"\n\nand\twent', "3", "ü" * 200_000, ""]
READ = [text for text in TEXTS if text]


def texts_of(path, **options):
    return [text for _, text in read_documents([str(path)], **options)]


def write_table(path, texts=TEXTS, column="text", dialect="excel"):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, dialect).writerows([("id", column), *enumerate(texts)])
    return path


@pytest.mark.parametrize(("name", "dialect"), [("a.csv", "excel"), ("a.CSV.gz", "excel"), ("a.tsv", "excel-tab")])
def test_a_table_has_a_document_a_row(name, dialect, tmp_path):
    assert texts_of(write_table(tmp_path / name, dialect=dialect)) == READ
    assert texts_of(write_table(tmp_path / name, column="body", dialect=dialect), text_key="body") == READ
    assert texts_of(tmp_path, text_key="id") == list("01234")  # a folder


def write_arrow(path, texts, kind=pa.string()):
    """As `datasets.save_to_disk` writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": pa.array(range(len(texts))), "text": pa.array(texts, kind)})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


def test_a_folder_of_datasets_is_read_by_its_splits(tmp_path):
    many = [f"text {number}" for number in range(1000)]
    write_arrow(tmp_path / "train/data-00000-of-00002.arrow", many[:900])
    write_arrow(tmp_path / "train/data-00001-of-00002.arrow", many[900:], pa.large_string())
    write_arrow(tmp_path / "test/data-00000-of-00001.arrow", ["of the test"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "train/state.json").write_text("{}")
    (tmp_path / "train/dataset_info.json").write_text("{}")
    assert texts_of(tmp_path / "train") == many
    splits = {file.name.removeprefix(f"{tmp_path}/"): file.split for file in find_files([str(tmp_path)])}
    assert set(splits) == {"test/data-00000-of-00001.arrow", *(f"train/data-0000{n}-of-00002.arrow" for n in (0, 1))}


DAMAGED = {  # name, content -> what is said
    "no column": ("a.csv", b"id,body\n1,x\n", "no column 'text' among 'id', 'body'; name the one with text or token ids by --text_key"),
    "a short row": ("a.csv", b"id,text\n1,x\n2\n", "line 3: 1 columns where the first line names 2"),
    "an open quote": ("a.csv", b'text\n"x\ny\n', "a.csv, the row of lines 2 to 3: unexpected end of data; end its"),
    "not UTF-8": ("a.tsv", b"text\n\xff\n", "a.tsv cannot be read"),
    "empty": ("a.csv", b"", "no column 'text'"),
    "no arrow": ("a.arrow", b"text\nx\n", "a.arrow cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_table_is_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LmError, match=message) as caught:
        texts_of(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_numbers_in_place_of_a_text_are_named(tmp_path):
    write_arrow(tmp_path / "a.arrow", [[1.5], [3]], pa.list_(pa.float32()))
    with pytest.raises(LmError, match="not text but list<.*; give another with"):
        texts_of(tmp_path / "a.arrow")
    write_arrow(tmp_path / "b.arrow", [[1, 2], [3]], pa.list_(pa.int32()))
    with pytest.raises(LmError, match=r"b.arrow holds token ids: give the tokenizer.json"):
        texts_of(tmp_path / "b.arrow")


def test_rows_without_a_text_are_named(tmp_path):
    write_arrow(tmp_path / "a.arrow", ["x"] * 400 + [None])
    with pytest.raises(LmError, match="row 400: column 'text' is null"):
        texts_of(tmp_path / "a.arrow")
