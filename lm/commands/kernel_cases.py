"""What `lm bench kernels` measures: each op with inputs of a training's shapes, the bytes it must move, its operations.

`kernel_timing` times the calls; `bench_kernels` makes a report of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lm.kernels import attention, cross_entropy, qk_norm_rope, rms_norm, swiglu
from lm.model.layers import rotary_table

EPS = 1e-5
THETA = 10_000.0


@dataclass(frozen=True)
class Sizes:
    """A micro-batch of a decoder; the defaults are `pretrain-350m.yaml`'s."""

    tokens: int = 16_384
    seq_len: int = 1_024
    hidden: int = 1_024
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 4_096
    vocab: int = 32_768


SMALL = Sizes(tokens=512, seq_len=128, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=2_048)


@dataclass(frozen=True)
class Traffic:
    """The bytes that a pass must move: each input read once, each output written once."""

    reads: dict[str, int]
    writes: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass(frozen=True)
class Case:
    """One op.

    Args:
        name: of the public function, and what is special here.
        ours: the op.
        plain: the same in plain PyTorch.
        inputs: makes fresh random inputs; gradients are taken of the tensors that require them.
        shape: what the inputs' sizes are.
        forward, backward: what the passes must move; None where a matrix product decides, not memory.
        operations: floating-point operations of forward and backward pass together, of matrix products alone.
    """

    name: str
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    shape: dict[str, int]
    forward: Traffic | None = None
    backward: Traffic | None = None
    operations: int | None = None


class Cases:
    """Every op of a decoder, for one micro-batch.

    Args:
        sizes: of the decoder and of the micro-batch.
        dtype: of activations and matrices; the norms' weights are fp32, as in mixed precision.
        device: where the inputs are made.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.item = torch.empty((), dtype=dtype).element_size()  # bytes

    def all(self) -> list[Case]:
        """One of each op, in the order of a block."""
        quarter = self.sizes.seq_len // 4
        return [self.rms_norm(), self.norm_linear(), self.qk_rope(normed=False), self.qk_rope(normed=True),
                self.attention(), self.attention(window=quarter), self.attention(document=quarter),
                self.swiglu(), self.swiglu_linear(), self.cross_entropy()]  # fmt: skip

    def programs(self) -> dict[str, dict[str, object]]:
        """The sources that these cases use, each with what it is compiled for."""
        sizes, dtype, vec, wide = self.sizes, self.dtype, 16 // self.item, torch.float32
        heads = (sizes.heads, sizes.kv_heads, sizes.head_dim, vec)
        return {
            "rms_norm": rms_norm.constants(dtype, wide, sizes.hidden, vec),
            "qk_norm_rope": qk_norm_rope.constants(dtype, wide, *heads),
            "swiglu": swiglu.constants(dtype, sizes.intermediate, vec),
            "cross_entropy": cross_entropy.constants(dtype, sizes.vocab, True, False),
        }

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed numbers, of which a gradient can be taken."""
        return torch.randn(shape, device=self.device).mul(scale).to(dtype or self.dtype).requires_grad_()

    def norm_weight(self, size: int) -> Tensor:
        return self.random(size, dtype=torch.float32)

    def rms_norm(self) -> Case:
        tokens, hidden = self.sizes.tokens, self.sizes.hidden
        rows, weight, rstd = tokens * hidden * self.item, hidden * 4, tokens * 4
        return Case(
            "rms_norm", rms_norm.rms_norm, rms_norm.rms_norm_plain,
            lambda: (self.random(tokens, hidden), self.random(tokens, hidden), self.norm_weight(hidden), EPS),
            {"tokens": tokens, "hidden": hidden},
            forward=Traffic({"x": rows, "residual": rows, "weight": weight}, {"stream": rows, "y": rows, "rstd": rstd}),
            backward=Traffic(
                {"dstream": rows, "dy": rows, "stream": rows, "weight": weight, "rstd": rstd},
                {"dx": rows, "dweight": weight}),
        )  # fmt: skip

    def norm_linear(self) -> Case:
        tokens, hidden, out = self.sizes.tokens, self.sizes.hidden, 2 * self.sizes.intermediate
        return Case(
            "norm_linear", rms_norm.norm_linear, rms_norm.norm_linear_plain,
            lambda: (self.random(tokens, hidden), self.random(tokens, hidden), self.norm_weight(hidden), EPS,
                     self.random(out, hidden, scale=0.02)),
            {"tokens": tokens, "hidden": hidden, "out": out},
            operations=6 * tokens * hidden * out,
        )  # fmt: skip

    def qk_rope(self, normed: bool) -> Case:
        sizes = self.sizes
        batch, heads, width = sizes.tokens // sizes.seq_len, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim
        rows, tables = sizes.tokens * heads * width * self.item, 2 * sizes.seq_len * width // 2 * 4
        turned = rows * (sizes.heads + sizes.kv_heads) // heads  # queries and keys alone
        weights = {"q_weight": width * 4, "k_weight": width * 4} if normed else {}

        def inputs() -> tuple[Any, ...]:
            qk_weights = [self.norm_weight(width) if normed else None for _ in range(2)]
            table = rotary_table(sizes.seq_len, width, THETA, self.device)
            return (self.random(batch, sizes.seq_len, heads * width), *qk_weights, *table, None,
                    sizes.heads, sizes.kv_heads, EPS)  # fmt: skip

        return Case(
            "qk_norm_rope" if normed else "qk_norm_rope, no norm",
            qk_norm_rope.qk_norm_rope, qk_norm_rope.qk_norm_rope_plain, inputs,
            {"tokens": sizes.tokens, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": width},
            forward=Traffic({"qkv": rows, "tables": tables, **weights}, {"q, k, v": rows}),
            backward=Traffic(
                {"dq, dk, dv": rows, "tables": tables, **weights, **({"q, k of qkv": turned} if normed else {})},
                {"dqkv": rows, **{f"d{name}": size for name, size in weights.items()}}),
        )  # fmt: skip

    def attention(self, window: int | None = None, document: int | None = None) -> Case:
        """With a window, or with documents of this many tokens; what is compared is a mask, or torch's own choice."""
        sizes = self.sizes
        batch, length = sizes.tokens // sizes.seq_len, sizes.seq_len
        span = window or length
        attended = (document + 1) / 2 if document else span - span * (span - 1) / (2 * length)  # tokens, on average
        documents = None
        if document:
            ids = torch.arange(length, device=self.device) // document
            documents = attention.documents_from(ids.expand(batch, -1))

        def inputs() -> tuple[Tensor, ...]:
            heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
            return tuple(self.random(batch, length, n, sizes.head_dim) for n in heads)

        # As in training, who sees whom is found once and not in every layer.
        x = torch.empty(batch, length, 1, dtype=self.dtype, device=self.device)
        reach, masked = attention.reach(x, window, documents), attention.Reach(None, None, None)
        if window or document:
            masked = attention.masked_reach(length, window, documents, self.device)

        def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with attention.chosen_kernels(q.device, [reach]):
                return attention.attend(q, k, v, reach)

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention.attend(q, k, v, masked)

        return Case(
            f"attention{f', window {window}' * bool(window)}{f', documents of {document}' * bool(document)}",
            chosen, plain, inputs,
            {"tokens": sizes.tokens, "seq_len": length, "heads": sizes.heads, "kv_heads": sizes.kv_heads,
             "head_dim": sizes.head_dim},
            operations=round(12 * sizes.heads * sizes.head_dim * attended * sizes.tokens),
        )  # fmt: skip

    def swiglu(self) -> Case:
        tokens, width = self.sizes.tokens, self.sizes.intermediate
        half = tokens * width * self.item
        return Case(
            "swiglu", swiglu.swiglu, swiglu.swiglu_plain, lambda: (self.random(tokens, 2 * width),),
            {"tokens": tokens, "intermediate": width},
            forward=Traffic({"gate_up": 2 * half}, {"z": half}),
            backward=Traffic({"dz": half, "gate_up": 2 * half}, {"dgate_up": 2 * half}),
        )  # fmt: skip

    def swiglu_linear(self) -> Case:
        tokens, width, out = self.sizes.tokens, self.sizes.intermediate, self.sizes.hidden
        return Case(
            "swiglu_linear", swiglu.swiglu_linear, swiglu.swiglu_linear_plain,
            lambda: (self.random(tokens, 2 * width), self.random(out, width, scale=0.02)),
            {"tokens": tokens, "intermediate": width, "out": out},
            operations=6 * tokens * width * out,
        )  # fmt: skip

    def cross_entropy(self) -> Case:
        tokens, hidden, vocab = self.sizes.tokens, self.sizes.hidden, self.sizes.vocab
        return Case(
            "linear_cross_entropy", cross_entropy.linear_cross_entropy, cross_entropy.linear_cross_entropy_plain,
            lambda: (self.random(tokens, hidden), self.random(vocab, hidden, scale=0.02),
                     torch.randint(vocab, (tokens,), device=self.device)),
            {"tokens": tokens, "hidden": hidden, "vocab": vocab},
            operations=6 * tokens * hidden * vocab,
        )  # fmt: skip
