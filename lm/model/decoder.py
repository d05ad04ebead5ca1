"""The decoder-only transformer: token ids in, logits or losses out.

This file is the specification of the model, in plain PyTorch, in reading order: RMSNorm, Linear, rotary embedding, MLP,
SelfAttention, Block, Decoder, initial weights. It runs on every device. `model/fused` has a second forward pass over
the same parameters, made of our CUDA kernels, which the tests hold equal to this one; `model/low_precision` has FP8.

Shapes: B rows of a batch, T tokens of a row, C hidden_size, H query heads, KV key and value heads, D head_dim,
I intermediate_size, V vocab_size.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.errors import RequestError
from lm.model.attention import HALF, AttentionMask, attend, attention_mask, documents_from
from lm.model.config import DecoderConfig

IGNORED = -100  # the label of a position without a loss, as in PyTorch


def upcast(x: Tensor) -> Tensor:
    """Cast half precision to fp32, for statistics and angles; fp32 and fp64 stay as they are."""
    return x.float() if x.dtype in HALF else x


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_upcast = upcast(x)
        scale = torch.rsqrt(x_upcast.square().mean(-1, keepdim=True) + self.eps)  # (..., 1)
        return (x_upcast * scale * self.weight).to(x.dtype)


class Linear(nn.Linear):
    """A weight matrix of a block, multiplied in the precision of the activations; few models have a bias, too."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Rotary(NamedTuple):
    """Rotary embedding (Su et al., 2021, arXiv:2104.09864): the angles, and the position of each token."""

    cos: Tensor  # (P, D / 2) fp32, a row for each position
    sin: Tensor  # (P, D / 2) fp32
    positions: Tensor | None  # (B, T) int32; None: token t is at position t


def rotary_table(
    length: int, head_dim: int, theta: float, device: torch.device | str = "cpu", scaling: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `(length, head_dim / 2)` of the angles of pair `i`, `position * theta ** (-2i / head_dim)`.

    The table is not a buffer but computed in fp32 for every batch, at almost no cost: a buffer would be cast with the
    module, and be empty after a start on the meta device.
    """
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * rope_frequencies(head_dim, theta, device, scaling)  # (length, head_dim / 2)
    return angles.cos(), angles.sin()


def rope_frequencies(
    head_dim: int, theta: float, device: torch.device | str = "cpu", scaling: dict[str, Any] | None = None
) -> Tensor:
    """Angle of each pair from one position to the next `(head_dim / 2,)`: `theta ** (-2i / head_dim)`.

    `scaling` is `rope_scaling` of the config, computed as in Hugging Face.
    """
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponent
    if scaling and scaling["rope_type"] == "linear":
        frequencies = frequencies / scaling["factor"]
    elif scaling and scaling["rope_type"] == "llama3":  # pairs with few turns in the original context turn more slowly
        turns = frequencies * scaling["original_max_position_embeddings"] / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (unscaled + (1 - unscaled) / scaling["factor"])
    return frequencies


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary embedding to queries or keys `(B, T, heads, D)`; pairs are `(i, i + D / 2)`, as in Hugging Face."""
    if rotary.positions is None:
        cos, sin = (table[: x.shape[1], None] for table in (rotary.cos, rotary.sin))  # (T, 1, D / 2)
    else:
        cos, sin = (table[rotary.positions][:, :, None] for table in (rotary.cos, rotary.sin))  # (B, T, 1, D / 2)
    left, right = upcast(x).chunk(2, dim=-1)  # (B, T, heads, D / 2)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020, arXiv:2002.05202): `down(silu(gate(x)) * up(x))`, gate and up in one matrix."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, I)
        return self.down_proj(F.silu(gate) * up)  # (B, T, C)


class SelfAttention(nn.Module):
    """Causal attention with grouped key and value heads (Ainslie et al., 2023, arXiv:2305.13245)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, int(config.num_key_value_heads)
        self.head_dim = int(config.head_dim)
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: Rotary, mask: AttentionMask) -> Tensor:
        q, k, v = self.queries_keys_values(x, rotary)
        out = attend(q, k, v, mask)  # (B, T, H, D)
        return self.o_proj(out.flatten(2))  # (B, T, C)

    def queries_keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """`(B, T, C)` to `(B, T, H, D)`, `(B, T, KV, D)` and `(B, T, KV, D)`."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2 KV, D)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        # The values are copied: a view would keep all of qkv in memory until the backward pass.
        return rotate(q, rotary), rotate(k, rotary), v.contiguous()


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection around it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: Rotary, mask: AttentionMask) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), rotary, mask))  # (B, T, C)
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))  # (B, T, C)


class Losses(NamedTuple):
    total: Tensor  # scalar fp32, in nats: the sum over all tokens; differentiable
    per_token: Tensor  # (B, T) fp32, the cross-entropy of each token in nats, 0 where ignored; not differentiable


def losses_of(logits: Tensor, labels: Tensor) -> Losses:
    """The losses of logits `(B, T, V)`, computed in fp32; the arguments of `Decoder.forward` explain the others."""
    rows = upcast(logits).flatten(0, 1)  # (B * T, V)
    targets = labels.flatten()  # (B * T,)
    per_token = F.cross_entropy(rows, targets, ignore_index=IGNORED, reduction="none")  # (B * T,)
    return Losses(per_token.sum(), per_token.detach().view(labels.shape))


class Continuation(NamedTuple):
    """What a decoder needs, besides the ids, to process tokens that follow those in a `KVCache`."""

    rotary: Rotary  # of the new tokens' positions
    masks: list[AttentionMask]  # of each layer, with its part of the cache, into which `attend` writes
    last: Tensor  # (B,) index of each row's last new token


class Decoder(nn.Module):
    """A decoder-only transformer: a Llama, or with `qk_norm` a Qwen3, or with `attention_bias` a Qwen2."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise RequestError("vocab_size is not known: set it, or take it from a tokenizer before building the model")
        self.config = config
        self.windows = config.windows  # of each layer
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers: Any = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        initialize(self)

    @property
    def output_weight(self) -> Tensor:
        """The matrix `(V, C)` that turns hidden states into logits."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        continuation: Continuation | None = None,
        max_documents: int | None = None,
    ) -> Tensor | Losses:
        """Losses or logits of token ids: argument -> method -> result.

            labels        ->  `losses`       ->  `Losses`
            continuation  ->  `next_logits`  ->  logits `(B, V)` after the last token of each row
            neither       ->  `logits`       ->  logits `(B, T, V)` after every token

        Call the decoder itself and not these methods: hooks, such as those by which FSDP2 gathers weights, are around
        this method alone.

        Args:
            input_ids: `(B, T)`, T at most max_position_embeddings.
            labels: `(B, T)`; `labels[b, t]` is the token that follows `input_ids[b, t]` (already shifted), or -100
                where nothing is to be predicted.
            document_ids: `(B, T)`, not decreasing along a row. A token then attends to its own document only, and
                positions count from the document's beginning.
            continuation: the tokens follow those of a `KVCache`; neither labels nor documents go with it.
            max_documents: upper bound on the documents in all rows; None: not known, and counting them synchronizes
                host and device.
        """
        if continuation is not None:
            return self.next_logits(input_ids, continuation)
        if labels is not None:
            return self.losses(input_ids, labels, document_ids, max_documents)
        return self.logits(input_ids, document_ids, max_documents)

    def logits(self, input_ids: Tensor, document_ids: Tensor | None = None, max_documents: int | None = None) -> Tensor:
        """Logits `(B, T, V)` in the precision of the computation."""
        return self.project(self.hidden_states(input_ids, document_ids, max_documents))

    def losses(
        self, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None, max_documents: int | None
    ) -> Losses:
        """The losses of the labels `(B, T)`, by `cross_entropy`, which `model/fused` replaces."""
        hidden = self.hidden_states(input_ids, document_ids, max_documents)  # (B, T, C)
        return Losses(*self.cross_entropy(hidden, self.output_weight, labels))

    def next_logits(self, input_ids: Tensor, continuation: Continuation) -> Tensor:
        """Logits `(B, V)` after each row's last token; the keys and values of `input_ids` are added to the cache."""
        hidden = self.run_blocks(self.embed(input_ids), continuation.rotary, continuation.masks)  # (B, T, C)
        return self.project(hidden[torch.arange(len(hidden), device=hidden.device), continuation.last])

    def hidden_states(
        self, input_ids: Tensor, document_ids: Tensor | None = None, max_documents: int | None = None
    ) -> Tensor:
        """The decoder without its output matrix: ids `(B, T)` to normalised states `(B, T, C)`. See `forward`."""
        x = self.embed(input_ids)  # (B, T, C)
        return self.run_blocks(x, *self.rotary_and_masks(x, document_ids, max_documents))

    def project(self, hidden: Tensor) -> Tensor:
        """Normalised states `(..., C)` to logits `(..., V)`."""
        return F.linear(hidden, self.output_weight.to(hidden.dtype))

    def run_blocks(self, x: Tensor, rotary: Rotary, masks: list[AttentionMask]) -> Tensor:
        """All blocks and the last norm: `(B, T, C)` to `(B, T, C)`."""
        for layer, mask in zip(self.layers, masks, strict=True):
            x = layer(x, rotary, mask)  # (B, T, C)
        return self.norm(x)

    def cross_entropy(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The fields of `Losses`, of normalised states `(B, T, C)`, the output matrix `(V, C)` and labels `(B, T)`.

        All logits are made at once, in `model/fused` a part at a time. Nothing of `self` is used, so that
        `torch.compile` makes one graph of this for any decoder.
        """
        return losses_of(F.linear(hidden, weight.to(hidden.dtype)), labels)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Ids `(B, T)` to the first hidden states `(B, T, C)`."""
        if input_ids.shape[1] > self.config.max_position_embeddings:
            raise RequestError(
                f"a sequence of {input_ids.shape[1]} tokens is longer than max_position_embeddings "
                f"{self.config.max_position_embeddings}; shorten it or build the model with a longer context"
            )
        x = self.dropout(self.embed_tokens(input_ids))  # (B, T, C)
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))  # a residual stream in half precision: half the memory traffic
        return x

    def rotary_and_masks(
        self, x: Tensor, document_ids: Tensor | None = None, max_documents: int | None = None
    ) -> tuple[Rotary, list[AttentionMask]]:
        """The positions of the tokens of `x` `(B, T, C)`, and each layer's attention mask."""
        documents = None if document_ids is None else documents_from(document_ids, max_documents)
        config = self.config
        table = rotary_table(x.shape[1], config.head_dim, config.rope_theta, x.device, config.rope_scaling)
        masks = {window: attention_mask(x, window, documents, config.head_dim) for window in set(self.windows)}
        positions = None if documents is None else documents.positions
        return Rotary(*table, positions), [masks[window] for window in self.windows]


def document_ids_from(input_ids: Tensor, eos_id: int) -> Tensor:
    """Number the documents of ids `(B, T)`, from 0 in each row: an end-of-sequence token begins the next one.

    So a document is computed as it is when a text is evaluated or continued: the token is its first context.
    """
    number = (input_ids == eos_id).cumsum(1)  # (B, T)
    return number - number[:, :1]


@torch.no_grad()
def initialize(model: Decoder, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
    """Initialize every weight with torch's global random generator.

    `weights`: names and tensors to fill instead of `named_parameters`, in its order, such as of a sharded decoder.

    | weights                              | initial values                                                      |
    |--------------------------------------|---------------------------------------------------------------------|
    | embed_tokens, lm_head                | normal, initializer_range                                           |
    | qkv_proj, gate_up_proj               | normal, initializer_range                                           |
    | o_proj, down_proj (residual stream)  | normal, initializer_range / sqrt(2 * num_hidden_layers), so that    |
    |                                      | the stream's variance does not grow with depth (Radford et al.,     |
    |                                      | 2019, "Language Models are Unsupervised Multitask Learners");       |
    |                                      | 0 with zero_init_residual (Goyal et al., 2017, arXiv:1706.02677)    |
    | norms; biases                        | 1; 0                                                                |
    """
    std = model.config.initializer_range
    residual_std = 0.0 if model.config.zero_init_residual else std / math.sqrt(2 * model.config.num_hidden_layers)
    for name, weight in weights or model.named_parameters():
        if weight.ndim == 1:
            nn.init.constant_(weight, 0.0 if name.endswith(".bias") else 1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.normal_(weight, std=residual_std)
        else:
            nn.init.normal_(weight, std=std)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the `with`, for generation and evaluation in the middle of training; then as before."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
