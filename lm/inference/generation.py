"""Generation: prompts in, tokens out, one at a time.

`generate` is the loop: the logits of the next token from `inference/decode_step`, then a token by `choose_tokens`, as
`Sampling` says. `inference/completion` makes text of the tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lm.data.tokenizer import Begin
from lm.errors import RequestError, RunError, require_at_least
from lm.inference.decode_step import DecodeStep, Step, UncachedStep, check_step
from lm.model.config import DecoderConfig
from lm.model.custom import config_of
from lm.model.decoder import Decoder, evaluating
from lm.system.units import Count

Reason = Literal["eos", "stop", "length", "context"]
HEAD = 1024  # to sort this many and not a whole vocabulary is several times faster on a CPU
LARGEST_SEED = 2**63 - 1  # that torch takes


# ---- generation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How a prompt is continued: how a token is chosen from the logits, and where a text ends.

    The filters are applied in the order of transformers: repetition penalty, temperature, `top_k`, `top_p`, `min_p`.

    Args:
        temperature: Logits are divided by it; 0 always takes the likeliest token.
        top_k: Choose among this many of the likeliest tokens; `null`: among all.
        top_p: Choose among the fewest tokens whose probabilities add up to this.
        min_p: Leave out tokens with less than this share of the likeliest one's probability.
        repetition_penalty: Above 1, tokens of the prompt or the text so far become less likely: their logits are
            divided by it, or multiplied where they are negative.
        max_new_tokens: The most tokens that follow a prompt.
        stop: Strings before which a text ends, as they are; a shell writes a line end as $'\\n'.
        seed: Seed of the random numbers; a new one if not given.
        ignore_eos: Continue after the end of a document, whose token is then part of the text, by its name.
        begin: What stands before a prompt: `eos` if the prompt begins a document, or `nothing`.

    Raises:
        RequestError: a number is out of range, or a stop string is empty.
    """

    temperature: float = 1.0
    top_k: Count | None = None
    top_p: float | None = None  # Holtzman et al., 2019, arXiv:1904.09751
    min_p: float | None = None  # Nguyen et al., 2024, arXiv:2407.01082
    repetition_penalty: float = 1.0  # Keskar et al., 2019, arXiv:1909.05858
    max_new_tokens: Count = Count(128)
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    ignore_eos: bool = False
    begin: Begin = "nothing"

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        require_at_least(1, "", max_new_tokens=self.max_new_tokens, top_k=self.top_k)
        wrong = {
            f"temperature {self.temperature} must not be below 0": not 0 <= self.temperature < math.inf,
            f"top_p {self.top_p} must lie in (0, 1]": self.top_p is not None and not 0 < self.top_p <= 1,
            f"min_p {self.min_p} must lie in [0, 1]": self.min_p is not None and not 0 <= self.min_p <= 1,
            f"repetition_penalty {self.repetition_penalty} must be above 0": not 0 < self.repetition_penalty < math.inf,
            f"seed {self.seed} must lie in 0 to {LARGEST_SEED}": not 0 <= (self.seed or 0) <= LARGEST_SEED,
            "a stop string is empty: every text would end before it begins": "" in self.stop,
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise RequestError(message)


class NewToken(NamedTuple):
    """A token that was generated."""

    row: int  # which prompt it continues
    token: int
    # Why this is the row's last token: end of a document, the caller's request, `max_new_tokens` reached, or the
    # context is full; None: more follow.
    reason: Reason | None
    log_probability: float  # nats, by the model's own distribution: at temperature 1, before any filter
    alternatives: list[tuple[int, float]]  # the likeliest tokens here and their log-probabilities, the likeliest first


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = Sampling(),
    *,
    eos_id: int | None = None,
    ended: Callable[[int, int], bool] | None = None,
    alternatives: int = 0,
    step: Step = "dynamic",
) -> Iterator[NewToken]:
    """Continue prompts; each token is yielded as soon as it is known, row after row.

    At temperature 0 a row does not depend on the others. The decoder is in evaluation mode until the last token was
    taken or the iterator is closed, and torch's global random numbers are not touched.

    Args:
        decoder: or a custom model; on any device. Inside `torch.autocast` it computes in that precision.
        prompts: token ids, in any lengths; an empty prompt begins with `eos_id`, after which documents begin.
        sampling: how tokens are chosen, and how many. What it says of texts is for `inference/completion`.
        eos_id: the token that ends a row; None: none does.
        ended: called with every row and new token but `eos_id`; returns whether the row is to end with it.
        alternatives: how many of the likeliest tokens to report with every one that was chosen.
        step: see `DecodeStep`.
    """
    device, config = next(decoder.parameters()).device, config_of(decoder)
    check_step(step, device)
    rows = [_checked(config, index, list(prompt), eos_id) for index, prompt in enumerate(prompts)]
    if not rows:
        return
    counts = [len(row) for row in rows]
    longest = max(counts)
    limits = [min(sampling.max_new_tokens, config.max_position_embeddings - count) for count in counts]
    # A row is padded with a token of its own, which is there anyway for the penalty on repetition.
    ids = torch.tensor([row + row[:1] * (longest - len(row)) for row in rows], device=device)  # (B, T)
    seen = None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(len(rows), config.vocab_size, dtype=torch.bool, device=device).scatter_(1, ids, True)
    generator = torch.Generator()
    generator.seed() if sampling.seed is None else generator.manual_seed(sampling.seed)
    if isinstance(decoder, Decoder):
        run = DecodeStep(decoder, len(rows), longest + max(limits), step)
    else:
        run = UncachedStep(decoder)

    active = set(range(len(rows)))
    with evaluating(decoder):
        logits = run.read(ids, torch.tensor(counts, device=device))  # (B, V)
        for made in range(1, max(limits) + 1):
            totals = logits.logsumexp(-1, keepdim=True)  # (B, 1)
            if not totals.isfinite().all():
                raise RunError("the logits are not finite: the weights are broken, or a number format overflowed")
            tokens = choose_tokens(logits, sampling, generator, seen)[:, None]  # (B, 1)
            log_probabilities = (logits.gather(-1, tokens) - totals).tolist()
            others = _likeliest_tokens(logits, totals, alternatives) if alternatives else [[] for _ in rows]
            for row, [token] in enumerate(tokens.tolist()):
                if row not in active:
                    continue
                reason: Reason | None = None
                if token == eos_id:
                    reason = "eos"
                elif ended is not None and ended(row, token):
                    reason = "stop"
                elif made == limits[row]:
                    reason = "length" if made == sampling.max_new_tokens else "context"
                if reason:
                    active.remove(row)
                yield NewToken(row, token, reason, *log_probabilities[row], others[row])
            if not active:
                return
            if seen is not None:
                seen.scatter_(1, tokens, True)
            logits = run(tokens)


def _checked(config: DecoderConfig, index: int, prompt: list[int], eos_id: int | None) -> list[int]:
    if not prompt and eos_id is None:
        raise RequestError(f"prompt {index} is empty, and no eos_id is given to begin with")
    prompt = prompt or [eos_id]
    vocab_size, context = config.vocab_size, config.max_position_embeddings
    outside = [token for token in prompt if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(f"prompt {index}: token id {outside[0]} is outside the vocabulary of {vocab_size}")
    if len(prompt) >= context:
        raise RequestError(
            f"prompt {index} leaves no room for a new token: it has {len(prompt)} tokens, and max_position_embeddings "
            f"is {context}; shorten it by {len(prompt) - context + 1} or more"
        )
    return prompt


def _likeliest_tokens(logits: Tensor, totals: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """For each row the likeliest tokens and their log-probabilities."""
    values, ids = logits.topk(count)
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), (values - totals).tolist(), strict=True)]


# ---- the choice of a token -------------------------------------------------------------------------------------------


def choose_tokens(
    logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None, seen: Tensor | None = None
) -> Tensor:
    """A token for each row, `(B,)`, by finite logits `(B, V)`.

    Args:
        generator: random numbers, on the CPU, one for each row, so that a seed means the same on every device;
            None: torch's global ones.
        seen: `(B, V)`, true for the tokens that a row holds, for the repetition penalty.
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
    """The tokens to choose among, at a temperature above 0, on the CPU.

    They are `(B, k)` weights, in proportion to the probabilities, and their ids `(B, k)`; None: all tokens in order.
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
        before = weights.cumsum(-1) - weights  # the sum of the likelier ones
        total = weights.sum(-1, keepdim=True) if sampling.top_k else 1
        weights = weights.where(before < sampling.top_p * total, 0)
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
