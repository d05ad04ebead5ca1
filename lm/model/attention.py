"""Attention: the only place where tokens of a sequence see each other. `model/decoder` stacks it with the MLP.

Heads are laid out `(B, heads, T, head_dim)`, as `scaled_dot_product_attention` wants them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model.config import DecoderConfig
from lm.model.layers import RMSNorm, rotate


class SelfAttention(nn.Module):
    """Causal attention with grouped key and value heads (Ainslie et al., 2023, arXiv:2305.13245)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.dropout = config.dropout
        self.qkv_proj = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of tokens, ready to attend: normalised where asked for, and rotated.

        Args:
            x: `(B, T, C)`.
            rotary: `rotary_table` of the tokens' positions, `(T, head_dim)` or `(B, 1, T, head_dim)`.

        Returns:
            `(B, H, T, head_dim)`, and twice `(B, KV, T, head_dim)`.
        """
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H + 2 KV, T, D)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None:
            # Under autocast the fp32 norm weights would widen the heads; attention wants all three alike.
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        cos, sin = (table.to(v.dtype) for table in rotary)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        """Mix tokens with those before them.

        Args:
            x: `(B, T, C)`.
            rotary: as for `project`.
            mask: `(B, 1, T, T)`, true where the row's token sees the column's; None is causal, the whole sequence.

        Returns:
            `(B, T, C)`.
        """
        q, k, v = self.project(x, rotary)
        dropout = self.dropout if self.training else 0.0
        if mask is None:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=self.kv_heads != self.heads)
        else:
            # No fused CUDA kernel takes a mask together with grouped heads, so the groups are spelled out.
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))  # (B, H, T, D)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # (B, T, H * D) -> (B, T, C)


def document_mask(document_ids: Tensor) -> Tensor:
    """Who sees whom when a token sees only its own document and the past.

    Args:
        document_ids: `(B, T)`.

    Returns:
        `(B, 1, T, T)` booleans.
    """
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]  # (B, 1, T, T)
    time = torch.arange(document_ids.shape[1], device=document_ids.device)
    return same & (time[:, None] >= time)
