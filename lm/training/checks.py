"""Checks for options of a training that do not go together; `lm plan` prints the findings, and a fit runs them first.

A check is a pure function of options and of known facts about them. It yields findings, each a problem and its
cure, if continuing would lose data, money or correctness, or would silently ignore an option. Values that
an option can never have are refused where it is declared, in the `config` files.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback

from lm.data.config import DataConfig
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError
from lm.model.build import kernels_missing
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder, Linear
from lm.runs.checkpoint import KEPT, encode
from lm.system.process import under_torchrun
from lm.system.units import shown
from lm.training.config import EvaluationConfig, GroupConfig, ModelConfig, RunOptions, SamplesConfig, TrainerConfig
from lm.training.precision import kept_in_bf16
from lm.training.world import srun_world

if TYPE_CHECKING:
    from lm.system.devices import Device

KERNELS_FROM, FP8_FROM = (8, 0), (8, 9)  # compute capability; the first is that of `model/fused`
LEAVE_OUT = "leave it out"


class Finding(NamedTuple):
    """A problem of a training's options."""

    level: Literal["error", "warning"]
    what: str  # with the arithmetic
    cure: str

    def __str__(self) -> str:
        separator = ": " if self.level == "error" else "; "
        return f"{self.what}{separator}{self.cure}" if self.cure else self.what


def error(what: str, cure: str = "") -> Finding:
    return Finding("error", what, cure)


def refuse(findings: Iterable[Finding]) -> None:
    """Raise RequestError for the first of some findings of this module, which are all errors."""
    if first := next(iter(findings), None):
        raise RequestError(str(first))


@dataclass(frozen=True)
class Known:
    """Known facts about a training; None: not known yet, and checks that need it are skipped."""

    devices: int | None = None  # number of devices over all nodes
    device: "Device | None" = None  # one of the devices
    here: bool = False  # whether the device is in this machine
    tokenizer: Tokenizer | None = None
    has_validation: bool | None = None


def find(
    trainer: TrainerConfig, model: ModelConfig, data: DataConfig, known: Known, *, samples: SamplesConfig | None = None,
    evaluation: EvaluationConfig | None = None, custom: bool = False,
) -> Iterator[Finding]:  # fmt: skip
    """Find all problems of a training's options; `custom`: the model is not the built-in decoder."""
    yield from check_trainer(trainer)
    if known.devices is not None:
        yield from check_ranks_options(trainer, known.devices)
    if trainer.precision.startswith("fp8"):
        yield from check_fp8(trainer, model.decoder, data, known)
    if not custom:  # of which building it finds out more
        if model.decoder.tie_word_embeddings and model.optimizer.groups.output != GroupConfig():
            yield error("model.optimizer.groups.output: the output matrix of this model is its embedding",
                        "set model.optimizer.groups.embedding")  # fmt: skip
        yield from check_device(trainer, model, known.device) if known.device is not None else ()
    if known.tokenizer is not None:
        yield from check_tokenizer(model.decoder, samples or SamplesConfig(), known.tokenizer)
    if evaluation is not None and known.has_validation is False and evaluation.tasks and evaluation.interval is None:
        yield error("evaluation.tasks: evaluations come after validations, and there is no validation data",
                    "give evaluation.interval, in optimizer steps, or data.val")  # fmt: skip


# ---- the Trainer alone -----------------------------------------------------------------------------------------------


def check_trainer(trainer: TrainerConfig) -> Iterator[Finding]:
    """Problems of the Trainer's options that do not depend on the model."""
    if any(path.is_file() for path in (Path(trainer.default_root_dir), *Path(trainer.default_root_dir).parents)):
        yield error(f"trainer.default_root_dir {trainer.default_root_dir} is a file, or in one", "give a folder")
    yield from check_callbacks(trainer.callbacks or [])
    if trainer.matmul_precision != "highest" and trainer.precision != "32-true":
        yield error(f"trainer.matmul_precision {trainer.matmul_precision} is for trainer.precision 32-true, and this "
                    f"is {trainer.precision}, which is faster already", LEAVE_OUT)  # fmt: skip
    if trainer.fp8_keep is not None and not trainer.precision.startswith("fp8"):
        yield error(f"trainer.fp8_keep {' '.join(trainer.fp8_keep)} is for FP8, and trainer.precision is "
                    f"{trainer.precision}", f"{LEAVE_OUT}, or take fp8-tensorwise or fp8-rowwise")  # fmt: skip


def check_event_program(run: RunOptions) -> Iterator[Finding]:
    """Yield an error if this machine has no such program."""
    if run.on_event and shutil.which(run.on_event[0]) is None:
        yield error(f"on_event: no program {run.on_event[0]!r} on PATH", "a script needs its path and `chmod +x`")


def check_accelerator(accelerator: str) -> Iterator[Finding]:
    """Yield an error if this machine has no such device."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    present["gpu"] = any(present.values())
    if not present.get(accelerator, True):
        yield error(f"trainer.accelerator {accelerator}: PyTorch finds no such device on this machine",
                    "give --trainer.accelerator cpu, or auto")  # fmt: skip


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


def check_callbacks(given: list[Any]) -> Iterator[Finding]:
    """Find objects that are not callbacks, and callbacks of Lightning that cannot work here."""
    for callback in given:
        if isinstance(callback, Callback) and (unkept := _unkept(callback)):
            yield error(f"trainer.callbacks: {unkept}", KEPT)
        if not isinstance(callback, Callback):
            yield error(f"callbacks: {shown(callback)} is not a callback", "give an object of a class of lm.Callback")
        for kind, instead in INSTEAD.items():
            if isinstance(callback, kind):
                yield error(f"trainer.callbacks: {type(callback).__name__} of Lightning does not work here", instead)
        # Callbacks of users may log more with `pl_module.log`.
        known = all(type(each).__module__.startswith(("lightning.", "lm.")) for each in given)
        monitor = getattr(callback, "monitor", None)
        if known and monitor not in (None, *MONITORED):
            yield error(f"trainer.callbacks: {type(callback).__name__} has no {monitor} to monitor",
                        f"give {' or '.join(MONITORED)}")  # fmt: skip


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


# ---- several devices -------------------------------------------------------------------------------------------------


def check_ranks_options(trainer: TrainerConfig, devices: int) -> Iterator[Finding]:
    """Options without effect, or with a wrong one, on this number of devices over all nodes.

    Under torchrun the number may change with a restart, so options without effect are no errors there.
    """
    strategy, nodes, precision, options = trainer.strategy, trainer.num_nodes, trainer.precision, trainer.distributed
    restarts = under_torchrun()
    if nodes > 1 and not restarts and srun_world() is None and "MASTER_ADDR" not in os.environ:
        yield error(f"trainer.num_nodes {nodes}: the nodes do not find one another",
                    f"start the command on each with `torchrun --nnodes {nodes}`, or with `srun --nodes {nodes}`, or "
                    "give --trainer.num_nodes 1")  # fmt: skip
    if strategy == "hsdp" and (nodes == 1 or devices == nodes) and not (nodes == 1 and restarts):
        other, where = ("fsdp2", "one node") if nodes == 1 else ("ddp", "one device a node")
        yield error(f"trainer.strategy hsdp shards a model within each of several nodes, and with {where} it would be "
                    f"{other}", f"give --trainer.strategy {other}")  # fmt: skip
    kind = "ddp" if strategy in ("auto", "ddp") else "fsdp2"
    for name, value in vars(options).items():
        needs, alone = "fsdp2" if name == "reshard" else "several devices", devices == 1
        fits = needs in (kind, "several devices")
        if value is not None and (not fits or alone and not restarts):
            yield error(f"trainer.distributed.{name} is for {needs}, and this training is on "
                        f"{'one device' if alone else kind}", LEAVE_OUT)  # fmt: skip
    take_mixed = f"{LEAVE_OUT}, or give --trainer.precision bf16-mixed"
    if options.reduce_dtype is not None and precision == "bf16-true":
        yield error("trainer.distributed.reduce_dtype is for gradients in fp32, and trainer.precision bf16-true has "
                    "them in bf16", take_mixed)  # fmt: skip
    if options.reduce_dtype == "bf16" and precision == "16-mixed":
        yield error("trainer.distributed.reduce_dtype bf16 does not go with trainer.precision 16-mixed, whose scaled "
                    "gradients need fp16's digits", take_mixed)  # fmt: skip


# ---- the model on its device -----------------------------------------------------------------------------------------


def check_fp8(trainer: TrainerConfig, decoder: DecoderConfig, data: DataConfig, known: Known) -> Iterator[Finding]:
    """Devices and shapes that FP8 does not support, and patterns of `fp8_keep` that match nothing or everything."""
    from lm.kernels.fp8.linear import MULTIPLE

    precision, device = trainer.precision, known.device
    if device is not None and (device.capability is None or device.capability < FP8_FROM):
        yield error(f"trainer.precision {precision} needs an NVIDIA GPU of compute capability 8.9 or later (Ada, "
                    f"Hopper, Blackwell), and this is {'a cpu' if device.capability is None else device.name}",
                    "take bf16-mixed")  # fmt: skip
    elif known.here and (missing := kernels_missing(torch.device("cuda"))) is not None:
        yield error(f"trainer.precision {precision} quantises by a CUDA kernel, and {missing}")
    seq_len = data.seq_len or decoder.max_position_embeddings
    if data.micro_batch_size * seq_len % MULTIPLE:  # tokens are a dimension of the products that are weights' gradients
        yield error(f"trainer.precision {precision} takes multiples of {MULTIPLE} tokens a micro-batch, and these are "
                    f"{data.micro_batch_size} x {seq_len}", "change data.micro_batch_size or data.seq_len")  # fmt: skip
    with torch.device("meta"):
        parts = Decoder(replace(decoder, vocab_size=1)).named_modules()
        matrices = {name: part for name, part in parts if isinstance(part, Linear)}
    for pattern in trainer.fp8_keep or ():
        if not any(fnmatchcase(name, pattern) for name in matrices):
            *names, last = matrices
            yield error(f"trainer.fp8_keep {pattern} fits no matrix",
                        f"they are {', '.join(names[:4])} ... {last}")  # fmt: skip
    keep = kept_in_bf16(trainer.fp8_keep, decoder.num_hidden_layers)
    chosen = {name: matrix for name, matrix in matrices.items() if not any(fnmatchcase(name, one) for one in keep)}
    if not chosen:
        of_default = "" if trainer.fp8_keep is not None else ", which are the last block's by default,"
        yield error(f"trainer.fp8_keep {' '.join(keep)}{of_default} leaves no matrix for FP8", "take bf16-mixed")
    for name, matrix in chosen.items():
        if matrix.in_features % MULTIPLE or matrix.out_features % MULTIPLE:
            yield error(f"trainer.precision {precision} takes multiples of {MULTIPLE}, and {name} is "
                        f"{matrix.out_features} x {matrix.in_features}",
                        "change the decoder's sizes, or name it in trainer.fp8_keep")  # fmt: skip
            break  # the other blocks have the same


def has_kernels(device: "Device", kernels: str | bool) -> bool:
    """Whether our kernels would run on a device; `kernels` is as in `model.kernels`."""
    return kernels not in ("off", False) and device.capability is not None and device.capability >= KERNELS_FROM


def check_device(trainer: TrainerConfig, model: ModelConfig, device: "Device") -> Iterator[Finding]:
    kernels, mode = has_kernels(device, model.kernels), model.activation_checkpointing
    if model.kernels in ("on", True) and not kernels:
        yield error(f"model.kernels on: {device.name} cannot run them", "set model.kernels auto")
    if model.attention != "auto" and (device.capability is None or trainer.precision == "32-true"):
        yield error(f"model.attention {model.attention} needs a CUDA device and half precision, and this is "
                    f"{device.name} in {trainer.precision}", "set model.attention auto")  # fmt: skip
    if kernels and mode in ("selective", "block") and model.compile != "none" and torch.__version__ < "2.13":
        yield error(f"model.activation_checkpointing {mode} saves no memory with our kernels and model.compile "
                    f"{model.compile} before torch 2.13, and this is {torch.__version__}",
                    "set model.compile none, or update torch")  # fmt: skip


def check_tokenizer(decoder: DecoderConfig, samples: SamplesConfig, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Problems of a vocabulary that is too small, and of prompts that are too long."""
    if decoder.vocab_size is not None and decoder.vocab_size < tokenizer.vocab_size:
        yield error(f"model.decoder.vocab_size {decoder.vocab_size:,} is smaller than the tokenizer's "
                    f"{tokenizer.vocab_size:,}", "leave it out to take the tokenizer's")  # fmt: skip
    context = decoder.max_position_embeddings
    for text in samples.prompts or ():
        if (over := len(tokenizer.encode(text)) - context + 1) > 0:
            yield error(f"samples.prompts: {shown(text)} leaves no room in the context of {context}",
                        f"shorten it by {over} tokens or more")  # fmt: skip
