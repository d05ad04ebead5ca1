"""A run on three sources and two phases: shares, epochs and losses by source are right, also after kills."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from shard_files import write_rows
from trainings import fit, lm, write_config

from lm.data.config import SourceConfig
from lm.data.datamodule import DataModule
from lm.data.tokenizer_training import train_char
from lm.errors import RequestError

SOURCES = {"low": (2, 5), "middle": (5, 8), "high": (8, 12)}  # ids of each source, which tell them apart


def write_sources(place):
    """Shards of all sources and of `more`, and two tokenizers."""
    random = np.random.default_rng(0)
    (place / "tok").mkdir()
    (place / "tok/tokenizer.json").write_text(train_char(["abcdefghij"]).text)
    (place / "other").mkdir()
    (place / "other/tokenizer.json").write_text(train_char(["ABCDEFGHIJ"]).text)
    for name, (first, end) in SOURCES.items():
        for split, lengths in {"train": (700, 500), "val": (400,)}.items():
            for number, length in enumerate(lengths):
                rows = [random.integers(first, end, length).tolist()]
                write_rows(place / f"{name}/{split}/{number}.parquet", rows)
    write_rows(place / "more/train/0.parquet", [random.integers(8, 12, 500).tolist()])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    write_sources(place)
    return place


def source(name, **settings):
    return {"name": name, "train": f"{name}/train", "val": f"{name}/val", "tokenizer": "tok", **settings}


def mixed(sources=None, phases=None, **changes):
    """Changes of a config: 6 of 8 samples of a step are low and 2 middle; from step 6 on 4 are middle and 4 high."""
    sources = sources or [source("low", weight=0.75), source("middle", weight=0.25), source("high", weight=0)]
    phases = [{"tokens": 5 * 256, "weights": {"middle": 1, "high": 1}}] if phases is None else phases
    data = {"sources": sources, "phases": phases, "micro_batch_size": 4, "global_batch_tokens": 256, "val_tokens": 384}
    return {"data": data, "trainer.max_steps": 10, **changes}


def source_of(ids):
    """By what is in a row, not by what anything says of it."""
    return next(name for name, (first, end) in SOURCES.items() if all(first <= token < end for token in ids))


def shown(place, run, step):
    """The samples of a step."""
    done = lm(place, "data", "show", "--run", run, "--step", str(step), "--limit", "0", "--json")
    return json.loads(done.stdout)["samples"]


def test_shares_epochs_and_losses_by_source_are_right(place):
    _, run = fit(place, "mixed", **mixed())
    for step, counts in {1: {"low": 6, "middle": 2}, 5: {"low": 6, "middle": 2}, 6: {"middle": 4, "high": 4}}.items():
        samples = shown(place, "mixed", step)
        assert Counter(source_of(sample["token_ids"]) for sample in samples) == counts
        assert all(sample["source"] == source_of(sample["token_ids"]) for sample in samples)
    last = run.metrics("train/loss")[-1]
    windows = (700 + 500 - 1) // 32  # of each source, whose two files are one block
    taken = {"low": 30, "middle": 30, "high": 20}
    assert {name: last[f"data/epochs/{name}"] for name in SOURCES} == {
        name: pytest.approx(taken[name] / windows) for name in SOURCES}  # fmt: skip
    assert last["train/loss"] == pytest.approx((last["train/loss/middle"] + last["train/loss/high"]) / 2, rel=1e-5)
    assert "train/loss/low" not in last  # it had no sample since the log line before
    shares = np.array(list(taken.values())) / sum(taken.values())  # of the whole run, in every validation
    for line in run.metrics("val/loss"):
        for metric in ("val/loss", "val/bpb"):
            each = [line[f"{metric}/{name}"] for name in SOURCES]
            assert line[metric] == pytest.approx(np.dot(each, shares), rel=1e-5)


def test_two_ranks_see_the_same_mixture_and_the_same_losses_by_source(place):
    changes = {"model.decoder.dropout": 0.0, "trainer.max_steps": 6, "trainer.log_interval": 2}
    runs = [fit(place, f"ranks-{ranks}", **mixed(**changes, **{"trainer.devices": ranks}))[1] for ranks in (1, 2)]
    for alone, shared in zip(*(run.metrics("train/loss") for run in runs), strict=True):
        names = {name for name in alone if name.startswith(("train/loss", "data/epochs"))}
        assert {name: shared[name] for name in names} == pytest.approx({name: alone[name] for name in names}, rel=1e-4)


def test_a_branch_with_other_weights_goes_on_where_each_source_was(place):
    """No sample of the trunk comes again; a source that is left out stays, with a weight of 0, and a new one comes."""
    two = [source("low", weight=0.75), source("middle", weight=0.25)]
    often = {"trainer.max_steps": 4, "trainer.checkpoint_interval": 2, "trainer.keep_checkpoints": 2}
    fit(place, "trunk", **mixed(two, [], **often))
    other = [source("high", weight=0.5), source("middle", weight=0.5)]
    lm(place, "branch", "trunk", "--at", "2", "--constant", "512", "--name", "branch", "--trainer.callbacks", "[]",
       "--data.sources", json.dumps(other))  # fmt: skip

    def windows(run, steps):
        seen = [sample for step in steps for sample in shown(place, run, step)]
        return {(sample["source"], tuple(sample["token_ids"])) for sample in seen}, Counter(s["source"] for s in seen)

    before, _ = windows("trunk", (1, 2))
    after, counts = windows("branch", (3, 4))
    assert counts == {"high": 8, "middle": 8} and not before & after and len(after) == 16


def test_plan_shows_the_epochs_of_each_source(place):
    write_config(place, "one", **mixed([source("low", weight=3)], []))
    said = lm(place, "plan", "--config", "one.yaml", "--json").stdout
    (found,) = json.loads(said)["steps"]["sources"].values()
    assert found == {"samples": 80, "share": 1.0, "epochs": pytest.approx(80 / 37)}


@pytest.mark.parametrize("sources, phases, said", [
    ([source("low", max_epochs=0.5), source("high")], [],
     "data.sources low is repeated 1.08 times, more than its max_epochs 0.5: 40 of the 80 samples"),
    ([source("low"), source("high", tokenizer="other")], [], "low and high have different tokenizers: prepare the texts of "
     "high again, to another folder, with --tokenizer tok"),
    ([source("low"), source("low")], [], "data.sources has two sources of the name low"),
    ([source("low", weight=0), source("high", weight=0)], [], "all weights are 0"),
    ([source("low", weight=-1), source("high")], [], "data.sources: the weight -1 of low must be a number, 0 or more"),
    ([source("low"), source("high")], [{"tokens": 512, "weights": {"web": 1}}], "there is no source web"),
    ([source("low"), source("high")], [{"tokens": 512, "weights": {"low": 1}}, {"tokens": 256, "weights": {"low": 1}}],
     "sort the phases by tokens"),
    ([source("low"), {"name": "high"}], [], "data.sources high: give one of path"),
    ([source("a/b")], [], "the name 'a/b' may have letters"),
])  # fmt: skip
def test_a_mixture_that_cannot_be_is_refused_with_the_reason(place, sources, phases, said):
    refused, run = fit(place, "wrong", expect=2, **mixed(sources, phases))
    assert said in refused.stderr and not run.path.exists()


HIGH = {"name": "high", "train": "high/train", "tokenizer": "tok"}


@pytest.mark.parametrize("given, said", [
    ({"name": "high", "path": "nowhere"}, "nowhere holds no manifest.json: make it with `lm data prepare --input TEXTS "
     "--output nowhere --tokenizer tok`"),
    ({"name": "high", "path": "emptied"}, "data.sources high: emptied/train: no such file or folder"),
    (HIGH | {"tokenizer": "nowhere"}, "tokenizer nowhere is not there: give a tokenizer.json"),
    (HIGH | {"train": "nowhere"}, "nowhere: no such file or folder"),
    (HIGH | {"val": "high/train/2.parquet"}, "high/train/2.parquet: no such file"),
    (HIGH | {"column": "ids"}, "has no column 'ids'; it has input_ids; set `column`"),
    (HIGH | {"train": "short"}, "give more data, or lower data.seq_len or model.decoder"),
])  # fmt: skip
def test_an_error_of_a_source_names_it_in_one_line(place, monkeypatch, given, said):
    monkeypatch.chdir(place)
    Path("emptied").mkdir(exist_ok=True)
    Path("emptied/manifest.json").write_text("{}")
    shutil.copy("tok/tokenizer.json", "emptied")
    write_rows(place / "short/0.parquet", [[8, 9]])
    data = DataModule(sources=[SourceConfig(**source("low")), SourceConfig(**given)], seq_len=32)
    with pytest.raises(RequestError, match="^data.sources high: [^\n]*$") as error:
        data.prepare_data()
        data.setup("fit")
    assert said in str(error.value)


def test_later_weights_may_change_on_resume_and_past_ones_not(place):
    """A source that is new begins in a later phase; the run says what changed."""
    name = "changed"
    fit(place, name, **mixed(**{"trainer.max_steps": 7}))

    def resume(sources=None, phases=None, expect=0):
        return fit(place, name, "--ckpt_path", "auto", expect=expect, **mixed(sources, phases))[0]

    early = [{"tokens": 4 * 256, "weights": {"middle": 1, "high": 1}}]
    said = ", and are 3:1:0 from sample 0; 0:1:1 from sample 32: only those of later phases may change"
    assert said in resume(phases=early, expect=2).stderr
    more = {"name": "more", "train": "more/train", "tokenizer": "tok", "weight": 0}
    sources = [source("low", weight=0.75), source("middle", weight=0.25), source("high", weight=0)]
    kept = {"tokens": 5 * 256, "weights": {"middle": 1, "high": 1}}
    assert "new ones go to the end" in resume([more, *sources], [kept], expect=2).stderr
    later = [kept, {"tokens": 8 * 256, "weights": {"more": 1}}]
    said = resume([*sources, more], later).stderr
    assert "the weights of low, middle, high, more to come were changed: 0:0:0:1 from sample 64" in said
    assert "changed since the run was started: data.sources.more.train: None -> more/train" in said
    assert "data.sources.low" not in said
    assert {sample["source"] for sample in shown(place, name, 8)} == {"middle", "high"}
    assert {sample["source"] for sample in shown(place, name, 9)} == {"more"}


def test_the_order_of_a_source_does_not_depend_on_the_others(place, monkeypatch):
    """Nor on how many blocks they have: a new one may come in the middle of a run."""
    monkeypatch.chdir(place)
    orders = []
    for names in (["low", "middle"], ["low", "middle", "high"]):
        sources = [SourceConfig(name, None, f"{name}/train", f"{name}/val", "tok") for name in names]
        data = DataModule(sources=sources, seq_len=32, shuffle_buffer=96 * 1200)
        data.setup("fit")
        orders.append(data.order().orders[0])
    samples = np.arange(500)
    assert orders[0].lanes == orders[1].lanes > 1
    assert np.array_equal(orders[0].locate(samples), orders[1].locate(samples))
