"""Generation: continue prompts with tokens, one at a time.

`generate` is the loop: the logits of each row's next token from `inference/steps`, then `choose_tokens` with the
options of `Sampling`. `inference/completion` turns tokens into text.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lm.errors import RequestError, RunError
from lm.inference.sampling import Sampling
from lm.inference.steps import Step, make_stepper
from lm.model.build import config_of
from lm.model.decoder import evaluating

Reason = Literal["eos", "stop", "length", "context"]


class NewToken(NamedTuple):
    row: int  # index of the prompt that it continues
    token: int
    # Why this is the row's last token: end of a document, the caller's request, `max_new_tokens` reached, or the
    # context is full; None: more follow.
    reason: Reason | None
    log_probability: float  # nats, by the model's own distribution: at temperature 1, before any filter


def generate(
    decoder: nn.Module,
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
        decoder: a `Decoder` or a custom model; on any device. Inside `torch.autocast` it computes in that precision.
        prompts: token ids, in any lengths, at least one each.
        sampling: how tokens are chosen, and how many. Its options for texts are for `inference/completion`.
        eos_id: the token that ends a row; None: none does.
        vocab_size: that of the tokenizer: the ids from it on, which a model may have, stand for no text and are never
            chosen.
        ended: called with every row and new token but `eos_id`; returns whether the row is to end with it.
        step: `cuda_graph` replays the steps as a CUDA graph, see `steps`; `dynamic` does not.
    """
    device, context = next(decoder.parameters()).device, config_of(decoder).max_position_embeddings
    if not prompts:
        return
    rows = [list(prompt) for prompt in prompts]
    counts = [len(row) for row in rows]
    longest = max(counts)
    if longest >= context:
        which = f"prompt {counts.index(longest) + 1}" if len(counts) > 1 else "the prompt"
        raise RequestError(
            f"{which} leaves no room for a new token: it has {longest} tokens, and the "
            f"context has {context}; shorten it by {longest - context + 1} or more"
        )
    limits = [min(sampling.max_new_tokens, context - count) for count in counts]
    ids = torch.tensor([row + row[:1] * (longest - len(row)) for row in rows], device=device)  # (B, T)
    generator = torch.Generator()
    generator.seed() if sampling.seed is None else generator.manual_seed(sampling.seed)
    stepper = make_stepper(decoder, len(rows), longest + max(limits), step)

    active = set(range(len(rows)))
    with evaluating(decoder):
        logits = stepper.prefill(ids, torch.tensor(counts, device=device))  # (B, V)
        for length in range(1, max(limits) + 1):
            totals = logits.logsumexp(-1, keepdim=True)  # (B, 1)
            if not totals.isfinite().all():
                raise RunError("the logits are not finite: the weights are broken, or its dtype overflowed")
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
                elif length == limits[row]:
                    reason = "length" if length == sampling.max_new_tokens else "context"
                if reason:
                    active.remove(row)
                yield NewToken(row, token, reason, *log_probabilities[row])
            if not active:
                return
            logits = stepper.advance(tokens)


# ---- the choice of a token -------------------------------------------------------------------------------------------


def choose_tokens(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Choose a token for each row, `(B,)`, from finite logits `(B, V)`.

    This draws as `torch.multinomial` does, but with one random number for each row, on the CPU, whatever the device
    and the filters: a seed gives the same everywhere.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    weights, ids = candidates(logits, sampling)
    # The weights, laid end to end, divide a line: 0.5, 0.3 and 0.2 end at 0.5, 0.8 and 1.0. A random point of the line
    # lies in a token's part as often as the token's weight says: 0.6 chooses the second. It is never 0, where a token
    # of weight 0 could end.
    ends = weights.double().cumsum(-1)  # (B, k)
    fraction = 1 - torch.rand(len(ends), 1, dtype=torch.float64, generator=generator)  # in (0, 1]
    index = torch.searchsorted(ends, fraction * ends[:, -1:])  # (B, 1), the first end at or after the point
    return (index if ids is None else ids.gather(-1, index))[:, 0].to(logits.device)


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """The tokens to choose from, at a temperature above 0, on the CPU.

    Returns weights `(B, k)`, proportional to probabilities, and their ids `(B, k)`, or None for all tokens in order.
    """
    logits = logits - logits.amax(-1, keepdim=True)  # so that no temperature causes overflow
    probabilities = (logits / sampling.temperature).softmax(-1)  # (B, V)
    top_k, top_p = sampling.top_k, sampling.top_p
    if top_k is None and top_p is None:
        return probabilities.cpu(), None
    vocab_size = probabilities.shape[-1]
    weights, ids = (part.cpu() for part in probabilities.topk(min(top_k or vocab_size, vocab_size)))  # (B, k), sorted
    if top_p is not None:
        total = 1.0 if top_k is None else weights.sum(-1, keepdim=True)
        before = weights.cumsum(-1) - weights  # sum over more probable tokens
        weights = weights.where(before < top_p * total, 0)
    return weights, ids
