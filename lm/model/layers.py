"""The parts of a block that look at one token at a time: RMSNorm, the rotary embedding, the SwiGLU MLP.

`model/attention`, where tokens meet, is next; `model/decoder` joins both.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model.config import DecoderConfig


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension (Zhang and Sennrich, 2019, arXiv:1910.07467).

    The statistics are fp32 whatever the input; the result is rounded to the input's precision before the weight, as
    Hugging Face's Llama does, so that a trained model gives the same numbers there.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # (..., size) -> (..., size)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def rotary_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (Su et al., 2021, arXiv:2104.09864).

    Pair `i` of a head turns by `position * theta ** (-2i / head_dim)`. Nothing of it is stored: the angles are
    recomputed in fp32 for every batch, so no cast or meta device can spoil them, and that costs next to nothing.

    Args:
        positions: whole numbers, any shape.
        head_dim: width of a head, even.
        dtype: what the tables are rounded to at the end.

    Returns:
        Two tensors `(*positions.shape, head_dim)`.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponent)  # (..., head_dim / 2)
    angles = torch.cat((angles, angles), dim=-1)  # (..., head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs `(x[i], x[i + head_dim / 2])`: the half-split layout of Hugging Face's weights.

    Args:
        x: queries or keys `(B, heads, T, head_dim)`.
        cos: `rotary_table`'s, broadcastable to `x`.
        sin: the same.
    """
    left, right = x.chunk(2, dim=-1)  # (B, heads, T, head_dim / 2) each
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))` (Shazeer, 2020, arXiv:2002.05202), gate and up in one matmul."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, I) each
        return self.down_proj(F.silu(gate) * up)
