"""What a model expects at every token of a text: of any text, or of one that it wrote itself."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lm.errors import RequestError
from lm.inference.completion import Written
from lm.inference.pretrained import Pretrained
from lm.inspection.drawing import BLUE, ORANGE, Html, colored_text, figure, label_axes, table, visible

CHUNK = 128  # tokens whose distributions are looked at together


class Expectation(NamedTuple):
    """A model's prediction in one place, and the token that came."""

    text: str  # of the token
    probability: float  # of the token, in [0, 1]
    rank: int  # 1 where none was likelier
    entropy: float  # of all tokens' distribution, in bits: how open the place was
    alternatives: list[tuple[str, float]]  # the likeliest tokens and their probabilities, the likeliest first


@torch.no_grad()
def predictions(model: Pretrained, ids: Sequence[int], context: int) -> Iterator[tuple[Sequence[int], Tensor]]:
    """All tokens but the first with the logits for them, some at a time: n ids and `(n, V)`.

    `context` tokens of the two or more are read at once; nothing before these is known.
    """
    for first in range(0, len(ids) - 1, context):
        window = ids[first : first + context + 1]
        logits = model.decoder(torch.tensor([window[:-1]], device=model.device))[0]  # (T, V)
        for start in range(0, len(logits), CHUNK):
            yield window[start + 1 : start + 1 + CHUNK], logits[start : start + CHUNK]


def expectations(model: Pretrained, text: str, alternatives: int = 5) -> list[Expectation]:
    """What a model expects at every token of a text, which begins as documents do, with the likeliest alternatives.

    A text longer than the context is cut into windows; nothing before a window is known in it.
    """
    return _expectations(model, [model.tokenizer.eos_id], model.tokenizer.encode(text), alternatives)


def expectations_of(model: Pretrained, written: Written, alternatives: int = 5) -> list[Expectation]:
    """What a model expects at every token of a generated text, its own or that of a model with the same tokenizer."""
    prompt = model.tokenizer.encode(written.prompt) or [model.tokenizer.eos_id]
    return _expectations(model, prompt, [token.id for token in written.tokens], alternatives)


def _expectations(model: Pretrained, before: list[int], ids: list[int], alternatives: int) -> list[Expectation]:
    if not ids:
        raise RequestError("there is no token to look at: the text is empty")
    decode = model.tokenizer.decode
    found: list[Expectation] = []
    for expected, logits in predictions(model, before + ids, model.config.max_position_embeddings):
        logs = logits.float().log_softmax(-1).cpu()
        likely = logs.topk(min(alternatives, logs.shape[-1]))
        own = logs.gather(-1, torch.tensor(expected)[:, None])  # (n, 1)
        ranks = (logs > own).sum(-1) + 1
        entropies = torch.special.entr(logs.exp()).sum(-1) / math.log(2)
        for place, token in enumerate(expected):
            others = zip(likely.indices[place].tolist(), likely.values[place].exp().tolist(), strict=True)
            found.append(Expectation(
                decode([token]), math.exp(own[place].item()), ranks[place].item(), entropies[place].item(),
                [(decode([other]), probability) for other, probability in others],
            ))  # fmt: skip
    return found[len(before) - 1 :]


def mean_bits(written: Written) -> float:
    """What the tokens that were written cost on average, in bits, by the model's own distribution; NaN without any."""
    bits = [-token.log_probability / math.log(2) for token in written.tokens]
    return sum(bits) / len(bits) if bits else math.nan


def color_expectations(expected: Sequence[Expectation], prompt: str = "") -> Html:
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
    """The first `tokens` of a text that was generated with `alternatives`, each beside the likeliest in its place."""
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
    """The bits that every token cost as bars, and the entropy of its place, the expected bits, as a line."""
    picture, axes = figure(width=max(8, 1.5 + 0.19 * len(expected)))
    places = range(len(expected))
    costs = [-math.log2(max(one.probability, math.ulp(0.0))) for one in expected]
    axes.bar(places, costs, color=BLUE, label="this token")
    axes.plot(
        places, [one.entropy for one in expected], ".-", color=ORANGE, linewidth=1.2, label="to be expected (entropy)"
    )
    axes.set_xticks(places, [visible(one.text) for one in expected], rotation=90, fontsize=8, parse_math=False)
    axes.margins(x=0.01)
    label_axes(axes, "What every token cost", "", "bits")
    axes.grid(visible=False, axis="x")
    return picture
