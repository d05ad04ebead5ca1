"""Step algebra: what the user asks for in tokens and optimizer steps, as the integers that the loops count in.

A *sample* is one window of `seq_len` predicted tokens. An optimizer step consumes the global batch: every rank takes
`accumulate` micro-batches of `micro_batch_size` samples. Pure arithmetic; a request that does not come out even is
refused with the arithmetic in the message.
"""

import math
from dataclasses import dataclass

from lm.errors import RequestError


@dataclass(frozen=True)
class Steps:
    """The numbers that a training run is made of."""

    seq_len: int
    micro_batch_size: int  # samples a rank runs through the model at once
    world_size: int
    accumulate: int  # micro-batches a rank adds up for one optimizer step
    max_steps: int

    @property
    def global_batch(self) -> int:
        """Samples one optimizer step consumes, over all ranks."""
        return self.micro_batch_size * self.accumulate * self.world_size

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens one optimizer step consumes, over all ranks."""
        return self.global_batch * self.seq_len

    def __str__(self) -> str:
        return (
            f"{self.micro_batch_size} x {self.seq_len} tokens x {self.accumulate} micro-batches x {self.world_size} "
            f"ranks = {self.tokens_per_step:,} tokens a step, {self.max_steps:,} steps"
        )


def plan_steps(
    *,
    seq_len: int,
    micro_batch_size: int,
    global_batch_tokens: int | None,
    world_size: int,
    max_steps: int | None,
    max_tokens: int | None,
) -> Steps:
    """Turn a request into counts.

    Args:
        global_batch_tokens: tokens an optimizer step should see; None takes one micro-batch a rank.
        max_steps: optimizer steps; or
        max_tokens: the tokens to train on, rounded up to whole steps. Exactly one of the two.

    Raises:
        RequestError: where the request does not come out even, with the arithmetic and the nearest that does.
    """
    if seq_len < 1 or micro_batch_size < 1:
        raise RequestError(f"data.seq_len {seq_len} and data.micro_batch_size {micro_batch_size} must be at least 1")
    at_once = micro_batch_size * seq_len * world_size
    wanted = at_once if global_batch_tokens is None else global_batch_tokens
    if wanted % at_once or wanted < at_once:
        nearest = max(1, round(wanted / at_once)) * at_once
        raise RequestError(
            f"data.global_batch_tokens {wanted:,} is not a whole number of micro-batches: micro_batch_size "
            f"{micro_batch_size} x seq_len {seq_len} x {world_size} ranks = {at_once:,} tokens, "
            f"{wanted:,} / {at_once:,} = {wanted / at_once:.3f}; the nearest that fits is {nearest:,}"
        )
    if (max_steps is None) == (max_tokens is None):
        have = "neither is" if max_steps is None else "both are"
        raise RequestError(f"give one of trainer.max_steps and trainer.max_tokens; {have} set")
    if max_steps is None:
        max_steps = math.ceil(max_tokens / wanted)
    if max_steps < 1:
        raise RequestError(f"trainer.max_steps {max_steps} must be at least 1")
    return Steps(seq_len, micro_batch_size, world_size, wanted // at_once, max_steps)
