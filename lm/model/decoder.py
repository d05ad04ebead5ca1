"""The decoder: token ids in, logits or losses out.

Sixth stop of a batch: it comes from `training/module.training_step`, and the losses are computed in
`kernels/cross_entropy`. RMSNorm, MLP, SelfAttention, Block and Decoder stand here in this order.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.errors import RequestError
from lm.kernels.linear import Scaling, linear
from lm.kernels.operations import PLAIN, Operations
from lm.model.attention import Past, Reach, attend, chosen_kernels, documents_from, reach
from lm.model.config import DecoderConfig

# ---- layers ----------------------------------------------------------------------------------------------------------
# The parts of a block that look at one token at a time: its matrices, the weights of RMSNorm, and the rotary angles.
#
# Their arithmetic is in `kernels/rms_norm`, `kernels/swiglu` and `kernels/qk_norm_rope`, because it is joined there
# with what stands before and after. `model/decoder`, where tokens meet, is next; `model/decoder` joins all.


class Linear(nn.Linear):
    """A block's matrix, without a bias.

    Attributes:
        scaling: how its products are scaled in FP8; None: they are in the precision of the activations.
    """

    scaling: Scaling | None = None

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)


class RMSNorm(nn.Module):
    """The weight of a normalisation over the last dimension, and what is added to the mean square."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class MLP(nn.Module):
    """The matrices of `down(silu(gate(x)) * up(x))` (Shazeer, 2020, arXiv:2002.05202), gate and up in one."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)


class Rotary(NamedTuple):
    """How far each token's queries and keys are turned."""

    cos: Tensor  # (P, head_dim / 2) fp32, a row a position
    sin: Tensor  # the same
    positions: Tensor | None  # (B, T) int32, the rows that tokens take; None: token t takes row t


def rotary_table(length: int, head_dim: int, theta: float, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (Su et al., 2021, arXiv:2104.09864).

    Pair `i` of a head turns by `position * theta ** (-2i / head_dim)`. Nothing of it is stored: the angles are
    recomputed in fp32 for every batch, so no cast or meta device can spoil them, and that costs next to nothing.

    Args:
        length: positions, from 0.
        head_dim: width of a head, even.
        theta: base of the wavelengths.
        device: where the tables are to be.

    Returns:
        Two tensors `(length, head_dim / 2)` in fp32.
    """
    positions = torch.arange(length, device=device, dtype=torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = positions[:, None] * (1.0 / theta**exponent)  # (length, head_dim / 2)
    return angles.cos(), angles.sin()


# ---- attention -------------------------------------------------------------------------------------------------------
# Attention: the only place where tokens of a sequence see each other. `model/decoder` stacks it with the MLP.
#
# Which library's kernel does it is decided in `model/attention`; heads are laid out `(B, T, heads, head_dim)`.


class SelfAttention(nn.Module):
    """Causal attention with grouped key and value heads (Ainslie et al., 2023, arXiv:2305.13245)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.dropout = config.dropout
        self.qkv_proj = Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size)
        self.eps = config.rms_norm_eps
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def split(self, qkv: Tensor, rotary: Rotary, operations: Operations) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ready to attend: normalised where asked for, and rotated.

        Args:
            qkv: `(B, T, (H + 2 KV) * head_dim)`, what `qkv_proj` gives.
            rotary: of the tokens' positions.
            operations: who does the arithmetic.

        Returns:
            `(B, T, H, head_dim)`, and twice `(B, T, KV, head_dim)`.
        """
        q_weight, k_weight = (None, None) if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight)
        return operations.qk_norm_rope(qkv, q_weight, k_weight, *rotary, self.heads, self.kv_heads, self.eps)

    def forward(self, qkv: Tensor, rotary: Rotary, reach: Reach, operations: Operations) -> Tensor:
        """Mix tokens with those before them.

        Args:
            qkv, rotary, operations: as for `split`.
            reach: who sees whom.

        Returns:
            `(B, T, C)`.
        """
        q, k, v = self.split(qkv, rotary, operations)
        out = attend(q, k, v, reach, self.dropout if self.training else 0.0)  # (B, T, H, D)
        return linear(out.flatten(2), self.o_proj.weight, self.o_proj.scaling)  # (B, T, H * D) -> (B, T, C)


# ---- cache -----------------------------------------------------------------------------------------------------------
# What is kept of the tokens that a decoder has read, so that writing one more token reads that one alone.
#
# `lm/inference/generation` makes a cache and hands a `Continuation` of it to `model/decoder` at every step; training
# has none.


class Continuation(NamedTuple):
    """Tokens that go on from what was read before."""

    rotary: Rotary  # of where they stand
    reaches: list[Reach]  # what they see in each layer
    last: Tensor  # (B,) which of a row's tokens is its last


class Cache:
    """Keys and values of every layer, for rows of unequal length.

    The slot of a token is its position, so positions alone say who sees whom. Rows are filled up at their ends: what
    fills a shorter one takes slots that its tokens do not see, and that those which follow overwrite.

    Args:
        config: of the decoder.
        rows: B.
        slots: S, the most tokens that a row is to hold, with what fills it up.
        device: where the decoder is.
        dtype: the precision of the computation.
    """

    def __init__(self, config: DecoderConfig, rows: int, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.windows = config.windows
        self.table = rotary_table(slots, config.head_dim, config.rope_theta, device)
        shape = (len(self.windows), 2, rows, slots, config.num_key_value_heads, config.head_dim)
        self.layers = torch.zeros(shape, dtype=dtype, device=device)  # keys, then values
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # (B,), tokens of each row
        self.used = 0  # slots that may hold something, the same for all rows

    def extend(self, length: int, counts: Tensor) -> Continuation:
        """Where the next tokens stand and what they see. The decoder is then to be called with them, once.

        Args:
            length: T, with what fills up the shorter rows.
            counts: `(B,)`, how many of them are a row's own, at least one.
        """
        self.used += length
        return self.place(length, counts, self.used)

    def place(self, length: int, counts: Tensor, slots: int) -> Continuation:
        """The same for tokens that are counted in `used` already, with more slots in sight than are used.

        What it computes has one shape however many tokens there were, so that it can be compiled or recorded.

        Args:
            length, counts: as for `extend`.
            slots: S, at least `used`.
        """
        device = self.lengths.device
        positions = self.lengths[:, None] + torch.arange(length, device=device)  # (B, T)
        self.lengths += counts
        behind = positions[:, :, None] - torch.arange(slots, device=device)  # (B, T, S), how far back a slot is
        masks = {None: (behind >= 0)[:, None]}  # (B, 1, T, S)
        for window in set(self.windows) - {None}:
            masks[window] = masks[None] & (behind < window)[:, None]
        reaches = [
            Reach(window, None, masks[window], Past(keys, values, positions))
            for window, (keys, values) in zip(self.windows, self.layers, strict=True)
        ]
        return Continuation(Rotary(*self.table, positions.int()), reaches, counts - 1)


# ---- decoder ---------------------------------------------------------------------------------------------------------
# The decoder: token ids in, logits or losses out. Here a batch leaves `module.training_step` and meets the weights.
#
# Read `config`, `layers`, `attention`, then this. The losses go back to `module`, the gradients to `optim`.

IGNORED = -100  # the label of a position that has no loss, as in PyTorch


class Losses(NamedTuple):
    """What a batch costs."""

    total: Tensor  # scalar fp32, the sum in nats and whatever is added to it: what to differentiate
    each: Tensor  # (B, T) fp32, the cross-entropy of every token in nats, 0 where it is ignored; not differentiable


class Block(nn.Module):
    """Attention and MLP, each normalised at its entrance and added to the residual stream.

    What a branch gives is added by the normalisation that comes next, so that the stream is read and written once.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, branch: Tensor, stream: Tensor | None, rotary: Rotary, reach: Reach, operations: Operations
    ) -> tuple[Tensor, Tensor]:
        """The next block's `branch` and `stream`, `(B, T, C)` each; their sum is the residual stream."""
        norm, proj = self.input_layernorm, self.self_attn.qkv_proj
        stream, qkv = operations.norm_linear(branch, stream, norm.weight, norm.eps, proj.weight, proj.scaling)
        branch = self.dropout(self.self_attn(qkv, rotary, reach, operations))  # (B, T, C)
        norm, proj = self.post_attention_layernorm, self.mlp.gate_up_proj
        stream, gate_up = operations.norm_linear(branch, stream, norm.weight, norm.eps, proj.weight, proj.scaling)
        proj = self.mlp.down_proj
        branch = self.dropout(operations.swiglu_linear(gate_up, proj.weight, proj.scaling))  # (B, T, 2 I) -> (B, T, C)
        return branch, stream


class Decoder(nn.Module):
    """A decoder-only transformer with Llama's arithmetic, or Qwen3's with `qk_norm`.

    Args:
        config: its shape.

    Attributes:
        operations: who does the arithmetic; plain PyTorch unless it is set to something else.

    Raises:
        RequestError: where the vocabulary is still open.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise RequestError("vocab_size is not known: set it, or take it from a tokenizer before building the model")
        self.config = config
        self.operations = PLAIN
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        initialize(self)

    @property
    def output_weight(self) -> Tensor:
        """The matrix `(V, C)` that turns hidden states into logits."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def hidden_states(
        self, input_ids: Tensor, document_ids: Tensor | None = None, continuation: Continuation | None = None
    ) -> Tensor:
        """Everything but the output matrix: `(B, T)` ids to `(B, T, C)` normalised states. See `forward`."""
        length = input_ids.shape[1]
        if length > self.config.max_position_embeddings:
            raise RequestError(
                f"a sequence of {length} tokens is longer than max_position_embeddings "
                f"{self.config.max_position_embeddings}; shorten it or build the model with a longer context"
            )
        branch, stream = self.dropout(self.embed_tokens(input_ids)), None  # (B, T, C)
        device = branch.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            branch = branch.to(torch.get_autocast_dtype(device))  # the stream travels in the computation's precision
        if continuation is None:
            rotary, reaches = self._from_the_beginning(branch, document_ids)
        else:
            rotary, reaches = continuation.rotary, continuation.reaches
        with chosen_kernels(branch.device, reaches):
            for layer, reach in zip(self.layers, reaches, strict=True):
                branch, stream = layer(branch, stream, rotary, reach, self.operations)
        return self.operations.rms_norm(branch, stream, self.norm.weight, self.norm.eps)[1]

    def _from_the_beginning(self, x: Tensor, document_ids: Tensor | None) -> tuple[Rotary, list[Reach]]:
        """Where the tokens of whole rows `(B, T, C)` stand, and what they see in each layer."""
        documents = None if document_ids is None else documents_from(document_ids)
        table = rotary_table(x.shape[1], self.config.head_dim, self.config.rope_theta, x.device)
        dropout = self.config.dropout if self.training else 0.0
        reaches = {window: reach(x, window, documents, dropout) for window in set(self.config.windows)}
        positions = None if documents is None else documents.positions
        return Rotary(*table, positions), [reaches[window] for window in self.config.windows]

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        z_loss: float = 0.0,
        continuation: Continuation | None = None,
    ) -> Tensor | Losses:
        """Logits, or with labels the losses.

        Args:
            input_ids: `(B, T)`, T at most max_position_embeddings.
            labels: `(B, T)`; `labels[b, t]` is the token that follows `input_ids[b, t]` (already shifted), or -100
                where nothing is to be predicted.
            document_ids: `(B, T)`, not decreasing along a row. Tokens then see only their own document, and
                positions count from its start.
            z_loss: added to the total, times the squared log of each token's partition function (Chowdhery et al.,
                2022, arXiv:2204.02311, section 5).
            continuation: the tokens go on from those that a `Cache` holds.

        Returns:
            Logits `(B, T, V)` in the precision of the computation; with labels `Losses`. With a continuation those of
            the last token of each row alone, `(B, V)`.

        Raises:
            RequestError: for a sequence longer than the context.
        """
        hidden = self.hidden_states(input_ids, document_ids, continuation)  # (B, T, C)
        if continuation is not None:
            hidden = hidden[torch.arange(hidden.shape[0], device=hidden.device), continuation.last]  # (B, C)
        if labels is None:
            return F.linear(hidden, self.output_weight.to(hidden.dtype))  # (B, T, V)
        return Losses(*self.losses(hidden, self.output_weight, labels, z_loss, self.operations))

    def losses(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, operations: Operations
    ) -> tuple[Tensor, Tensor]:
        """The content of `Losses` for normalised states `(B, T, C)` and the output matrix `(V, C)`."""
        return operations.linear_cross_entropy(
            hidden, weight.to(hidden.dtype), labels, ignore_index=IGNORED, z_loss=z_loss)  # fmt: skip


def document_ids_from(input_ids: Tensor, eos_id: int) -> Tensor:
    """Number the documents of each row: one ends with its end-of-sequence token, the next token starts another.

    Args:
        input_ids: `(B, T)`.
        eos_id: the token that ends a document, and belongs to it.

    Returns:
        `(B, T)` whole numbers from 0, never decreasing along a row.
    """
    ends = (input_ids == eos_id).long()  # (B, T)
    return ends.cumsum(1) - ends


@torch.no_grad()
def initialize(model: Decoder) -> None:
    """Set every weight from torch's global random numbers; after `to_empty` this is all there is to do.

    | weights                              | initial values                                                      |
    |--------------------------------------|---------------------------------------------------------------------|
    | embed_tokens, lm_head                | normal, initializer_range                                           |
    | qkv_proj, gate_up_proj               | normal, initializer_range                                           |
    | o_proj, down_proj (residual stream)  | normal, initializer_range / sqrt(2 * num_hidden_layers), so that    |
    |                                      | the stream's variance does not grow with depth (Radford et al.,     |
    |                                      | 2019, "Language Models are Unsupervised Multitask Learners")        |
    | norms                                | 1                                                                   |
    """
    std = model.config.initializer_range
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            nn.init.ones_(weight)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.normal_(weight, std=std / math.sqrt(2 * model.config.num_hidden_layers))
        else:
            nn.init.normal_(weight, std=std)


# ---- mode ------------------------------------------------------------------------------------------------------------
# Evaluation mode for a while, in the middle of a training.


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode while it lasts; then each part is as it was."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
