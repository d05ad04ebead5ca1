"""The decoder's forward pass with fused ops: the same parameters and results, with less memory and memory traffic.

Read `model/decoder` first. What differs here:

- A block returns the output of its last branch and the residual stream separately. The next norm adds them, so the
  stream is read and written once instead of twice.
- `norm_linear` is RMSNorm and the projection after it, `norm_mlp` RMSNorm and the MLP. The normalised rows and
  the activation are recomputed in the backward pass instead of saved: a block saves less than half as much.
- `qk_norm_rope` splits, normalises and rotates in one pass.
- `linear_cross_entropy` computes loss and gradients in chunks of tokens; all logits never exist at once.

On a GPU the ops are CUDA kernels; on a CPU, which only tests use, they are plain PyTorch.
"""

from torch import Tensor, nn

from lm.kernels.cross_entropy import linear_cross_entropy
from lm.kernels.mlp import norm_mlp
from lm.kernels.norm_linear import norm_linear
from lm.kernels.qk_norm_rope import qk_norm_rope
from lm.kernels.rms_norm import rms_norm
from lm.model.attention import AttentionMask, attend
from lm.model.decoder import IGNORED, Block, Decoder, Rotary
from lm.model.low_precision import gradient_sum, use_low_precision


class FusedBlock(Block):
    """A `Block` with `branch` and `stream` kept separate, `(B, T, C)` each; their sum is the residual stream."""

    def forward(
        self, branch: Tensor, stream: Tensor | None, rotary: Rotary, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        branch, stream = self.attention_branch(branch, stream, rotary, mask)
        branch, stream = self.mlp_branch(self.dropout(branch), stream)
        return self.dropout(branch), stream

    def attention_branch(
        self, branch: Tensor, stream: Tensor | None, rotary: Rotary, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        """The norm and `SelfAttention.forward`: the new `branch`, and `branch + stream`."""
        part, norm = self.self_attn, self.input_layernorm
        # (B, T, C), (B, T, (H + 2 KV) * D)
        stream, qkv = norm_linear(branch, stream, norm.weight, norm.eps, part.qkv_proj.operand)
        if part.qkv_proj.bias is not None:
            qkv = qkv + part.qkv_proj.bias.to(qkv.dtype)
        q_weight, k_weight, eps = None, None, 0.0
        if part.q_norm is not None and part.k_norm is not None:
            q_weight, k_weight, eps = part.q_norm.weight, part.k_norm.weight, part.q_norm.eps
        # (B, T, H, D), (B, T, KV, D), (B, T, KV, D)
        q, k, v = qk_norm_rope(qkv, q_weight, k_weight, *rotary, part.heads, part.kv_heads, eps)
        out = attend(q, k, v, mask)  # (B, T, H, D)
        return part.o_proj(out.flatten(2)), stream  # (B, T, C)

    def mlp_branch(self, branch: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """The norm and `MLP.forward`: the new `branch`, and `branch + stream`."""
        norm, mlp = self.post_attention_layernorm, self.mlp
        up, down = mlp.gate_up_proj.operand, mlp.down_proj.operand
        stream, branch = norm_mlp(branch, stream, norm.weight, norm.eps, up, down)
        return branch, stream


class FusedDecoder(Decoder):
    output_copy: Tensor | None = None  # the output matrix in half precision, while `WeightCopies` keeps a copy
    output_adds: bool = False  # while the backward pass adds the output matrix's gradient to `.grad` by itself

    def run_blocks(self, branch: Tensor, rotary: Rotary, masks: list[AttentionMask]) -> Tensor:
        stream = None
        for layer, mask in zip(self.layers, masks, strict=True):
            branch, stream = layer(branch, stream, rotary, mask)  # (B, T, C) each
        return rms_norm(branch, stream, self.norm.weight, self.norm.eps)[1]

    def cross_entropy(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        total = gradient_sum(weight) if self.output_adds else None
        return linear_cross_entropy(hidden, weight, labels, self.output_copy, total, ignore_index=IGNORED)


def fuse(decoder: Decoder) -> None:
    """Replace a decoder's forward pass by the one in this file. Call it once, before the decoder is compiled.

    The decoder and its blocks change their class but stay the same objects, with the same parameters. Hooks around
    them (such as FSDP2's) run as before.
    """
    use_low_precision(decoder)
    for block in decoder.layers:
        block.__class__ = FusedBlock
    decoder.__class__ = FusedDecoder


def is_fused(decoder: nn.Module) -> bool:
    """Whether a decoder's forward pass is the one in this file."""
    return isinstance(decoder, FusedDecoder)
