"""Generation: prompts in, tokens out, one at a time, over a cache of the keys and values that were computed before.

`Cache` holds these, `DecodeStep` runs the decoder, `Sampling` says how a token is chosen, `stream` and `generate`
continue prompts. `inference/completion` makes text of the tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lm.errors import RequestError, RunError, require_at_least
from lm.model.attention import AttentionMask, Past
from lm.model.config import DecoderConfig
from lm.model.custom import config_of
from lm.model.decoder import Continuation, Decoder, Rotary, evaluating, rotary_table

Step = Literal["dynamic", "static", "cuda_graph"]
Reason = Literal["eos", "stop", "length", "context"]
SMALLEST = 256  # slots of a static step, at least
WARMUP = 2  # steps before one is captured, so that every kernel is loaded
HEAD = 1024  # to sort this many and not a whole vocabulary is several times faster on a CPU


# ---- cache -----------------------------------------------------------------------------------------------------------


class Cache:
    """Keys and values of every layer, for rows of unequal length.

    A token's slot is its position, so a mask follows from positions alone. Shorter rows are padded at the end: padding
    takes slots that the row's own tokens do not attend to, and the next tokens overwrite them.

    Args:
        config: of the decoder.
        rows: B.
        slots: S, the most tokens of a row, with its padding.
        device: of the decoder.
        dtype: the precision of the computation.
    """

    def __init__(self, config: DecoderConfig, rows: int, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.windows = config.windows
        self.table = rotary_table(slots, config.head_dim, config.rope_theta, device)
        shape = (len(self.windows), 2, rows, slots, config.num_key_value_heads, config.head_dim)
        self.layers = torch.zeros(shape, dtype=dtype, device=device)  # keys, then values
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # (B,), tokens of each row
        self.used = 0  # slots that may hold something, the same for all rows

    def extend(self, length: int, counts: Tensor) -> Continuation:
        """Reserve slots for the next tokens. The decoder must then be called once with the result.

        Args:
            length: T, with the padding of shorter rows.
            counts: `(B,)`, tokens of each row without its padding, at least one.
        """
        self.used += length
        return self.place(length, counts, self.used)

    def place(self, length: int, counts: Tensor, slots: int) -> Continuation:
        """Like `extend`, for tokens that `used` counts already, with a mask over a given number of slots.

        The shapes do not depend on the number of tokens so far, so the step can be compiled or captured as a graph.

        Args:
            length, counts: as for `extend`.
            slots: S, at least `used`.
        """
        device = self.lengths.device
        positions = self.lengths[:, None] + torch.arange(length, device=device)  # (B, T)
        self.lengths += counts
        distance = positions[:, :, None] - torch.arange(slots, device=device)  # (B, T, S), from a slot to a token
        dense = {None: (distance >= 0)[:, None]}  # (B, 1, T, S)
        for window in set(self.windows) - {None}:
            dense[window] = dense[None] & (distance < window)[:, None]
        masks = [
            AttentionMask(window, None, dense[window], Past(keys, values, positions))
            for window, (keys, values) in zip(self.windows, self.layers, strict=True)
        ]
        return Continuation(Rotary(*self.table, positions.int()), masks, counts - 1)


# ---- decode step -----------------------------------------------------------------------------------------------------


def slots_for(tokens: int, step: Step) -> int:
    """How many slots a step attends to for this many tokens: the same number, or a power of two."""
    return tokens if step == "dynamic" else max(SMALLEST, 1 << (tokens - 1).bit_length())


def check_step(step: Step, device: torch.device) -> None:
    """Raise RequestError where a step is to be a CUDA graph and cannot be one."""
    kind = device.type
    if step == "cuda_graph" and (kind != "cuda" or torch.is_autocast_enabled(kind)):
        where = "inside torch.autocast" if kind == "cuda" else f"on {kind}"
        raise RequestError(f"a step of generation cannot be a CUDA graph {where}")


class DecodeStep:
    """Runs the decoder on prompts, and then on one new token of each row at a time.

    Args:
        decoder: in evaluation mode.
        cache: with `slots_for` slots for all tokens.
        step: `dynamic`: a step attends to the slots in use, so its shape changes at every step; `static`: to a fixed
            number of slots, doubled when they are full, so that compiled blocks are compiled once; `cuda_graph`: the
            same, captured (see `check_step`).
    """

    def __init__(self, decoder: Decoder, cache: Cache, step: Step) -> None:
        self.decoder, self.cache, self.step = decoder, cache, step
        self.ones = torch.ones_like(cache.lengths)  # (B,)
        self.slots = 0  # of the newest static step
        self.calls = 0  # static steps with this many slots
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def read(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Logits `(B, V)` in fp32 after more tokens `(B, T)`, of which `counts` `(B,)` are a row's own.

        Every call has another shape, so compiled blocks run uncompiled.
        """
        with torch.compiler.set_stance("force_eager"):
            return self.decoder(ids, continuation=self.cache.extend(ids.shape[1], counts)).float()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits `(B, V)` after one more token of each row `(B, 1)`, in fp32; the next step may overwrite them."""
        if self.step == "dynamic":
            return self.read(tokens, self.ones)
        self.cache.used += 1
        slots = slots_for(self.cache.used, self.step)
        if slots != self.slots:
            self.slots, self.calls, self.graph = slots, 0, None
        self.calls += 1
        if self.step == "static" or self.calls <= WARMUP:
            return self._static(tokens)
        if self.graph is None:
            self._capture(tokens)
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.logits

    def _static(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens, continuation=self.cache.place(1, self.ones, self.slots)).float()

    def _capture(self, tokens: Tensor) -> None:
        self.tokens = tokens.clone()
        self.graph = torch.cuda.CUDAGraph()
        device = tokens.device  # its own stream: torch's stream for capturing is on the device that captured first
        with torch.cuda.device(device), torch.cuda.graph(self.graph, stream=torch.cuda.Stream(device)):
            self.logits = self._static(self.tokens)


class WholeTexts:
    """As `DecodeStep`, for a model of one's own, which has no cache: every step reads the whole texts."""

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder
        self.rows: list[Tensor] = []  # of (t,) ids each, without padding

    @torch.no_grad()
    def read(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Logits `(B, V)` in fp32 after prompts `(B, T)`, of which `counts` `(B,)` are a row's own."""
        self.rows = [row[:count] for row, count in zip(ids, counts.tolist())]
        return self._logits()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits `(B, V)` after one more token of each row `(B, 1)`, in fp32."""
        longest = config_of(self.decoder).max_position_embeddings  # a row that has ended is still there
        self.rows = [torch.cat((row, token))[-longest:] for row, token in zip(self.rows, tokens)]
        return self._logits()

    def _logits(self) -> Tensor:
        ids = nn.utils.rnn.pad_sequence(self.rows, batch_first=True)  # (B, T)
        last = torch.tensor([len(row) - 1 for row in self.rows], device=ids.device)
        with torch.compiler.set_stance("force_eager"):
            return self.decoder(ids)[torch.arange(len(ids), device=ids.device), last].float()


# ---- sampling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the logits; the filters are applied in the order of transformers: repetition penalty,
    temperature, `top_k`, `top_p`, `min_p`.

    Attributes:
        temperature: logits are divided by it; 0 always takes the likeliest token.
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
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise RequestError(message)


def choose_tokens(
    logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None, seen: Tensor | None = None
) -> Tensor:
    """A token for each row.

    Args:
        logits: `(B, V)`, finite, on any device.
        sampling: temperature and filters.
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
        logits, sampling, seen: as for `choose_tokens`, the temperature above 0.

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


# ---- generation ------------------------------------------------------------------------------------------------------


class NewToken(NamedTuple):
    """A token that was generated."""

    row: int  # which prompt it continues
    token: int
    reason: Reason | None  # why this is the row's last token, as in `Completion`; None: more follow
    log_probability: float  # nats, by the model's own distribution: at temperature 1, before any filter
    alternatives: list[tuple[int, float]]  # the likeliest tokens here and their log-probabilities, the likeliest first


class Completion(NamedTuple):
    """What follows a prompt."""

    tokens: list[int]  # without the one that ended a document
    reason: Reason  # end of a document, the caller's request, `max_new_tokens` reached, or the context is full


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
    step: Step = "dynamic",
) -> Iterator[NewToken]:
    """Continue prompts; each token is yielded as soon as it is known, row after row.

    At temperature 0 a row does not depend on the others. The decoder is in evaluation mode until the last token was
    taken or the iterator is closed, and torch's global random numbers are not touched.

    Args:
        decoder: on any device; inside `torch.autocast` it computes in that precision.
        prompts: token ids, in any lengths; an empty prompt begins with `eos_id`, after which documents begin.
        max_new_tokens: the most tokens that follow a prompt. Where the context is full before, a row ends there.
        sampling: how tokens are chosen.
        eos_id: the token that ends a row; None: none does.
        generator: random numbers, on the CPU, so that a seed means the same on every device; None: from a new seed.
        ended: called with every row and new token but `eos_id`; returns whether the row is to end with it.
        alternatives: how many of the likeliest tokens to report with every one that was chosen.
        step: how the decoder is run; see `DecodeStep`.

    Raises:
        RequestError: a number is out of range; a prompt is empty without an `eos_id`, has an id outside the vocabulary,
            or fills the context; or `step` is impossible on this device.
        RunError: logits are not finite.
    """
    require_at_least(1, "", max_new_tokens=max_new_tokens)
    vocab_size = config_of(decoder).vocab_size
    if not 0 <= alternatives <= vocab_size:
        raise RequestError(f"alternatives {alternatives} must lie in 0 to {vocab_size}, the vocabulary")
    check_step(step, next(decoder.parameters()).device)
    rows = [_checked(decoder, index, list(prompt), eos_id) for index, prompt in enumerate(prompts)]
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return _stream(decoder, rows, max_new_tokens, sampling, eos_id, generator, ended, alternatives, step)


def _checked(decoder: Decoder, index: int, prompt: list[int], eos_id: int | None) -> list[int]:
    if not prompt and eos_id is None:
        raise RequestError(f"prompt {index} is empty, and no eos_id is given to begin with")
    prompt = prompt or [eos_id]
    config = config_of(decoder)
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


def _stream(
    decoder: Decoder, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling, eos_id: int | None,
    generator: torch.Generator, ended: Callable[[int, int], bool] | None, alternatives: int, step: Step,
) -> Iterator[NewToken]:  # fmt: skip
    if not prompts:
        return
    weight, config = next(decoder.parameters()), config_of(decoder)
    device = weight.device
    half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
    counts = [len(prompt) for prompt in prompts]
    longest = max(counts)
    limits = [min(max_new_tokens, config.max_position_embeddings - count) for count in counts]
    if isinstance(decoder, Decoder):
        cache = Cache(config, len(prompts), slots_for(longest + max(limits), step), device, half)
        run = DecodeStep(decoder, cache, step)
    else:
        run = WholeTexts(decoder)
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)  # (B, T)
    active = set(range(len(prompts)))
    seen = _seen(prompts, config.vocab_size, device) if sampling.repetition_penalty != 1 else None
    with evaluating(decoder):
        logits = run.read(ids, torch.tensor(counts, device=device))  # (B, V)
        for made in range(1, max(limits) + 1):
            totals = logits.logsumexp(-1, keepdim=True)  # (B, 1)
            if not totals.isfinite().all():
                raise RunError("the logits are not finite: the weights are broken, or a number format overflowed")
            tokens = choose_tokens(logits, sampling, generator, seen)[:, None]  # (B, 1)
            probabilities = (logits.gather(-1, tokens) - totals).tolist()
            others = _alternatives(logits, totals, alternatives) if alternatives else [[] for _ in prompts]
            for row, [token] in enumerate(tokens.tolist()):
                if row not in active:
                    continue
                stop = ended is not None and token != eos_id and ended(row, token)
                reason = _reason(token == eos_id, stop, made == max_new_tokens, made == limits[row])
                if reason:
                    active.remove(row)
                yield NewToken(row, token, reason, *probabilities[row], others[row])
            if not active:
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


def _alternatives(logits: Tensor, totals: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """For each row the likeliest tokens and their log-probabilities."""
    values, ids = logits.topk(count)
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), (values - totals).tolist(), strict=True)]
