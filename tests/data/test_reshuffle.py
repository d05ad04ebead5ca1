"""Documents in another order in each epoch: nothing is lost, samples are cut elsewhere, and any division is exact."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from shard_files import write_rows
from trainings import lm, make_workplace, write_config

from lm.data.config import SourceConfig
from lm.data.datamodule import DataModule
from lm.data.loader import Stream
from lm.data.reshuffle import ReshuffledOrder, ReshuffledShards
from lm.data.shards import Shards

SEQ_LEN, END, SEED = 8, 0, 5


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three files of documents of 1 to 30 tokens that end with 0, in blocks of about 150; one has labels."""
    folder, random = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.data.blocks.BLOCK_TOKENS", 150)
        for name in "abc":
            rows = [[*random.integers(1, 1000, random.integers(0, 30)).tolist(), END] for _ in range(30)]
            labels = {"labels": [[id if id % 3 else -100 for id in row] for row in rows]} if name == "b" else {}
            write_rows(folder / f"{name}.parquet", rows, columns=labels)
        return Shards.open(str(folder), vocab_size=1000)


@pytest.fixture(scope="module")
def reshuffled(shards):
    return ReshuffledShards(shards, SEED, END)


def order(shards):
    return ReshuffledOrder(shards.index.windows(SEQ_LEN), SEED, lanes=8, blocks=len(shards.index.blocks))


def documents(ids):
    """How often each document is there; what follows the last end of text is one too."""
    return Counter(map(tuple, np.split(ids, np.flatnonzero(ids == END) + 1)))


def test_an_epoch_has_the_documents_of_each_block_once_in_another_order(shards, reshuffled):
    blocks = len(shards.index.blocks)
    assert blocks > 5
    for block in range(blocks):
        stored = shards.read(block)
        epochs = [reshuffled.read(block + epoch * blocks) for epoch in range(4)]
        assert np.array_equal(epochs[0], stored)
        assert all(documents(ids) == documents(stored) for ids in epochs)
        unfinished = len(stored) - 1 - np.flatnonzero(stored == END)[-1]
        assert all(np.array_equal(ids[len(ids) - unfinished :], stored[len(stored) - unfinished :]) for ids in epochs)
        assert len({ids.tobytes() for ids in epochs}) == 4 or len(documents(stored)) < 5


def test_what_is_a_target_moves_with_its_token(shards, reshuffled):
    block = next(block for block in range(len(shards.index.blocks)) if shards.read_tokens(block).targets is not None)
    before, after = shards.read_tokens(block), reshuffled.read_tokens(block + len(shards.index.blocks))
    assert Counter(zip(*map(np.ndarray.tolist, before))) == Counter(zip(*map(np.ndarray.tolist, after)))
    assert not np.array_equal(before.targets, after.targets)


@pytest.mark.parametrize(("world", "start"), [(1, 0), (2, 0), (4, 120), (8, 1000)])
def test_ranks_and_start_change_nothing(shards, reshuffled, world, start):
    """The rows of every step are those of the order, read one by one, also over the border of epochs."""
    steps = 20
    located = zip(*map(np.ndarray.tolist, order(shards).locate(np.arange(start, start + 8 * steps))))
    expected = [reshuffled.read(block)[window * SEQ_LEN : window * SEQ_LEN + SEQ_LEN + 1] for block, window in located]
    for rank in range(world):
        stream = Stream(reshuffled, order(shards), seq_len=SEQ_LEN, start=start, global_batch=8, rank=rank, world=world)
        part = np.concatenate([batch.tokens.numpy() for batch in islice(stream, steps)])
        assert np.array_equal(part, np.stack(expected[rank::world]))


def test_epochs_are_cut_into_other_samples(shards, reshuffled):
    total = order(shards).total

    def samples(epoch):
        blocks, windows = order(shards).locate(np.arange(epoch * total, (epoch + 1) * total))
        return {reshuffled.read(b)[w * SEQ_LEN : (w + 1) * SEQ_LEN].tobytes() for b, w in zip(blocks, windows)}

    first, second, third = map(samples, range(3))
    assert len(first & second) < total / 4 and len(second & third) < total / 4


def test_the_file_of_a_token_is_where_it_is_stored(shards, reshuffled):
    blocks = len(shards.index.blocks)
    for index in range(blocks, 2 * blocks):
        ids, block = reshuffled.read(index), shards.index.blocks[index % blocks]
        stored = Counter((int(id), block.file_of(place)) for place, id in enumerate(shards.read(index % blocks)))
        assert Counter((int(id), reshuffled.file_of(index, place)) for place, id in enumerate(ids)) == stored


def test_from_the_command_line(tmp_path):
    """A run over several epochs resumes, shows its batches, and refuses to go on without it."""
    make_workplace(tmp_path, "data/small")
    write_config(tmp_path, **{
        "data.reshuffle": "documents", "data.global_batch_tokens": 1024, "trainer.max_steps": 24,
        "model.schedule.name": "constant", "trainer.callbacks": None,
    })  # fmt: skip
    fit = "fit", "--config", "small.yaml"
    lm(tmp_path, *fit, "--run", "whole")
    lm(tmp_path, *fit, "--run", "parts", "--trainer.max_steps", "19")
    refused = lm(tmp_path, *fit, "--run", "parts", "--ckpt_path", "auto", "--data.reshuffle", "null", expect=2)
    assert "data.reshuffle" in refused.stderr, refused.stderr
    lm(tmp_path, *fit, "--run", "parts", "--ckpt_path", "auto")
    runs = [tmp_path / "checkpoints" / run / "last" for run in ("whole", "parts")]
    assert len({(run / "model.safetensors").read_bytes() for run in runs}) == 1
    assert "data/small/train/" in lm(tmp_path, "data", "show", "--run", "whole", "--step", "24").stdout


def test_a_mixture_has_the_documents_of_its_own_sources(here):
    """Blocks are numbered over all sources, and each source has epochs of its own."""
    make_workplace(here)
    for name, tokenizer in (("a", "char"), ("b", "a")):
        lm(here, "data", "prepare", "--input", "texts", "--output", name, "--tokenizer", tokenizer)
    sources = [SourceConfig("a", "a", weight=3.0), SourceConfig("b", "b", weight=1.0)]
    data = DataModule(sources=sources, seq_len=32, reshuffle="documents")
    data.set_position(seed=SEED, global_batch=8)
    data.setup("fit")
    rows = np.concatenate([batch.tokens.numpy() for batch in islice(data.train_dataloader(), 200)])
    shown, places = data.read_samples(0, len(rows))
    assert np.array_equal(rows, shown.tokens.numpy())
    for (file, _), source in zip(places, data.sources_of(0, len(rows)), strict=True):
        assert file.startswith(f"{source}/")
    assert data.order().epochs(len(rows)).min() > 1
