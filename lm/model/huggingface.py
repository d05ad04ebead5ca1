"""Conversion between the decoder's weights and config and those of Hugging Face, both ways.

A checkpoint folder is a Llama (Qwen3 with `qk_norm`, Qwen2 with `attention_bias`, Ministral with windows alone), so
`AutoModelForCausalLM.from_pretrained` reads it as it is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lm.errors import RequestError
from lm.model.config import ROPE_SCALINGS, DecoderConfig
from lm.model.decoder import Decoder

# Hugging Face's defaults of keys that a config.json may leave out; the other shapes have no sensible default.
DEFAULTS = {
    "LlamaForCausalLM": {"num_key_value_heads": None, "head_dim": None},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "head_dim": None},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128},
    "MinistralForCausalLM": {"num_key_value_heads": 8, "head_dim": None},
}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # ours -> theirs
LAYERS = {"S": "sliding_attention", "L": "full_attention"}
SLIDING_WINDOW = 4096  # where a config.json asks for windows without their width
SHARED_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "initializer_range": 0.02}
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
# Their names are our own, too.
SHAPE = (*REQUIRED, "num_key_value_heads", "head_dim", *SHARED_DEFAULTS, "rope_scaling")


def to_huggingface(state: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The weights of `Decoder.state_dict()` under Hugging Face's names: views of the same, fused ones split."""
    heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    out = {}
    for name, weight in state.items():
        names = _their_names(name)
        rows = (heads, kv_heads, kv_heads) if len(names) == 3 else weight.shape[0] // len(names)
        out |= zip(names, weight.split(rows) if len(names) > 1 else [weight], strict=True)
    return out


def _their_names(name: str) -> list[str]:
    """Hugging Face's names of one of our weights: several of a fused one."""
    name = name if name.startswith("lm_head.") else f"model.{name}"
    fused = next((part for part in FUSED if part in name), "")
    return [name.replace(fused, part) for part in FUSED[fused]] if fused else [name]


def from_huggingface(state: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The inverse of `to_huggingface`: what `Decoder.load_state_dict` takes; no weight may be missing or left over."""
    # Old files hold the rotary frequencies, which are known without them; others a tied matrix by its second name.
    remaining = {name: weight for name, weight in state.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings and "lm_head.weight" in remaining:
        output = remaining.pop("lm_head.weight")
        if not _same(remaining.setdefault("model.embed_tokens.weight", output), output):
            raise RequestError(
                "lm_head.weight is not model.embed_tokens.weight, though config.json ties them: set its "
                "tie_word_embeddings to false, or take lm_head.weight out of the weights"
            )

    def take(*names: str) -> Tensor:
        if missing := [name for name in names if name not in remaining]:
            raise RequestError(f"the weights lack {missing[0]}: they are not of this config's architecture")
        weights = [remaining.pop(name) for name in names]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    with torch.device("meta"):
        ours = Decoder(config).state_dict()
    out = {name: take(*_their_names(name)) for name in ours}
    if remaining:
        raise RequestError(f"the weights hold {min(remaining)}, which this decoder has no place for")
    return out


def check_tied(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise RequestError where two names of one weight of a module have different values: one would be lost."""
    names: dict[int, str] = {}
    for name, weight in module.state_dict(keep_vars=True).items():
        first = names.setdefault(id(weight), name)
        if first != name and {first, name} <= weights.keys() and not _same(weights[first], weights[name]):
            raise RequestError(
                f"{first} and {name} are one weight in this model and two in the checkpoint, of other values: build "
                "the model with two, as the one that was trained"
            )


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same values, in any floating-point format, with NaN; of meta tensors the shapes."""
    if first.is_meta or first.shape != second.shape:
        return first.shape == second.shape
    return torch.allclose(first.double(), second.double(), 0, 0, equal_nan=True)


def architecture_name(config: DecoderConfig) -> str:
    """Name of the class in transformers, without `ForCausalLM`."""
    if config.qk_norm or config.attention_bias:
        return "Qwen3" if config.qk_norm else "Qwen2"
    return "Ministral" if any(config.windows) else "Llama"


def config_json(config: DecoderConfig, eos_id: int | None, dtype: str) -> dict[str, Any]:
    """The `config.json` of a decoder.

    Dropout is not in it: it belongs to the training, and Hugging Face's applies to attention alone. Which layers have
    windows is in `layer_types`; for readers that know only a Qwen3's `max_window_layers`, the full layers before the
    first window, that holds the same if all layers after it have windows. `dtype` is that of the stored weights:
    "float32", "bfloat16" or "float16".
    """
    windows = config.windows
    kind = architecture_name(config)
    sliding = {
        "sliding_window": max((window for window in windows if window), default=None),
        "layer_types": [LAYERS["S" if window else "L"] for window in windows],
    }
    first = next((i for i, window in enumerate(windows) if window), len(windows))
    qwen = {"use_sliding_window": any(windows), "max_window_layers": first, **sliding}
    of_kind = {
        "Qwen2": qwen,
        "Qwen3": {"attention_bias": False, **qwen},
        "Ministral": sliding,
        "Llama": {"attention_bias": False, "mlp_bias": False},
    }
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        **of_kind[kind],
        **{name: getattr(config, name) for name in SHAPE},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": None,
        "torch_dtype": dtype,  # read by every version; the newer name `dtype` only from 4.56 on
    }


def generation_config_json(eos_id: int | None) -> dict[str, Any]:
    return {"bos_token_id": None, "eos_token_id": eos_id, "pad_token_id": eos_id}


def config_from_json(document: dict[str, Any]) -> DecoderConfig:
    """The shape that a Hugging Face `config.json` describes; RequestError for what this decoder does not have."""
    architecture = (document.get("architectures") or [None])[0]
    if architecture not in DEFAULTS:
        known = ", ".join(DEFAULTS)
        raise RequestError(f"config.json: architectures is {architecture}; this decoder is one of {known}")
    rope = document.get("rope_scaling") or document.get("rope_parameters") or {}  # the order of transformers 5
    kind = rope.get("rope_type", rope.get("type", "default"))
    _check_features(document, rope, kind)
    values = {**SHARED_DEFAULTS, **DEFAULTS[architecture], **document}
    values["rope_theta"] = rope.get("rope_theta", values["rope_theta"])
    if missing := [name for name in (*REQUIRED, *SHARED_DEFAULTS) if values.get(name) is None]:
        raise RequestError(f"config.json lacks {missing[0]}")
    context = {"original_max_position_embeddings": document["max_position_embeddings"]}
    numbers = context | rope | {name: document[name] for name in context if name in document}
    scaling = {"rope_type": kind} | {name: numbers.get(name) for name in ROPE_SCALINGS.get(kind, ())}
    values["rope_scaling"] = None if kind == "default" else scaling
    pattern, window = _windows(document, architecture)
    return DecoderConfig(
        **{name: values[name] for name in SHAPE},
        qk_norm=architecture == "Qwen3ForCausalLM",
        attention_bias=architecture == "Qwen2ForCausalLM",
        window_pattern=pattern,
        sliding_window=window,
    )


def _windows(document: dict[str, Any], architecture: str) -> tuple[str | None, int | None]:
    """The shortest pattern that gives a file's kinds of layers, and the window; None twice where all are full."""
    qwen = architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    has_windows = document.get("use_sliding_window", False) if qwen else architecture == "MinistralForCausalLM"
    window = document.get("sliding_window", SLIDING_WINDOW) if has_windows else None
    first = document.get("max_window_layers", 28) if qwen else 0
    layers = document["num_hidden_layers"]
    kinds = document.get("layer_types") or [LAYERS["L" if window is None or i < first else "S"] for i in range(layers)]
    if unknown := set(kinds) - set(LAYERS.values()):
        raise RequestError(f"config.json: layer_types has {min(unknown)}, which this decoder does not have")
    if len(kinds) != layers:
        raise RequestError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
    letters = "".join("S" if kind == LAYERS["S"] else "L" for kind in kinds)
    if "S" not in letters:
        return None, None
    return next(letters[:n] for n in range(1, layers + 1) if (letters[:n] * layers)[:layers] == letters), window


def _check_features(document: dict[str, Any], rope: dict[str, Any], kind: str) -> None:
    known = document["architectures"][0].removesuffix("ForCausalLM").lower()
    features = {
        "model_type": document.get("model_type", known) != known,  # which transformers goes by
        "hidden_act": document.get("hidden_act", "silu") != "silu",
        "attention_bias": document.get("attention_bias"),
        "mlp_bias": document.get("mlp_bias"),
        "quantization_config": document.get("quantization_config"),
        "rope_scaling": kind not in ("default", *ROPE_SCALINGS)
        or any(isinstance(part, dict) for part in rope.values()),
        "partial_rotary_factor": {document.get("partial_rotary_factor"), rope.get("partial_rotary_factor")} - {None, 1},
    }
    for name, is_unknown in features.items():
        if is_unknown:
            value = rope if name == "rope_scaling" else document.get(name, rope.get(name))
            raise RequestError(f"config.json: {name} is {value}, which this decoder does not have")
