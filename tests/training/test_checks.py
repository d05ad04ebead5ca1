"""The one list of options that do not go together: `lm plan` prints what `lm fit` refuses, in the same words."""

import re

import pytest
import torch
from decoders import SMALL
from trainings import lm, make_workplace, write_config

from lm.data.config import DataConfig
from lm.data.tokenizer_training import train_char
from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.system.devices import DEVICES, Device
from lm.training.checks import find_problems
from lm.training.config import (
    DistributedConfig,
    EvaluationConfig,
    GroupConfig,
    GroupsConfig,
    ModelConfig,
    OptimizerConfig,
    SamplesConfig,
    TrainerConfig,
)
from lm.training.findings import Known
from lm.training.trainer import Trainer

H200, CPU = DEVICES["h200"], Device("a processor", None, None)
FP8 = {"precision": "fp8-rowwise"}


def found(trainer={}, model={}, data={}, known=Known(), **sections):
    model = ModelConfig(**{"decoder": SMALL} | model)
    data = DataConfig(**{"path": "data/tiny", "seq_len": 64} | data)
    return [str(finding) for finding in find_problems(TrainerConfig(**trainer), model, data, known, **sections)]


def with_options(strategy, **options):
    """Options of a Trainer on several devices."""
    return {"strategy": strategy, "distributed": DistributedConfig(**options)}


def shape(**changes):
    return {"decoder": DecoderConfig(**vars(SMALL) | changes)}


NARROW = shape(intermediate_size=72)
OUTPUT = OptimizerConfig(groups=GroupsConfig(output=GroupConfig(lr=0.1)))
ONE, TWO = Known(1, H200), Known(2)


@pytest.mark.parametrize("given, words", [
    # several devices
    ((with_options("auto", reduce_dtype="bf16"), {}, {}, Known(1)), "reduce_dtype is for several devices, and this"),
    ((with_options("ddp", reduce_dtype="bf16") | {"precision": "bf16-true"}, {}, {}, TWO), "has them in bf16"),
    ((with_options("ddp", reduce_dtype="bf16") | {"precision": "16-mixed"}, {}, {}, TWO), "need fp16's digits"),
    # the Trainer
    (({"matmul_precision": "high", "precision": "bf16-mixed"},), "which is faster already: leave it out"),
    # FP8
    ((FP8, NARROW, {}, ONE), "fp8-rowwise takes multiples of 16, and a block's mlp.down_proj is 48 x 72: change the "
     "decoder's sizes"),
    ((FP8, {}, {"micro_batch_size": 3, "seq_len": 24}, ONE), "16 tokens a micro-batch, and these are 3 x 24"),
    ((FP8, shape(num_hidden_layers=1), {}, ONE), "all blocks but the last, and there is one: take bf16-mixed"),
    ((FP8, {}, {}, Known(1, DEVICES["a100"])), "8.9 or later (Ada, Hopper, Blackwell), and this is NVIDIA A100"),
    ((FP8, {}, {}, Known(1, CPU)), "and this is a cpu: take bf16-mixed"),
    # the model on its device
    (({}, {"kernels": "on"}, {}, Known(1, DEVICES["t4"])), "Tesla T4 cannot run them: set model.kernels auto"),
    (({}, {"attention": "flash"}, {}, ONE), "a CUDA device and half precision, and this is NVIDIA H200 in 32-true"),
    (({}, shape(tie_word_embeddings=True) | {"optimizer": OUTPUT}), "leave it out, as --model.optimizer.groups.output null does"),
], ids=lambda each: each if isinstance(each, str) else "")  # fmt: skip
def test_options_that_do_not_go_together(monkeypatch, given, words):
    monkeypatch.setenv("MASTER_ADDR", "here")
    [line] = found(*given)
    assert words in line


def test_options_that_go_together_are_left_alone(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "here")
    assert found(known=Known(1, CPU, on_this_machine=True)) == []
    assert found(with_options("ddp", reduce_dtype="bf16"), known=Known(2, H200)) == []
    assert found({"strategy": "fsdp2", "num_nodes": 2}, known=Known(4, H200)) == []
    assert found(FP8, data={"micro_batch_size": 2}, known=ONE) == []
    custom = shape(tie_word_embeddings=True) | {"optimizer": OUTPUT}
    assert found(model=custom, custom=True) == []  # which may have such a matrix


def test_what_does_not_fit_the_data():
    tokenizer = train_char(["the context of"])
    samples = SamplesConfig(prompts=["of", "the context " * 9])
    model, known = shape(vocab_size=3, max_position_embeddings=100), Known(tokenizer=tokenizer)
    small, long = found(model=model, known=known, samples=samples)
    assert "vocab_size 3 is smaller than the tokenizer's" in small
    assert "leaves no room in the context of 100: shorten it by 9 tokens or more" in long
    tasks = EvaluationConfig(tasks=["embedded:sotu"])
    [never] = found(known=Known(has_validation=False), evaluation=tasks)
    assert "evaluations come after validations, and there is no validation data" in never
    assert found(known=Known(has_validation=None), evaluation=tasks) == []


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has it")
def test_a_device_that_is_not_there_is_refused_with_the_cure():
    with pytest.raises(RequestError, match="give --trainer.accelerator cpu, or auto"):
        Trainer(max_steps=1, accelerator="mps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("checks"), "data/small")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"trainer.peak_tflops": 0}, {"trainer.early_stopping.patience": 0}, {"trainer.stop_within": -1},
    {"trainer.stop_within": 1e9}, {"trainer.keep_every": 0}, {"model.optimizer.eps": -1},
    {"trainer.callbacks": [{"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:01:00:00"}}]},
    {"samples.prompts": ["The letter of the captain was lost, and so the captain"]}, {"model.kernels": "on"},
    {"trainer.default_root_dir": "texts/000.txt"}, {"guards.inject_step": 400},
    {"run": "a/b"}, {"seed_everything": True},
    {"model.schedule.name": "wsd", "model.schedule.decay_steps": 11},
    {"trainer.callbacks": [{"class_path": "lightning.pytorch.callbacks.EarlyStopping",
                            "init_args": {"monitor": "val/loss", "mode": "lowest"}}]},
    {"model.decoder.vocab_size": 5}, {"trainer.matmul_precision": "high", "trainer.precision": "bf16-mixed"},
], ids=str)  # fmt: skip
def test_plan_and_fit_refuse_the_same_in_the_same_words(folder, changes):
    config = str(write_config(folder, "wrong", **changes))
    planned = lm(folder, "plan", "--config", config, "--json", expect=2).stderr
    refused = lm(folder, "fit", "--config", config, expect=2).stderr.strip().splitlines()[-1]
    what = re.sub(r"^lm plan: (wrong is not ready: 1 error[^:]*: )?", "", planned.strip().splitlines()[-1])
    assert refused.removeprefix("lm fit: ").startswith(what) or "seed_everything" in changes  # of which parsers know
    assert not (folder / "checkpoints").exists()
