"""The decoder: token ids in, logits or losses out. Here a batch leaves `module.training_step` and meets the weights.

Read `config`, `layers`, `attention`, then this. The losses go back to `module`, the gradients to `optim`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.errors import RequestError
from lm.model.attention import SelfAttention, document_mask
from lm.model.config import DecoderConfig
from lm.model.layers import MLP, RMSNorm, rotary_table

IGNORED = -100  # the label of a position that has no loss, as in PyTorch


class Block(nn.Module):
    """Attention and MLP, each normalised at its entrance and added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), rotary, mask))  # (B, T, C)
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))  # (B, T, C)


class Decoder(nn.Module):
    """A decoder-only transformer with Llama's arithmetic, or Qwen3's with `qk_norm`.

    Args:
        config: its shape.

    Raises:
        RequestError: where the vocabulary is still open.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise RequestError("vocab_size is not known: set it, or take it from a tokenizer before building the model")
        self.config = config
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

    def hidden_states(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Everything but the output matrix: `(B, T)` ids to `(B, T, C)` normalised states. See `forward`."""
        length = input_ids.shape[1]
        if length > self.config.max_position_embeddings:
            raise RequestError(
                f"a sequence of {length} tokens is longer than max_position_embeddings "
                f"{self.config.max_position_embeddings}; shorten it or build the model with a longer context"
            )
        x = self.dropout(self.embed_tokens(input_ids))  # (B, T, C)
        if document_ids is None:
            positions, mask = torch.arange(length, device=input_ids.device), None  # (T)
        else:
            positions, mask = document_positions(document_ids)[:, None], document_mask(document_ids)  # (B, 1, T)
        rotary = rotary_table(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, rotary, mask)
        return self.norm(x)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """Logits, or with labels the loss of every token.

        Args:
            input_ids: `(B, T)`, T at most max_position_embeddings.
            labels: `(B, T)`; `labels[b, t]` is the token that follows `input_ids[b, t]` (already shifted), or -100
                where nothing is to be predicted.
            document_ids: `(B, T)`, not decreasing along a row. Tokens then see only their own document, and
                positions count from its start.

        Returns:
            Logits `(B, T, V)` in the precision of the computation; with labels the cross-entropy of each token in
            nats, `(B, T)` fp32, 0 where the label is -100.

        Raises:
            RequestError: for a sequence longer than the context.
        """
        logits = F.linear(self.hidden_states(input_ids, document_ids), self.output_weight)  # (B, T, V)
        if labels is None:
            return logits
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")  # (B * T)
        return losses.view(labels.shape)


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


def document_positions(document_ids: Tensor) -> Tensor:
    """The position of each token in its document: `(B, T)` document ids to `(B, T)` whole numbers from 0."""
    time = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)  # (B, T)
    starts = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)  # (B, T)
    return time - torch.where(starts, time, 0).cummax(1).values


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
