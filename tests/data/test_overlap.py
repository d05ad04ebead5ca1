"""Validation text that is in the training text too is found, however it was written, and counted."""

import random
import re

import pytest
from shard_files import write_rows

from lm.data.config import PrepareOptions, SourceConfig
from lm.data.datamodule import DataModule
from lm.data.overlap import shared_spans
from lm.data.prepare import prepare
from lm.data.shards import Shards
from lm.errors import RequestError

END = 0  # id that ends a document


def document(draw, tokens=200):
    return [*(draw.randrange(1, 5000) for _ in range(tokens)), END]


def shared(tmp_path, training, validation):
    for name, rows in (("train", training), ("val", validation)):
        compression = "zstd" if name == "val" else "none"
        write_rows(tmp_path / f"{name}/a.parquet", rows, row_group_rows=7, compression=compression)
    return shared_spans(*(Shards.open(str(tmp_path / name), vocab_size=5000) for name in ("train", "val")), END)


@pytest.mark.parametrize("common", [0, 3, 20])
def test_passages_are_found_whatever_is_around_them(tmp_path, common):
    """Rows in another order and other row groups, cut and joined elsewhere, after tokens that are no document."""
    draw = random.Random(7)
    training, validation = ([document(draw) for _ in range(count)] for count in (300, 20))
    cut = [row[5:] + row[:5] for row in validation[:common]]
    found, total = shared(tmp_path, draw.sample(training + cut, 300 + common), validation)
    assert total > 300 and found == pytest.approx(common / 20 * total, abs=0.05 * total)
    assert (found == 0) == (common == 0)


def test_padding_and_short_documents_say_nothing(tmp_path):
    assert shared(tmp_path, [[3] * 300, [4, 5, END] * 90], [[3] * 300, [4, 5, END] * 90]) == (0, 0)


def test_a_fit_refuses_much_of_it_and_warns_of_some(tmp_path):
    draw = random.Random(7)
    texts = ["".join(draw.choice("abcdefgh ") for _ in range(300)) for _ in range(60)]
    (tmp_path / "texts.txt").write_text("\n\n".join(texts))
    prepare(PrepareOptions([str(tmp_path / "texts.txt")], str(tmp_path / "made"), tokenizer="char"))
    rows = [[draw.randrange(2, 9) for _ in range(600)] for _ in range(60)]
    splits = {"val": rows[:10], "most": rows[2:], "one": [rows[0][:200], *rows[10:]], "none": rows[10:]}
    for name, some in splits.items():
        write_rows(tmp_path / name / "a.parquet", some)

    def opened(train):
        places = {"train": train, "val": "val", "tokenizer": "made"}
        data = DataModule(**{name: str(tmp_path / place) for name, place in places.items()}, seq_len=16)
        data.setup("fit")
        return [what for what, _ in data.warnings()]

    with pytest.raises(RequestError, match=r"of 5\d\d passages of the validation data, \d\d.\d%, are in the training"):
        opened("most")
    assert "are in the training data too, so its loss is too low" in opened("one")[0]
    assert opened("none") == []


def test_passages_of_files_for_training_and_validation_are_compared(tmp_path, caplog):
    """Whole documents of the validation data are left out of the training data."""
    caplog.set_level("INFO")
    draw = random.Random(7)
    texts = ["".join(draw.choice("abcdefgh ") for _ in range(300)) for _ in range(60)]

    def make(name, training, validation=texts[:20], tokenizer="char"):
        for split, documents in (("train", training), ("val", validation)):
            (tmp_path / name / split).mkdir(parents=True)
            for number, text in enumerate(documents):
                (tmp_path / name / split / f"{number}-{split}.txt").write_text(text)
        files = [str(tmp_path / name / split) for split in ("train", "val")]
        return prepare(PrepareOptions(files, str(tmp_path / f"{name}-made"), tokenizer=tokenizer))

    made = make("all", [text.upper() + "\n" for text in texts])
    assert [made["splits"][name]["documents"] for name in ("train", "val")] == [40, 20]
    assert made["repeated"] == {"documents": 20, "tokens": 20 * 302, "of_validation": 20}
    assert "left out: 20 documents that repeat another, 20 of them one of the validation data (6" in caplog.text
    with pytest.raises(RequestError, match="^all documents of the training data are in the validation data too"):
        make("only", texts[:20])
    with pytest.raises(RequestError, match=r"^(\d+) of \1 passages of the validation data, 100.0%, are in the train"):
        make("inside", [f"a {text} b" for text in texts])
    caplog.clear()
    make("none", texts[20:40])
    make("others", texts[:10], texts[40:], tokenizer=str(tmp_path / "none-made"))
    assert "training data too" not in caplog.text
    # Each is sound by itself, and one has half of the other's validation.
    sources = [SourceConfig(name, str(tmp_path / f"{name}-made")) for name in ("none", "others")]
    data = DataModule(sources=sources, seq_len=16)
    data.setup("fit")
    assert re.search(r" passages of the validation data, 2\d.\d%, are in the training", data.warnings()[0][0])
