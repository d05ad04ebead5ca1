"""The steps of a run and the learning rate of each step: pure functions of the config, so no checkpoint stores them."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm.errors import RequestError, require_at_least
from lm.system.units import plural
from lm.training.config import ScheduleConfig

if TYPE_CHECKING:
    from lm.data.config import DataConfig
    from lm.data.datamodule import DataModule

# ---- learning rate ---------------------------------------------------------------------------------------------------


def warmup_and_decay_steps(max_steps: int, config: ScheduleConfig) -> tuple[int, int]:
    """`warmup_steps` and `decay_steps` of a run of `max_steps` optimizer steps; 0 where there is none."""
    max_steps -= config.begin_step
    warmup, decay = config.warmup_steps, config.decay_steps or 0
    if config.warmup_ratio is not None:
        warmup = round(config.warmup_ratio * max_steps)
    if config.decay_ratio is not None:
        decay = round(config.decay_ratio * max_steps)
    if config.name != "wsd":
        return warmup, decay
    if config.warmup_ratio is not None and config.decay_ratio is not None:
        decay = min(decay, max_steps - warmup)  # both may have been rounded up
    if warmup + decay > max_steps:
        decays = config.decay_steps and warmup < max_steps
        fits = f"decay_steps {max_steps - warmup}" if decays else f"warmup_steps {max(0, max_steps - decay)}"
        raise RequestError(
            f"model.schedule: warm-up {warmup:,} + decay {decay:,} steps are more than the run's {max_steps:,}: "
            f"give --model.schedule.{fits}, or train for more steps"
        )
    return warmup, decay


def lr_fraction(step: int, max_steps: int, config: ScheduleConfig) -> float:
    """The fraction of the peak learning rate at optimizer step `step` (the first is 0) of a run of `max_steps`.

    It rises linearly to 1 during the warm-up. Then

        constant        stays
        wsd             stays, and falls linearly over the last `decay` steps (Hu et al., 2024, arXiv:2404.06395)
        linear, cosine  falls from the warm-up to the end, or to step `decay_steps` (Loshchilov and Hutter, 2017,
                        arXiv:1608.03983)

    to `final_fraction`. A branch begins at `begin_step`, with `begin_fraction` of the rate.
    """
    warmup, decay = warmup_and_decay_steps(max_steps, config)
    if step < config.begin_step:  # before the first step of a branch; another branch may begin there
        return config.begin_fraction
    step, max_steps = step - config.begin_step, max_steps - config.begin_step
    if step < warmup:
        return config.begin_fraction + (1 - config.begin_fraction) * (step + 1) / warmup
    top = config.begin_fraction if config.begin_step and not warmup else 1.0
    if config.name == "constant" or (config.name == "wsd" and not decay):
        return top
    if config.name == "wsd":
        progress = (step - (max_steps - 1 - decay)) / decay  # 1 in the last step
    else:
        progress = (step - warmup) / max(1, (decay or max_steps) - warmup)  # 1 in the step after the last
    progress = min(1.0, max(0.0, progress))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1 - progress  # 1 falls to 0
    return config.final_fraction + (top - config.final_fraction) * remaining


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Batch sizes and number of steps of a run. A sample is a window of `seq_len` predicted tokens."""

    seq_len: int
    micro_batch_size: int  # samples that a rank runs through the model at once
    world_size: int
    accumulate: int  # micro-batches of a rank in an optimizer step
    max_steps: int
    done: tuple[int, int] = (0, 0)  # steps of earlier processes, maybe with another batch, and their samples

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        return self.micro_batch_size * self.accumulate * self.world_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    def samples(self, step: int) -> int:
        """Samples that the first `step` optimizer steps take, over all ranks."""
        return self.done[1] + (step - self.done[0]) * self.global_batch

    def tokens(self, step: int) -> int:
        """Predicted tokens of the first `step` optimizer steps, over all ranks."""
        return self.samples(step) * self.seq_len

    def __str__(self) -> str:
        return (
            f"{self.micro_batch_size} x {self.seq_len} tokens x {plural(self.accumulate, 'micro-batch')} x "
            f"{plural(self.world_size, 'rank')} = {self.tokens_per_step:,} tokens"
        )


def plan_steps(
    data: "DataConfig | DataModule",
    world_size: int,
    max_steps: int | None,
    max_tokens: int | None,
    done: tuple[int, int] = (0, 0),
) -> Steps:
    """Make the `Steps` of a run from its length in optimizer steps, or in tokens, rounded up to whole steps.

    An optimizer step has the `global_batch_tokens` of the data; if that is None, one micro-batch per rank.
    """
    seq_len, micro_batch_size, global_batch_tokens = data.seq_len, data.micro_batch_size, data.global_batch_tokens
    tokens_at_once = micro_batch_size * seq_len * world_size
    tokens_per_step = tokens_at_once if global_batch_tokens is None else global_batch_tokens
    if tokens_per_step % tokens_at_once or tokens_per_step < tokens_at_once:
        ratio = tokens_per_step / tokens_at_once
        if tokens_per_step < seq_len:
            shorter = tokens_per_step // (micro_batch_size * world_size)
            samples = f"--data.seq_len {shorter}, for shorter samples, or " if shorter >= 16 else ""
            raise RequestError(
                f"a sample has model.decoder.max_position_embeddings, {seq_len:,} tokens, and an optimizer step only "
                f"data.global_batch_tokens {tokens_per_step:,}: give {samples}a larger batch"
            )
        nearest = max(1, round(ratio)) * tokens_at_once
        sizes = [size for size in range(1, micro_batch_size) if tokens_per_step % (size * seq_len * world_size) == 0]
        smaller = f", or give --data.micro_batch_size {sizes[-1]}" if sizes else ""
        raise RequestError(
            f"data.global_batch_tokens {tokens_per_step:,} is not a whole number of micro-batches: micro_batch_size "
            f"{micro_batch_size} x seq_len {seq_len} x {plural(world_size, 'rank')} = {tokens_at_once:,} tokens, "
            f"{tokens_per_step:,} / {tokens_at_once:,} = {ratio:.3f}; the nearest that fits is {nearest:,}{smaller}"
        )
    if max_steps is None and max_tokens is not None:
        max_steps = done[0] + max(0, math.ceil((max_tokens - done[1] * seq_len) / tokens_per_step))
    elif max_steps is None or max_tokens is not None:
        have = "neither is" if max_steps is None else "both are"
        raise RequestError(
            f"give one of trainer.max_steps and trainer.max_tokens (max_epochs is only a limit); {have} set"
        )
    require_at_least(1, "trainer.", max_steps=max_steps)
    return Steps(seq_len, micro_batch_size, world_size, tokens_per_step // tokens_at_once, max_steps, done)
