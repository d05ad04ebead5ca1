"""Checks for options of a training run that do not go together; `lm plan` prints the findings, a fit runs them first.

A check is a pure function of options and of known facts about them. It yields findings (`training/findings`) where
continuing would lose data, money or correctness, or would silently ignore an option. Values that an option can never
have are refused where it is declared, in the `config` files.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback

from lm.data.config import DataConfig
from lm.data.datamodule import DataModule
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.runs.json_tree import ENCODABLE, encode
from lm.system.units import shown
from lm.training.config import (
    DistributedConfig,
    EvaluationConfig,
    GroupConfig,
    ModelConfig,
    RunOptions,
    SamplesConfig,
    TrainerConfig,
)
from lm.training.findings import LEAVE_OUT, Finding, Known, error

if TYPE_CHECKING:
    from lm.system.devices import Device

KERNELS_FROM = (8, 0)  # compute capability; see `model/fused`


def find_problems(
    trainer: TrainerConfig,
    model: ModelConfig,
    data: DataConfig,
    known: Known,
    *,
    samples: SamplesConfig | None = None,
    evaluation: EvaluationConfig | None = None,
    custom: bool = False,
) -> Iterator[Finding]:
    """Find all problems of a training's options; `custom`: the model is not the built-in decoder."""
    yield from check_trainer(trainer)
    several = trainer.num_nodes > 1 or trainer.distributed != DistributedConfig()
    if known.devices is not None and (known.devices > 1 or several):
        from lm.training.rank_checks import check_ranks_options

        yield from check_ranks_options(trainer, known.devices)
    if trainer.precision.startswith("fp8"):
        from lm.training.fp8 import check_fp8

        yield from check_fp8(trainer, model.decoder, data, known)
    if not custom:  # of which building it finds out more
        if model.decoder.tie_word_embeddings and model.optimizer.groups.output != GroupConfig():
            yield error(
                "model.optimizer.groups.output: the output matrix of this model is its embedding",
                "leave it out, as --model.optimizer.groups.output null does, and set groups.embedding",
            )
        yield from check_device(trainer, model, known.device) if known.device is not None else ()
    if known.tokenizer is not None:
        yield from check_tokenizer(model.decoder, samples or SamplesConfig(), known.tokenizer)
    if evaluation is not None and known.has_validation is False and evaluation.tasks and evaluation.interval is None:
        yield error(
            "evaluation.tasks: evaluations come after validations, and there is no validation data",
            "give evaluation.interval, in optimizer steps, or data.val",
        )


# ---- the Trainer alone -----------------------------------------------------------------------------------------------


def check_trainer(trainer: TrainerConfig) -> Iterator[Finding]:
    """Problems of the Trainer's options that do not depend on the model."""
    if any(path.is_file() for path in (Path(trainer.default_root_dir), *Path(trainer.default_root_dir).parents)):
        yield error(f"trainer.default_root_dir {trainer.default_root_dir} is a file, or in one", "give a folder")
    yield from check_callbacks(trainer.callbacks or [])
    if trainer.matmul_precision != "highest" and trainer.precision != "32-true":
        yield error(
            f"trainer.matmul_precision {trainer.matmul_precision} is for trainer.precision 32-true, and this "
            f"is {trainer.precision}, which is faster already",
            LEAVE_OUT,
        )


def check_event_program(run: RunOptions) -> Iterator[Finding]:
    """Yield an error if this machine has no such program."""
    if run.on_event and shutil.which(run.on_event[0]) is None:
        yield error(f"on_event: no program {run.on_event[0]!r} on PATH", "a script needs its path and `chmod +x`")


def check_accelerator(accelerator: str) -> Iterator[Finding]:
    """Yield an error if this machine has no such device."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    present["gpu"] = any(present.values())
    if not present.get(accelerator, True):
        yield error(
            f"trainer.accelerator {accelerator}: PyTorch finds no such device on this machine",
            "give --trainer.accelerator cpu, or auto",
        )


MONITORED = ("val/loss", "val/perplexity", "val/bpb")  # metrics of a validation that Lightning knows
# Lightning's callbacks that do not work if a batch is an optimizer step and an epoch has no end -> what replaces
# them.
INSTEAD: dict[type[Callback], str] = {
    callbacks.GradientAccumulationScheduler: "every step has data.global_batch_tokens tokens",
    callbacks.StochasticWeightAveraging: "an epoch has no end here; `--model.schedule.name wsd` ends with a low rate",
    callbacks.WeightAveraging: "checkpoints have no second set of weights",
    callbacks.ModelPruning: "its masks rename weights, and checkpoints have Hugging Face's names",
    callbacks.BackboneFinetuning: "the decoder is trained as a whole",
    callbacks.LearningRateFinder: "give --model.optimizer.lr; `lm scale --depth N` proposes one",
    callbacks.BatchSizeFinder: "`lm plan --config FILE --fit` prints the largest data.micro_batch_size",
    callbacks.Timer: "--guards.budget.max_hours ends a run in time, over all its sessions",
    callbacks.LearningRateMonitor: "optim/lr is in every log line, in metrics.jsonl and in TensorBoard",
    callbacks.DeviceStatsMonitor: "the machine's load is in metrics.jsonl and in TensorBoard",
    callbacks.ThroughputMonitor: "perf/tokens_per_second and perf/mfu are in metrics.jsonl and in TensorBoard",
    callbacks.SpikeDetection: "guards.spike finds spikes, and guards.alerts can stop a run or roll it back",
    callbacks.OnExceptionCheckpoint: "a state that may be broken is not saved; lower --trainer.checkpoint_interval",
    callbacks.ProgressBar: "a terminal shows the progress, and log lines do elsewhere",
}


def check_callbacks(configured: list[Any]) -> Iterator[Finding]:
    """Find objects that are not callbacks, and callbacks of Lightning that cannot work here."""
    for callback in configured:
        if isinstance(callback, Callback) and (unkept := _unkept(callback)):
            yield error(f"trainer.callbacks: {unkept}", ENCODABLE)
        if not isinstance(callback, Callback):
            yield error(f"callbacks: {shown(callback)} is not a callback", "give an object of a class of lm.Callback")
        for kind, instead in INSTEAD.items():
            if isinstance(callback, kind):
                yield error(f"trainer.callbacks: {type(callback).__name__} of Lightning does not work here", instead)
        # Callbacks of users may log more with `pl_module.log`.
        known = all(type(each).__module__.startswith(("lightning.", "lm.")) for each in configured)
        monitor = getattr(callback, "monitor", None)
        if known and monitor not in (None, *MONITORED):
            yield error(
                f"trainer.callbacks: {type(callback).__name__} has no {monitor} to monitor",
                f"give {' or '.join(MONITORED)}",
            )


def _unkept(callback: Callback) -> str | None:
    """The part of a callback's initial state that checkpoints cannot hold; None if there is none."""
    try:
        state = callback.state_dict()
    except Exception:  # some have a state only during training
        return None
    try:
        encode(state, f"callbacks[{callback.state_key!r}]")
    except TypeError as error:
        return str(error)


# ---- the model on its device -----------------------------------------------------------------------------------------


def has_kernels(device: "Device", kernels: str) -> bool:
    """Whether our kernels would run on a device; `kernels` is as in `model.kernels`."""
    return kernels != "off" and device.capability is not None and device.capability >= KERNELS_FROM


def check_device(trainer: TrainerConfig, model: ModelConfig, device: "Device") -> Iterator[Finding]:
    kernels, mode = has_kernels(device, model.kernels), model.activation_checkpointing
    if model.kernels == "on" and not kernels:
        yield error(f"model.kernels on: {device.name} cannot run them", "set model.kernels auto")
    if model.attention != "auto" and (device.capability is None or trainer.precision == "32-true"):
        yield error(
            f"model.attention {model.attention} needs a CUDA device and half precision, and this is "
            f"{device.name} in {trainer.precision}",
            "set model.attention auto",
        )
    if kernels and mode in ("selective", "block") and model.compile != "none" and torch.__version__ < "2.13":
        yield error(
            f"model.activation_checkpointing {mode} saves no memory with our kernels and model.compile "
            f"{model.compile} before torch 2.13, and this is {torch.__version__}",
            "set model.compile none, or update torch",
        )


def check_tokenizer(decoder: DecoderConfig, samples: SamplesConfig, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Problems of a vocabulary that is too small, and of prompts that are too long."""
    if decoder.vocab_size is not None and decoder.vocab_size < tokenizer.vocab_size:
        yield error(
            f"model.decoder.vocab_size {decoder.vocab_size:,} is smaller than the tokenizer's {tokenizer.vocab_size:,}",
            "leave it out to take the tokenizer's",
        )
    context = decoder.max_position_embeddings
    for text in samples.prompts or ():
        if (over := len(tokenizer.encode(text)) - context + 1) > 0:
            yield error(
                f"samples.prompts: {shown(text)} leaves no room in the context of {context}",
                f"shorten it by {over} tokens or more",
            )


# ---- objects in place of options -------------------------------------------------------------------------------------


def check_parts(model: Any, datamodule: Any) -> None:
    """Raise RequestError unless the parts are a LanguageModule without weights outside its decoder and a DataModule."""
    if isinstance(model, type) or not hasattr(model, "build_decoder"):  # whose file imports this one
        raise RequestError(
            f"lm.Trainer trains an lm.LanguageModule, and this is {kind_of(model)}: build your model "
            "in `build_decoder` of a subclass, or take lightning.Trainer"
        )
    if model.hparams:  # the arguments of a subclass
        from lm.model.custom import plain_arguments

        plain_arguments(type(model), model.hparams)  # refuses what a checkpoint could not name
    if extra := [name for name in model.state_dict() if not name.startswith("decoder.")]:
        raise RequestError(
            f"{type(model).__name__} has a weight or buffer of its own, {extra[0]}, which is not trained "
            "and would be in no model: move it into the module that build_decoder returns"
        )
    if not isinstance(datamodule, DataModule):
        raise RequestError(
            f"lm.Trainer takes its data from an lm.DataModule, and this is {kind_of(datamodule)}: give "
            "lm.DataModule(path), with a folder of `lm.prepare`"
        )


def kind_of(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
