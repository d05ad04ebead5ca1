"""The parts of a block that look at one token at a time: its matrices, the weights of RMSNorm, and the rotary angles.

Their arithmetic is in `kernels/rms_norm`, `kernels/swiglu` and `kernels/qk_norm_rope`, because it is joined there with
what stands before and after. `model/attention`, where tokens meet, is next; `model/decoder` joins all.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lm.kernels.fp8 import Scaling
from lm.model.config import DecoderConfig


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
