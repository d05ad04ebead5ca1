"""`DecoderConfig`: the shape of a decoder, checked when it is constructed; and the choices of how to compute it."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from lm.errors import RequestError
from lm.system.units import OPEN, Count, Derivable

CUSTOM_MODEL_TYPE = "lm_custom"  # in config.json, of a class of the user's; transformers does not know it
MAX_DIMENSION = 2**31 - 1  # of a dimension
MAX_LAYERS = 10_000
INTEGERS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings", "sliding_window"),
)
ROPE_SCALINGS = {  # rope_type -> the numbers beside it, in Hugging Face's names
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

Attention = Literal["auto", "cudnn", "flash", "efficient", "math"]
Compile = Literal["none", "inductor", "triton_free"]
DTypeName = Literal["float32", "bfloat16", "float16"]
ActivationCheckpointing = Literal["none", "selective", "block"]


class Derived(int):
    """A value derived from other fields; `dataclasses.replace` computes it again when one of them changes."""


@dataclass
class DecoderConfig:
    """A decoder-only transformer, in Hugging Face's names.

    Args:
        vocab_size: Rows of the embedding and output matrices; that of the tokenizer if not given.
        hidden_size: Width of the residual stream.
        num_hidden_layers: Number of blocks, each with attention and an MLP.
        num_attention_heads: Query heads; must divide hidden_size.
        num_key_value_heads: Key and value heads, each shared by equally many query heads; as many as query heads
            if not given.
        head_dim: Width of a head, even; hidden_size / num_attention_heads if not given.
        intermediate_size: Width of the MLP; if not given, 8/3 of hidden_size, rounded up to a multiple of 64: its three
            matrices then have as many weights as two of width 4 x hidden_size.
        max_position_embeddings: Context length: the most tokens in a sequence.
        rms_norm_eps: Term added to the mean square in every RMSNorm.
        rope_theta: Base of the wavelengths of the rotary position embedding.
        rope_scaling: For an imported model: how its wavelengths were stretched, as Hugging Face writes it, such as
            `{rope_type: linear, factor: 4.0}`; or llama3, or dynamic, which changes nothing within the context length.
        tie_word_embeddings: Use the embedding as the output matrix too.
        window_pattern: Layers with full attention (L) and with sliding-window attention (S), such as SSSL, repeated
            over the layers. All layers have full attention if not given.
        sliding_window: Tokens that a token attends to in an S layer, itself included.
        qk_norm: RMSNorm on each query and key head before the rotation; exported as Qwen3, else as Llama, or with
            windows as Ministral.
        attention_bias: For an imported Qwen2: a bias on queries, keys and values.
        initializer_range: Standard deviation of the initial weights. With `tie_word_embeddings` and
            `zero_init_residual`, 2 / hidden_size works well: the untrained model predicts its own input, with a logit
            of hidden_size times this.
        zero_init_residual: Initialize o_proj and down_proj with 0, so that every block is the identity at first.
        dropout: Dropout probability of embeddings and residual branches during training. Attention weights have no
            dropout, so that the fastest attention kernels can run.
    """

    vocab_size: Derivable[Count] = OPEN
    hidden_size: Count = Count(512)
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: Derivable[int] = OPEN
    head_dim: Derivable[int] = OPEN
    intermediate_size: Derivable[Count] = OPEN
    max_position_embeddings: Count = Count(1024)
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = True
    window_pattern: str | None = None
    sliding_window: Count | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02
    zero_init_residual: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in (*INTEGERS, "rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            if name in INTEGERS and not isinstance(value, int | None):
                raise RequestError(f"{name} {value!r} must be a whole number")
            if value is not None and not 0 < value <= MAX_DIMENSION:
                raise RequestError(f"{name} {value!r:.40} must be above 0 and at most {MAX_DIMENSION:,}")
        if not 0 <= self.dropout < 1:
            raise RequestError(f"dropout {self.dropout} must lie in [0, 1)")
        self._check_windows()
        self._check_rope_scaling()
        if self.qk_norm and self.attention_bias:
            raise RequestError("attention_bias is of a Qwen2, qk_norm of a Qwen3; no known architecture has both")
        if self.hidden_size % self.num_attention_heads:
            even = 2 * self.num_attention_heads  # a multiple of this has an even width of a head
            below = self.hidden_size // even * even
            near = " or ".join(f"{width:,}" for width in (below, below + even) if width)
            kv_heads = self.num_key_value_heads
            also = ""
            if isinstance(kv_heads, int) and self.num_attention_heads % kv_heads:
                also = f", and num_key_value_heads {kv_heads} does not divide it: null makes one of each query head"
            raise RequestError(
                f"num_attention_heads {self.num_attention_heads} does not divide hidden_size {self.hidden_size}: "
                f"the nearest hidden_size that fits is {near}{also}"
            )
        # Fields that were left open follow from the rest, so that every reader of a config sees whole numbers.
        for name, value in (
            ("num_key_value_heads", self.num_attention_heads),
            ("head_dim", self.hidden_size // self.num_attention_heads),
            ("intermediate_size", -(-self.hidden_size // 24) * 64),  # 64 / 24 = 8 / 3
        ):
            if getattr(self, name) is None or isinstance(getattr(self, name), Derived):
                setattr(self, name, Derived(value))
        if self.num_attention_heads % self.num_key_value_heads:
            raise RequestError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide num_attention_heads "
                f"{self.num_attention_heads}: every key head serves equally many query heads; null makes one for each"
            )
        if self.head_dim % 2:
            raise RequestError(
                f"head_dim {self.head_dim} is odd and the rotary embedding turns pairs; change hidden_size "
                f"{self.hidden_size} or num_attention_heads {self.num_attention_heads}, or set an even head_dim"
            )

    def _check_windows(self) -> None:
        pattern = self.window_pattern
        if pattern is not None and (not pattern or set(pattern) - {"S", "L"}):
            raise RequestError(f"window_pattern {pattern!r} must be made of S (a window) and L (all), such as SSSL")
        slides = "S" in (pattern or "")
        if slides and self.sliding_window is None:
            raise RequestError(f"window_pattern {pattern} has windows: give model.decoder.sliding_window, their tokens")
        if not slides and self.sliding_window is not None:
            raise RequestError(
                f"sliding_window {self.sliding_window} needs layers with an S: give model.decoder.window_pattern, "
                "such as SSSL"
            )

    def _check_rope_scaling(self) -> None:
        scaling = self.rope_scaling or {"rope_type": "linear", "factor": 1}
        names = ROPE_SCALINGS.get(str(scaling.get("rope_type")), ())
        if (
            scaling.keys() != {"rope_type", *names}
            or not all(isinstance(scaling[name], int | float) and 0 < scaling[name] < math.inf for name in names)
            or not scaling.get("low_freq_factor", 0) < scaling.get("high_freq_factor", 1)
        ):
            known = ", ".join(f"{kind} ({', '.join(names)})" for kind, names in ROPE_SCALINGS.items())
            raise RequestError(f"rope_scaling {scaling} must be a rope_type with its numbers above 0: {known}")

    @property
    def windows(self) -> list[int | None]:
        """For each layer how many tokens a token attends to, itself included; None: all before it."""
        pattern = self.window_pattern or "L"
        return [
            int(self.sliding_window) if pattern[layer % len(pattern)] == "S" else None
            for layer in range(self.num_hidden_layers)
        ]


def matrix_rows(config: DecoderConfig) -> dict[str, int]:
    """Rows of each matrix inside the weights that stack several of one shape, keyed by the end of the weight's name."""
    return {"qkv_proj.weight": int(config.head_dim), "gate_up_proj.weight": int(config.intermediate_size)}
