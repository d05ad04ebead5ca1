"""One dial: from a depth to a whole recipe, by published rules. `commands/scale` writes it down as YAML.

Each rule is a pure function that names its source. The rules for batch, learning rate and decay were fitted to AdamW
by others, on other data: they are where a search begins, not where it ends.
"""

import math
from dataclasses import dataclass

from lm.errors import RequestError
from lm.model.accounting import flops_per_token, parameters
from lm.model.config import DecoderConfig

HEAD_DIM = 128
ASPECT = 64  # width / depth
TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al., 2022, arXiv:2203.15556; nanochat takes 12, with Muon
DEVICES = 8  # of a node; the batch comes out even on so many, and on 4, 2 and 1


@dataclass(frozen=True)
class Recipe:
    """What a depth and a horizon come to."""

    decoder: DecoderConfig
    parameters: int  # all of them; the embedding is tied, so its table counts once
    flops_per_token: float  # of training
    batch: int  # samples of an optimizer step
    micro_batch: int  # samples a device runs at once
    steps: int
    learning_rate: float  # peak
    weight_decay: float
    warmup_steps: int

    @property
    def batch_tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.batch * self.decoder.max_position_embeddings

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.steps * self.batch_tokens

    @property
    def flops(self) -> float:
        """Floating-point operations of the run."""
        return self.tokens * self.flops_per_token

    @property
    def block_flops(self) -> float:
        """Those of them in the blocks: all but the output matrix."""
        return self.tokens * (self.flops_per_token - 6 * self.decoder.vocab_size * self.decoder.hidden_size)


def recipe(
    depth: int,
    *,
    tokens_per_parameter: float | None = None,
    flops: float | None = None,
    steps: int | None = None,
    vocab_size: int = 32_768,
    seq_len: int = 2_048,
    device_tokens: int = 16_384,
) -> Recipe:
    """All that follows from a depth and a horizon.

    Args:
        depth: blocks.
        tokens_per_parameter: the horizon, as tokens for each parameter; or
        flops: as floating-point operations of the run; or
        steps: as optimizer steps. Exactly one of the three.
        vocab_size: rows of the embedding.
        seq_len: context, in tokens.
        device_tokens: the most tokens that a device runs at once.

    Raises:
        RequestError: the shape is impossible, or the horizon is less than one optimizer step.
    """
    decoder = shape(depth, vocab_size, seq_len)
    count = parameters(decoder)["total"]
    each = flops_per_token(decoder, seq_len)
    if steps is not None:
        wanted = tokens_of_steps(steps)
    else:
        wanted = tokens_per_parameter * count if flops is None else flops / each
    batch = power_of_two(batch_tokens(wanted) / seq_len)
    tokens = batch * seq_len
    if steps is None:
        steps = round(wanted / tokens)
    if steps < 1:
        raise RequestError(
            f"{wanted:,.0f} tokens are less than one optimizer step of {batch} x {seq_len} = {tokens:,}: "
            "give a longer horizon or a shorter --seq_len"
        )
    rate = learning_rate(steps * tokens * (each - 6 * vocab_size * decoder.hidden_size), tokens)
    return Recipe(
        decoder=decoder, parameters=count, flops_per_token=each, batch=batch,
        micro_batch=micro_batch(batch, device_tokens // seq_len), steps=steps, learning_rate=rate,
        weight_decay=weight_decay(rate, steps, steps * tokens / count),
        warmup_steps=warmup_steps(steps, tokens),
    )  # fmt: skip


# ---- the model -------------------------------------------------------------------------------------------------------


def shape(depth: int, vocab_size: int, seq_len: int) -> DecoderConfig:
    """A decoder of `depth` blocks in the proportions below.

    Every query head has its own key head, as in nanochat: at these sizes the cache that sharing them saves is small.
    The embedding is the output matrix too, or most of a small model would be its two tables. QK-norm bounds the
    attention logits, which lets larger learning rates pass (Wortsman et al., 2023, arXiv:2309.14322).

    Raises:
        RequestError: fewer than two blocks, or an impossible size.
    """
    if depth < 2:
        raise RequestError(f"--depth {depth} must be at least 2")
    if seq_len < 2:
        raise RequestError(f"--seq_len {seq_len} must be at least 2")
    return DecoderConfig(
        vocab_size=vocab_size, hidden_size=width(depth), num_hidden_layers=depth,
        num_attention_heads=width(depth) // HEAD_DIM, intermediate_size=mlp_width(width(depth)),
        max_position_embeddings=seq_len, window_pattern=window_pattern(depth), sliding_window=sliding_window(seq_len),
        qk_norm=True, tie_word_embeddings=True,
    )  # fmt: skip


def width(depth: int) -> int:
    """Width of the residual stream: `64 x depth`, rounded up to whole heads of 128.

    Source: nanochat, https://github.com/karpathy/nanochat, scripts/base_train.py; in its log 64 is better than 128.
    """
    return _round_up(ASPECT * depth, HEAD_DIM)


def mlp_width(width: int) -> int:
    """Width inside the MLP: `8/3 x width`, rounded up to a multiple of 128.

    Three matrices of it hold as many parameters as two of `4 x width` (Shazeer, 2020, arXiv:2002.05202).
    """
    return _round_up(math.ceil(8 * width / 3), HEAD_DIM)


def window_pattern(depth: int) -> str:
    """Three layers with a window, then one that sees all; the last layer always sees all.

    Source: nanochat, nanochat/gpt.py. Written out layer by layer where four does not divide the depth.
    """
    return "SSSL" if depth % 4 == 0 else ("SSSL" * depth)[: depth - 1] + "L"


def sliding_window(seq_len: int) -> int:
    """Tokens that a token sees in a layer with a window: a quarter of the context, rounded up to tiles of 128.

    Source: nanochat, nanochat/gpt.py.
    """
    return min(seq_len, _round_up(math.ceil(seq_len / 4), 128))


# ---- the horizon and the batch ---------------------------------------------------------------------------------------


def batch_tokens(tokens: float) -> float:
    """Tokens of an optimizer step that lead to the lowest loss after `tokens` of training.

    `0.0306 x tokens^0.383` sequences of 2,048, whatever the size of the model (Bergsma et al., 2025,
    arXiv:2505.13738). nanochat takes the same exponent, from 512Ki tokens at depth 12, tuned for Muon.
    """
    return 2_048 * 0.0306 * tokens**0.383


def tokens_of_steps(steps: int) -> float:
    """The tokens that are `steps` optimizer steps of their own best batch: `batch_tokens` solved for them."""
    return (2_048 * 0.0306 * steps) ** (1 / (1 - 0.383))


def micro_batch(batch: int, most: int) -> int:
    """Samples a device runs at once: a power of two up to `most` that leaves every device of a node a share."""
    return power_of_two(min(max(1, most), max(1, batch // DEVICES)), down=True)


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def learning_rate(flops: float, batch: float) -> float:
    """Peak learning rate of AdamW.

    `0.3118 x flops^-0.1250` at a batch of `0.2920 x flops^0.3271` tokens, the two fitted together (DeepSeek-AI, 2024,
    arXiv:2401.02954, section 3.1); from there to our batch with its square root (Malladi et al., 2022,
    arXiv:2205.10287).

    Args:
        flops: floating-point operations of the whole run in the blocks; the output matrix does not count.
        batch: tokens of an optimizer step.
    """
    return 0.3118 * flops**-0.1250 * math.sqrt(batch / (0.2920 * flops**0.3271))


def weight_decay(learning_rate: float, steps: int, tokens_per_parameter: float) -> float:
    """AdamW's decay `1 / (timescale x learning_rate x steps)`.

    The weights are a running mean of the updates over `1 / (learning_rate x decay)` steps (Wang and Aitchison, 2024,
    arXiv:2405.13698). The best mean is over a share `1.084 x tokens_per_parameter^-0.527` of the run, the timescale
    (Bergsma et al., 2025, arXiv:2505.13738).
    """
    timescale = 1.084 * tokens_per_parameter**-0.527
    return 1 / (timescale * learning_rate * steps)


def warmup_steps(steps: int, batch: int) -> int:
    """Optimizer steps of linear rise: a tenth of the run, at most 375M tokens.

    Source: Bergsma et al., 2025, "Scaling with Collapse", arXiv:2509.25087, table 2. Then the rate falls in a straight
    line to 0, which is better than a cosine to a tenth of the peak (Bergsma et al., 2025, arXiv:2502.15938).
    """
    return math.floor(min(steps / 10, 375e6 / batch))


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def power_of_two(number: float, down: bool = False) -> int:
    """The power of two nearest to a number in ratio, or the largest that is not above it; at least 1."""
    exponent = math.log2(max(1, number))
    return 2 ** (math.floor(exponent) if down else round(exponent))


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
