"""Training data in which no document ends, or whose ends are ordinary text, is named: its model would never stop."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm.cli.data import main_prepare
from lm.data.datamodule import DataModule
from lm.data.document_ends import describe_ends
from lm.data.shards import Shards
from lm.data.tokenizer_training import train_char

TOKENIZER = train_char(["abc"])  # 0 ends a document
ROW = [2, 3, 4] * 200
ENDED = [*ROW, TOKENIZER.eos_id]


@pytest.mark.parametrize(
    ("columns", "rows", "said"),
    [
        ({"input_ids": ENDED}, 200, None),
        ({"input_ids": ROW}, 200, "no document ends in the first 120,000 tokens"),
        ({"input_ids": ROW}, 50, None),  # which may be one document
        ({"input_ids": ENDED, "attention_mask": [1] * 600 + [0]}, 200, "no document ends"),
        ({"input_ids": ENDED, "labels": [*ROW, -100]}, 200, "no document ends"),
        ({"input_ids": ENDED, "labels": ENDED}, 200, None),
    ],
)
def test_shards_of_others_without_an_end_that_is_learned_are_named(columns, rows, said, tmp_path):
    pq.write_table(pa.table({name: [values] * rows for name, values in columns.items()}), tmp_path / "a.parquet")
    problem = describe_ends(Shards.open(str(tmp_path), vocab_size=TOKENIZER.vocab_size), TOKENIZER)
    assert problem is None if said is None else said in str(problem)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.text)
    module = DataModule(train=str(tmp_path), tokenizer=str(tmp_path), seq_len=16)
    module.setup("fit")
    assert (problem in module.warnings()) == bool(said)


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
@pytest.mark.parametrize("text, warned", [
    ("".join(f"text {i}\n<|endoftext|>\n" for i in range(99)), True),
    ("one <|endoftext|> in a text that is about it, " + "and more words\n" * 99, False),
    ("one text\n" * 99, False),
])  # fmt: skip
def test_ends_that_are_spelled_in_the_text_are_named(text, warned, tokenizer, tmp_path, caplog):
    (tmp_path / "a.txt").write_text(text)
    main_prepare(input=[str(tmp_path / "a.txt")], output=str(tmp_path / "o"), tokenizer=tokenizer, vocab_size=300)
    assert ("has <|endoftext|> " in caplog.text and "make a JSON line of each" in caplog.text) == warned
