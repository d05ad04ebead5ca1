"""Google Cloud Storage: `gs://` is read through pyarrow from a server at the loopback device, and fails in one line."""

import time

import numpy as np
import pytest
from gcs_server import gcs_server
from shard_files import write_folder

from lm.data.documents import read_documents
from lm.data.shards import Shards
from lm.data.text_files import find_files
from lm.errors import RequestError, RunError
from lm.system import remote
from lm.system.sources import list_files


@pytest.fixture(scope="module")
def gcs(tmp_path_factory):
    """A bucket with shards and texts: the server, and the tokens of the shards."""
    folder = tmp_path_factory.mktemp("gcs")
    tokens = write_folder(folder / "train", [500, 600])
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("first")
    (folder / "texts" / "b.txt").write_text("second")
    with gcs_server() as server:
        server.upload(folder, "v1")
        yield server, tokens


@pytest.mark.parametrize("faults", [[], [None, 503, 429, None, "cut"], ["stall"]])
def test_shards_and_texts_are_read(gcs, faults, monkeypatch):
    server, tokens = gcs
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.05)
    server.fail(faults)
    shards = Shards.open(f"gs://anonymous@corpus/v1/train{server.query}", vocab_size=1000, patience=6)
    assert np.array_equal(np.concatenate([shards.read(i) for i in range(len(shards.index.blocks))]), tokens)
    met = server.fail([])
    assert {*map(str, faults)} <= met.keys()
    texts = read_documents([f"gs://anonymous@corpus/v1/texts/*.txt{server.query}"])
    assert [text for _, text in texts] == ["first", "second"]


def test_a_file_whose_first_bytes_do_not_come_is_read_again(gcs):
    """Which pyarrow reports as one that was closed; here it tries for a second."""
    server, _ = gcs
    server.fail([])
    [file] = find_files([f"gs://anonymous@corpus/v1/texts/a.txt{server.query}&retry_limit_seconds=1"])
    server.fail([None] + [503] * 2)
    assert file.open().read() == b"first" and server.fail([])["503"] == 2


@pytest.mark.parametrize("place, faults, message", [
    ("nowhere/v1", [], "no such file or folder"), ("corpus/v2", [], "no such file or folder"),
    ("corpus/v1/*.md", [], "no file matches"),
    ("corpus/v1", [403] * 9, "cannot be listed .*denied|cannot be listed .*403"),
])  # fmt: skip
def test_what_is_missing_or_denied_is_reported_at_once(gcs, place, faults, message):
    """pyarrow would repeat some requests for 15 minutes."""
    server, _ = gcs
    server.fail(faults)
    began = time.monotonic()
    with pytest.raises(RequestError, match=f"^gs://anonymous@{place.replace('*', '.')}.*({message})"):
        list_files(f"gs://anonymous@{place}{server.query}")
    assert time.monotonic() - began < 10


def test_patience_with_it_has_an_end(gcs):
    server, _ = gcs
    server.fail([503] * 1000)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^gs://anonymous@corpus/v1.*attempts to read it failed in 1 s"):
        list_files(f"gs://anonymous@corpus/v1{server.query}", patience=1)
    assert time.monotonic() - began < 10
