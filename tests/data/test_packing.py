"""Whole documents in rows: nothing is lost or cut without need, and padding is never trained on."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.trainer.states import TrainerState
from shard_files import write_jsonl
from trainings import fit, lm, write_config

from lm.data.cache import BlockCache
from lm.data.config import PrepareOptions
from lm.data.datamodule import DataModule
from lm.data.packing import pack_documents
from lm.data.parquet import PackedRows
from lm.data.prepare import prepare
from lm.data.shard_statistics import padding_fraction
from lm.data.shards import Shards
from lm.data.tokenizer import Tokenizer
from lm.system.units import Count

SEQ_LEN = 32


def pack(lengths, seq_len):
    ends = np.cumsum(lengths)
    return pack_documents(ends - lengths, ends, seq_len)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(2, 20))
def test_every_token_is_in_one_row_and_no_document_is_cut_that_fits_one(lengths, seq_len):
    packing, ends = pack(lengths, seq_len), np.cumsum(lengths)
    spans = list(zip(packing.starts.tolist(), packing.stops.tolist(), packing.rows.tolist()))
    assert sorted(token for start, stop, _ in spans for token in range(start, stop)) == list(range(ends[-1]))
    begins = {0, *ends[:-1].tolist()}
    rows = {row: [span[:2] for span in spans if span[2] == row] for row in range(spans[-1][2] + 1)}
    assert [row for *_, row in spans] == sorted(row for *_, row in spans)
    for row in rows.values():
        assert 0 < sum(stop - start for start, stop in row) <= seq_len
        assert all(start in begins for start, _ in row[1:]), "only the first may continue a document"
    whole = {(start, stop) for start, stop, _ in spans}
    for start, stop in pairwise([0, *ends.tolist()]):
        assert stop - start > seq_len or (start, stop) in whole
    open_rows = [sum(stop - start for start, stop in row) for row in rows.values() if row[0][0] in begins]
    assert all(a + b > seq_len for a, b in pairwise(sorted(open_rows))), "two rows would fit one"
    firsts = [row[0][0] if row[0][0] not in begins else min(start for start, _ in row) for row in rows.values()]
    assert firsts == sorted(firsts), "the order of the documents is kept, and a long one's rows follow each other"


def test_a_document_goes_into_the_row_with_the_least_space_that_is_enough():
    packing = pack([7, 5, 3], 10)
    assert packing.rows.tolist() == [0, 0, 1] and packing.starts.tolist() == [0, 12, 7]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """`packed/`, `stream/` and the texts of both: short documents, and a few that are longer than a sample."""
    place, random = tmp_path_factory.mktemp("place"), np.random.default_rng(0)
    texts = ["".join(random.choice(list("abcdefgh "), length))
             for length in [*random.integers(1, SEQ_LEN, 300), 100, SEQ_LEN - 1, SEQ_LEN, 64]]  # fmt: skip
    common = {"input": [str(write_jsonl(place / "texts.jsonl", texts))], "tokenizer": "char", "val_fraction": 0.1}
    prepare(PrepareOptions(**common, output=str(place / "packed"), packing="whole", seq_len=Count(SEQ_LEN)))
    prepare(PrepareOptions(**common, output=str(place / "stream")))
    return place


def read_rows(folder, split):
    shards = Shards.open(str(folder / split))
    tokens = shards.read_tokens(0)
    rows = tokens.ids.reshape(-1, SEQ_LEN + 1)
    targets = np.ones_like(rows, bool) if tokens.targets is None else tokens.targets.reshape(rows.shape)
    return shards, rows, targets


def test_the_targets_of_all_rows_are_the_documents(place):
    """As the stream of the same texts has them, by an independent count."""
    tokenizer = Tokenizer.load(place / "packed")
    for split in ("train", "val"):
        shards, rows, targets = read_rows(place / "packed", split)
        stream = Shards.open(str(place / "stream" / split)).read(0)
        documents = np.split(stream, np.flatnonzero(stream == tokenizer.eos_id)[:-1] + 1)
        assert shards.index.windows(SEQ_LEN).tolist() == [len(rows)] and shards.index.left_over(SEQ_LEN) == 0
        assert targets[:, 1:].sum() == len(stream)
        assert 0.1 > padding_fraction(shards) == pytest.approx(1 - len(stream) / (len(rows) * SEQ_LEN))
        contents = [row[1:][mask[1:]].tobytes() for row, mask in zip(rows, targets)]
        for document in documents:
            pieces = [document[at : at + SEQ_LEN] for at in range(0, len(document), SEQ_LEN)]
            assert all(any(piece.tobytes() in row for row in contents) for piece in pieces)
            for before, piece in pairwise(pieces):  # a row that continues a document begins with the token before
                row = np.append(before[-1:], piece)
                assert any(np.array_equal(other[: len(row)], row) for other in rows)


def test_counts_are_in_the_manifest_and_the_commands_show_them(place):
    manifest = json.loads((place / "packed/manifest.json").read_text())
    _, rows, targets = read_rows(place / "packed", "train")
    [entry] = manifest["splits"]["train"]["shards"]
    assert entry["padding"] == (~targets[:, 1:]).sum() and manifest["packed"][0] == SEQ_LEN
    shown = lm(place, "data", "inspect", "packed").stdout
    assert f"in samples of {SEQ_LEN} tokens" in shown and f" {len(rows)} " in shown and "filled up" in shown
    planned = lm(place, "plan", "--config", str(write_config(place, "planned", data=data("packed")))).stdout
    assert "only fills it up" in planned


def data(path, **changes):
    return {"path": path, "seq_len": SEQ_LEN, "micro_batch_size": 4, "global_batch_tokens": 8 * SEQ_LEN, **changes}


def test_a_batch_has_the_rows_and_counts_no_padding(place):
    _, rows, targets = read_rows(place / "packed", "val")
    module = DataModule(path=str(place / "packed"), seq_len=SEQ_LEN, micro_batch_size=4)
    module.trainer = type("Trainer", (), {"global_rank": 0, "world_size": 1, "state": TrainerState()})
    module.setup("validate")
    batches = list(module.val_dataloader())
    assert np.array_equal(np.concatenate([batch.tokens for batch in batches])[: len(rows)], rows)
    assert sum(batch.num_targets for batch in batches) == targets[:, 1:].sum()


def test_a_fit_packs_its_texts(place):
    """The context of the model is the length of a row, and what is trained on are the rows."""
    module = data("fitted", packing="whole", seq_len=None, prepare={
        "input": ["texts.jsonl"], "tokenizer": "char", "val_fraction": 0.1})  # fmt: skip
    fit(place, "fitted", data=module)
    for split in ("train", "val"):
        assert np.array_equal(read_rows(place / "fitted", split)[1], read_rows(place / "packed", split)[1])
    rows = {row.tobytes() for row in read_rows(place / "fitted", "train")[1].astype(np.int64)}
    shown = json.loads(lm(place, "data", "show", "--run", "fitted", "--step", "2", "--json").stdout)
    for sample in shown["samples"]:
        assert np.array(sample["token_ids"]).tobytes() in rows
        assert not any(text == "<|endoftext|>" for text in sample["documents"][1:])


def test_a_remote_copy_without_its_manifest_is_read_the_same(place, tmp_path):
    import fsspec

    fsspec.filesystem("memory").put(str(place / "packed/train") + "/", "/packed/", recursive=True)
    eos_id = Tokenizer.load(place / "packed").eos_id
    cache = BlockCache(tmp_path, 10**6)
    remote, (local, rows, _) = Shards.open("memory://packed", cache=cache), read_rows(place / "packed", "train")
    assert remote.packed == local.packed == PackedRows(SEQ_LEN, eos_id)
    for _ in range(2):  # the second time from the cache
        ids, targets = remote.read_tokens(0)
        assert np.array_equal(ids, rows.ravel()) and np.array_equal(targets, local.read_tokens(0).targets)


@pytest.mark.parametrize("command, message", [
    ("data prepare --input texts.jsonl --output x --packing whole", "--packing whole needs --seq_len"),
    ("data prepare --input texts.jsonl --output x --seq_len 64", "--seq_len is for --packing whole"),
    ("data prepare --input texts.jsonl --output packed --tokenizer char --val_fraction 0.1",
     "--packing was whole, is stream, --seq_len was 32, is None"),
    ("plan --config other.yaml --data.seq_len 16", "packed for samples of 32 tokens, and data.seq_len .* is 16"),
    ("plan --config other.yaml --data.packing stream", "prepared with --packing whole, and data.packing is stream"),
    ("plan --config other.yaml --data.path stream --data.packing whole", "prepared with --packing stream, and"),
    ("plan --config other.yaml --data.pad_id 0", "data.pad_id is for rows that another program padded"),
    ("plan --config mixed.yaml", "packed differently.*: prepare them with the same --packing"),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(place, command, message):
    sources = [{"name": name, "path": name, "weight": 1} for name in ("packed", "stream")]
    write_config(place, "other", data=data("packed"))
    write_config(place, "mixed", data={**data("packed"), "path": None, "sources": sources})
    done = lm(place, *command.split(), expect=2)
    [line] = done.stderr.strip().splitlines()
    assert re.search(message, done.stdout + line)  # `plan` has said it above its last line


@pytest.mark.parametrize("texts", [["a", "b", "c"] * 40, ["abc def. " * 9], ["ab"]], ids=["letters", "one", "short"])
def test_a_validation_that_had_to_be_cut_has_text_to_predict(tmp_path, texts):
    folder, source = tmp_path / "made", write_jsonl(tmp_path / "a.jsonl", texts)
    prepare(PrepareOptions([str(source)], str(folder), "char", packing="whole", seq_len=Count(SEQ_LEN)))
    eos_id = Tokenizer.load(folder).eos_id
    for split in ("train", "val"):
        _, rows, targets = read_rows(folder, split)
        assert all((row[mask] != eos_id).any() for row, mask in zip(rows, targets))
        [entry] = json.loads((folder / "manifest.json").read_text())["splits"][split]["shards"]
        assert entry["padding"] == (~targets[:, 1:]).sum()
        if texts[0] == "a":
            between = [piece for row in rows for piece in np.split(row[1:], np.flatnonzero(row[1:] == eos_id))]
            assert all((piece != eos_id).sum() <= 1 for piece in between)
