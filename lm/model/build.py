"""Builds a decoder that is ready to train from its config, step by step in the necessary order.

`training/module.LanguageModule` and `lm.load_model` call it, and a plain training loop can: nothing here needs
Lightning, data or a Trainer.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lm.errors import RequestError, RunError
from lm.model.attention import describe_attention, enter_kernels
from lm.model.config import ActivationCheckpointing, Attention, Compile, DecoderConfig
from lm.model.decoder import Decoder


@dataclass(frozen=True)
class BuildOptions:
    """How a decoder is computed; the fields are options of `model` in a config, and explained there."""

    kernels: Literal["auto", "on", "off"] = "auto"
    attention: Attention = "auto"
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: Compile = "none"
    document_mask: bool = False


class Built(NamedTuple):
    """A decoder that is ready, what it is, and how it computes, in words."""

    decoder: nn.Module | None
    fused: bool  # whether its forward pass is that of `model/fused`
    kernels: str
    attention: str
    description: str  # all of it, for the log


NOT_BUILT = Built(None, False, *("not chosen yet",) * 3)


def build(
    config: DecoderConfig,
    options: BuildOptions,
    device: torch.device,
    dtype: torch.dtype,
    *,
    make: Callable[[DecoderConfig], nn.Module] = Decoder,
    builtin: bool | None = None,
    on_made: Callable[[nn.Module, bool], None] = lambda decoder, builtin: None,
    shard: Callable[[nn.Module], None] | None = None,
) -> Built:
    """Build a decoder.

    Args:
        config: its shape, with its vocabulary.
        dtype: of the activations.
        make: the model itself; another than `Decoder` keeps to the contract of `model/custom`.
        builtin: whether `make` returns what the config says; None: the result of another than `Decoder` is compared.
        on_made: called with the model and whether it is builtin, before anything is compiled or sharded; its weights
            may still be on the meta device.
        shard: divides the weights over ranks, in place, and initializes those of a `Decoder`, which is made on the meta
            device in this case; None: no sharding.
    """
    with torch.device("meta") if shard is not None and make is Decoder else nullcontext():
        decoder = attach_config(make(config), config)
    if builtin is None and make is not Decoder:
        from lm.model.builtin import is_builtin

        builtin = is_builtin(decoder)
    builtin = builtin is not False
    on_made(decoder, builtin)

    fused, kernels = False, f"the model's own, {type(decoder).__name__}"
    if builtin:
        fused, kernels = choose_kernels(options.kernels, device)
    if fused:
        from lm.model.fused import fuse

        fuse(decoder)

    attention = "the model's own"
    if isinstance(decoder, Decoder):
        kernel = None
        if options.attention == "auto":
            enter_kernels(decoder)
        else:
            from lm.model.attention_choice import use_attention

            kernel = use_attention(decoder, options.attention, device, dtype, config)
        attention = describe_attention(
            device, dtype, config.windows, options.document_mask, int(config.head_dim), kernel
        )

    if options.activation_checkpointing != "none" or options.compile != "none":
        from lm.model.compile import checkpoint_activations, compile_decoder

        checkpoint_activations(decoder, options.activation_checkpointing)
        compile_decoder(decoder, options.compile)
    if shard is not None:
        shard(decoder)
    description = f"kernels: {kernels}; attention: {attention}; compile: {options.compile}; activation checkpointing: "
    return Built(decoder, fused, kernels, attention, description + options.activation_checkpointing)


def choose_kernels(kernels: str, device: torch.device) -> tuple[bool, str]:
    """Whether to fuse a decoder on a device, by `BuildOptions.kernels`, and the reason in words for the log."""
    if kernels == "off":
        return False, "plain PyTorch"
    missing = kernels_missing(device)
    if missing is None:
        return True, "CUDA"
    if kernels == "on":
        raise RequestError(f"model.kernels on: {missing}; `auto` uses plain PyTorch there")
    return False, f"plain PyTorch ({missing})"


def kernels_missing(device: torch.device) -> str | None:
    """Why our kernels cannot run on a device; None if they can."""
    if device.type != "cuda" or torch.version.hip:
        return f"no CUDA device, the model is on {'an AMD GPU' if torch.version.hip else device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):  # the first with bf16 in hardware
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    from lm.kernels import runtime, swiglu

    if not runtime.available():
        return "NVRTC is not installed (pip install cuda-bindings nvidia-cuda-nvrtc)"
    try:  # an older driver cannot load what a newer NVRTC compiles
        runtime.program("swiglu", device, **swiglu.constants(torch.bfloat16, 64, 8))
    except RunError as error:
        return f"a kernel does not load: {error}"
    return None


_configs: WeakKeyDictionary[nn.Module, DecoderConfig] = WeakKeyDictionary()  # of custom models


def attach_config(decoder: nn.Module, config: DecoderConfig) -> nn.Module:
    """Make `config_of` return this config for a model; sets no attribute, as a custom model may have a `config`."""
    if not isinstance(decoder, nn.Module):
        raise RequestError(f"build_decoder returned {type(decoder).__name__}: it returns a torch.nn.Module")
    if not isinstance(decoder, Decoder):
        _configs[decoder] = config
    return decoder


def config_of(decoder: nn.Module) -> DecoderConfig:
    """The config that a model was built from: vocabulary and context of any model."""
    return decoder.config if isinstance(decoder, Decoder) else _configs[decoder]
