"""Remote shards: read from a real S3 server, kept within a bounded cache, tried again when a read fails."""

import multiprocessing
import os
import threading
import time
from unittest.mock import Mock

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from shard_files import all_tokens, write_folder, write_manifest, write_rows, write_shard

from lm.data.cache import BlockCache
from lm.data.parquet import BadBlock
from lm.data.shards import Shards
from lm.errors import RunError
from lm.system import remote
from lm.system.remote import read_exactly, with_retries

BLOCK = np.arange(1000, dtype=np.uint16)
KEPT = BLOCK.nbytes + 4  # with its checksum


@pytest.fixture(scope="module")
def s3(s3_client, tmp_path_factory):
    """A bucket `corpus` with a prepared folder: the client, and the tokens of its shards."""
    folder = tmp_path_factory.mktemp("corpus")
    tokens = write_folder(folder / "train", [500, 600, 700])
    write_manifest(folder)
    for path in sorted(folder.rglob("*.*")):
        s3_client.upload_file(str(path), "corpus", f"v1/{path.relative_to(folder)}")
    s3_client.upload_file(str(folder / "train/00000.parquet"), "corpus", "bare/00000.parquet")
    return s3_client, tokens


@pytest.mark.parametrize("source", ["s3://corpus/v1/train", "s3://corpus/v1/train/", "s3://corpus/v1/train/*.parquet"])
def test_shards_on_s3_are_read(s3, source):
    _, tokens = s3
    shards = Shards.open(source, vocab_size=1000)
    assert np.array_equal(all_tokens(shards), tokens)
    assert shards.index.blocks[0].file_of(0) == "s3://corpus/v1/train/00000.parquet"
    assert shards.fingerprint()[0].name == "00000.parquet"


def test_the_second_epoch_comes_from_the_cache(s3, tmp_path):
    client, tokens = s3
    shards = Shards.open("s3://corpus/bare", vocab_size=1000, cache=BlockCache(tmp_path, 10**6))
    first = all_tokens(shards)
    content = client.get_object(Bucket="corpus", Key="bare/00000.parquet")["Body"].read()
    client.delete_object(Bucket="corpus", Key="bare/00000.parquet")
    try:
        assert np.array_equal(all_tokens(shards), first) and np.array_equal(first, tokens[:500])
        [entry] = tmp_path.iterdir()
        entry.write_bytes(entry.read_bytes()[:100])  # damaged: not believed
        with pytest.raises(RunError, match="shard s3://corpus/bare/00000.parquet: cannot be read .*No such file"):
            all_tokens(shards)
    finally:
        client.put_object(Bucket="corpus", Key="bare/00000.parquet", Body=content)
    assert np.array_equal(all_tokens(Shards.open("s3://corpus/bare", cache=BlockCache(tmp_path, 10**6))), first)


def test_cached_ids_are_checked_against_the_vocabulary_in_use(s3, tmp_path):
    cache = BlockCache(tmp_path, 10**6)
    all_tokens(Shards.open("s3://corpus/v1/train", vocab_size=1000, cache=cache))
    with pytest.raises(RunError, match="s3://corpus/v1/train/00000.parquet, row group 0, row .*vocabulary of 500"):
        all_tokens(Shards.open("s3://corpus/v1/train", vocab_size=500, cache=cache))


def test_many_small_remote_files_are_one_block_and_each_is_kept(tmp_path):
    """With their labels: the second time nothing is read but the cache."""
    memory, ids = fsspec.filesystem("memory"), np.random.default_rng(0).integers(0, 1000, (50, 20))
    labels = np.where(ids % 2, ids, -100)
    for number in range(50):
        write_rows(tmp_path / "a.parquet", ids[number : number + 1].tolist(), columns={"labels": [labels[number]]})
        memory.put(str(tmp_path / "a.parquet"), f"/small/{number:02d}.parquet")
    shards = Shards.open("memory://small", vocab_size=1000, cache=BlockCache(tmp_path / "cache", 10**6))
    for _ in range(2):
        [block] = shards.index.blocks
        found, targets = shards.read_tokens(0)
        assert np.array_equal(found, ids.ravel()) and np.array_equal(targets, labels.ravel() != -100)
        memory.rm("/small", recursive=True) if memory.exists("/small") else None
    assert len(list((tmp_path / "cache").iterdir())) == len(block.parts) == 50


def test_a_copy_of_a_remote_folder_is_made_again_when_its_files_have_changed(tmp_path, monkeypatch):
    """This store says no times: files of the same size are copied again after a minute."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for content, fresh, copied in ((b"one", 60, b"one"), (b"three", 60, b"three"), (b"seven", 60, b"three"),
                                   (b"seven", -1, b"seven")):  # fmt: skip
        monkeypatch.setattr(remote, "FRESH", fresh)
        fsspec.filesystem("memory").pipe_file("/copied/config.json", content)
        assert (remote.fetch("memory://copied") / "config.json").read_bytes() == copied


def test_a_damaged_remote_shard_is_not_taken_for_a_failing_network(tmp_path):
    write_shard(tmp_path / "0.parquet", np.random.default_rng(0).integers(0, 1000, 4000, np.uint16))
    content = bytearray((tmp_path / "0.parquet").read_bytes())
    content[2000] ^= 1
    fsspec.filesystem("memory").pipe_file("/damaged/0.parquet", bytes(content))
    shards = Shards.open("memory://damaged", vocab_size=1000)
    with pytest.raises(BadBlock, match="memory://.*damaged/0.parquet, row group 0: cannot be decoded"):
        shards.read(0)


def test_a_server_that_is_away_for_a_while_is_waited_for(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.05)
    pauses = []
    read = Mock(side_effect=[OSError("connection reset"), TimeoutError("slow"), OSError("again"), "content"])
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert with_retries(read, "s3://corpus/x") == "content"
    assert len(pauses) == 3 and 0.04 <= pauses[0] < pauses[1] < pauses[2]


def test_the_cache_drops_what_was_used_longest_ago(tmp_path):
    cache = BlockCache(tmp_path / "cache", 3 * KEPT)
    keys = [BlockCache.key("s3://a", number) for number in range(4)]
    for age, key in enumerate(keys[:3]):
        cache.put(key, BLOCK + age)
        os.utime(tmp_path / "cache" / key, (1000 + age, 1000 + age))
    assert np.array_equal(cache.get(keys[0], BLOCK.dtype), BLOCK)  # used just now
    cache.put(keys[3], BLOCK)
    assert [cache.get(key, BLOCK.dtype) is not None for key in keys] == [True, False, True, True]


def test_a_kept_block_of_which_a_byte_changed_is_not_believed(tmp_path):
    """Wherever the byte is; ids that are still inside the vocabulary would tell nobody."""
    cache, key = BlockCache(tmp_path, 10**6), BlockCache.key("s3://a")
    for place in (0, 9, 60, 128, 1000, KEPT - 1):
        cache.put(key, BLOCK)
        assert np.array_equal(cache.get(key, BLOCK.dtype), BLOCK)
        content = bytearray((tmp_path / key).read_bytes())
        content[place] ^= 1
        (tmp_path / key).write_bytes(content)
        assert cache.get(key, BLOCK.dtype) is None and not (tmp_path / key).exists()


def test_the_cache_stays_within_its_bytes(tmp_path):
    (tmp_path / ".old.tmp").write_bytes(b"\0" * KEPT)  # of a process that was killed
    os.utime(tmp_path / ".old.tmp", (1, 1))
    cache = BlockCache(tmp_path, 4 * KEPT)
    for number in range(20):
        cache.put(BlockCache.key(number), BLOCK)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= cache.max_bytes
    assert not (tmp_path / ".old.tmp").exists()
    assert not cache.fits(10 * KEPT) and cache.get(BlockCache.key(19), BLOCK.dtype) is not None


def _hammer(folder, seed):
    cache, random = BlockCache(folder, 5 * KEPT), np.random.default_rng(seed)
    for number in random.integers(0, 12, 150).tolist():
        block = cache.get(BlockCache.key(number), BLOCK.dtype)
        assert block is None or np.array_equal(block, BLOCK + number), "never half a block, never another's"
        cache.put(BlockCache.key(number), BLOCK + number)


def test_processes_and_threads_may_share_the_cache(tmp_path, recwarn):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_hammer, args=(tmp_path, seed)) for seed in range(2)]
    threads = [threading.Thread(target=_hammer, args=(tmp_path, seed)) for seed in (2, 3)]
    for worker in workers + threads:
        worker.start()
    for worker in workers + threads:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert not list(tmp_path.glob(".*.tmp")) and not recwarn.list
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 9 * KEPT


def test_an_empty_file_is_read():
    assert read_exactly(pa.BufferReader(b""), 0) == b"" and read_exactly(pa.BufferReader(b"abc"), 2, 1) == b"bc"
