"""The decoder's forward pass by fused ops: the same parameters and results, with less memory and memory traffic.

Read `model/decoder` first. What differs here:

- A block returns the output of its last branch and the residual stream apart. The next norm adds them, so that the
  stream is read and written once instead of twice.
- `norm_linear` is RMSNorm and the projection after it, `swiglu_linear` the activation and the projection after it. What
  lies between is recomputed in the backward pass and not saved: a block saves less than half as much.
- `qk_norm_rope` splits, normalises and rotates in one pass.
- `linear_cross_entropy` computes loss and gradients in chunks of tokens; all logits never exist at once.
"""

from types import MethodType

import torch
from torch import Tensor

from lm.kernels.fp8 import Float8, quantize
from lm.kernels.operations import FusedOps
from lm.model.attention import AttentionMask, attend
from lm.model.decoder import IGNORED, MLP, Block, Decoder, Linear, RMSNorm, Rotary, SelfAttention


def fuse(decoder: Decoder, ops: FusedOps | None) -> None:
    """Replace a decoder's forward pass by the one in this file. Call it once, before the decoder is compiled.

    The modules are still called, so hooks around the decoder and its blocks (FSDP2 has some) run as before.

    Args:
        decoder: changed in place.
        ops: as `kernels/operations.choose_kernels` gives them; None leaves the decoder as it is.
    """
    if ops is None:
        return
    decoder.fused = ops
    decoder.run_blocks = MethodType(run_blocks, decoder)
    decoder.cross_entropy = MethodType(cross_entropy, decoder)
    for block in decoder.layers:
        block.forward = MethodType(block_forward, block)
        block.fused_mlp = MethodType(mlp_forward, block.mlp)


def run_blocks(decoder: Decoder, branch: Tensor, rotary: Rotary, masks: list[AttentionMask]) -> Tensor:
    """`Decoder.run_blocks`: all blocks and the last norm, `(B, T, C)` to `(B, T, C)`."""
    stream = None
    for layer, mask in zip(decoder.layers, masks, strict=True):
        branch, stream = layer(branch, stream, rotary, mask, decoder.fused)  # (B, T, C) each
    return decoder.fused.rms_norm(branch, stream, decoder.norm.weight, decoder.norm.eps)[1]


def block_forward(
    block: Block, branch: Tensor, stream: Tensor | None, rotary: Rotary, mask: AttentionMask, ops: FusedOps
) -> tuple[Tensor, Tensor]:
    """`Block.forward` with `branch` and `stream` apart, `(B, T, C)` each; their sum is the residual stream."""
    branch, stream = attention_forward(block.self_attn, branch, stream, block.input_layernorm, rotary, mask, ops)
    branch, stream = block.fused_mlp(block.dropout(branch), stream, block.post_attention_layernorm, ops)
    return block.dropout(branch), stream


def attention_forward(
    part: SelfAttention, branch: Tensor, stream: Tensor | None, norm: RMSNorm, rotary: Rotary, mask: AttentionMask,
    ops: FusedOps,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The norm and `SelfAttention.forward`: the new `branch`, and `branch + stream`, `(B, T, C)` each."""
    proj = part.qkv_proj  # (B, T, C) -> (B, T, (H + 2 KV) * D)
    stream, qkv = ops.norm_linear(branch, stream, norm.weight, norm.eps, proj.weight, proj.scaling, proj.copy)
    q_weight, k_weight, eps = None, None, 0.0
    if part.q_norm is not None:
        q_weight, k_weight, eps = part.q_norm.weight, part.k_norm.weight, part.q_norm.eps
    # (B, T, H, D), (B, T, KV, D), (B, T, KV, D)
    q, k, v = ops.qk_norm_rope(qkv, q_weight, k_weight, *rotary, part.heads, part.kv_heads, eps)
    out = attend(q, k, v, mask, part.dropout if part.training else 0.0)  # (B, T, H, D)
    return part.o_proj(out.flatten(2)), stream  # (B, T, C)


def mlp_forward(part: MLP, branch: Tensor, stream: Tensor, norm: RMSNorm, ops: FusedOps) -> tuple[Tensor, Tensor]:
    """The norm and `MLP.forward`: the new `branch`, and `branch + stream`, `(B, T, C)` each."""
    proj = part.gate_up_proj  # (B, T, C) -> (B, T, 2 I)
    stream, gate_up = ops.norm_linear(branch, stream, norm.weight, norm.eps, proj.weight, proj.scaling, proj.copy)
    proj = part.down_proj  # (B, T, 2 I) -> (B, T, C)
    return ops.swiglu_linear(gate_up, proj.weight, proj.scaling, proj.copy), stream


def cross_entropy(
    decoder: Decoder, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, copy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`Decoder.cross_entropy`."""
    return decoder.fused.linear_cross_entropy(hidden, weight, labels, copy, ignore_index=IGNORED, z_loss=z_loss)


class WeightCopies:
    """Copies of a fused decoder's matrices as the products take them, in half precision or in FP8: made once an
    optimizer step, not once a micro-batch.

    `with copies:` brings them up to date and lets the forward passes inside use them. They keep their place in memory,
    as CUDA graphs need it. Gradients are those of the weights themselves.

    Args:
        decoder: after `fuse`, on its device; its matrices know whether they are multiplied in FP8.
        dtype: of the activations.
    """

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        self.decoder = decoder
        matrices = [part for part in decoder.modules() if isinstance(part, Linear)]
        self.float8 = [(matrix, _float8(matrix)) for matrix in matrices if matrix.scaling is not None]
        self.half = [matrix for matrix in matrices if matrix.scaling is None]
        self.weights = [matrix.weight.detach() for matrix in self.half] + [decoder.output_weight.detach()]
        self.copies = [torch.empty_like(weight, dtype=dtype) for weight in self.weights]

    def __enter__(self) -> None:
        torch._foreach_copy_(self.copies, self.weights)
        *copies, self.decoder.output_copy = self.copies
        for matrix, copy in zip(self.half, copies, strict=True):
            matrix.copy = copy
        for matrix, copy in self.float8:
            for old, new in zip(copy, _float8(matrix), strict=True):
                torch._foreach_copy_(old, new)
            matrix.copy = copy

    def __exit__(self, *exception: object) -> None:
        for matrix in [*self.half, *(matrix for matrix, _ in self.float8)]:
            matrix.copy = None
        self.decoder.output_copy = None


def _float8(matrix: Linear) -> Float8:
    return quantize(matrix.weight.detach(), matrix.scaling, transpose=True)
