"""Attention: the only place where tokens of a sequence see each other. `model/decoder` stacks it with the MLP.

Which library's kernel does it is decided in `kernels/attention`; heads are laid out `(B, T, heads, head_dim)`.
"""

from torch import Tensor, nn

from lm.kernels.attention import Reach, attend
from lm.kernels.linear import linear
from lm.kernels.operations import Operations
from lm.model.config import DecoderConfig
from lm.model.layers import Linear, RMSNorm, Rotary


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
