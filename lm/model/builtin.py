"""Whether a model is the decoder that its config describes, or one with parts of its own."""

from typing import Any

import torch
from torch import nn

from lm.model.decoder import Decoder


def is_builtin(decoder: nn.Module) -> bool:
    """Whether a decoder, before it gets hooks and kernels of this project, is what its config says: our kernels compute
    that, and Hugging Face's classes hold it."""
    return isinstance(decoder, Decoder) and has_usual_weights(decoder) and _parts(_usual(decoder)) == _parts(decoder)


def has_usual_weights(decoder: Decoder) -> bool:
    """Whether names and shapes of a decoder's weights are those of its config."""
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (decoder, _usual(decoder))]
    return shapes[0] == shapes[1]


def _usual(decoder: Decoder) -> Decoder:
    with torch.device("meta"):
        return Decoder(decoder.config)


def _parts(decoder: nn.Module) -> dict[str, tuple[type, dict[str, Any]]]:
    """Class and attributes of each part: sizes, eps, windows, hooks, methods that were replaced ..."""
    left_out = {"_parameters", "_buffers", "_modules", "_compiled_call_impl", "training"}
    return {
        name: (type(part), {key: value for key, value in vars(part).items() if key not in left_out})
        for name, part in decoder.named_modules(remove_duplicate=False)
    }
