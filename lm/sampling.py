"""Sampling: how a token is chosen from the logits. `generation` does it once for every token.

The filters are those of the field, in the order in which transformers applies them: repetition penalty, temperature,
`top_k`, `top_p`, `min_p`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lm.errors import RequestError

HEAD = 1024  # to sort this many and not a whole vocabulary is several times faster on a CPU


@dataclass(frozen=True)
class Sampling:
    """How to choose.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token always.
        top_k: choose among this many of the likeliest tokens; None: among all.
        top_p: choose among the fewest tokens whose probabilities add up to this (Holtzman et al., 2019,
            arXiv:1904.09751); None: among all.
        min_p: leave out tokens with less than this share of the likeliest one's probability (Nguyen et al., 2024,
            arXiv:2407.01082); None: none.
        repetition_penalty: the logit of a token that stands in the prompt or was written is divided by it, or
            multiplied where it is negative (Keskar et al., 2019, arXiv:1909.05858); 1: nothing changes.

    Raises:
        RequestError: a number means nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        wrong = {
            f"temperature {self.temperature} must not be below 0": not 0 <= self.temperature < float("inf"),
            f"top_k {self.top_k} must be at least 1": self.top_k is not None and self.top_k < 1,
            f"top_p {self.top_p} must lie in (0, 1]": self.top_p is not None and not 0 < self.top_p <= 1,
            f"min_p {self.min_p} must lie in [0, 1]": self.min_p is not None and not 0 <= self.min_p <= 1,
            f"repetition_penalty {self.repetition_penalty} must be above 0":
                not 0 < self.repetition_penalty < float("inf"),
        }  # fmt: skip
        for message, is_so in wrong.items():
            if is_so:
                raise RequestError(message)


def choose(
    logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None, seen: Tensor | None = None
) -> Tensor:
    """A token for each row.

    Args:
        logits: `(B, V)`, finite, on any device.
        sampling: how.
        generator: random numbers, on the CPU, one for each row, so that a seed means the same on every device;
            None: torch's global ones.
        seen: `(B, V)`, true for the tokens that a row holds, for the repetition penalty.

    Returns:
        `(B,)` token ids, on the device of the logits.
    """
    if sampling.temperature == 0:
        return penalized(logits, sampling, seen).argmax(-1)
    weights, ids = candidates(logits, sampling, seen)
    sums = weights.double().cumsum(-1)  # (B, k)
    # A share in (0, 1] of the sum falls to the first token that reaches it, which cannot be one of weight 0.
    share = 1 - torch.rand(len(sums), 1, dtype=torch.float64, generator=generator)
    index = torch.searchsorted(sums, share * sums[:, -1:])  # (B, 1)
    return (index if ids is None else ids.gather(-1, index))[:, 0].to(logits.device)


def candidates(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The tokens to choose among.

    Args:
        logits, sampling, seen: as for `choose`, the temperature above 0.

    Returns:
        `(B, k)` weights, in proportion to the probabilities, and the ids `(B, k)` that they belong to; None: of all
        tokens in their order. Both are on the CPU.
    """
    logits = penalized(logits, sampling, seen)
    logits = logits - logits.amax(-1, keepdim=True)  # so that no temperature makes them overflow
    weights, ids = (logits / sampling.temperature).softmax(-1), None  # (B, V)
    if sampling.top_k is not None:
        weights, ids = weights.topk(min(sampling.top_k, weights.shape[-1]))  # (B, k), the likeliest first
    elif sampling.top_p is not None:
        weights, ids = _likeliest(weights, sampling.top_p)
    weights, ids = weights.cpu(), None if ids is None else ids.cpu()  # what follows is the same on every device
    if sampling.top_p is not None:
        before = weights.cumsum(-1) - weights  # what the likelier ones add up to
        all_of_it = weights.sum(-1, keepdim=True) if sampling.top_k else 1
        weights = weights.where(before < sampling.top_p * all_of_it, 0)
    if sampling.min_p is not None:
        weights = weights.where(weights >= sampling.min_p * weights.amax(-1, keepdim=True), 0)
    return weights, ids


def _likeliest(probabilities: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """So many of the likeliest tokens, sorted, that in each row they have this share; mostly a small part of all."""
    size = probabilities.shape[-1]
    weights, ids = probabilities.topk(min(HEAD, size))
    if HEAD < size and (weights.sum(-1) < share).any():
        weights, ids = probabilities.topk(size)
    return weights, ids


def penalized(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """Logits `(B, V)` after the repetition penalty; the same ones where there is none."""
    if seen is None or sampling.repetition_penalty == 1:
        return logits
    factor = sampling.repetition_penalty
    return logits.where(~seen, torch.where(logits < 0, logits * factor, logits / factor))
