"""A checkpoint is never computed as another model in silence, nor a run continued with other settings."""

import json
import re
import shutil

import pytest
from trainings import lm, write_config

MODEL = {"model.decoder.num_hidden_layers": 2, "model.decoder.window_pattern": "SL", "model.decoder.sliding_window": 8,
         "trainer.max_steps": 4, "trainer.checkpoint_interval": 4, "trainer.val_interval": 4, "trainer.callbacks": [],
         "model.schedule.warmup_steps": 0}  # fmt: skip


@pytest.fixture(scope="module")
def place(prepared):
    lm(prepared, "fit", "--config", str(write_config(prepared, "trained", **MODEL)))
    shutil.copytree(prepared / "checkpoints/trained/step-00000004", prepared / "elsewhere")  # of no run
    return prepared


OTHER = {  # the command that refuses it, what is other, and what it says
    "rope_theta": ("fit", {"rope_theta": 500.0}, "model.decoder.rope_theta is 10000.0 there and 500.0 here"),
    "rms_norm_eps": ("validate", {"rms_norm_eps": 0.1}, "model.decoder.rms_norm_eps is 1e-05 there and 0.1 here"),
    "windows": ("fit", {"window_pattern": "LS"}, "model.decoder.window_pattern is SL there and LS here"),
    "window": ("validate", {"sliding_window": 4}, "model.decoder.sliding_window is 8 there and 4 here"),
    "no windows": (
        "fit", {"window_pattern": None, "sliding_window": None}, "give --model.decoder.sliding_window 8 "),
    "heads": (
        "validate", {"num_attention_heads": 4, "num_key_value_heads": 2}, "num_attention_heads is 2 there and 4 here"),
}  # fmt: skip


@pytest.mark.parametrize("command, changes, message", OTHER.values(), ids=OTHER)
def test_another_model_of_the_same_shapes_is_refused(place, command, changes, message):
    other = {f"model.decoder.{name}": value for name, value in changes.items()}
    config = write_config(place, "other", **MODEL | {"trainer.max_steps": 8} | other)
    arguments = ["--config", str(config), "--ckpt_path", "elsewhere"]
    [line] = lm(place, command, *arguments, expect=2).stderr.strip().splitlines()[-1:]
    assert message in line and " this is a checkpoint of another model" in line
    cure = line.partition("give ")[2].partition(", or --force")[0]
    assert "val/loss" in lm(place, "validate", *arguments, *cure.split()).stdout


def test_what_changes_nothing_is_taken(place):
    """Other words for the same windows, a longer context, dropout, which does nothing here."""
    same = MODEL | {"model.decoder.window_pattern": "SLSL", "model.decoder.dropout": 0.1, "data.seq_len": 16,
                    "model.decoder.max_position_embeddings": 64, "model.decoder.initializer_range": 0.1}  # fmt: skip
    arguments = ["--config", str(write_config(place, "same", **same)), "--ckpt_path", "checkpoints/trained/last"]
    assert "val/loss" in lm(place, "validate", *arguments).stdout


def test_force_computes_another_model(place):
    config = str(write_config(place, "theta", **MODEL | {"model.decoder.rope_theta": 500.0}))
    arguments = ["validate", "--config", config, "--ckpt_path", "checkpoints/trained/last", "--force"]
    assert "val/loss" in lm(place, *arguments).stdout


SCRIPT = """
import json
import sys

import lightning

import lm

given = {"seed": 1, "rope_theta": 1e4, "shuffle_buffer": 2**20, "document_mask": False} | json.loads(sys.argv[1])
lightning.seed_everything(given["seed"])
trainer = lm.Trainer("objects", max_steps=2, checkpoint_interval=1, val_interval=2)
decoder = lm.DecoderConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16,
                           rope_theta=given["rope_theta"])
module = lm.LanguageModule(decoder, document_mask=given["document_mask"])
data = lm.DataModule("data/small", micro_batch_size=2, shuffle_buffer=given["shuffle_buffer"], val_tokens=256)
trainer.fit(module, data, ckpt_path="auto")
"""


def test_the_trainer_in_python_resumes_no_run_with_other_settings(place):
    (place / "objects.py").write_text(SCRIPT)
    lm(place, "objects.py", "{}")
    settings = json.dumps({"seed": 2}), json.dumps({"shuffle_buffer": 2**21}), json.dumps({"document_mask": True})
    for given in (*settings, json.dumps({"rope_theta": 500.0})):
        said = lm(place, "objects.py", given, expect=1).stderr
        assert "RequestError: run checkpoints/objects cannot be resumed with other options: " in said, given
    assert "val/loss" in lm(place, "validate", "--run", "objects").stdout  # its config is there
    shown = " ".join(lm(place, "runs", "show", "objects").stdout.split())
    assert "model.decoder.num_hidden_layers 1," in shown and "model.decoder.hidden_size 16" in shown
    said = lm(place, "generate", "--run", "objects", "--prompt", "The", "--max_new_tokens", "3", "--seed", "1").stderr
    assert re.search(r"\d+ tokens, [\d.]+ tokens/s, the first after [\d.e-]+ s, ended by length, seed ", said)
    lm(place, "objects.py", "{}")


EPOCHS = """
import lightning

import lm


class Seen(lightning.Callback):
    rows = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rows += batch.tokens.tolist()


decoder = lm.DecoderConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16)
found = {}
for limit, overfit in ((1.0, 0), (2, 0), (1.0, 2)):
    lightning.seed_everything(1)
    trainer = lightning.Trainer(max_steps=6, limit_train_batches=limit, overfit_batches=overfit, logger=False,
                                enable_checkpointing=False, accelerator="cpu", check_val_every_n_epoch=None,
                                callbacks=[seen := Seen()], enable_progress_bar=False)
    seen.rows = []
    trainer.fit(lm.LanguageModule(decoder), lm.DataModule("data/small", micro_batch_size=2, seq_len=16))
    found[limit, overfit] = seen.rows
assert found[2, 0] == found[1.0, 0] and len(found[2, 0]) == 12
assert found[1.0, 2] == 3 * found[2, 0][:4]
"""


def test_an_epoch_of_a_plain_trainer_does_not_begin_the_stream_again(place):
    """Where `limit_train_batches` ends one; `overfit_batches` asks for the same batches."""
    (place / "epochs.py").write_text(EPOCHS)
    lm(place, "epochs.py")
