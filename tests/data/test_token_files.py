"""Token ids of other projects become the same shards as their documents in Parquet, to the bit; what is not known is
refused before anything is made of it."""

import struct
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm.data.config import PrepareOptions
from lm.data.documents import read_pieces
from lm.data.prepare import prepare
from lm.data.text_files import find_files
from lm.data.tokenizer_training import train_char
from lm.errors import RunError

TOKENIZER = train_char(["abcdefgh"])
EOS = TOKENIZER.eos_id
DRAW = np.random.default_rng(0)
DOCUMENTS = [DRAW.integers(2, TOKENIZER.vocab_size, size).tolist() for size in DRAW.integers(1, 90, 200)]
ENDED = [[*document, EOS] for document in DOCUMENTS]


def ids(documents, dtype="<u2"):
    return np.concatenate(documents).astype(dtype).tobytes()


def write_llm_c(path, magic, version, dtype):
    """As `dev/data/data_common.py` of llm.c, whose documents begin with the end-of-text token."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, sum(map(len, ENDED))
    path.write_bytes(header.tobytes() + ids([[EOS, *document] for document in DOCUMENTS], dtype))


def write_megatron(path, documents, code=8, dtype="<u2", version=1, magic=b"MMIDIDX\0\0"):
    """As `IndexedDatasetBuilder` of megatron.core.datasets.indexed_dataset; each document has two sequences."""
    sequences = [part for document in documents for part in (document[:1], document[1:])]
    lengths = list(map(len, sequences))
    pointers = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    borders = np.arange(0, len(sequences) + 1, 2)
    index = struct.pack("<9sQBQQ", magic, version, code, len(lengths), len(borders))
    index += np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes() + borders.astype("<i8").tobytes()
    path.write_bytes(ids(documents, dtype))
    path.with_suffix(".idx").write_bytes(index)


def write_datatrove(path, size, with_end):
    """By datatrove itself."""
    tokenizer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    folder = pytest.importorskip("datatrove.io").get_datafolder(str(path.parent))
    options = {"tokenizer_name_or_path": "t", "save_final_metadata": True, "token_size": size}
    file = tokenizer.TokenizedFile(folder, path.name, **options)
    for document in ENDED if with_end else DOCUMENTS:
        file.write(document, None)
    file.close()


def write_rows_of_ids(path, rows):
    """As `datasets.save_to_disk`, or as Parquet."""
    table = pa.table({"text": pa.array(rows, pa.list_(pa.int32()))})
    if path.suffix == ".parquet":
        return pq.write_table(table, path)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=30)


FORMATS = {
    "datasets.arrow": lambda path: write_rows_of_ids(path, DOCUMENTS),
    "ended.arrow": lambda path: write_rows_of_ids(path, [sum(ENDED[i : i + 5], []) for i in range(0, len(ENDED), 5)]),
    "rows.parquet": lambda path: write_rows_of_ids(path, ENDED),
    "nanogpt.bin": lambda path: path.write_bytes(ids(ENDED)),
    "olmo.npy": lambda path: path.write_bytes(ids(ENDED)),
    "numpy.npy": lambda path: np.save(path, np.concatenate(ENDED)),
    "llm.c.bin": lambda path: write_llm_c(path, 20240520, 1, "<u2"),
    "llama3.bin": lambda path: write_llm_c(path, 20240801, 7, "<u4"),
    "megatron.bin": lambda path: write_megatron(path, ENDED),
    "nemo.bin": lambda path: write_megatron(path, DOCUMENTS, 4, "<i4"),  # without end-of-text tokens
    "trove.ds": lambda path: write_datatrove(path, 2, True),
    "wide.ds": lambda path: write_datatrove(path, 4, False),
}


def prepared(folder, file):
    (folder / "tokenizer").mkdir(exist_ok=True)
    for name, text in TOKENIZER.files().items():
        (folder / "tokenizer" / name).write_text(text)
    options = PrepareOptions([str(file)], str(folder / "out"), str(folder / "tokenizer"), val_fraction=0.2)
    return prepare(options)["splits"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The splits of the same documents from JSON lines."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "a.bin").write_bytes(ids(ENDED))
    splits = prepared(folder, folder / "a.bin")
    assert sum(split["documents"] for split in splits.values()) == len(DOCUMENTS)
    return splits


@pytest.mark.parametrize("name", FORMATS)
def test_it_becomes_the_same_shards(name, expected, tmp_path):
    FORMATS[name](tmp_path / name)
    assert prepared(tmp_path, tmp_path / name) == expected


@pytest.mark.parametrize("chunk", [3, 64, 1000])
@pytest.mark.parametrize("name", ["llm.c.bin", "nemo.bin"])
def test_documents_are_whole_where_a_chunk_ends_in_them(name, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr("lm.data.token_files.CHUNK", chunk)
    FORMATS[name](tmp_path / name)
    [file] = find_files([str(tmp_path / name)])
    pieces = list(read_pieces(file, tokenizer=TOKENIZER))
    numbers = accumulate((piece.last for piece in pieces), initial=0)
    found = [[] for _ in DOCUMENTS]
    for number, piece in zip(numbers, pieces):
        found[number] += piece.content.tolist()
    assert found == DOCUMENTS


def change(path, change_bytes):
    path.write_bytes(change_bytes(path.read_bytes()))


WRONG = {
    "an unknown header": ("a.bin", lambda path: write_llm_c(path, 20260101, 3, "<u2"), "header that is not known .*20260101"),
    "another version": ("a.bin", lambda path: write_llm_c(path, 20240520, 2, "<u2"), "version 2"),
    "fewer ids than its header says": ("a.bin", lambda path: (
        FORMATS["llm.c.bin"](path), change(path, lambda data: data[:-40])), "ends after .* it is truncated"),
    "half of an id": ("a.bin", lambda path: path.write_bytes(ids(ENDED) + b"\0"), "a.bin ends inside of a token id"),
    "floating point": ("a.bin", lambda path: write_megatron(path, ENDED, code=7), r"not an index of Megatron-LM"),
    "an older index": ("a.bin", lambda path: write_megatron(path, ENDED, magic=b"TNTIDX\0\0\0"), "not an index of Meg"),
    "a damaged index": ("a.bin", lambda path: (
        write_megatron(path, ENDED), change(path.with_suffix(".idx"), lambda data: data[:-8])), "is it damaged"),
    "a short index": ("a.bin", lambda path: (
        write_megatron(path, ENDED), change(path.with_suffix(".idx"), lambda data: data[:9])), "is it damaged"),
    "fewer ids than its index says": ("a.bin", lambda path: (
        write_megatron(path, ENDED), change(path, lambda data: data[:-40])), "ends after .* it is truncated"),
    "an array of numbers": ("a.npy", lambda path: np.save(path, np.ones(9)), r"\(9,\) of float64, not a list of ids"),
    "a table": ("a.npy", lambda path: np.save(path, np.ones((3, 3), int)), r"\(3, 3\) of int64, .*ravel"),
    "a damaged array": ("a.npy", lambda path: path.write_bytes(b"\x93NUMPY\1\0\x10\0abc"), "damaged array of NumPy"),
    "a negative id": ("a.npy", lambda path: np.save(path, np.array([3, -1])), "token 1: id -1 is outside"),
    "a mask of the loss": ("a.ds", lambda path: (
        write_datatrove(path, 2, True), (path.parent / "a.ds.loss").write_bytes(b"\1")), "mask of its loss"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_told_apart_is_never_trained_on(case, tmp_path):
    name, write, message = WRONG[case]
    write(tmp_path / name)
    with pytest.raises(RunError, match=message) as caught:
        prepared(tmp_path, tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)
