"""Rules of `lm scale`: a model, a batch and an optimizer for a depth and a training length, as pure functions.

Each rule names its source; `training/optimizer_rules` has those for learning rates. They were found on other data, or
on small models: they are where a search starts.
"""

import math
from dataclasses import dataclass, replace

from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.model.estimates import block_flops_per_token, flops_per_token, parameters
from lm.system.units import format_count
from lm.training.builtin_optimizers import OptimizerName
from lm.training.optimizer_rules import RULES

TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al., 2022, arXiv:2203.15556; nanochat takes 12, with Muon
BIGRAM_MAX_STEPS, BIGRAM_MAX_VOCABULARY = 2_000, 8_192  # the longest run and largest vocabulary with `bigram_init`
SMALL_STEP, MANY_STEPS = 4_096, 1_200  # tokens of a step, and steps, of a run shorter than the published rule is for
DEVICES = 8  # of a node; a batch of as many samples or more divides evenly over 8, 4, 2 and 1
DEVICE_TOKENS = 16_384  # the most tokens of a micro-batch, until `lm plan --fit` finds how many fit


@dataclass(frozen=True)
class Recipe:
    """Model, batch, length and optimizer of a run; all else follows from them by the rules below."""

    decoder: DecoderConfig
    batch: int  # samples of an optimizer step
    steps: int
    optimizer: OptimizerName  # of the matrices in the blocks; AdamW for the rest

    @property
    def parameters(self) -> int:
        return parameters(self.decoder)["total"]

    @property
    def multiplied(self) -> int:
        """Number of parameters that multiply activations: all but the embedding. Tokens per parameter count these.

        Source: nanochat, scripts/base_train.py.
        """
        return self.parameters - self.decoder.vocab_size * self.decoder.hidden_size

    @property
    def seq_len(self) -> int:  # tokens of a sample
        return self.decoder.max_position_embeddings

    @property
    def batch_tokens(self) -> int:  # of an optimizer step
        return self.batch * self.seq_len

    @property
    def tokens(self) -> int:  # of the run
        return self.steps * self.batch_tokens

    @property
    def flops_per_token(self) -> float:  # of training
        return flops_per_token(self.decoder, self.seq_len)

    @property
    def flops(self) -> float:  # of the run
        return self.tokens * self.flops_per_token

    @property
    def block_flops(self) -> float:
        """FLOPs of the run in the blocks: all but the output matrix."""
        return self.tokens * block_flops_per_token(self.decoder, self.seq_len)

    @property
    def learning_rate(self) -> float:
        """Peak learning rate of the matrices in the blocks."""
        return RULES[self.optimizer].learning_rate(self.decoder, self.block_flops, self.batch_tokens)

    @property
    def bigram_init(self) -> bool:
        """Whether the run begins with embedding and output matrix from bigrams of the data.

        Measured in runs of 300 to 1,200 steps (tests/benchmarks/README.md, "Bigrams before the first step").
        """
        small = self.steps <= BIGRAM_MAX_STEPS and self.decoder.vocab_size <= BIGRAM_MAX_VOCABULARY
        return self.optimizer == "muon" and small

    @property
    def memory(self) -> float:
        """Fraction of the run over which the matrices average their updates; see `weight_decay`."""
        return RULES[self.optimizer].memory(self.tokens / self.multiplied)


def make_recipe(
    decoder: DecoderConfig,
    *,
    tokens_per_parameter: float | None = None,
    flops: float | None = None,
    steps: int | None = None,
    optimizer: OptimizerName = "muon",
    batch: int | None = None,
) -> Recipe:
    """Make the recipe of a decoder for a training length, given in one of three units, and `batch` samples a step.

    The units: tokens for each parameter outside the embedding, FLOPs of the run, optimizer steps.
    """
    step = Recipe(decoder, 1, 1, optimizer)  # of one sample
    if steps is not None:
        tokens = tokens_of_steps(steps)
    elif flops is not None:
        tokens = flops / step.flops_per_token
    else:
        tokens = (tokens_per_parameter or TOKENS_PER_PARAMETER) * step.multiplied
    best = published_batch_tokens(tokens) if steps else batch_tokens(tokens)
    step = replace(step, batch=batch or power_of_two(best / step.seq_len))
    steps = steps or round(tokens / step.batch_tokens)
    if steps < 1:
        raise RequestError(
            f"{tokens:,.0f} tokens are less than one optimizer step of {step.batch} x {step.seq_len} = "
            f"{step.batch_tokens:,}: give a longer horizon or a shorter --seq_len"
        )
    return replace(step, steps=steps)


# ---- the model -------------------------------------------------------------------------------------------------------


def width(depth: int, aspect_ratio: float, head_dim: int) -> int:
    """Width of the residual stream: `64 x depth`, rounded up to whole heads of 128.

    Source: nanochat, https://github.com/karpathy/nanochat, scripts/base_train.py; in its log 64 is better than 128.
    """
    return round_up(aspect_ratio * depth, head_dim)


def mlp_width(width: int) -> int:
    """Width inside the MLP: `8/3 x width`, rounded up to a multiple of 128.

    Three matrices of this width have as many parameters as two of `4 x width` (Shazeer, 2020, arXiv:2002.05202).
    """
    return round_up(8 * width / 3, 128)


def window_pattern(depth: int, pattern: str) -> str:
    """Three layers with a window, then one with full attention; the last layer always has full attention.

    Source: nanochat, nanochat/gpt.py. The pattern is written out by layer if its length does not divide the depth.
    """
    return pattern if depth % len(pattern) == 0 and pattern[-1] == "L" else (pattern * depth)[: depth - 1] + "L"


def sliding_window(seq_len: int) -> int:
    """Tokens that a token sees in a layer with a window: a quarter of the context, rounded up to tiles of 128.

    Source: nanochat, nanochat/gpt.py.
    """
    return min(seq_len, round_up(seq_len / 4, 128))


# ---- the horizon and the batch ---------------------------------------------------------------------------------------


def batch_tokens(tokens: float) -> float:
    """Tokens of an optimizer step that lead to the lowest loss after `tokens` of training: as published, but smaller
    in runs that would have fewer than 1,200 steps.

    With 9.8M tokens steps of 8,192 end below those of 16,384 and 32,768, with 2.5M those of 4,096 below those of 8,192
    (tests/benchmarks/README.md, "Small steps").
    """
    return min(published_batch_tokens(tokens), max(SMALL_STEP, tokens / MANY_STEPS))


def published_batch_tokens(tokens: float) -> float:
    """Tokens of an optimizer step by a rule that was fitted to far longer runs.

    `0.0306 x tokens^0.383` sequences of 2,048, whatever the size of the model (Bergsma et al., 2025,
    arXiv:2505.13738). nanochat takes the same exponent, from 512Ki tokens at depth 12, tuned for Muon.
    """
    return 2_048 * 0.0306 * tokens**0.383


def tokens_of_steps(steps: int) -> float:
    """The tokens of a run of `steps` optimizer steps: `published_batch_tokens` solved for tokens."""
    return (2_048 * 0.0306 * steps) ** (1 / (1 - 0.383))


def micro_batch(batch: int, seq_len: int, devices: int = DEVICES, fitting: int = DEVICE_TOKENS) -> int:
    """Samples per micro-batch: a power of two that divides the batch, with one micro-batch or more for each device.

    `fitting` are the samples that a device has memory for.
    """
    each = batch // devices
    return math.gcd(power_of_two(min(DEVICE_TOKENS // seq_len, each, fitting), down=True), batch, each)


def rare_entries(vocab_size: int, tokens: int) -> str | None:
    """A warning where a vocabulary is large for a text of so many tokens; None where it is not.

    With 76 tokens of text for each entry, 4,096 entries teach as well as 1,024 (tests/benchmarks/README.md, "Little
    text"); less was not measured, and entries that a text hardly has stay as they were initialized.
    """
    suited = 2 ** int(math.log2(max(512, tokens / 75)))
    if vocab_size < 1.5 * suited:
        return None
    few = f"{tokens / vocab_size:.2g} for each of the {vocab_size:,} entries of the vocabulary"
    return f"{format_count(tokens)} tokens of text are {few}; prepare it with --vocab_size {suited}"


def weight_decay(memory: float, learning_rate: float, steps: int) -> float:
    """Decoupled weight decay for which the weights average the updates over the fraction `memory` of the run.

    The weights are a running mean of the updates over `1 / (learning_rate x decay)` steps (Wang and Aitchison, 2024,
    arXiv:2405.13698).
    """
    return 1 / (memory * learning_rate * steps)


def power_of_two(number: float, down: bool = False) -> int:
    """The power of two nearest to a number in ratio, or the largest that is not above it; at least 1."""
    exponent = math.log2(max(1, number))
    return 2 ** (math.floor(exponent) if down else round(exponent))


def round_up(number: float, unit: int) -> int:
    return math.ceil(number / unit) * unit
