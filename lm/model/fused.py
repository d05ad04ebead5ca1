"""The decoder's forward pass by fused ops: the same parameters and results, with less memory and memory traffic.

Read `model/decoder` first. What differs here:

- A block returns the output of its last branch and the residual stream apart. The next norm adds them, so that the
  stream is read and written once instead of twice.
- `norm_linear` is RMSNorm and the projection after it, `swiglu_linear` the activation and the projection after it. What
  lies between is recomputed in the backward pass and not saved: a block saves less than half as much.
- `qk_norm_rope` splits, normalises and rotates in one pass.
- `linear_cross_entropy` computes loss and gradients in chunks of tokens; all logits never exist at once.
"""

from torch import Tensor, nn

from lm.kernels.operations import FusedOps
from lm.model.attention import AttentionMask, attend
from lm.model.decoder import IGNORED, Block, Decoder, Rotary
from lm.model.low_precision import use_low_precision


def fuse(decoder: Decoder, ops: FusedOps | None) -> None:
    """Replace a decoder's forward pass by the one in this file. Call it once, before the decoder is compiled.

    The decoder and its blocks change their class and stay the same objects, with the same parameters. They are still
    called, so hooks around them (FSDP2 has some) run as before. Without `ops` nothing changes.
    """
    if ops is None:
        return
    use_low_precision(decoder)
    for block in decoder.layers:
        block.__class__ = FusedBlock
    decoder.__class__, decoder.ops = FusedDecoder, ops


def is_fused(decoder: nn.Module) -> bool:
    """Whether a decoder's forward pass is the one in this file."""
    return isinstance(decoder, FusedDecoder)


class FusedBlock(Block):
    """A `Block` with `branch` and `stream` apart, `(B, T, C)` each; their sum is the residual stream."""

    def forward(
        self, branch: Tensor, stream: Tensor | None, rotary: Rotary, mask: AttentionMask, ops: FusedOps
    ) -> tuple[Tensor, Tensor]:
        branch, stream = self.attention_branch(branch, stream, rotary, mask, ops)
        branch, stream = self.mlp_branch(self.dropout(branch), stream, ops)
        return self.dropout(branch), stream

    def attention_branch(
        self, branch: Tensor, stream: Tensor | None, rotary: Rotary, mask: AttentionMask, ops: FusedOps
    ) -> tuple[Tensor, Tensor]:
        """The norm and `SelfAttention.forward`: the new `branch`, and `branch + stream`."""
        part, norm = self.self_attn, self.input_layernorm
        proj = part.qkv_proj  # (B, T, C) -> (B, T, (H + 2 KV) * D)
        stream, qkv = ops.norm_linear(branch, stream, norm.weight, norm.eps, proj.weight, proj.scaling, proj.copy)
        q_weight, k_weight, eps = None, None, 0.0
        if part.q_norm is not None:
            q_weight, k_weight, eps = part.q_norm.weight, part.k_norm.weight, part.q_norm.eps
        # (B, T, H, D), (B, T, KV, D), (B, T, KV, D)
        q, k, v = ops.qk_norm_rope(qkv, q_weight, k_weight, *rotary, part.heads, part.kv_heads, eps)
        out = attend(q, k, v, mask, part.dropout if part.training else 0.0)  # (B, T, H, D)
        return part.o_proj(out.flatten(2)), stream  # (B, T, C)

    def mlp_branch(self, branch: Tensor, stream: Tensor, ops: FusedOps) -> tuple[Tensor, Tensor]:
        """The norm and `MLP.forward`: the new `branch`, and `branch + stream`."""
        norm, proj = self.post_attention_layernorm, self.mlp.gate_up_proj  # (B, T, C) -> (B, T, 2 I)
        stream, gate_up = ops.norm_linear(branch, stream, norm.weight, norm.eps, proj.weight, proj.scaling, proj.copy)
        proj = self.mlp.down_proj  # (B, T, 2 I) -> (B, T, C)
        return ops.swiglu_linear(gate_up, proj.weight, proj.scaling, proj.copy), stream


class FusedDecoder(Decoder):
    """A `Decoder` of fused blocks."""

    ops: FusedOps
    output_copy: Tensor | None = None  # of the output matrix in half precision, while `WeightCopies` keeps one

    def run_blocks(self, branch: Tensor, rotary: Rotary, masks: list[AttentionMask]) -> Tensor:
        stream = None
        for layer, mask in zip(self.layers, masks, strict=True):
            branch, stream = layer(branch, stream, rotary, mask, self.ops)  # (B, T, C) each
        return self.ops.rms_norm(branch, stream, self.norm.weight, self.norm.eps)[1]

    def cross_entropy(self, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        return self.ops.linear_cross_entropy(
            hidden, weight, labels, self.output_copy, ignore_index=IGNORED, z_loss=z_loss
        )
