"""Another config on a resume: what is changed is shown and taken; what would make the run a lie is refused."""

import contextlib
import io
import re
import shutil

import pytest
from trainings import equipment, expected, fit, lm, losses, write_config

from lm.cli.command import main
from lm.runs.config_diff import PURPOSES
from lm.runs.run import Run

pytestmark = pytest.mark.fault(14)

# One change of each key that is fixed when a run starts, and how it is typed.
LIES = {
    "seed_everything": ["--seed_everything=8"],
    "model.decoder": ["--model.decoder.hidden_size=64"],
    "model.document_mask": ["--model.document_mask=true"],
    "data.path": ["--data.path=data/other"],
    "data.train": ["--data.path=null", "--data.train=data/small/train", "--data.tokenizer=data/small"],
    "data.tokenizer": ["--data.tokenizer=data/small/tokenizer.json"],
    "data.prepare": ["--data.prepare.val_fraction=0.3"],
    "data.column": ["--data.column=tokens"],
    "data.pad_id": ["--data.pad_id=0"],
    "data.seq_len": ["--data.seq_len=16"],
    "data.shuffle_buffer": ["--data.shuffle_buffer=1M"],
    "data.reshuffle": ["--data.reshuffle=documents"],
}


@pytest.fixture(scope="module")
def stopped(uninterrupted, tmp_path_factory):
    """A run that was stopped after 6 of 12 steps."""
    folder = tmp_path_factory.mktemp("changed") / "work"
    shutil.copytree(uninterrupted, folder, symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
    stop = equipment("recorder.KillAt", signal_name="SIGTERM", micro_batch=11)
    fit(folder, expect=75, callbacks=[stop])
    write_config(folder)
    return folder


@pytest.fixture
def copied(stopped, tmp_path, monkeypatch):
    folder = tmp_path / "work"
    shutil.copytree(stopped, folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


def resume(folder, *changes, expect=0):
    return lm(folder, "fit", "--config", "small.yaml", "--ckpt_path", "auto", *changes, expect=expect)


def test_every_fixed_key_is_refused_by_name_and_nothing_is_written(copied, monkeypatch):
    """Also the keys that are refused for what they are, before they are compared."""
    assert LIES.keys() == set(PURPOSES["resume"][0])
    config = str(write_config(copied, **{"trainer.callbacks": None}))
    before = {path: path.stat().st_mtime_ns for path in (copied / "checkpoints").rglob("*")}
    for key, change in LIES.items():
        with contextlib.redirect_stderr(io.StringIO()) as err:
            assert main(["fit", "--config", config, "--ckpt_path", "auto", *change]) == 2, key
        assert re.search(rf"(other options: |; |, ){re.escape(key)}\b", err.getvalue()), err.getvalue()
        shapes = key == "model.decoder"  # of weights, which --force does not change
        cure = "or start a new run without --ckpt_path" + ", or give --force" * (not shapes)
        assert err.getvalue().endswith(cure + "\n")
    assert {path: path.stat().st_mtime_ns for path in (copied / "checkpoints").rglob("*")} == before


def test_a_new_run_from_a_checkpoint_with_all_the_steps_is_refused(copied, capsys):
    """Also where its model is another: it said "the run has finished", with code 0."""
    config, checkpoint = str(write_config(copied, **{"trainer.callbacks": None})), "checkpoints/small/step-00000006"
    for change in ([], LIES["model.decoder"]):
        new = ["--run", "new", "--ckpt_path", checkpoint, "--trainer.max_steps", "6", *change]
        assert main(["fit", "--config", config, *new]) == 2 and not (copied / "checkpoints/new").exists()
        assert "has nothing to train: all 6 steps are done; to train on, give a larger --" in capsys.readouterr().err


def test_data_that_was_prepared_is_resumed_as_it_is(copied):
    """A typed `--data.path` leaves out what the config prepares; a run that was begun with it in its config goes on."""
    shown = resume(copied, "--data.path=data/small")
    assert "data.prepare" not in shown.stderr and losses(copied) == expected(copied)


def test_a_resume_with_fewer_checkpoints_to_keep_removes_none_of_the_earlier_ones(copied):
    """The option may have been typed when the run was begun, and not now."""
    resume(copied, "--trainer.keep_checkpoints=9", "--trainer.checkpoint_interval=1", "--trainer.max_steps=9")
    earlier = set(Run(copied / "checkpoints/small").steps())
    assert len(earlier) > 3
    shown = resume(copied, "--trainer.max_steps=10").stderr
    assert "trainer.keep_checkpoints stays 9, so that no earlier checkpoint is removed" in shown
    assert earlier < set(Run(copied / "checkpoints/small").steps())


def test_what_may_change_is_shown_and_used(copied):
    """The learning rate, the betas, the decay, the schedule, the batch: of the command, from the next step on. Half of
    the run's tokens are left, which are three of the larger steps."""
    changes = [
        "--model.optimizer.lr=0.02", "--model.optimizer.betas=[0.8, 0.9]", "--model.optimizer.weight_decay=0.5",
        "--model.schedule.name=linear", "--data.global_batch_tokens=512", "--trainer.gradient_clip_val=0.5",
        "--trainer.max_steps=null", "--trainer.max_tokens=3072",
    ]  # fmt: skip
    shown = resume(copied, *changes).stderr
    for text in ("model.optimizer.lr: 0.01 -> 0.02", "model.optimizer.betas: ", "model.optimizer.weight_decay: ",
                 "model.schedule.name: cosine -> linear", "data.global_batch_tokens: 256 -> 512",
                 "trainer.gradient_clip_val: 1.0 -> 0.5"):  # fmt: skip
        assert f"changed since the run was started: {text}" in shown
    assert (
        "--model.optimizer.lr=0.01 --model.optimizer.weight_decay=0.1" in shown
        and "resumes it with the earlier" in shown
    )
    run = Run(copied / "checkpoints/small")
    lines = {line["step"]: line for line in run.metrics() if "optim/lr" in line}
    assert lines[7]["optim/lr"] > lines[6]["optim/lr"] and lines[8]["tokens"] == 6 * 256 + 2 * 512
    rises = "the learning rate rises from {:.2e} to {:.2e} in step 7,".format(*(lines[at]["optim/lr"] for at in (6, 7)))
    assert rises in shown and "end this run now and `lm branch small --at 4`" in shown
    assert max(lines) == 9 and run.read("state.json")["max_tokens"] == lines[9]["tokens"] == 3072
    assert run.settings()["model"]["optimizer"]["lr"] == 0.02  # and the next one is compared with this


def test_another_optimizer_is_refused_before_it_meets_a_state_that_is_not_its_own(copied):
    refused = resume(copied, "--model.optimizer.name=muon", expect=2)
    assert refused.stderr.splitlines()[-1].endswith("give --model.optimizer.name adamw")
    resume(copied)
    assert losses(copied) == expected(copied)


def test_what_was_refused_is_done_when_forced(copied):
    """With another order of the samples the run resumes and says what it is by now."""
    done = resume(copied, "--seed_everything=8", "--force")
    assert "changed since the run was started: seed_everything: 7 -> 8" in done.stderr
    run = Run(copied / "checkpoints/small")
    assert run.status() == "finished" and run.settings()["seed_everything"] == 8
    assert losses(copied) != expected(copied)
    assert {step: loss for step, loss in losses(copied).items() if step[0] <= 6} == {
        step: loss for step, loss in expected(copied).items() if step[0] <= 6
    }  # fmt: skip
