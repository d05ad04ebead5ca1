"""The stream: however it is divided, and wherever it starts, training sees the same samples in the same order."""

import gc
import pickle
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import write_folder, write_rows
from trainings import wait_until

from lm.data.loader import Assembler, Batch, BlockBuffer, Stream, Windows
from lm.data.sampler import Order
from lm.data.shards import Shards
from lm.errors import RunError
from lm.system import remote

SEQ_LEN = 8


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Nine shards of 33 to 400 tokens in blocks of 60 or so, with token = place in the concatenation modulo 997."""
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.data.blocks.BLOCK_TOKENS", 60)
        write_folder(folder, [33, 400, 77, 120, 256, 64, 99, 301, 41], row_groups=5)
        return Shards.open(str(folder), vocab_size=1000)


def stream(shards, **options):
    settings = dict(seq_len=SEQ_LEN, start=0, global_batch=24, lanes=8, seed=5) | options
    order = Order(shards.index.windows(SEQ_LEN), settings.pop("seed"), lanes=settings.pop("lanes"))
    return Stream(shards, order, **settings)


def reference(shards, start, count, seed=5, lanes=8):
    """Rows of samples from `start` on, one at a time, from the blocks themselves."""
    blocks, windows = Order(shards.index.windows(SEQ_LEN), seed, lanes=lanes).locate(np.arange(start, start + count))
    return np.stack([shards.read(b)[w * SEQ_LEN : w * SEQ_LEN + SEQ_LEN + 1] for b, w in zip(blocks, windows)])


@given(
    st.sampled_from([(1, 24), (2, 4), (3, 8), (4, 2), (6, 1), (8, 3), (2, 12), (1, 1)]),
    st.integers(0, 1000),
    st.sampled_from([1, 8, 64]),
    st.integers(1, 2000),
)
@settings(max_examples=15, deadline=None)
def test_ranks_micro_batches_start_and_buffer_change_nothing(shards, division, start, lanes, buffer):
    """Interleaving the ranks' micro-batches gives the samples of each step, in order, whatever division or memory.

    The memory may be less than a block.
    """
    world, micro = division
    expected = reference(shards, start, 24 * 4, lanes=lanes)
    rows = np.empty_like(expected)
    for rank in range(world):
        batches = iter(stream(shards, start=start, rank=rank, world=world, lanes=lanes, shuffle_buffer=buffer))
        for step, batch in enumerate(islice(batches, 4)):
            assert batch.consumed == start + (step + 1) * 24
            micro_batches = batch.split(micro)
            assert len(micro_batches) == 24 // world // micro
            part = np.concatenate([micro_batch.tokens.numpy() for micro_batch in micro_batches])
            rows[step * 24 + rank : (step + 1) * 24 : world] = part
        batches.close()
    assert np.array_equal(rows, expected)


def test_a_stream_can_be_sent_to_a_spawned_process(shards):
    copy = pickle.loads(pickle.dumps(stream(shards)))
    assert torch.equal(next(iter(copy)).labels, next(iter(stream(shards))).labels)


@given(st.integers(1, 40), st.integers(0, 500))
@settings(max_examples=10, deadline=None)
def test_memory_stays_within_the_buffer(shards, blocks, start):
    capacity, most = blocks * shards.index.largest.tokens, [0]
    want = BlockBuffer.request

    def watched(buffer, *arguments):
        admitted = want(buffer, *arguments)
        held = sum(shards.index.blocks[block].tokens for block in buffer.blocks)
        assert held == buffer.tokens <= capacity
        most[0] = max(most[0], held)
        return admitted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockBuffer, "request", watched)
        resumed = stream(shards, start=start)
        list(Assembler(shards, resumed.order, SEQ_LEN, islice(resumed.requests(), 60), capacity).batches())
    assert most[0] > 0


@given(st.integers(1, 5), st.integers(1, 7), st.one_of(st.none(), st.integers(1, 400)))
@settings(max_examples=25, deadline=None)
def test_evaluation_counts_each_window_once_in_lockstep(shards, world, micro, limit):
    """Over the ranks the counted rows are the first windows in order; every rank yields as many batches."""
    rows = [
        ids[start + 1 : start + SEQ_LEN + 1].tolist()
        for ids in map(shards.read, range(len(shards.index.blocks))) for start in range(0, len(ids) - SEQ_LEN, SEQ_LEN)
    ]  # fmt: skip
    targets, lengths = [], set()
    for rank in range(world):
        batches = list(Windows(shards, seq_len=SEQ_LEN, micro_batch=micro, limit=limit, rank=rank, world=world))
        lengths.add(len(batches))
        for batch in batches:
            assert batch.tokens.shape == (micro, SEQ_LEN + 1)
            counted = batch.labels[(batch.labels != -100).all(1)]
            assert batch.num_targets == counted.numel() == (batch.labels != -100).sum()
            targets += counted.tolist()
    assert targets == rows[:limit] and len(lengths) == 1


def test_tokens_come_out_as_they_went_in():
    """uint16 ids above 32767 and int32 ids widen without a sign; the mask ignores labels."""
    ids = np.array([[0, 32767, 32768, 65535]], dtype=np.uint16)
    batch = Batch(torch.from_numpy(ids), consumed=1)
    assert batch.input_ids.tolist() == [[0, 32767, 32768]] and batch.labels.tolist() == [[32767, 32768, 65535]]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64 and batch.num_targets == 3
    wide = Batch(torch.tensor([[7, 70000, 9]], dtype=torch.int32), mask=torch.tensor([[True, False]]))
    assert wide.labels.tolist() == [[70000, -100]] and wide.num_targets == 1
    assert wide.tokens.tolist() == [[7, 70000, 9]], "the batch itself is left as it was"
    moved = batch.to("cpu")
    assert moved.consumed == batch.consumed and moved.mask is None


@given(st.integers(1, 3), st.integers(0, 200))
@settings(max_examples=15, deadline=None)
def test_only_targets_of_the_labels_count(labelled, world, start):
    """Beside a shard without labels too; the tokens are inputs all the same."""
    shards, ids, targets = labelled
    order = Order(shards.index.windows(SEQ_LEN), 5, lanes=1)
    expected = np.where(targets, ids, -100)
    for rank in range(world):
        part = Stream(shards, order, seq_len=SEQ_LEN, start=start, global_batch=6, rank=rank, world=world)
        batch = next(iter(part))
        _, windows = order.locate(np.arange(start + rank, start + 6, world))
        for inputs, labels, first in zip(batch.input_ids, batch.labels, windows * SEQ_LEN):
            assert inputs.tolist() == ids[first : first + SEQ_LEN].tolist()
            assert labels.tolist() == expected[first + 1 : first + SEQ_LEN + 1].tolist()
        assert batch.num_targets == (batch.labels != -100).sum()


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Shards of which the second has labels: with their ids and targets, end to end."""
    folder, random = tmp_path_factory.mktemp("labelled"), np.random.default_rng(0)
    write_folder(folder, [150])
    ids = random.integers(0, 1000, (20, 9))
    labels = np.where(random.random(ids.shape) < 0.5, ids, -100)
    write_rows(folder / "1.parquet", ids.tolist(), columns={"labels": labels.tolist()})
    shards = Shards.open(str(folder), vocab_size=1000)
    return shards, shards.read(0).astype(int), np.concatenate([np.ones(150, bool), labels.ravel() != -100])


def no_threads():
    return not [thread for thread in threading.enumerate() if thread.name.startswith("lm-")]


def test_threads_end_with_their_iterator(shards):
    wait_until(no_threads)
    batches = iter(stream(shards))
    next(batches)
    assert not no_threads()
    batches.close()
    wait_until(no_threads)
    batches = iter(stream(shards))
    next(batches)
    del batches
    gc.collect()
    wait_until(no_threads)
    assert len(list(Windows(shards, seq_len=SEQ_LEN, micro_batch=4, limit=10))) == 3
    wait_until(no_threads)


@pytest.mark.parametrize("asked", [False, True])
def test_a_block_is_waited_for_no_longer_than_the_timeout_unless_its_store_asks_to_wait(shards, asked, monkeypatch):
    read = shards.read_tokens
    monkeypatch.setattr(shards, "read_tokens", lambda block: time.sleep(1) or read(block))
    monkeypatch.setattr(remote, "_asked_until", time.monotonic() + 30 if asked else 0.0)
    buffer = BlockBuffer(shards, 10**6, timeout=0.2)
    buffer.request(0)
    if asked:
        assert len(buffer.get(0).ids)
    else:
        with pytest.raises(RunError, match=r"not read after 0.2 seconds \(data.timeout\)"):
            buffer.get(0)
    buffer.close()


def test_the_next_blocks_are_decoded_while_a_batch_is_trained_on(shards):
    """By the time that a batch is asked for, its blocks were read without anybody asking for it."""
    counted, read = pickle.loads(pickle.dumps(shards)), set()
    counted.read_tokens = lambda block, actual=counted.read_tokens: (actual(block), read.add(block))[0]
    batch_stream = stream(counted, lanes=2, global_batch=4)
    batches = iter(batch_stream)
    for step in range(1, 40):
        next(batches)
        needed = set(batch_stream.order.locate(np.arange(step * 4, step * 4 + 4))[0].tolist())
        wait_until(lambda: needed <= read)


def test_the_interpreter_exits_in_the_middle_of_a_stream(tmp_path):
    write_folder(tmp_path, [3000] * 4)
    script = f"""
from lm.data.sampler import Order
from lm.data.shards import Shards
from lm.data.loader import Stream
shards = Shards.open({str(tmp_path)!r}, vocab_size=1000)
batches = iter(Stream(shards, Order(shards.index.windows(8), 1), seq_len=8, start=0, global_batch=4))
print(tuple(next(batches).tokens.shape))
"""
    command, root = [sys.executable, "-c", script], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(4, 9)\n", "")
