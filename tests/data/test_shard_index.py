"""`lm data index`: shards of others open without reading their footers, and a change of any of them is noticed."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from shard_files import all_tokens, write_rows

from lm.cli.command import main
from lm.data import catalog
from lm.data.catalog import INDEX
from lm.data.shards import Shards
from lm.data.tokenizer_training import train_char
from lm.errors import RequestError, RunError

DRAW = np.random.default_rng(0)


@pytest.fixture
def folder(here):
    """Shards with padding, and their tokenizer."""
    for number in range(20):
        rows = [DRAW.integers(2, 9, size).tolist() + [0] * 3 for size in DRAW.integers(1, 30, 9)]
        write_rows(here / f"shards/part-{number:02}.parquet", rows, compression="none", use_dictionary=False)
    for name, text in train_char(["abcdefgh"]).files().items():
        (here / name).write_text(text)
    return here / "shards"


def run(*options):
    assert main(["data", "index", "shards", *options]) == 0


def open_shards(**options):
    return Shards.open("shards", vocab_size=11, pad_id=0, eos_id=0, **options)


def test_the_shards_open_without_their_footers(folder, monkeypatch):
    before = open_shards()
    run("--pad_id", "0", "--tokenizer", ".")
    monkeypatch.setattr(catalog, "_from_footer", lambda *_: pytest.fail("a footer was read"))
    after = open_shards()
    assert after.fingerprint() == before.fingerprint()
    assert np.array_equal(all_tokens(after), all_tokens(before))
    assert Shards.open("shards", pad_id=0, eos_id=0).column.vocab_size == 10  # of the tokenizer
    assert [path.name for path in folder.glob("_*")] == [INDEX]


def test_a_change_is_noticed(folder):
    run("--pad_id", "0", "--tokenizer", ".")
    path = folder / "part-03.parquet"
    content = path.read_bytes()

    def refused(message):
        with pytest.raises(RequestError, match=message) as caught:
            open_shards()
        assert "run `lm data index shards` again" in str(caught.value) and "\n" not in str(caught.value)

    path.write_bytes(content + b" ")
    refused("shards/part-03.parquet is new, gone or changed")
    path.rename(folder / "part-x.parquet")
    refused("shards/part-.*.parquet is new, gone or changed")
    (folder / "part-x.parquet").unlink()
    refused("shards/part-03.parquet is new, gone or changed")
    rows = pq.read_table(folder / "part-04.parquet")["input_ids"].to_pylist()
    path.write_bytes(content)
    others = [[9 if token == 8 else token for token in row] for row in rows]
    write_rows(folder / "part-04.parquet", others, compression="none", use_dictionary=False)
    indexed = json.loads((folder / INDEX).read_text())["shards"]
    assert (folder / "part-04.parquet").stat().st_size == indexed["part-04.parquet"]["size"]
    with pytest.raises(RunError, match="part-04.parquet.* footer is not the one that it had"):
        all_tokens(open_shards())  # of the same size
    run("--pad_id", "0", "--tokenizer", ".")
    all_tokens(open_shards())


@pytest.mark.parametrize("options, message", [
    ({"pad_id": None}, "indexed with pad_id 0, and here it is None"),
    ({"column": "ids"}, "indexed with column input_ids, and here it is ids"),
    ({"eos_id": 1}, "indexed with eos_id 0, and here it is 1"),
    ({"tokenizer_sha256": "ab"}, "with another tokenizer: run `lm data index shards` again, with --tokenizer"),
])  # fmt: skip
def test_an_index_of_another_reading_is_refused(options, message, folder):
    run("--pad_id", "0", "--tokenizer", ".")
    with pytest.raises(RequestError, match=message):
        Shards.open("shards", **{"vocab_size": 11, "pad_id": 0, "eos_id": 0, **options})


def test_what_cannot_be_indexed_is_refused(folder, capsys):
    for path, message in (("none", "none: no such file or folder"), ("s3://a/b", "is a URL")):
        assert main(["data", "index", path]) == 2
        assert message in capsys.readouterr().err
    assert main(["data", "index", "shards", "--column", "ids"]) == 2
    assert "has no column 'ids'" in capsys.readouterr().err
    assert not (folder / INDEX).exists()
