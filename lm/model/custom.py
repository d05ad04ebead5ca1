"""Custom models in the place of the decoder: the contract, and how a checkpoint names them.

`LanguageModule.build_decoder` of a subclass returns one. It may be a `Decoder` with parts of its own, which keeps all
that a decoder can do but our kernels and Hugging Face's names; or any module with a forward pass

    forward(input_ids, labels=None)

that returns logits `(B, T, V)`, and with labels `Losses`, for which `model/decoder.losses_of` is there: the sum over
the targets, which has a gradient, and each target's part, which needs none. The logits of a token depend on it and on
those before it alone. `document_ids` are given, as `Decoder.forward` explains them, where the config has
`model.document_mask`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from lm.errors import RequestError
from lm.model.build import attach_config
from lm.model.config import CUSTOM_MODEL_TYPE, DecoderConfig
from lm.model.decoder import Decoder, Losses, evaluating
from lm.model.estimates import flops_per_token, parameters

SAME_LOSS = 1e-3  # of the largest change of a loss: what kernels may differ by


def call_for_losses(
    decoder: nn.Module, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None
) -> Losses:
    """Call a custom model for its losses; it gets `document_ids` only if there are any."""
    options = {"document_ids": document_ids} if document_ids is not None else {}
    total, per_token = decoder(input_ids, labels=labels, **options)
    if total.numel() != 1 or per_token.shape != labels.shape:  # two rows of logits, or what is shifted by one target
        raise RequestError(
            f"{type(decoder).__name__}.forward(input_ids, labels=labels) returns Losses(total, per_token), total one "
            f"number and per_token {tuple(labels.shape)}, as lm.model.decoder.losses_of makes them"
        )
    return Losses(total, per_token.detach())


@torch.no_grad()
def check_causal(decoder: nn.Module, tokens: int, vocab_size: int) -> None:
    """Raise RequestError for a model that sees later tokens than it predicts from: it would learn to copy, and its loss
    would mean nothing. In each trial the tokens from one on are others, which changes nothing in the model.
    """
    device = next(decoder.parameters()).device
    ids = torch.arange(tokens, device=device)[None] % vocab_size  # (1, T)
    for start in sorted({1, tokens // 2, tokens - 1} - {0, tokens}):
        other = ids.clone()
        other[0, start:] = (ids[0, start:] + 1) % vocab_size
        with evaluating(decoder):
            before, after = (
                call_for_losses(decoder, row_ids, ids).per_token[0].float() for row_ids in (ids, other)
            )  # (T,)
        changes = (after - before).abs()
        change = changes[:start].max().item()
        if change > SAME_LOSS * changes.max().item():
            raise RequestError(
                f"{type(decoder).__name__} sees later tokens: when those from token {start:,} of {tokens:,} on are "
                f"others, losses before them change by up to {change:.2g}. The logits of a token may depend on it and "
                "on those before it alone: mask the attention, or pad a convolution on its left side only"
            )


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def custom_config_json(
    config: DecoderConfig, eos_id: int | None, dtype: str, kind: type, init_args: Mapping[str, Any]
) -> dict[str, Any]:
    """The `config.json` of a custom model: the subclass of `LanguageModule` that builds it, by name, and the arguments
    that it was made with beside those of `LanguageModule`.
    """
    return {
        "architectures": [kind.__name__],
        "model_type": CUSTOM_MODEL_TYPE,
        "init_args": plain_arguments(kind, init_args),
        "decoder": asdict(config),
        "vocab_size": config.vocab_size,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }


def known_class(document: Mapping[str, Any], kind: type | None, where: str, script: Path | None = None) -> type:
    """The class that a document of `custom_config_json` names, if it is `kind`, that of this process; or RequestError.

    `where`, the folder, and `script`, the file that trained the model, are for the message.
    """
    name = document["architectures"][0]
    if kind is None or kind.__name__ != name:
        other = "" if kind is None else f", and this is {kind.__name__}"
        raise RequestError(
            f"{where} holds a model that the class {name} builds{other}: give the command to the file that has "
            f"`lm.run({name})`, such as `python {script or 'my_model.py'} generate`; in Python, "
            f"lm.load_model(path, module={name})"
        )
    return kind


def build_custom(document: Mapping[str, Any], kind: type | None, where: str, script: Path | None = None) -> nn.Module:
    """The model that a `config.json` describes; `kind`, `where` and `script` as for `known_class`."""
    kind, config = known_class(document, kind, where, script), DecoderConfig(**document["decoder"])
    hints = get_type_hints(kind.__init__)
    arguments = {
        argument: hints[argument](**value) if is_dataclass(hints.get(argument)) else value
        for argument, value in document["init_args"].items()
    }
    return attach_config(kind(decoder=config, **arguments).build_decoder(config), config)


def plain_arguments(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a class as JSON has them; `build_custom` makes dataclasses of them again."""
    plain = {}
    for name, value in arguments.items():
        plain[name] = asdict(value) if is_dataclass(value) else value
        try:
            json.dumps(plain[name])
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"{kind.__name__}: the argument {name} is a {type(value).__name__}, and checkpoints write it down as "
                "JSON: use numbers, texts, lists, dictionaries or dataclasses of them"
            ) from error
    return plain


def custom_flops_per_token(
    decoder: nn.Module, config: DecoderConfig, seq_len: int, full_attention: bool = False
) -> float:
    """As `estimates.flops_per_token`, by the weights that are there: 6 for each, but for those of embeddings, which are
    looked up. An embedding that is the output matrix too does count. Attention counts where the model is a `Decoder`; a
    subclass of `LanguageModule` that knows more overrides `flops_per_token`."""
    looked_up = {id(part.weight) for part in decoder.modules() if isinstance(part, nn.Embedding)}
    weights = sum(weight.numel() for weight in decoder.parameters() if id(weight) not in looked_up)
    has_output = any(name.endswith("lm_head.weight") for name, _ in decoder.named_parameters())
    output = 0 if has_output else config.vocab_size * config.hidden_size
    attention = 0.0
    if isinstance(decoder, Decoder):
        counts = parameters(config)
        matrices = 6 * (counts["non_embedding"] + config.vocab_size * config.hidden_size)
        attention = flops_per_token(config, seq_len, full_attention) - matrices
    return 6 * (weights + output) + attention
