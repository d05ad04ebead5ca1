"""Generation: continue prompts with tokens, one at a time.

`generate` is the loop: the logits of each row's next token, then `choose_tokens` with the options of `Sampling`. The
logits come from `DecodeStep`, a decoder over a `Cache` of the keys and values computed so far, or from
`UncachedStep`, for any other model. `inference/completion` turns tokens into text.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lm.errors import RequestError, RunError
from lm.inference.sampling import Sampling
from lm.model.attention import AttentionMask, Past
from lm.model.config import DecoderConfig
from lm.model.decoder import Continuation, Decoder, Rotary, config_of, evaluating, rotary_table

Reason = Literal["eos", "stop", "length", "context"]
Step = Literal["dynamic", "static", "cuda_graph"]
HEAD = 1024  # sorting only this many of the vocabulary is several times faster on a CPU
SMALLEST = 256  # least number of slots of a static step
WARMUP = 2  # steps before a graph is captured, so that all kernels are loaded


# ---- generation ------------------------------------------------------------------------------------------------------


class NewToken(NamedTuple):
    """A generated token."""

    row: int  # index of the prompt that it continues
    token: int
    # Why this is the row's last token: end of a document, the caller's request, `max_new_tokens` reached, or the
    # context is full; None: more follow.
    reason: Reason | None
    log_probability: float  # nats, by the model's own distribution: at temperature 1, before any filter


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = Sampling(),
    *,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    ended: Callable[[int, int], bool] | None = None,
    step: Step = "dynamic",
) -> Iterator[NewToken]:
    """Continue prompts; each token is yielded as soon as it is known, row after row.

    At temperature 0, rows are independent of each other. The decoder is in evaluation mode until the last token was
    consumed or the iterator is closed, and torch's global random state is not changed.

    Args:
        decoder: or a custom model; on any device. Inside `torch.autocast` it computes in that precision.
        prompts: token ids, in any lengths, at least one each.
        sampling: how tokens are chosen, and how many. Its options for texts are for `inference/completion`.
        eos_id: the token that ends a row; None: none does.
        vocab_size: that of the tokenizer: the ids from it on, which a model may have, stand for no text and are never
            chosen.
        ended: called with every row and new token but `eos_id`; returns whether the row is to end with it.
        step: see `DecodeStep`.
    """
    device, config = next(decoder.parameters()).device, config_of(decoder)
    check_step(step, device)
    rows, context = [list(prompt) for prompt in prompts], config.max_position_embeddings
    if not rows:
        return
    counts = [len(row) for row in rows]
    longest = max(counts)
    if longest >= context:
        raise RequestError(
            f"prompt {counts.index(longest) + 1} leaves no room for a new token: it has {longest} tokens, and the "
            f"context has {context}; shorten it by {longest - context + 1} or more"
        )
    limits = [min(sampling.max_new_tokens, context - count) for count in counts]
    ids = torch.tensor([row + row[:1] * (longest - len(row)) for row in rows], device=device)  # (B, T)
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
            tokens = choose_tokens(logits[:, :vocab_size], sampling, generator)[:, None]  # (B, 1)
            log_probabilities = (logits.gather(-1, tokens) - totals).tolist()
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
                yield NewToken(row, token, reason, *log_probabilities[row])
            if not active:
                return
            logits = run(tokens)


# ---- the choice of a token -------------------------------------------------------------------------------------------


def choose_tokens(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """Choose a token for each row, `(B,)`, from finite logits `(B, V)`.

    The random numbers are drawn on the CPU, one for each row, so that a seed gives the same on every device; without a
    generator, torch's global one is used.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    weights, ids = candidates(logits, sampling)
    sums = weights.double().cumsum(-1)  # (B, k)
    # A share in (0, 1] of the sum selects the first token whose sum reaches it, which cannot have weight 0.
    share = 1 - torch.rand(len(sums), 1, dtype=torch.float64, generator=generator)
    index = torch.searchsorted(sums, share * sums[:, -1:])  # (B, 1)
    return (index if ids is None else ids.gather(-1, index))[:, 0].to(logits.device)


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """The tokens to choose from, at a temperature above 0, on the CPU.

    Returns weights `(B, k)`, proportional to probabilities, and their ids `(B, k)`, or None for all tokens in order.
    """
    logits = logits - logits.amax(-1, keepdim=True)  # so that no temperature causes overflow
    weights, ids = (logits / sampling.temperature).softmax(-1), None  # (B, V)
    if sampling.top_k is not None:
        weights, ids = weights.topk(min(sampling.top_k, weights.shape[-1]))  # (B, k), the likeliest first
    elif sampling.top_p is not None:
        weights, ids = _likeliest(weights, sampling.top_p)
    weights, ids = weights.cpu(), None if ids is None else ids.cpu()  # from here on the same on every device
    if sampling.top_p is not None:
        before = weights.cumsum(-1) - weights  # sum over likelier tokens
        total = weights.sum(-1, keepdim=True) if sampling.top_k else 1
        weights = weights.where(before < sampling.top_p * total, 0)
    return weights, ids


def _likeliest(probabilities: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, sorted: enough for their probabilities to sum to at least `share` in each row."""
    size = probabilities.shape[-1]
    weights, ids = probabilities.topk(min(HEAD, size))
    if HEAD < size and (weights.sum(-1) < share).any():
        weights, ids = probabilities.topk(size)
    return weights, ids


# ---- the logits of the next token ------------------------------------------------------------------------------------


class Cache:
    """Keys and values of every layer, for rows of unequal length.

    A token's slot is its position, so masks depend only on positions. Shorter rows are padded at the end: padding
    takes slots that the row's own tokens do not attend to, and the next tokens overwrite them. `slots` must suffice for
    the longest row, with its padding.
    """

    def __init__(self, config: DecoderConfig, rows: int, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.windows = config.windows
        self.table = rotary_table(slots, config.head_dim, config.rope_theta, device, config.rope_scaling)
        shape = (len(self.windows), 2, rows, slots, config.num_key_value_heads, config.head_dim)
        # Keys, then values.
        self.layers = torch.zeros(shape, dtype=dtype, device=device)  # pyright: ignore[reportCallIssue]
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # (B,), tokens of each row

    def extend(self, length: int, counts: Tensor, slots: int) -> Continuation:
        """Reserve slots for the next T tokens, of which `counts` `(B,)`, 1 or more, are not padding.

        The first S = `slots` are attended to: at least those in use, with the new ones. The decoder must be called once
        with the result. The shapes do not depend on the number of tokens so far, so the step can be compiled or
        captured as a graph.
        """
        device = self.lengths.device
        positions = self.lengths[:, None] + torch.arange(length, device=device)  # (B, T)
        self.lengths += counts
        distance = positions[:, :, None] - torch.arange(slots, device=device)  # (B, T, S), of each slot from each token
        dense: dict[int | None, Tensor] = {None: (distance >= 0)[:, None]}  # (B, 1, T, S)
        for window in filter(None, set(self.windows)):
            dense[window] = dense[None] & (distance < window)[:, None]
        masks = [
            AttentionMask(window, None, dense[window], Past(keys, values, positions))
            for window, (keys, values) in zip(self.windows, self.layers, strict=True)
        ]
        return Continuation(Rotary(*self.table, positions.int()), masks, counts - 1)


def slots_for(tokens: int, step: Step) -> int:
    """Number of slots that a step attends to for this many tokens: the same number, or a power of two."""
    return tokens if step == "dynamic" else max(SMALLEST, 1 << (tokens - 1).bit_length())


def check_step(step: Step, device: torch.device) -> None:
    """Raise RequestError if a CUDA graph is requested but not possible."""
    kind = device.type
    if step == "cuda_graph" and (kind != "cuda" or torch.is_autocast_enabled(kind)):
        where = "inside torch.autocast" if kind == "cuda" else f"on {kind}"
        raise RequestError(f"a step of generation cannot be a CUDA graph {where}")


class DecodeStep:
    """Runs a decoder in evaluation mode: on prompts, then on one new token per row at a time.

    Args:
        tokens: length of the longest row, with its padding.
        step: `dynamic`: a step attends to the slots in use, so its shape changes at every step; `static`: to a fixed
            number of slots, doubled when they are full, so that compiled blocks are compiled once; `cuda_graph`: the
            same, captured (see `check_step`).
    """

    def __init__(self, decoder: Decoder, rows: int, tokens: int, step: Step) -> None:
        weight = next(decoder.parameters())
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        self.decoder, self.step = decoder, step
        self.cache = Cache(decoder.config, rows, slots_for(tokens, step), weight.device, dtype)
        self.ones = torch.ones_like(self.cache.lengths)  # (B,)
        self.used = 0  # number of slots in use, the same for all rows
        self.slots = 0  # number of slots of the newest static step
        self.calls = 0  # number of static steps with this many slots
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def read(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Logits `(B, V)` in fp32 after more tokens `(B, T)`, of which `counts` `(B,)` are not padding.

        Every call has a new shape, so compiled blocks run uncompiled.
        """
        self.used += ids.shape[1]
        with torch.compiler.set_stance("force_eager"):
            return self.decoder(ids, continuation=self.cache.extend(ids.shape[1], counts, self.used)).float()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits `(B, V)` after one more token of each row `(B, 1)`, in fp32; the next step may overwrite them."""
        if self.step == "dynamic":
            return self.read(tokens, self.ones)
        self.used += 1
        slots = slots_for(self.used, self.step)
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
        return self.decoder(tokens, continuation=self.cache.extend(1, self.ones, self.slots)).float()

    def _capture(self, tokens: Tensor) -> None:
        self.tokens = tokens.clone()
        self.graph = torch.cuda.CUDAGraph()
        device = tokens.device  # a stream on this device: torch's capture stream is on the device of the first capture
        with torch.cuda.device(device), torch.cuda.graph(self.graph, stream=torch.cuda.Stream(device)):
            self.logits = self._static(self.tokens)


class UncachedStep:
    """Like `DecodeStep`, for a custom model, which has no cache: every step reads whole rows."""

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder
        self.rows: list[Tensor] = []  # (t,) ids each, without padding

    @torch.no_grad()
    def read(self, ids: Tensor, counts: Tensor) -> Tensor:
        self.rows = [row[:count] for row, count in zip(ids, counts.tolist())]
        return self._logits()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        longest = config_of(self.decoder).max_position_embeddings  # rows that have ended continue to grow
        self.rows = [torch.cat((row, token))[-longest:] for row, token in zip(self.rows, tokens)]
        return self._logits()

    def _logits(self) -> Tensor:
        ids = nn.utils.rnn.pad_sequence(self.rows, batch_first=True)  # (B, T)
        last = torch.tensor([len(row) - 1 for row in self.rows], device=ids.device)
        with torch.compiler.set_stance("force_eager"):
            logits = self.decoder(ids)[torch.arange(len(ids), device=ids.device), last]  # (B, V), V may be padded
        return logits[:, : config_of(self.decoder).vocab_size].float()
