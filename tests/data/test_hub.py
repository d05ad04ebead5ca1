"""The Hugging Face hub: read from a server that speaks its protocol, at one commit, through all that goes wrong."""

import gzip
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice, repeat
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import Fault, hub_server
from shard_files import all_tokens, write_folder, write_jsonl, write_manifest, write_rows, write_tokens
from trainings import PLACES, lm, start, write_config

from lm.data.cache import BlockCache
from lm.data.config import PrepareOptions
from lm.data.documents import read_documents
from lm.data.prepare import prepare
from lm.data.shards import Shards
from lm.data.text_files import find_files
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError, RunError
from lm.system import remote
from lm.system.hub import hub as hub_of_this_process
from lm.system.sources import list_files


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """A hub that this process finds, and commands with its `environment`."""
    home = tmp_path_factory.mktemp("home")
    with hub_server() as server:
        server.environment.update(HF_HOME=str(home), XDG_CACHE_HOME=str(home))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(remote, "FIRST_PAUSE", 0.02)
        monkeypatch.setattr(remote, "_last_warnings", {})
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        hub_of_this_process.cache_clear()
        yield server


@pytest.fixture
def shards_on_hub(hub, tmp_path):
    """A prepared folder of five shards, of which the tree has more than one page: its tokens."""
    tokens = write_folder(tmp_path / "made" / "train", [500, 600, 700, 800, 900])
    write_manifest(tmp_path / "made")
    hub.commit("o/n", tmp_path / "made")
    return tokens


@pytest.mark.parametrize("source", ["train", "train/*.parquet", "tr*/*[0-4].parquet", "@main/train/"])
def test_shards_on_the_hub_are_read(hub, shards_on_hub, source):
    shards = Shards.open(f"hf://datasets/o/n{'' if source[0] == '@' else '/'}{source}", vocab_size=1000)
    assert np.array_equal(all_tokens(shards), shards_on_hub)
    assert shards.fingerprint()[0].name.endswith("00000.parquet")


def test_reading_asks_for_bytes_alone(hub, tmp_path):
    """Once files are listed, and for no byte twice: what counts at a hub that allows so many requests a minute."""
    tokens = np.random.default_rng(0).integers(0, 1000, 2**22, np.uint16)
    file = write_tokens(tmp_path / "a.parquet", tokens, row=2**20, row_groups=4)
    hub.commit("o/n", {"a.parquet": file.read_bytes()})
    shards = Shards.open("hf://datasets/o/n/a.parquet", vocab_size=1000)
    hub.fail([])
    assert len(shards.index.blocks) == 4 and np.array_equal(all_tokens(shards), tokens)
    assert hub.count("/api/") == 0 and hub.count("resolve") == 5  # with the footer
    assert hub.sent < file.stat().st_size + 2**17


def test_a_branch_that_moves_changes_nothing_of_what_was_listed(hub, shards_on_hub, tmp_path):
    """Nor in other processes, for which a pickle stands here; what is opened later is of the new commit."""
    shards = Shards.open("hf://datasets/o/n/train", vocab_size=1000)
    [text] = find_files(["hf://datasets/o/n/manifest.json"])
    others = write_folder(tmp_path / "other" / "train", [500, 600, 700, 800, 900], seed=1)
    first = hub.commit_id("o/n", 0)
    hub.commit("o/n", {"manifest.json": b"{}"} | {
        f"train/{path.name}": path.read_bytes() for path in (tmp_path / "other" / "train").iterdir()
    })  # fmt: skip
    assert np.array_equal(all_tokens(shards), shards_on_hub)
    copy, text = pickle.loads(pickle.dumps((shards, text)))
    hub_of_this_process.cache_clear()
    assert np.array_equal(all_tokens(copy), shards_on_hub) and text.open().read() != b"{}"
    assert np.array_equal(all_tokens(Shards.open("hf://datasets/o/n/train")), others)
    assert np.array_equal(all_tokens(Shards.open(f"hf://datasets/o/n@{first}/train")), shards_on_hub)


def test_a_file_that_a_commit_did_not_change_is_the_same(hub, shards_on_hub, tmp_path):
    """To the cache of blocks, and to a preparation; one of the same size that it did change is not."""
    cache = BlockCache(tmp_path / "cache", 10**6)
    all_tokens(Shards.open("hf://datasets/o/n/train/00000.parquet", cache=cache))
    before = find_files(["hf://datasets/o/n/train"])
    changed = bytearray(hub.repositories["o/n"][0]["train/00001.parquet"])
    changed[100] ^= 1
    hub.commit("o/n", {"README.md": b"more", "train/00001.parquet": bytes(changed)})
    after = find_files(["hf://datasets/o/n/train"])
    assert [old == new for old, new in zip(before, after)] == [True, False, True, True, True]
    assert repr(before[0]) == repr(after[0]) and before[0].address != after[0].address
    hub.fail([])
    all_tokens(Shards.open("hf://datasets/o/n/train/00000.parquet", cache=cache))
    assert hub.count("resolve") == 1  # its footer


def test_other_revisions_of_a_file_are_other_files(hub):
    first = hub.commit("o/n", {"a.txt": b"one"})
    hub.commit("o/n", {"a.txt": b"two"})
    inputs = ["hf://datasets/o/n/a.txt", f"hf://datasets/o/n@{first}/a.txt"]
    assert sorted(text for _, text in read_documents(inputs)) == ["one", "two"]


# ---- too many requests, errors, stalls -------------------------------------------------------------------------------
@pytest.mark.parametrize("header, least, most", [
    ({"Retry-After": "30"}, 30, 34), ({"RateLimit": '"api";r=0;t=30', "Retry-After": "1"}, 30, 34),
    ({"Retry-After": "86400"}, 600, 661), ({"Retry-After": "soon"}, 0, 1),
])  # fmt: skip
def test_the_hub_is_asked_again_when_its_answer_asks_for_it(hub, header, least, most, monkeypatch, caplog):
    """And that does not use up the patience, here of 5 seconds; the client has no retries of its own."""
    hub.commit("o/n", {"a.txt": b"text"})
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    hub.fail([Fault(429, header)] * 3, "revision")
    with caplog.at_level(logging.WARNING):
        assert list(list_files("hf://datasets/o/n/a.txt", patience=5).files) == ["a.txt"]
    assert len(pauses) == 3 and all(least <= pause <= most for pause in pauses) and len(set(pauses)) == 3
    [line] = [record.message for record in caplog.records]
    waits = r"the store asks to wait \d+ s" if least else "a read failed and is retried"
    assert re.search(rf"^hf://datasets/o/n/a.txt: {waits}: .*429.*Too Many Requests", line)
    assert hub.count("revision") == 4 and hub.count("paths-info") == 1


@pytest.mark.parametrize("kind", [429, 503, "cut", "stall"])
def test_every_request_that_fails_is_made_again(hub, shards_on_hub, kind, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)  # seconds without an answer
    hub.fail(cycle([Fault(kind), None, None]))
    shards = Shards.open("hf://datasets/o/n/train", vocab_size=1000, patience=20)
    hub_of_this_process().known.clear()  # as in a process that did not list them
    assert np.array_equal(all_tokens(shards), shards_on_hub) and hub.met[kind] >= 10


def test_a_hub_that_only_fails_ends_in_one_line(hub, shards_on_hub):
    hub.fail(repeat(Fault(503)))
    with pytest.raises(RunError, match=r"^hf://datasets/o/n/train: \d+ attempts .* in 1 s: .*503 .*Unavailable"):
        Shards.open("hf://datasets/o/n/train", patience=1)


# ---- the cache -------------------------------------------------------------------------------------------------------
READERS = """
import sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from lm.data.cache import BlockCache
from lm.data.shards import Shards
from lm.system import remote
remote.FIRST_PAUSE = 0.05
cache = BlockCache(sys.argv[1], int(sys.argv[2]))
shards = Shards.open("hf://datasets/o/n", vocab_size=1000, cache=cache, patience=60, block_tokens=3000)
expected = [np.load(sys.argv[3])[block * 3000 : block * 3000 + 3000] for block in range(4)]
print("ready", flush=True)
sys.stdin.readline()
with ThreadPoolExecutor(16) as pool:
    for block, tokens in zip(list(range(4)) * 16, pool.map(shards.read, list(range(4)) * 16)):
        assert np.array_equal(tokens, expected[block]), block
print("right", flush=True)
"""


def test_sixty_four_readers_download_a_block_once(hub, tmp_path):
    """4 processes of 16 threads with one cache, while requests are refused, fail, are cut and stall."""
    rows = np.random.default_rng(0).integers(0, 1000, (4, 3000)).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", rows.ravel())
    for number, row in enumerate(rows):
        hub.commit("o/n", {f"{number}.parquet": write_rows(tmp_path / "a.parquet", [row]).read_bytes()})
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", READERS, str(tmp_path / "cache"), "25000", str(tmp_path / "tokens.npy")],
            env={**os.environ, **hub.environment, "PYTHONPATH": PLACES, "HF_HUB_DOWNLOAD_TIMEOUT": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    faults = [Fault(429, {"Retry-After": "1"}), Fault(500), Fault("cut"), Fault("stall"), Fault(503)]
    hub.fail(islice(cycle([*faults, None]), 12))
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        assert process.communicate(timeout=60)[0] == "right\n"
    assert hub.met["stall"] and hub.met[429] and hub.met["cut"]
    # Of each of the 4 blocks a footer and a row group, at two addresses each; an attempt may fail at the second.
    assert hub.met[None] <= 4 * 2 * 2 + 12, "64 readers that each fetch them are 256 requests"
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= 25000


def test_a_reader_that_holds_a_block_and_stalls_does_not_stop_the_others(hub, shards_on_hub, tmp_path):
    """They wait for as long as their patience is, and then read it themselves; one that died holds nothing."""
    cache = BlockCache(tmp_path / "cache", 10**6)
    shards = Shards.open("hf://datasets/o/n/train", vocab_size=1000, cache=cache, patience=1)
    keys = []
    cache.reserve, reserve = (lambda key, seconds: keys.append(key) or reserve(key, seconds)), cache.reserve
    shards.read(0)
    (tmp_path / "cache" / keys[0]).unlink()
    with reserve(keys[0], 5), ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        assert np.array_equal(pool.submit(shards.read, 0).result(20), shards_on_hub[: shards.index.blocks[0].tokens])
        assert 0.9 < time.monotonic() - began < 10


# ---- commands --------------------------------------------------------------------------------------------------------
TEXTS = [f"Document {number} is of kind {number % 7}, {'and long ' * (number % 11)}." for number in range(300)]


@pytest.fixture
def texts(hub, tmp_path):
    """A repository with texts in three files, which are in `tmp_path/texts`, too."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(2):
        pq.write_table(pa.table({"text": TEXTS[number * 100 : number * 100 + 100]}), folder / f"{number}.parquet")
    lines = write_jsonl(tmp_path / "2.jsonl", TEXTS[200:])
    (folder / "2.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    hub.commit("o/n", {f"texts/{path.name}": path.read_bytes() for path in folder.iterdir()})
    return folder


def content(folder):
    """The files that a preparation made, but for what says where its texts were."""
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    manifest = json.loads(files.pop(Path("manifest.json")))
    return files, manifest["splits"]


def test_texts_and_a_tokenizer_on_the_hub_are_prepared_like_local_ones(hub, texts, tmp_path):

    def made(name, inputs, tokenizer):
        prepare(PrepareOptions([str(each) for each in inputs], str(tmp_path / name), tokenizer, val_fraction=0.1))
        return content(tmp_path / name)

    local = made("local", [texts], "char")
    globs = [f"hf://datasets/o/n/texts/{name}" for name in ("*.parquet", "2.jsonl.gz")]
    assert made("made", globs, "char") == local
    hub.commit("o/n", {f"made/{name}": (tmp_path / "made" / name).read_bytes() for name in local[0]})
    url = f"{hub.endpoint}/datasets/o/n/resolve/main/made/tokenizer.json"
    places = ["hf://datasets/o/n/made/tokenizer.json", "hf://datasets/o/n/made", url]
    for number, tokenizer in enumerate(places):
        assert made(f"again{number}", ["hf://datasets/o/n/texts"], tokenizer) == local
    hub.fail([])
    Tokenizer.load(places[0])
    assert hub.count("resolve") == 0  # it is the same as the copy


@pytest.mark.slow
def test_commands_train_on_shards_on_the_hub(hub, texts, tmp_path):
    folder = ("--output", "made", "--tokenizer", "char", "--val_fraction", "0.1")
    lm(tmp_path, "data", "prepare", "--input", "hf://datasets/o/n/texts", *folder, **hub.environment)
    hub.commit("o/n", {f"made/{name}": data for name, data in content(tmp_path / "made")[0].items()})
    shown = lm(tmp_path, "data", "inspect", "hf://datasets/o/n/made/train", **hub.environment).stdout
    assert "hf://datasets/o/n/made/train" in shown
    config = {"data.path": None, "data.prepare": None, "trainer.callbacks": [], "trainer.max_steps": 4}
    for name, place in (("train", "train"), ("val", "val/*.parquet"), ("tokenizer", "tokenizer.json")):
        config[f"data.{name}"] = f"hf://datasets/o/n/made/{place}"
    write_config(tmp_path, **config)
    assert "4 steps in" in lm(tmp_path, "fit", "--config", "small.yaml", **hub.environment).stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", [503, "stall"])
def test_a_killed_preparation_goes_on_where_it_was(hub, tmp_path, kind):
    """It fetches what is left, though other files have changed since; while the hub fails, it waits."""
    lines = "".join(json.dumps({"text": text * 100}) + "\n" for text in TEXTS * 2)  # 4 MB, and each a unit
    parts = {f"texts/{number}.jsonl": (lines + f'{{"text": "{number}"}}\n').encode() for number in range(3)}
    hub.commit("o/n", parts)
    options = ("--input", "hf://datasets/o/n/texts", "--tokenizer", "char", "--sample_bytes", "1M", "--workers", "1")
    environment = {**hub.environment, "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
    source = ["hf://datasets/o/n/texts"]
    prepare(PrepareOptions(source, str(tmp_path / "whole"), "char", sample_bytes=10**6, workers=1))
    process = start(tmp_path, "data", "prepare", *options, "--output", "made", **environment)
    while len(list((tmp_path / "made").glob(f".parts/{'?' * 32}.json"))) < 1:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = len(list((tmp_path / "made").glob(f".parts/{'?' * 32}.json")))
    hub.commit("o/n", {"README.md": b"another commit"})
    hub.fail([None] + [Fault(kind)] * 2, "resolve")
    shown = lm(tmp_path, "data", "prepare", *options, "--output", "made", **environment).stderr
    assert f"continuing: {done} of " in shown and "a read failed and is retried" in shown and hub.met[kind] == 2
    assert content(tmp_path / "made") == content(tmp_path / "whole")
    assert hub.count("resolve.*texts/0.jsonl") == 0 and hub.count("resolve.*texts/2.jsonl") >= 1


# ---- wrong requests --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source, token, message", [
    ("datasets/o/none/a.txt", None, r"no such repository, or it is private: .* set HF_TOKEN"),
    ("datasets/o/private/a.txt", None, r"no such repository, or it is private: .* set HF_TOKEN"),
    ("datasets/o/private/a.txt", "hf_wrong", r"status 401, Invalid credentials .*look at HF_TOKEN"),
    ("datasets/o/n@v9/a.txt", None, r"no such revision \(the branch, tag or commit after @\)"),
    ("datasets/o/n/b.txt", None, r"no such file or folder"), ("datasets/o/n/b/*.txt", None, r"no such file or folder"),
    ("datasets/o/n/*.md", None, r"no file matches"),
    ("datasets/o", None, r"names no repository; the form is hf://datasets/OWNER/NAME/PATH"),
])  # fmt: skip
def test_a_wrong_url_is_reported_at_once(hub, source, token, message, monkeypatch):
    hub.commit("o/n", {"a.txt": b"text"})
    hub.commit("o/private", {"a.txt": b"text"})
    hub.private.add("o/private")
    monkeypatch.setenv("HF_TOKEN", token or "")
    began = time.monotonic()
    with pytest.raises(RequestError, match=f"^hf://{re.escape(source)}.*{message}"):
        find_files([f"hf://{source}"])
    assert time.monotonic() - began < 5


def test_a_private_repository_is_read_with_a_token(hub, monkeypatch):
    hub.commit("o/private", {"a.txt": b"text", "b.jsonl.gz": gzip.compress(b'{"text": "more"}')})
    hub.private.add("o/private")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert [text for _, text in read_documents(["hf://datasets/o/private"])] == ["text", "more"]
