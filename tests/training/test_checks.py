"""The one list of options that do not go together: `lm plan` prints what `lm fit` refuses, in the same words."""

import pytest
from decoders import SMALL
from trainings import lm, make_workplace, write_config

from lm.data.config import DataConfig
from lm.data.tokenizer import train_char
from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.system.hardware import DEVICES, Device
from lm.training import checks
from lm.training.checks import Known, find
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

H200, A100, CPU = DEVICES["h200"], DEVICES["a100"], Device("a processor", None, None)
FP8 = {"precision": "fp8-rowwise"}


def found(trainer={}, model={}, data={}, known=Known(), **sections):
    model = ModelConfig(**{"decoder": SMALL} | model)
    data = DataConfig(**{"path": "data/tiny", "seq_len": 64} | data)
    return [str(finding) for finding in find(TrainerConfig(**trainer), model, data, known, **sections)]


@pytest.mark.parametrize("trainer, devices, words", [
    ({"strategy": "auto", "distributed": {"reduce_dtype": "bf16"}}, 1, "reduce_dtype is for several devices, and this"),
    ({"strategy": "ddp", "distributed": {"reshard": False}}, 2, "distributed.reshard is for fsdp2, and this"),
    ({"strategy": "fsdp2", "distributed": {"bucket_mb": 50}}, 2, "distributed.bucket_mb is for ddp, and this training"),
    ({"precision": "bf16-true", "distributed": {"reduce_dtype": "bf16"}}, 2, "bf16-true has them in bf16"),
    ({"precision": "16-mixed", "distributed": {"reduce_dtype": "bf16"}}, 2, "need fp16's digits"),
    ({"strategy": "hsdp"}, 2, "with one node it would be fsdp2: give --trainer.strategy fsdp2"),
    ({"strategy": "hsdp", "num_nodes": 2}, 2, "with one device a node it would be ddp: give --trainer.strategy ddp"),
    ({"matmul_precision": "high", "precision": "bf16-mixed"}, 1, "which is faster already: leave it out"),
    ({"fp8_keep": ["*"]}, 1, "trainer.fp8_keep * is for FP8, and trainer.precision is 32-true: leave it out, or take"),
    ({"default_root_dir": "s3://bucket/runs"}, 1, "trainer.default_root_dir"),
])  # fmt: skip
def test_options_that_would_change_nothing_or_break_something(monkeypatch, trainer, devices, words):
    monkeypatch.setenv("MASTER_ADDR", "here")
    trainer = trainer | {"distributed": DistributedConfig(**trainer.get("distributed", {}))}
    [line] = found(trainer, known=Known(devices))
    assert words in line


def test_options_that_go_together_are_left_alone(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "here")
    assert found(known=Known(1, CPU, here=True)) == []
    for strategy, devices, options in (("ddp", 2, {"bucket_mb": 50, "reduce_dtype": "bf16"}), ("ddp", 2, {}),
                                       ("hsdp", 4, {"reshard": False, "prefetch": 2})):
        nodes = 2 if strategy == "hsdp" else 1
        trainer = {"strategy": strategy, "num_nodes": nodes, "distributed": DistributedConfig(**options)}
        assert found(trainer, known=Known(devices, H200)) == []
    assert found(FP8, data={"micro_batch_size": 2}, known=Known(1, H200)) == []
    for name in ("bucket_mb", "prefetch"):
        with pytest.raises(RequestError, match=f"trainer.distributed.{name} 0 must be at least 1"):
            DistributedConfig(**{name: 0})


@pytest.mark.parametrize("model, trainer, data, words", [
    ({"decoder": DecoderConfig(**{**vars(SMALL), "intermediate_size": 72})}, FP8, {}, [
        "trainer.precision fp8-rowwise takes multiples of 16, and layers.0.mlp.down_proj is 48 x 72: change the "
        "decoder's sizes, or name it in trainer.fp8_keep"]),
    ({"decoder": DecoderConfig(**{**vars(SMALL), "intermediate_size": 72})}, FP8 | {"fp8_keep": ["*.down_proj"]}, {},
     []),
    ({}, FP8, {"micro_batch_size": 3, "seq_len": 24}, ["multiples of 16 tokens a micro-batch, and these are 3 x 24"]),
    ({}, FP8 | {"fp8_keep": ["layers.9.*"]}, {}, [
        "trainer.fp8_keep layers.9.* fits no matrix: they are layers.0.self_attn.qkv_proj, layers.0.self_attn.o_proj, "
        "layers.0.mlp.gate_up_proj, layers.0.mlp.down_proj ... "]),
    ({}, FP8 | {"fp8_keep": ["*_proj"]}, {}, ["trainer.fp8_keep *_proj leaves no matrix for FP8: take bf16-mixed"]),
    ({"decoder": DecoderConfig(**{**vars(SMALL), "num_hidden_layers": 1})}, FP8, {}, ["by default, leaves no matrix"]),
])  # fmt: skip
def test_shapes_and_names_that_fp8_does_not_take(model, trainer, data, words):
    lines = found(trainer, model, data, Known(1, H200))
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines))


@pytest.mark.parametrize("device, trainer, model, words", [
    (A100, FP8, {}, "compute capability 8.9 or later (Ada, Hopper, Blackwell), and this is NVIDIA A100-SXM4-80GB"),
    (CPU, FP8, {}, "and this is a cpu: take bf16-mixed"),
    (DEVICES["t4"], {}, {"kernels": "on"}, "model.kernels on: Tesla T4 cannot run them: set model.kernels auto"),
    (H200, {}, {"attention": "flash"}, "needs a CUDA device and half precision, and this is NVIDIA H200 in 32-true"),
    (CPU, {}, {"cuda_graphs": True}, "model.cuda_graphs needs a CUDA device, and this is a processor: turn it off"),
])
def test_what_a_device_cannot_do(device, trainer, model, words):
    [line] = found(trainer, model, known=Known(1, device))
    assert words in line


def test_a_graph_repeats_what_must_not_differ():
    graphs = {"cuda_graphs": True}
    [several] = found({}, graphs, known=Known(2, H200))
    [skipped] = found({}, graphs, {"on_bad_shard": "skip"}, Known(1, H200))
    [labels] = found({}, graphs, known=Known(1, H200, every_target=False))
    assert "needs one device, and these are 2" in several and "on_bad_shard raise" in skipped and "`labels`" in labels


def test_settings_for_an_output_matrix_that_is_the_embedding():
    optimizer = OptimizerConfig(groups=GroupsConfig(output=GroupConfig(lr=0.1)))
    tied = DecoderConfig(**{**vars(SMALL), "tie_word_embeddings": True})
    [line] = found(model={"decoder": tied, "optimizer": optimizer})
    assert line.endswith("set model.optimizer.groups.embedding")
    assert found(model={"decoder": tied, "optimizer": optimizer}, custom=True) == []  # which may have such a matrix


def test_what_does_not_fit_the_data():
    tokenizer = train_char(["the context of"])
    decoder = DecoderConfig(**{**vars(SMALL), "vocab_size": 3, "max_position_embeddings": 100})
    samples = SamplesConfig(prompts=["of", "the context " * 9])
    small, long = found(model={"decoder": decoder}, known=Known(tokenizer=tokenizer), samples=samples)
    assert "vocab_size 3 is smaller than the tokenizer's" in small
    assert "leaves no room in the context of 100: shorten it by 9 tokens or more" in long
    tasks = EvaluationConfig(tasks=["embedded:sotu"])
    [never] = found(known=Known(has_validation=False), evaluation=tasks)
    assert "evaluations come after validations, and there is no validation data" in never
    assert found(known=Known(has_validation=None), evaluation=tasks) == []


def test_only_errors_refuse(caplog):
    caplog.set_level("INFO", "lm")
    checks.refuse([checks.Finding("advice", "this is idle", "")])
    assert caplog.messages == ["this is idle"]
    with pytest.raises(RequestError, match="^wrong: right$"):
        checks.refuse([checks.error("wrong", "right")])
    assert str(checks.Finding("warning", "odd", "even")) == "odd; even"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"trainer.peak_tflops": 0}, {"trainer.early_stopping.patience": 0}, {"trainer.stop_within": -1},
    {"trainer.stop_within": 1e9}, {"trainer.histogram_interval": 0}, {"model.optimizer.eps": -1},
    {"trainer.callbacks": [{"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:01:00:00"}}]},
    {"samples.prompts": ["The letter of the captain was lost, and so the captain"]}, {"model.kernels": "on"},
    {"trainer.default_root_dir": "texts/000.txt"}, {"data.shuffle_buffer": 10}, {"guards.inject_step": 400},
    {"run": "a/b"}, {"seed_everything": True}, {"trainer.callbacks": [{"class_path": "recorder.Stateful"}] * 2},
    {"model.schedule.name": "wsd", "model.schedule.decay_steps": 11},
    {"trainer.callbacks": [{"class_path": "lightning.pytorch.callbacks.EarlyStopping",
                            "init_args": {"monitor": "val/loss", "mode": "lowest"}}]},
    {"model.decoder.vocab_size": 5}, {"trainer.matmul_precision": "high", "trainer.precision": "bf16-mixed"},
], ids=str)  # fmt: skip
def test_plan_and_fit_refuse_the_same_in_the_same_words(tmp_path, changes):
    folder = make_workplace(tmp_path, "data/small")
    config = str(write_config(folder, "wrong", **changes))
    planned, trained = (lm(folder, command, "--config", config, expect=2).stderr for command in ("plan", "fit"))
    refused = trained.strip().splitlines()[-1]
    what = planned.strip().splitlines()[-1].removeprefix("lm plan: ").removeprefix("wrong: 1 error: ")
    assert refused.removeprefix("lm fit: ").startswith(what) or "seed_everything" in changes  # of which parsers know
    assert not (folder / "checkpoints").exists()
