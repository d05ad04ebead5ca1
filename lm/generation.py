"""Generation: prompts in, tokens out, one at a time. A prompt is read once and every new token once (`model/cache`).

`sampling` chooses the tokens, `completion` makes text of them, and `callbacks/samples` watches a training with it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lm.decode_step import DecodeStep, Step, check_step, slots_for
from lm.errors import RequestError, RunError
from lm.model.cache import Cache
from lm.model.decoder import Decoder
from lm.model.mode import evaluating
from lm.sampling import Sampling, choose

Reason = Literal["eos", "stop", "length", "context"]


class NewToken(NamedTuple):
    """A token that was generated."""

    row: int  # which prompt it continues
    token: int
    reason: Reason | None  # None where the row goes on, else why this is its last, as in `Completion`
    log_probability: float  # nats, by the model's own distribution: at temperature 1, before any filter
    alternatives: list[tuple[int, float]]  # the likeliest tokens here and their log-probabilities, the likeliest first


class Completion(NamedTuple):
    """What follows a prompt."""

    tokens: list[int]  # without the one that ended a document
    reason: Reason  # the end of a document, the caller's wish, as many as were asked for, or a context that is full


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> list[Completion]:
    """Continue prompts, all of them together. Arguments and errors are those of `stream`."""
    tokens: list[list[int]] = [[] for _ in prompts]
    reasons: list[Reason] = ["length"] * len(prompts)
    for new in stream(
        decoder, prompts, max_new_tokens=max_new_tokens, sampling=sampling, eos_id=eos_id, generator=generator
    ):
        if new.reason != "eos":
            tokens[new.row].append(new.token)
        reasons[new.row] = new.reason or reasons[new.row]
    return [Completion(*both) for both in zip(tokens, reasons, strict=True)]


def stream(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
    ended: Callable[[int, int], bool] | None = None,
    alternatives: int = 0,
    step: Step = "growing",
) -> Iterator[NewToken]:
    """Continue prompts and hand out each token as soon as it is there, row after row.

    What a row becomes does not depend on the rows beside it where the temperature is 0. The decoder is in evaluation
    mode until the last token was taken or the iterator is closed, and torch's global random numbers are not touched.

    Args:
        decoder: on any device; inside `torch.autocast` it computes in that precision.
        prompts: token ids, in any lengths; an empty prompt begins with `eos_id`, after which documents begin.
        max_new_tokens: the most tokens that follow a prompt. Where the context is full before, a row ends there.
        sampling: how tokens are chosen.
        eos_id: the token that ends a row; None: none does.
        generator: random numbers, on the CPU, so that a seed means the same on every device; None: from a new seed.
        ended: is asked for every row and new token whether the row is to end with it; not for `eos_id`.
        alternatives: how many of the likeliest tokens to report with every one that was chosen.
        step: how the decoder is run; see `DecodeStep`.

    Raises:
        RequestError: a number is out of range, a prompt is empty and there is no `eos_id`, holds an id outside the
            vocabulary, or leaves no room for a token in the context; or `step` is impossible.
        RunError: logits are not finite.
    """
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens {max_new_tokens} must be at least 1")
    if not 0 <= alternatives <= decoder.config.vocab_size:
        raise RequestError(f"alternatives {alternatives} must lie in 0 to {decoder.config.vocab_size}, the vocabulary")
    check_step(step, decoder.embed_tokens.weight.device)
    rows = [_checked(decoder, index, list(prompt), eos_id) for index, prompt in enumerate(prompts)]
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return _stream(decoder, rows, max_new_tokens, sampling, eos_id, generator, ended, alternatives, step)


def _checked(decoder: Decoder, index: int, prompt: list[int], eos_id: int | None) -> list[int]:
    if not prompt and eos_id is None:
        raise RequestError(f"prompt {index} is empty, and no eos_id is given to begin with")
    prompt = prompt or [eos_id]
    vocab_size, context = decoder.config.vocab_size, decoder.config.max_position_embeddings
    outside = [token for token in prompt if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(f"prompt {index}: token id {outside[0]} is outside the vocabulary of {vocab_size}")
    if len(prompt) >= context:
        raise RequestError(
            f"prompt {index} leaves no room for a new token: it has {len(prompt)} tokens, and max_position_embeddings "
            f"is {context}; shorten it by {len(prompt) - context + 1} or more"
        )
    return prompt


def _stream(
    decoder: Decoder, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling, eos_id: int | None,
    generator: torch.Generator, ended: Callable[[int, int], bool] | None, alternatives: int, step: Step,
) -> Iterator[NewToken]:  # fmt: skip
    if not prompts:
        return
    weight = decoder.embed_tokens.weight
    device = weight.device
    half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
    counts = [len(prompt) for prompt in prompts]
    longest = max(counts)
    room = [min(max_new_tokens, decoder.config.max_position_embeddings - count) for count in counts]
    cache = Cache(decoder.config, len(prompts), slots_for(longest + max(room), step), device, half)
    run = DecodeStep(decoder, cache, step)
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)  # (B, T)
    going = set(range(len(prompts)))
    seen = _seen(prompts, decoder.config.vocab_size, device) if sampling.repetition_penalty != 1 else None
    with evaluating(decoder):
        logits = run.read(ids, torch.tensor(counts, device=device))  # (B, V)
        for made in range(1, max(room) + 1):
            totals = logits.logsumexp(-1, keepdim=True)  # (B, 1)
            if not totals.isfinite().all():
                raise RunError("the logits are not finite: the weights are broken, or a number format overflowed")
            tokens = choose(logits, sampling, generator, seen)[:, None]  # (B, 1)
            probabilities = (logits.gather(-1, tokens) - totals).tolist()
            others = _likeliest(logits, totals, alternatives) if alternatives else [[] for _ in prompts]
            for row, [token] in enumerate(tokens.tolist()):
                if row not in going:
                    continue
                stop = ended is not None and token != eos_id and ended(row, token)
                reason = _reason(token == eos_id, stop, made == max_new_tokens, made == room[row])
                if reason:
                    going.remove(row)
                yield NewToken(row, token, reason, *probabilities[row], others[row])
            if not going:
                return
            if seen is not None:
                seen.scatter_(1, tokens, True)
            logits = run(tokens)


def _reason(eos: bool, stop: bool, length: bool, context: bool) -> Reason | None:
    return "eos" if eos else "stop" if stop else "length" if length else "context" if context else None


def _seen(prompts: list[list[int]], vocab_size: int, device: torch.device) -> Tensor:
    """The tokens that each prompt holds, `(B, V)`."""
    seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    return seen.to(device)


def _likeliest(logits: Tensor, totals: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """For each row the likeliest tokens and their log-probabilities."""
    values, ids = logits.topk(count)
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), (values - totals).tolist(), strict=True)]
