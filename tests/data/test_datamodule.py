"""What `fit`, `plan` and `data inspect` say of anyone's shards before they are trained on."""

import json
import shutil

import numpy as np
import pytest
from shard_files import write_rows
from trainings import lm, write_config

from lm.data.tokenizer_training import train_char


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Shards of ids 2 to 11 in folders, and their tokenizer."""
    place, random = tmp_path_factory.mktemp("place"), np.random.default_rng(0)

    def rows(*lengths):
        return [random.integers(2, 12, length).tolist() for length in lengths]

    (place / "tok").mkdir()
    (place / "tok/tokenizer.json").write_text(train_char(["abcdefghij"]).text)
    for number, length in enumerate(random.integers(5, 90, 100)):
        write_rows(place / f"short/{number:02d}.parquet", rows(length))
    write_rows(place / "val/0.parquet", rows(400))
    write_rows(place / "both/0.parquet", rows(900))
    shutil.copytree(place / "val", place / "both/val")
    return place


def config(place, name, **data):
    data = {"train": "short", "val": "val", "tokenizer": "tok", "micro_batch_size": 4, **data}
    changes = {"data": data, "trainer.callbacks": None, "trainer.max_steps": 2, "model.schedule": {"warmup_steps": 1}}
    return str(write_config(place, name, **changes))


def test_training_data_that_contains_the_validation_data_is_refused(place):
    """By `fit` before it writes and by `plan`, with the file's name, whatever the paths are."""
    (place / "link").unlink(missing_ok=True)
    (place / "link").symlink_to("both")
    for train, val, named in (
        ("both", "val", "both/val/0.parquet, which is val/0.parquet"), ("both", "both/val", "both/val/0.parquet"),
        (["both/*.parquet", "link/**/*.parquet"], "both/val", "link/val/0.parquet, which is both/val/0.parquet"),
    ):  # fmt: skip
        written = config(place, "both", train=train, val=val)
        message = "the training data contains the validation data: " + named
        assert message in lm(place, "plan", "--config", written, expect=2).stdout
    done = lm(place, "fit", "--config", written, expect=2)
    assert done.stderr.splitlines()[-1].startswith("lm fit: " + message) and not (place / "checkpoints/both").exists()
    lm(place, "plan", "--config", config(place, "both", train="both/*.parquet", val="both/val"))


def test_tokens_that_are_left_over_are_reported(place):
    short = lm(place, "plan", "--config", config(place, "short")).stdout
    assert "train: 4.78K tokens in 100 shards, 149 samples, 12 tokens left over" in short
    assert "val: 15 of 400 tokens, 3.8%, are in no sample of 32 + 1" in short
    shown = json.loads(lm(place, "data", "inspect", "short", "--seq_len", "32", "--json").stdout)["splits"][""]
    assert (shown["samples"], shown["left_over"]) == (149, 12)
    shown = lm(place, "data", "inspect", "short", "--seq_len", "32").stdout
    assert "in samples of 32 tokens" in shown and "left over" in shown
    done = lm(place, "fit", "--config", config(place, "short"))
    log = (place / "checkpoints/short/log.txt").read_text()
    warning = next(line for line in done.stderr.splitlines() if "val: 15 of 400 tok" in line)
    assert warning.endswith("; lower data.seq_len") and warning in log


def test_a_run_is_not_resumed_over_other_windows(place):
    """As by a version of lm in which windows ended with their file."""
    written = config(place, "older")
    lm(place, "fit", "--config", written)
    record = place / "checkpoints/older/data.json"
    shards = json.loads(record.read_text())
    record.write_text(json.dumps({split: [entry[:4] for entry in entries] for split, entries in shards.items()}))
    resume = ("fit", "--config", written, "--ckpt_path", "auto", "--trainer.max_steps", "3")
    message = lm(place, *resume, expect=2).stderr.splitlines()[-1]
    assert "train: the same shards, cut into other windows" in message and "start a new run" in message
    record.write_text(json.dumps(shards))
    lm(place, *resume)
