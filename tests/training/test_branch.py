"""`lm branch`: a run that begins at a checkpoint of another, with a schedule or data of its own."""

import json
import os
import shutil

import pytest
from safetensors.torch import load_file
from trainings import fit, lm

from lm.runs.run import Run

TRUNK = {"trainer.max_steps": 12, "trainer.checkpoint_interval": 4, "trainer.keep_checkpoints": 9,
         "trainer.callbacks": [], "model.decoder.dropout": 0.1, "model.optimizer": {"name": "muon", "lr": 0.01},
         "model.schedule": {"name": "wsd", "warmup_steps": 2, "final_fraction": 0.0}}  # fmt: skip
STEP = 256  # tokens


@pytest.fixture(scope="module")
def place(workplace):
    """A trunk of twelve steps with a constant rate, and a whole run whose rate falls in the last four of eight."""
    fit(workplace, "trunk", **TRUNK)
    fit(workplace, "whole", **TRUNK | {"trainer.max_steps": 8, "model.schedule.decay_steps": 4})
    return workplace


def logged(place, run):
    lines = Run(place / "checkpoints" / run).metrics("train/loss")
    return [(line["step"], line["train/loss"], line["optim/lr"]) for line in lines]


def weights(place, run, checkpoint="last"):
    return load_file(place / "checkpoints" / run / checkpoint / "model.safetensors")


def test_a_decay_is_that_of_a_whole_run(place):
    """To the bit, also after a kill before its first checkpoint; the trunk is as it was, and may go."""
    shutil.copytree(place / "checkpoints/trunk", place / "checkpoints/spare", symlinks=True)
    before = {path: path.stat().st_mtime_ns for path in (place / "checkpoints/spare").rglob("*")}
    kill = ["--trainer.callbacks", '[{"class_path": "recorder.KillAt", "init_args": {"signal_name": "SIGKILL", '
            '"micro_batch": 11}}]']  # fmt: skip
    lm(place, "branch", "spare", "--at", "4", "--decay", str(4 * STEP), "--name", "killed", *kill, expect=-9)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    shutil.rmtree(place / "checkpoints/spare")
    lm(place, "fit", "--config", "checkpoints/killed/config.yaml", "--ckpt_path", "auto", "--trainer.callbacks", "[]")
    assert logged(place, "killed")[-4:] == logged(place, "whole")[-4:]
    first, second = weights(place, "killed"), weights(place, "whole")
    assert all(first[name].equal(second[name]) for name in first)


def test_it_says_where_it_comes_from_and_is_branched_itself(place):
    """In run.json, and `runs show` of both; a rate rises again before it stays or falls."""
    said = lm(place, "branch", "trunk", "--at", "8", "--constant", str(2 * STEP), "--model.optimizer.lr", "0.02",
              "--data.val_tokens", "256")  # fmt: skip
    assert "changed: model.optimizer.lr: 0.01 -> 0.02" in said.stderr
    run = Run(place / "checkpoints/trunk-8-branch")
    origin = run.read("run.json")["branch"]
    assert (origin["run"], origin["step"]) == ("trunk", 8) and origin["changes"]["model.optimizer.lr"] == [0.01, 0.02]
    assert [(step, rate) for step, _, rate in logged(place, run.name)] == [(9, 0.02), (10, 0.02)]
    shown = " ".join(lm(place, "runs", "show", run.name).stdout.split())
    assert "branch of trunk at step 8: data.val_tokens 512 -> 256, model.optimizer.lr 0.01 -> 0.02" in shown
    assert "branches: trunk-8-branch at step 8" in " ".join(lm(place, "runs", "show", "trunk").stdout.split())

    lm(place, "branch", "trunk-8-branch", "--rewarm", str(2 * STEP), "--decay", str(4 * STEP), "--name", "rewarmed",
       "--final_fraction", "0.4")  # fmt: skip
    rates = [round(rate / 0.02, 3) for _, _, rate in logged(place, "rewarmed")]
    assert rates == [1.0, 1.0, 0.7, 0.4]  # its trunk ended at its peak
    low = lm(place, "branch", "rewarmed", "--decay", str(2 * STEP), "--name", "low", "--make_only").stderr
    assert "the rate begins at 0.4 of its peak: --rewarm TOKENS lets it rise first" in low
    lm(place, "branch", "whole", "--rewarm", str(2 * STEP), "--constant", str(3 * STEP), "--name", "again")
    assert [round(rate / 0.01, 3) for _, _, rate in logged(place, "again")] == [0.5, 1.0, 1.0]  # from 0
    lm(place, "branch", "again", "--at", "8", "--rewarm", str(2 * STEP), "--constant", str(3 * STEP), "--name", "third")
    assert logged(place, "third") == logged(place, "again")  # where its trunk began, the rate is still 0
    refused = lm(place, "data", "show", "--run", "third", "--step", "8", expect=2).stderr
    assert "has taken steps 9 to 11; there is no step 8" in refused


def test_made_and_trained_later(place):
    """By the command that is printed, from files that are links to those of the trunk."""
    made = lm(place, "branch", "trunk", "--at", "8", "--decay", str(2 * STEP), "--name", "later", "--make_only")
    said = made.stdout
    assert "--rewarm" not in made.stderr  # the rate is at its peak
    assert not logged(place, "later") and "fit --config checkpoints/later/config.yaml --ckpt_path auto" in said
    lm(place, "fit", "--config", "checkpoints/later/config.yaml", "--ckpt_path", "auto")
    assert [step for step, *_ in logged(place, "later")] == [9, 10]
    first, trunk = (place / "checkpoints" / run / "step-00000008/model.safetensors" for run in ("later", "trunk"))
    assert os.path.samefile(first, trunk)  # nine checkpoints are kept
    refused = lm(place, "branch", "trunk", "--decay", "512", expect=2, TORCHELASTIC_RUN_ID="1", LOCAL_WORLD_SIZE="1",
                 GROUP_WORLD_SIZE="1")  # fmt: skip
    assert "give --make_only to one process" in refused.stderr
    refused = lm(place, "branch", "trunk", "--at", "8", "--constant", "512", "--trainer.max_steps", "40", expect=2)
    assert "--decay and --constant give the length of the branch: leave trainer.max_steps out" in refused.stderr


@pytest.mark.slow
def test_over_two_ranks(place):
    options = ["--at", "8", "--decay", str(4 * STEP), "--model.decoder.dropout", "0"]
    lm(place, "branch", "trunk", *options, "--name", "one")
    lm(place, "branch", "trunk", *options, "--name", "two", "--trainer.devices", "2", "--data.micro_batch_size", "2")
    one, two = ([loss for _, loss, _ in logged(place, name)] for name in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-4)


def test_other_data_and_a_longer_context(place):
    """Samples are counted by the tokens that were trained on."""
    (place / "others").mkdir()
    for index in range(60):
        text = f"No garden of {index} was sold, and the engine had an answer. " * 8
        (place / "others" / f"{index}.txt").write_text(text)
    lm(place, "data", "prepare", "--input", "others", "--output", "data/others", "--tokenizer", "data/small",
       "--val_fraction", "0.2")  # fmt: skip
    lm(place, "branch", "trunk", "--at", "8", "--constant", str(2 * STEP), "--name", "long", "--data.path",
       "data/others", "--model.decoder.max_position_embeddings", "64", "--data.seq_len", "64", "--data.micro_batch_size", "2",
       "--model.decoder.rope_theta", "2e4")  # fmt: skip
    config = Run(place / "checkpoints/long").settings()
    assert config["data"]["seq_len"] == 64 and config["data"]["micro_batch_size"] == 2
    assert config["model"]["decoder"]["rope_theta"] == 2e4
    document = json.loads((place / "checkpoints/long/step-00000008/trainer.json").read_text())
    assert document["cursor"]["consumed"] == 8 * STEP // 64
    assert Run(place / "checkpoints/long").metrics("train/loss")[-1]["tokens"] == 10 * STEP


def test_data_of_another_tokenizer_is_made_again_with_that_of_the_checkpoint(place):
    """And typed data replaces the mixture that the other run had."""
    lm(place, "data", "prepare", "--input", "texts", "--output", "data/bpe", "--vocab_size", "280")
    lm(place, "branch", "trunk", "--at", "8", "--constant", str(STEP), "--name", "mixed", "--data.sources",
       "[{name: a, path: data/small}]")  # fmt: skip
    branch = ("branch", "mixed", "--constant", str(STEP), "--name", "on-bpe", "--data.path")
    refused = lm(place, *branch, "data/bpe", expect=2).stderr.splitlines()[-1]
    assert "prepare the text again with the checkpoint, or its run's data, as --tokenizer" in refused
    lm(place, "data", "prepare", "--input", "texts", "--output", "data/bpe-again", "--tokenizer", "data/small")
    lm(place, *branch, "data/bpe-again")


def test_lengths_are_counted_in_steps_of_the_branch(place):
    """512 tokens are two steps of the trunk, and one of a branch whose steps are twice as large."""
    said = lm(place, "branch", "trunk", "--at", "8", "--decay", "1024", "--name", "larger",
              "--data.global_batch_tokens", "512", "--make_only")  # fmt: skip
    config = Run(place / "checkpoints/larger").settings()
    assert config["trainer"]["max_steps"] == 10 and config["model"]["schedule"]["decay_steps"] == 2, said.stderr


ZERO = "the learning rate of the run at step 8 is 0, and would stay 0: let it rise with --rewarm"


@pytest.mark.parametrize("arguments, message", [
    (["whole", "--constant", "512"], ZERO), (["trunkk", "--decay", "512"], "trunkk"), ([], "give a run"),
    (["--at", "5"], "has no checkpoint 'step-00000005'; it has: step-00000004, step-00000008, "),
    (["--at", "four"], "has no checkpoint 'four'"),
    (["--decay", "100"], "at least those of a step, 256: 2560 are 10 steps"), (["--at", "last"], "give --decay TOKENS or --con"),
    (["--rewarm", "512"], "is a part of --decay or of --constant"),
    (["--decay", "512", "--constant", "512"], "give --decay or --constant"),
    (["--decay", "512", "--model.decoder.hidden_size", "64"], "model.decoder.hidden_size was 32, now 64"),
    (["--decay", "512", "--model.optimizer.name", "adamw"], "model.optimizer.name was muon, now adamw"),
    (["--decay", "512", "--model.optimizer.lrr", "1"], "did you mean 'model.optimizer.lr'?"),
    (["whole", "--at", "4", "--decay", "512", "--final_fraction", "1.5"], "and --final_fraction 1.5 is more: give a smaller"),
    (["--decay", "512", "--name", "whole"], "there is a run"),
    (["--decay", "512", "--name", "a/b"], "run name 'a/b'"),
    (["--decay", "512", "--data.path", "data/nowhere"], "data.path data/nowhere"),
    (["--constant", "512", "--data.micro_batch_size", "3"], "lm branch: data.global_batch_tokens 256 is not a whole "),
])  # fmt: skip
def test_what_cannot_be_is_one_line_and_leaves_nothing(place, arguments, message):
    before = set(os.listdir(place / "checkpoints"))
    run = ["trunk"] if arguments and arguments[0].startswith("--") else []
    refused = lm(place, "branch", *run, *arguments, expect=2).stderr
    assert message in refused.strip().splitlines()[-1] and "changed: " not in refused
    assert set(os.listdir(place / "checkpoints")) == before
