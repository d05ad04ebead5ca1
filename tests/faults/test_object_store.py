"""An object store that fails, stalls or cuts answers costs time; one that is gone ends a run that resumes later."""

import time
from itertools import chain, repeat

import pytest
from object_store import object_store
from trainings import lm, losses, make_workplace, start, trace, validations, wait_until, write_config

from lm.data.shards import Shards
from lm.data.text_files import find_files
from lm.errors import RequestError, RunError
from lm.runs.run import Run
from lm.system import remote
from lm.system.sources import list_files

pytestmark = pytest.mark.fault(22)

DATA = {"micro_batch_size": 4, "global_batch_tokens": 256, "val_tokens": 512, "shuffle_buffer": 1024,
        "cache_bytes": 0, "timeout": 10}  # fmt: skip
REMOTE = {**DATA, "train": "s3://corpus/many/train", "val": "s3://corpus/many/val", "tokenizer": "data/many"}
PASSING = ("reset", None, 500, None, "cut", 503, None, 429, None, "lie", "lie", None, "stall", None, "drip")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run on many small shards, and its exact losses."""
    place = make_workplace(tmp_path_factory.mktemp("store"))
    prepare = {"input": ["texts"], "tokenizer": "char", "val_fraction": 0.2, "shard_tokens": 256}
    config = write_config(place, "local", data={**DATA, "path": "data/many", "prepare": prepare})
    lm(place, "fit", "--config", str(config))
    return place


@pytest.fixture(scope="module")
def straight(place):
    return losses(place)


@pytest.fixture(scope="module")
def served(place, straight):
    """The shards in a bucket behind a proxy."""
    with object_store() as store:
        store.upload(place / "data" / "many", "many")
        yield store


@pytest.fixture
def store(place, served):
    (place / "trace.jsonl").unlink(missing_ok=True)
    yield served
    served.proxy.recover()


def test_faults_that_pass_cost_time_and_nothing_else(place, straight, store):
    """Every kind of fault is met in one run, and its losses are those of the same shards on a disk."""
    config = write_config(place, "bumpy", data={**REMOTE, "timeout": 60})
    store.proxy.fail(chain(repeat(None, 20), PASSING))
    lm(place, "fit", "--config", str(config), **store.environment)
    assert losses(place) == straight and {*PASSING} <= store.proxy.met.keys()


# So many requests are answered: more than the beginning takes, fewer than the run.
@pytest.mark.parametrize(("fault", "answered"), [(503, 40), ("drip", 40)])
def test_a_store_that_is_gone_ends_the_run_and_it_resumes_later(place, straight, store, fault, answered):
    """One line after a bounded time, no step lost, and the same command resumes bit for bit when it is back."""
    config = write_config(place, f"gone-{fault}", data=REMOTE)
    command = ("fit", "--config", str(config), "--ckpt_path", "auto")
    store.proxy.fail(chain(repeat(None, answered), repeat(fault)))
    ended = lm(place, *command, expect=1, **store.environment)
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("lm fit: shard s3://corpus/many/") and "attempts to read it failed in 5 s" in line
    assert "--ckpt_path auto" in line and "Traceback" not in ended.stderr
    run = Run(place / "checkpoints" / f"gone-{fault}")
    assert run.read("run.json")["status"] == "failed"
    taken = max(entry["step"] for entry in trace(place))
    assert list(run.steps())[-1] in (taken, taken - 1)  # the newest of all steps that were whole
    store.proxy.recover()
    lm(place, *command, **store.environment)
    assert losses(place) == straight and run.read("run.json")["status"] == "finished"
    assert validations(run) == validations(Run(place / "checkpoints" / "local"))


def test_a_store_that_does_not_answer_at_the_start_is_not_waited_for_without_end(place, store):
    """Footers and manifests are read under the same bound, and the process ends though its reads never return."""
    config = write_config(place, "silent", data={**REMOTE, "timeout": 8})
    store.proxy.fail(chain(repeat(None, 1), repeat("stall")))
    process = start(place, "fit", "--config", str(config), **store.environment)
    wait_until(lambda: store.proxy.met["stall"], process)
    began = time.monotonic()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1 and time.monotonic() - began < 60
    assert "s3://corpus/many" in err.splitlines()[-1] and "in 4 s" in err.splitlines()[-1]
    assert not (place / "checkpoints" / "silent").exists()


def test_a_store_that_refuses_is_not_asked_again(store, monkeypatch):
    """Credentials that are wrong are reported at once, not after the patience with a store that is away."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    store.proxy.fail(repeat(403))
    began = time.monotonic()
    with pytest.raises(RequestError, match="^s3://corpus/many/train: cannot be listed .*ACCESS_DENIED"):
        Shards.open("s3://corpus/many/train")
    source = "s3://corpus/many/train/*.parquet"  # a glob has no manifest, so footers are read
    store.proxy.fail([])
    list_files(source)
    store.proxy.fail(chain(repeat(None, store.proxy.met[None]), repeat(403)))
    with pytest.raises(RunError, match="^shard s3://corpus/many/train/.*: cannot be read .*ACCESS_DENIED"):
        Shards.open(source)
    assert time.monotonic() - began < 60  # and not 150


def test_an_answer_that_is_half_of_what_was_asked_for_is_not_believed(store, monkeypatch):
    """pyarrow fills it up with whatever is in memory; no bytes are mistaken for such, and no manifest for damaged."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.05)
    for content in (bytes(1000), b"text\n" * 200, b"\xf1" * 1000, b"\xf2" * 1000):
        store.client.put_object(Bucket="corpus", Key="halves/a.txt", Body=content)
        [file] = find_files(["s3://corpus/halves/a.txt"])
        store.proxy.fail([None, "lie", "lie"])  # first its size
        assert file.open().read() == content and store.proxy.met["lie"] == 2
    store.proxy.fail([])
    fingerprint = Shards.open("s3://corpus/many/train").fingerprint()
    for place in range(store.proxy.met[None]):  # each request of the listing and of the manifest
        store.proxy.fail(chain(repeat(None, place), ["lie"]))
        assert Shards.open("s3://corpus/many/train").fingerprint() == fingerprint and store.proxy.met["lie"]
