"""Checks for options of a training run that do not go together; `lm plan` prints the findings, a fit runs them first.

A check is a pure function of options and of known facts about them. It yields findings where continuing would
lose time or correctness, and no error that PyTorch or Lightning gives by itself says why. Values that an option can
never have are refused where it is declared, in the `config` files.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lm.data.datamodule import DataModule
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError
from lm.system.process import under_torchrun
from lm.training.config import ModelConfig, TrainerConfig
from lm.training.world import srun_world

if TYPE_CHECKING:
    from lm.system.devices import Device

KERNELS_FROM = (8, 0)  # compute capability; see `model/fused`
FP8_FROM = (8, 9)
MONITORED = ("val/loss", "val/perplexity", "val/bpb")  # metrics of a validation that Lightning knows


class Finding(NamedTuple):
    """A problem of the options of a training run, and how to mend it."""

    level: Literal["error", "warning"]
    what: str  # with the arithmetic
    cure: str

    def __str__(self) -> str:
        separator = ": " if self.level == "error" else "; "
        return f"{self.what}{separator}{self.cure}" if self.cure else self.what


def error(what: str, cure: str = "") -> Finding:
    return Finding("error", what, cure)


def find_problems(
    trainer: TrainerConfig, model: ModelConfig, device: "Device | None" = None, tokenizer: Tokenizer | None = None
) -> Iterator[Finding]:
    """Find all problems of a training's options; checks that need a device, one of several, or a tokenizer are skipped
    without it."""
    nodes, rows = trainer.num_nodes, model.decoder.vocab_size
    started = under_torchrun() or "MASTER_ADDR" in os.environ
    if device is not None and nodes > 1 and not started and srun_world() is None:
        yield error(
            f"trainer.num_nodes {nodes}: the nodes do not find one another",
            f"start the command on each with `torchrun --nnodes {nodes}`, or with `srun --nodes {nodes}`, or "
            "give --trainer.num_nodes 1",
        )
    is_fp8 = trainer.precision.startswith("fp8")
    if is_fp8 and device is not None and (device.capability is None or device.capability < FP8_FROM):
        yield error(
            f"trainer.precision {trainer.precision} needs an NVIDIA GPU of compute capability 8.9 or later (Ada, "
            f"Hopper, Blackwell), and this is {'a cpu' if device.capability is None else device.name}",
            "take bf16-mixed",
        )
    callbacks = trainer.callbacks or []
    all_known = all(type(callback).__module__.startswith(("lightning.", "lm.")) for callback in callbacks)
    for callback in callbacks if all_known else ():  # those of users may log more
        if (monitor := getattr(callback, "monitor", None)) not in (None, *MONITORED):
            name, fix = type(callback).__name__, f"give {' or '.join(MONITORED)}"
            yield error(f"trainer.callbacks: {name} has no {monitor} to monitor", fix)
    if tokenizer is not None and rows is not None and rows < tokenizer.vocab_size:
        yield error(
            f"model.decoder.vocab_size {rows:,} is smaller than the tokenizer's {tokenizer.vocab_size:,}",
            "leave it out to take the tokenizer's",
        )


def has_kernels(device: "Device", kernels: str) -> bool:
    """Whether our kernels would run on a device; `kernels` is as in `model.kernels`."""
    return kernels != "off" and device.capability is not None and device.capability >= KERNELS_FROM


# ---- objects in place of options -------------------------------------------------------------------------------------


def check_parts(model: Any, datamodule: Any) -> None:
    """Raise RequestError unless the parts are a LanguageModule without weights outside its decoder and a DataModule."""
    if isinstance(model, type) or not hasattr(model, "build_decoder"):  # whose file imports this one
        raise RequestError(
            f"lm.Trainer trains an lm.LanguageModule, and this is {kind_of(model)}: build your model "
            "in `build_decoder` of a subclass, or take lightning.Trainer"
        )
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
