"""The one list of options that do not go together: `lm plan` prints what `lm fit` refuses, in the same words."""

import re

import pytest
from decoders import SMALL
from trainings import lm, write_config

from lm.data.tokenizer_training import train_char
from lm.model.config import DecoderConfig
from lm.system.devices import DEVICES, Device
from lm.training.checks import find_problems
from lm.training.config import ModelConfig, TrainerConfig

H200, CPU = DEVICES["h200"], Device("a processor", None, None)
FP8 = {"precision": "fp8-rowwise"}


def found(trainer={}, decoder={}, device=None, tokenizer=None):
    model = ModelConfig(decoder=DecoderConfig(**vars(SMALL) | decoder))
    return [str(finding) for finding in find_problems(TrainerConfig(**trainer), model, device, tokenizer)]


@pytest.mark.parametrize("device, words", [
    (DEVICES["a100"], "8.9 or later (Ada, Hopper, Blackwell), and this is NVIDIA A100"),
    (CPU, "and this is a cpu: take bf16-mixed"),
])  # fmt: skip
def test_fp8_needs_a_new_gpu(device, words):
    [line] = found(FP8, device=device)
    assert words in line and found(FP8, device=H200) == []


def test_nodes_that_nothing_has_started_are_not_waited_for(monkeypatch):
    for name in ("MASTER_ADDR", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    [line] = found({"num_nodes": 2}, device=CPU)
    assert re.match("trainer.num_nodes 2: .*torchrun --nnodes 2", line) and found({"num_nodes": 2}) == []
    monkeypatch.setenv("MASTER_ADDR", "here")
    assert found({"num_nodes": 2}, device=CPU) == []


def test_a_vocabulary_smaller_than_the_tokenizers():
    [line] = found(decoder={"vocab_size": 3}, tokenizer=train_char(["the context of"]))
    assert "vocab_size 3 is smaller than the tokenizer's" in line


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"trainer.peak_tflops": -1}, {"trainer.early_stopping.patience": 0}, {"trainer.stop_within": -1},
    {"trainer.keep_every": 0}, {"model.optimizer.eps": -1},
    {"run": "a/b"}, {"seed_everything": True},
    {"model.schedule.name": "wsd", "model.schedule.decay_steps": 11},
    {"trainer.callbacks": [{"class_path": "lightning.pytorch.callbacks.EarlyStopping",
                            "init_args": {"monitor": "val/loss", "mode": "lowest"}}]},
    {"model.decoder.vocab_size": 5},
], ids=str)  # fmt: skip
def test_plan_and_fit_refuse_the_same_in_the_same_words(prepared, changes):
    config = str(write_config(prepared, "wrong", **changes))
    planned = lm(prepared, "plan", "--config", config, "--json", expect=2).stderr
    refused = lm(prepared, "fit", "--config", config, expect=2).stderr.strip().splitlines()[-1]
    what = re.sub(r"^lm plan: (wrong is not ready: 1 error[^:]*: )?", "", planned.strip().splitlines()[-1])
    assert refused.removeprefix("lm fit: ").startswith(what) or "seed_everything" in changes  # of which parsers know
    assert not (prepared / "checkpoints").exists()
