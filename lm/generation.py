"""Generation: prompts in, tokens out, one at a time. A prompt is read once and every new token once (`model/cache`).

`callbacks/samples` watches a training with it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lm.errors import RequestError, RunError
from lm.model.cache import Cache, Continuation
from lm.model.decoder import Decoder

Reason = Literal["eos", "length", "context"]


class NewToken(NamedTuple):
    """A token that was generated."""

    row: int  # which prompt it continues
    token: int
    reason: Reason | None  # None where the row goes on, else why this is its last, as in `Completion`


class Completion(NamedTuple):
    """What follows a prompt."""

    tokens: list[int]  # without the one that ended it
    reason: Reason  # the end of a document, as many tokens as were asked for, or a context that is full


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> list[Completion]:
    """Continue prompts, all of them together. Arguments and errors are those of `stream`."""
    new = stream(
        decoder, prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        eos_id=eos_id, generator=generator,
    )  # fmt: skip
    tokens: list[list[int]] = [[] for _ in prompts]
    reasons: list[Reason] = ["length"] * len(prompts)
    for row, token, reason in new:
        if reason != "eos":
            tokens[row].append(token)
        reasons[row] = reason or reasons[row]
    return [Completion(*both) for both in zip(tokens, reasons, strict=True)]


def stream(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[NewToken]:
    """Continue prompts and hand out each token as soon as it is there, row after row.

    What a row becomes does not depend on the rows beside it where the temperature is 0. The decoder is in evaluation
    mode until the last token was taken or the iterator is closed, and torch's global random numbers are not touched.

    Args:
        decoder: on any device; inside `torch.autocast` it computes in that precision.
        prompts: token ids, in any lengths; an empty prompt begins with `eos_id`, after which documents begin.
        max_new_tokens: the most tokens that follow a prompt. Where the context is full before, a row ends there.
        temperature: logits are divided by it; 0 takes the likeliest token always.
        top_k: choose among this many of the likeliest tokens; None: among all.
        top_p: choose among the fewest tokens whose probabilities add up to this, after `top_k` (Holtzman et al., 2019,
            arXiv:1904.09751); None: among all.
        eos_id: the token that ends a row; None: none does.
        generator: random numbers, on the CPU, so that a seed means the same on every device; None: from a new seed.

    Raises:
        RequestError: a number is out of range, a prompt is empty and there is no `eos_id`, holds an id outside the
            vocabulary, or leaves no room for a token in the context.
        RunError: logits are not finite.
    """
    check(max_new_tokens, temperature, top_k, top_p)
    rows = [_checked(decoder, index, list(prompt), eos_id) for index, prompt in enumerate(prompts)]
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return _stream(decoder, rows, max_new_tokens, temperature, top_k, top_p, eos_id, generator)


def check(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, name: str = "") -> None:
    """Raise RequestError for a number that means nothing; `name` is what goes before its own in the message."""
    wrong = {
        f"max_new_tokens {max_new_tokens} must be at least 1": max_new_tokens < 1,
        f"temperature {temperature} must not be below 0": not temperature >= 0,
        f"top_k {top_k} must be at least 1": top_k is not None and top_k < 1,
        f"top_p {top_p} must lie in (0, 1]": top_p is not None and not 0 < top_p <= 1,
    }
    for message, is_so in wrong.items():
        if is_so:
            raise RequestError(name + message)


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
    decoder: Decoder, prompts: list[list[int]], max_new_tokens: int, temperature: float, top_k: int | None,
    top_p: float | None, eos_id: int | None, generator: torch.Generator,
) -> Iterator[NewToken]:  # fmt: skip
    if not prompts:
        return
    weight = decoder.embed_tokens.weight
    device = weight.device
    half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
    counts = [len(prompt) for prompt in prompts]
    longest = max(counts)
    room = [min(max_new_tokens, decoder.config.max_position_embeddings - count) for count in counts]
    cache = Cache(decoder.config, len(prompts), longest + max(room), device, half)
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)  # (B, T)
    going, own = set(range(len(prompts))), torch.tensor(counts, device=device)
    with _evaluating(decoder):
        for made in range(1, max(room) + 1):
            logits = _logits(decoder, ids, cache.extend(ids.shape[1], own))  # (B, V)
            tokens = choose(logits, temperature, top_k, top_p, generator)  # (B,)
            for row, token in enumerate(tokens.tolist()):
                if row not in going:
                    continue
                reason = _reason(token == eos_id, made == max_new_tokens, made == room[row])
                if reason:
                    going.remove(row)
                yield NewToken(row, token, reason)
            if not going:
                return
            ids, own = tokens[:, None].to(device), torch.ones_like(own)


def _reason(eos: bool, length: bool, context: bool) -> Reason | None:
    return "eos" if eos else "length" if length else "context" if context else None


@torch.no_grad()
def _logits(decoder: Decoder, ids: Tensor, continuation: Continuation) -> Tensor:
    # Every step has another shape; blocks that are compiled for training's run as they are written here.
    with torch.compiler.set_stance("force_eager"):
        logits = decoder(ids, continuation=continuation).float().cpu()
    if not logits.isfinite().all():
        raise RunError("the logits are not finite: the weights are broken, or a number format overflowed")
    return logits


def choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """A token for each row.

    Args:
        logits: `(B, V)`.
        temperature, top_k, top_p, generator: as for `stream`.

    Returns:
        `(B,)` token ids.
    """
    if temperature == 0:
        return logits.argmax(-1)
    probabilities, ids = candidates(logits, temperature, top_k, top_p)
    index = torch.multinomial(probabilities, 1, generator=generator)  # (B, 1)
    return (index if ids is None else ids.gather(-1, index))[:, 0]


def candidates(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> tuple[Tensor, Tensor | None]:
    """The tokens to choose among.

    Args:
        logits: `(B, V)`.
        temperature, top_k, top_p: as for `stream`, the temperature above 0.

    Returns:
        `(B, k)` weights, in proportion to the probabilities, and the ids `(B, k)` that they belong to; None: of all
        tokens in their order.
    """
    logits = logits - logits.amax(-1, keepdim=True)  # so that no temperature makes them overflow
    if top_k is None and top_p is None:
        return (logits / temperature).softmax(-1), None
    size = logits.shape[-1]
    logits, ids = logits.topk(min(top_k or size, size))  # (B, k), the likeliest first
    probabilities = (logits / temperature).softmax(-1)
    if top_p is not None:
        before = probabilities.cumsum(-1) - probabilities  # what the likelier ones add up to
        probabilities = probabilities.where(before < top_p, 0)
    return probabilities, ids


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode while it lasts; then each part is as it was."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
