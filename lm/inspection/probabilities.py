"""What a model expects, token by token: of a text that somebody wrote, or of one that it wrote itself."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from lm.errors import RequestError
from lm.inference.completion import Written
from lm.inference.pretrained import Pretrained
from lm.inspection.drawing import BLUE, ORANGE, Html, colored_text, figure, finish, table, visible

TINY = 2.0**-1074  # the smallest number above 0
CHUNK = 128  # tokens whose distributions are looked at together


class Expectation(NamedTuple):
    """What a model thought of the token in one place, before it saw it."""

    text: str  # of the token
    probability: float  # of the token, in [0, 1]
    rank: int  # 1 where none was likelier
    entropy: float  # of all tokens' distribution, in bits: how open the place was
    alternatives: list[tuple[str, float]]  # the likeliest tokens and their probabilities, the likeliest first


def windows(ids: Sequence[int], context: int) -> Iterator[Sequence[int]]:
    """Cut tokens into pieces such that each but the first is predicted once.

    Args:
        ids: the first is only read.
        context: the most tokens that a model reads at once; a piece has one more, which is only predicted.
    """
    for start in range(0, len(ids) - 1, context):
        yield ids[start : start + context + 1]


def expectations(model: Pretrained, text: str, alternatives: int = 5) -> list[Expectation]:
    """What a model expects at every token of a text, which begins as documents do.

    What is longer than the context is cut into windows, and what stands before a window is not known in it.

    Args:
        text: of at least one token.
        alternatives: how many of the likeliest tokens to name.

    Raises:
        RequestError: the text is empty.
    """
    return _expectations(model, [model.tokenizer.eos_id], model.tokenizer.encode(text), alternatives)


def expectations_of(model: Pretrained, written: Written, alternatives: int = 5) -> list[Expectation]:
    """What a model expects at every token of what was generated from a prompt, be it by itself or by another.

    Args:
        written: by a model of the same tokenizer.
        alternatives: how many of the likeliest tokens to name.

    Raises:
        RequestError: no token was written.
    """
    prompt = model.tokenizer.encode(written.prompt) or [model.tokenizer.eos_id]
    return _expectations(model, prompt, [token.id for token in written.tokens], alternatives)


@torch.no_grad()
def _expectations(model: Pretrained, before: list[int], ids: list[int], alternatives: int) -> list[Expectation]:
    if not ids:
        raise RequestError("there is no token to look at: the text is empty")
    decode, decoder = model.tokenizer.decode, model.decoder
    found: list[Expectation] = []
    for window in windows(before + ids, decoder.config.max_position_embeddings):
        hidden = decoder.hidden_states(torch.tensor([window[:-1]], device=model.device))[0]  # (T, C)
        for start in range(0, len(hidden), CHUNK):
            logits = hidden[start : start + CHUNK] @ decoder.output_weight.to(hidden.dtype).mT  # (T, V)
            logs = logits.float().log_softmax(-1).cpu()
            likely = logs.topk(min(alternatives, logs.shape[-1]))
            own = logs.gather(-1, torch.tensor(window[start + 1 : start + 1 + CHUNK])[:, None])  # (T, 1)
            ranks = (logs > own).sum(-1) + 1
            entropies = torch.special.entr(logs.exp()).sum(-1) / math.log(2)
            found += [
                Expectation(decode([token]), math.exp(log), rank, entropy, [
                    (decode([other]), math.exp(other_log)) for other, other_log in zip(others, other_logs, strict=True)
                ])
                for token, log, rank, entropy, others, other_logs in zip(
                    window[start + 1 :], own[:, 0].tolist(), ranks.tolist(), entropies.tolist(),
                    likely.indices.tolist(), likely.values.tolist(), strict=False,
                )
            ]  # fmt: skip
    return found[len(before) - 1 :]


def mean_bits(written: Written) -> float:
    """What the tokens that were written cost on average, in bits, by the model's own distribution; NaN without any."""
    bits = [-token.log_probability / math.log(2) for token in written.tokens]
    return sum(bits) / len(bits) if bits else math.nan


def color(expected: Sequence[Expectation], prompt: str = "") -> Html:
    """The text, coloured by how little each token was expected; the alternatives appear under the pointer."""
    notes = [
        f"probability {one.probability:.3g}, rank {one.rank:,}, entropy {one.entropy:.2f} bits\nlikeliest: "
        + ", ".join(f"{visible(text)} {probability:.3g}" for text, probability in one.alternatives)
        for one in expected
    ]
    return colored_text(
        [prompt, *(one.text for one in expected)], [None, *(one.probability for one in expected)], ["", *notes]
    )


def color_written(written: Written) -> Html:
    """A prompt in grey and what was generated from it, coloured by how little each token was expected."""
    pieces = [token.text for token in written.tokens]
    chances = [math.exp(token.log_probability) for token in written.tokens]
    return colored_text([written.prompt, *pieces], [None, *chances])


def alternatives_table(written: Written, tokens: int = 20) -> Html:
    """The first tokens that were written, each beside the likeliest ones in its place.

    Args:
        written: generated with `alternatives`.
        tokens: how many to show.
    """
    most = max((len(token.alternatives) for token in written.tokens), default=0)
    rows = [
        (visible(token.text), math.exp(token.log_probability), *(
            f"{visible(other.text)}  {math.exp(other.log_probability):.3f}" for other in token.alternatives
        ))
        for token in written.tokens[:tokens]
    ]  # fmt: skip
    columns = ("written", "probability", *(f"likeliest {place}" for place in range(1, most + 1)))
    return table(rows, columns)


def draw_expectations(expected: Sequence[Expectation]) -> Figure:
    """Bits that every token cost as bars, and the entropy of its place, the bits to be expected, as a line."""
    picture, axes = figure(width=max(8, 1.5 + 0.19 * len(expected)))
    places = range(len(expected))
    axes.bar(places, [-math.log2(max(one.probability, TINY)) for one in expected], color=BLUE, label="this token")
    axes.plot(
        places, [one.entropy for one in expected], ".-", color=ORANGE, linewidth=1.2, label="to be expected (entropy)"
    )
    axes.set_xticks(places, [visible(one.text) for one in expected], rotation=90, fontsize=8, parse_math=False)
    axes.margins(x=0.01)
    finish(axes, "What every token cost", "", "bits")
    axes.grid(visible=False, axis="x")
    return picture
