"""Builds a decoder that is ready to train from its config, step by step in the necessary order.

`training/module.LanguageModule` and `lm.load_model` call it, and a plain training loop can: nothing here needs
Lightning, data or a Trainer.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from lm.errors import RequestError
from lm.model.attention import describe_attention
from lm.model.attention_choice import Heads, backend, use_attention
from lm.model.compile import ActivationCheckpointing, Compile, checkpoint_activations, compile_decoder
from lm.model.config import Attention, DecoderConfig
from lm.model.custom import attach_config, is_builtin
from lm.model.decoder import Decoder
from lm.model.fused import choose_kernels, fuse


@dataclass(frozen=True)
class BuildOptions:
    """How a decoder is computed; the fields are options of `model` in a config, and explained there."""

    kernels: Literal["auto", "on", "off"] = "auto"
    attention: Attention = "auto"
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: Compile = "none"
    document_mask: bool = False
    z_loss: float = 0.0


class Built(NamedTuple):
    """A decoder that is ready, and how it computes, in words."""

    decoder: nn.Module | None
    kernels: str
    attention: str
    description: str  # all of it, for the log


NOT_BUILT = Built(None, *("not chosen yet",) * 3)


def build(
    config: DecoderConfig, options: BuildOptions, device: torch.device, dtype: torch.dtype,
    *,
    make: Callable[[DecoderConfig], nn.Module] = Decoder,
    on_made: Callable[[nn.Module], None] = lambda decoder: None,
    shard: Callable[[nn.Module], None] | None = None,
) -> Built:  # fmt: skip
    """Build a decoder.

    Args:
        config: its shape, with its vocabulary.
        dtype: of the activations.
        make: the model itself; another than `Decoder` keeps to the contract of `model/custom`.
        on_made: called with the model, before anything is compiled or sharded; its weights may still be on the meta
            device.
        shard: divides the weights over ranks, in place, and initializes those of a `Decoder`, which is made on the meta
            device in this case; None: no sharding.
    """
    with torch.device("meta") if shard is not None and make is Decoder else nullcontext():
        decoder = attach_config(make(config), config)
    builtin = is_builtin(decoder)
    if not builtin:
        _refuse_custom(decoder, options)
    on_made(decoder)

    kernels = f"the model's own, {type(decoder).__name__}"
    if builtin:
        fused, kernels = choose_kernels(options.kernels, device)
        if fused:
            fuse(decoder)

    attention = "the model's own"
    if isinstance(decoder, Decoder):
        heads = Heads(config.num_attention_heads, int(config.num_key_value_heads), int(config.head_dim))
        sequences = options.document_mask or any(config.windows)
        use_attention(decoder, options.attention, device, dtype, heads, sequences)
        attention = describe_attention(
            device, dtype, config.windows, options.document_mask, heads.width, backend(options.attention)
        )

    checkpoint_activations(decoder, options.activation_checkpointing)
    compile_decoder(decoder, options.compile)
    if shard is not None:
        shard(decoder)
    description = (f"kernels: {kernels}; attention: {attention}; compile: {options.compile}; activation "
                   f"checkpointing: {options.activation_checkpointing}")  # fmt: skip
    return Built(decoder, kernels, attention, description)


def _refuse_custom(decoder: nn.Module, options: BuildOptions) -> None:
    """Refuse options that would do nothing in a custom model, and parameters that fused optimizers train wrongly."""
    for key, weight in decoder.named_parameters():
        if any(step == 0 and size > 1 for size, step in zip(weight.shape, weight.stride())):
            raise RequestError(f"{type(decoder).__name__}: values of {key} share memory, as `expand` leaves them: "
                               "copy it, with `contiguous()`")  # fmt: skip
    asked = {"kernels": options.kernels == "on"}
    if not isinstance(decoder, Decoder):
        asked["attention"] = options.attention != "auto"
        asked["activation_checkpointing"] = options.activation_checkpointing != "none"
    for option, given in asked.items():
        if given:
            raise RequestError(f"model.{option} is for the decoder of this project, and build_decoder returned "
                               f"{type(decoder).__name__}: leave it out")  # fmt: skip
