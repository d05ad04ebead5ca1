"""Rules of `lm scale` for each built-in optimizer: learning rate, memory and warm-up, and the YAML that it prints.

Nothing here imports torch, so that `lm scale` answers at once.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from lm.model.config import DecoderConfig
from lm.training.builtin_optimizers import OptimizerName

MATRICES = 3.0  # Muon's learning rate x width x sqrt(depth)
SHORT_RUN = 500  # optimizer steps, below which Muon needs no warm-up
SHORT_CONTEXT = 512  # tokens, up to which positions turn faster


class OptimizerRules(NamedTuple):
    """The rules for an optimizer, each with its source."""

    learning_rate: Callable[[DecoderConfig, float, float], float]  # peak; arguments as of `adamw_learning_rate`
    memory: Callable[[float], float]  # share of a run whose updates the matrices average, from tokens a parameter
    memory_source: str
    values: Callable[[int, float], dict[str, str]]  # of the YAML, by optimizer steps, and tokens of a step
    optimizer_yaml: str  # lines of the config that `lm scale` prints, with the source of each number
    schedule_yaml: str


def adamw_learning_rate(decoder: DecoderConfig, flops: float, batch: float) -> float:
    """Peak learning rate of AdamW, in every decoder.

    `0.3118 x flops^-0.1250` at a batch of `0.2920 x flops^0.3271` tokens, the two fitted together (DeepSeek-AI, 2024,
    arXiv:2401.02954, section 3.1); from there to our batch, tokens of an optimizer step, with its square root (Malladi
    et al., 2022, arXiv:2205.10287). `flops` are those of the whole run in the blocks, without the output matrix.
    """
    return 0.3118 * flops**-0.1250 * math.sqrt(batch / (0.2920 * flops**0.3271))


def peak_rate(factor: float, depth: int, width: int) -> float:
    """Peak learning rate `factor / (width x sqrt(depth))`, for the matrices in the blocks Muon's.

    Swept with models of 2 to 8 blocks, 64 to 256 wide, in 300 steps of 8Ki tokens: the best rates, of all parameters
    together, are 2.9 to 3.2 of this unit for the matrices (tests/benchmarks/README.md); the root of the depth is that
    of Yang et al., 2023, arXiv:2310.02244. At 2 blocks 75 steps want the same rate as 300, and steps of 32Ki tokens the
    same as of 8Ki, so neither is in the rule; steps of 2Ki want half.

    Published runs have more: in this unit Moonlight's rates are 5 to 8.4 at depths 12 to 20 (Liu et al., 2025,
    arXiv:2502.16982, table 2), nanochat's 9.6 at depth 12, in another architecture.
    """
    return factor / (width * math.sqrt(depth))


def averaging(steps: int, share: float, shortest: float, longest: float) -> float:
    """Decay rate of a running mean over `steps / share` optimizer steps, at least `shortest` and at most `longest`.

    A mean that is long for its run is late all the way: in 300 steps at depth 6, the short ones here and a schedule
    for short runs end 0.028 bits per byte below those of long runs (tests/benchmarks/README.md, "Short runs").
    """
    return 1 - 1 / min(max(steps / share, shortest), longest)


def warmup(steps: int, longest: float, source: str) -> str:
    """The line of the YAML for a warm-up of a tenth of a run, and of at most `longest` optimizer steps."""
    length = "warmup_ratio: 0.1" if steps / 10 <= longest else f"warmup_steps: {int(longest):_}"
    return f"{length}  # a tenth of the run, at most {source}"


def adamw_values(steps: int, batch: float) -> dict[str, str]:
    # Bergsma et al., 2025, arXiv:2509.25087, table 2
    return {"warmup": warmup(steps, 375e6 / batch, "375M tokens (arXiv:2509.25087)")}


def muon_values(steps: int, batch: float) -> dict[str, str]:
    momentum, beta1, beta2 = averaging(steps, 45, 6.7, 20), averaging(steps, 150, 2, 5), averaging(steps, 6, 20, 50)
    short = steps < SHORT_RUN
    none = f"warmup_steps: 0  # none in fewer than {SHORT_RUN} steps (measured)"
    return {
        "momentum": f"{momentum:.2g}",
        "betas": f"[{beta1:.2g}, {beta2:.2g}]",
        "warmup": none if short else warmup(steps, 40, "40 steps (nanochat)"),
        "decay_ratio": "0.5" if short else "0.65",
    }


def rope_theta(seq_len: int) -> int:
    """Base of the rotary embedding: the usual one is for contexts of thousands of tokens."""
    return 1_000 if seq_len <= SHORT_CONTEXT else 10_000


RULES: dict[OptimizerName, OptimizerRules] = {
    "adamw": OptimizerRules(
        learning_rate=adamw_learning_rate,
        memory=lambda tokens: 1.084 * tokens**-0.527,
        memory_source="arXiv:2505.13738",  # Bergsma et al., 2025
        values=adamw_values,
        optimizer_yaml="""\
    name: adamw  # the rules for lr and weight_decay are fitted to it
    lr: {lr}  # peak: for {flops} operations in the blocks (arXiv:2401.02954), at this batch (arXiv:2205.10287)
    betas: [0.9, 0.95]  # decay rates of the running means of the gradient and its square
""",
        schedule_yaml="""\
    name: linear  # linear decay to 0, better than a cosine to a tenth (arXiv:2502.15938)
    {warmup}
    final_fraction: 0.0  # learning rate at the end, as a fraction of the peak
""",
    ),
    "muon": OptimizerRules(
        learning_rate=lambda decoder, flops, batch: peak_rate(MATRICES, decoder.num_hidden_layers, decoder.hidden_size),
        memory=lambda tokens: 1.0,  # the share that is best with AdamW, 0.22 of 20 tokens a parameter, is too short
        memory_source="measured",  # "Training-only gains" in tests/benchmarks/README.md
        values=muon_values,
        optimizer_yaml="""\
    name: muon  # for the matrices in the blocks; AdamW for the rest. --optimizer adamw for all
    lr: {lr}  # peak: {matrices:g} / (hidden_size x sqrt(depth)), swept at depths 2 to 8
    momentum: {momentum}  # Muon: decay rate of the running mean of the gradient; smaller in short runs (measured)
    betas: {betas}  # AdamW: decay rates of the running means of the gradient and its square; the same
""",
        schedule_yaml="""\
    name: wsd  # constant, then linear decay (nanochat)
    {warmup}
    decay_ratio: {decay_ratio}  # fraction of the run in which the learning rate decays (nanochat: 0.65)
    final_fraction: 0.05  # learning rate at the end, as a fraction of the peak (nanochat)
""",
    ),
}
