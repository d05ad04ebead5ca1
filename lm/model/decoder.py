"""The decoder: token ids in, logits or losses out. Here a batch leaves `module.training_step` and meets the weights.

Read `config`, `layers`, `attention`, then this. The losses go back to `module`, the gradients to `optim`.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.errors import RequestError
from lm.kernels.attention import Reach, chosen_kernels, documents_from, reach
from lm.kernels.operations import PLAIN, Operations
from lm.model.attention import SelfAttention
from lm.model.cache import Continuation
from lm.model.config import DecoderConfig
from lm.model.layers import MLP, RMSNorm, Rotary, rotary_table

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
