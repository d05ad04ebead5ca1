"""How a model reads a text, token by token: the attention of every head, and the model's predictions.

Attention is computed from the queries and keys of the model's plain forward pass, after their norm and rotation.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from lm.errors import RequestError
from lm.inference.completion import Written
from lm.inference.pretrained import Pretrained
from lm.inspection.drawing import SEQUENTIAL, Html, colored_text, figure, label_axes, visible
from lm.model.attention import AttentionMask, dense_mask
from lm.model.decoder import Block, Decoder, SelfAttention
from lm.model.fused import is_fused

COLUMNS = 4  # heads side by side
CHUNK = 128  # tokens whose distributions are computed together

# ---- attention -------------------------------------------------------------------------------------------------------


class Attention(NamedTuple):
    tokens: list[str]  # T, text of each token, with visible blanks and line ends
    maps: np.ndarray  # (layers, heads, T, T), as from `attention_maps`


@torch.no_grad()
def attention_maps(decoder: Decoder, ids: Sequence[int]) -> np.ndarray:
    """The attention weights of a sequence of T tokens, at most the context: `(layers, heads, T, T)` float32.

    `[l, h, t, s]` is the weight of token `s` for token `t`. Rows sum to one, and are 0 beyond `t` and before a
    layer's window. The decoder is in evaluation mode.
    """
    if not isinstance(decoder, Decoder) or any(type(block.self_attn) is not SelfAttention for block in decoder.layers):
        raise RequestError("attention maps are of this project's SelfAttention, and this model has its own")
    maps: list[Tensor] = []
    x = decoder.embed(torch.tensor([list(ids)], device=decoder.embed_tokens.weight.device))  # (1, T, C)
    rotary, masks = decoder.rotary_and_masks(x)
    for block, mask in zip(decoder.layers, masks, strict=True):
        queries, keys, _ = block.self_attn.queries_keys_values(block.input_layernorm(x), rotary)
        maps.append(_attention_weights(queries, keys, mask)[0].cpu())
        kind = Block if is_fused(decoder) else type(block)
        x = kind.forward(block, x, rotary, mask)  # also where `block.forward` is compiled or fused
    return torch.stack(maps).numpy()


def _attention_weights(queries: Tensor, keys: Tensor, mask: AttentionMask) -> Tensor:
    """`(B, H, T, T)` fp32 from queries `(B, T, H, D)` and keys `(B, T, KV, D)`."""
    groups = queries.shape[2] // keys.shape[2]
    queries = queries.float().transpose(1, 2)  # (B, H, T, D)
    keys = keys.float().transpose(1, 2).repeat_interleave(groups, dim=1)  # (B, H, T, D)
    scores = queries @ keys.mT * queries.shape[-1] ** -0.5
    seen = dense_mask(queries.shape[2], mask.window, None, queries.device).dense  # (1, 1, T, T)
    return scores.where(seen, float("-inf")).softmax(-1)


def attention_of(model: Pretrained, text: str) -> Attention:
    """The attention maps of a text, which begins like a document, after an end-of-text token."""
    ids = [model.tokenizer.eos_id, *model.tokenizer.encode(text)]
    return Attention([visible(model.tokenizer.decode([token])) for token in ids], attention_maps(model.decoder, ids))


def draw_attention(attention: Attention, layer: int) -> Figure:
    """A heat map of each head of a layer, counted from 0; texts of up to 40 tokens are readable.

    The colour grows with the square root of the weight. Layer -1 is the last.
    """
    maps, length = attention.maps[layer], len(attention.tokens)
    columns = min(len(maps), 2 if length > 12 else COLUMNS)
    rows, side = -(-len(maps) // columns), 1.5 + 0.17 * length
    picture, grid = figure(rows, columns, width=max(6, side * columns + 0.8), height=side * rows + 0.6, squeeze=False)
    image: Any = None
    unseen = np.triu(np.ones_like(maps[0], dtype=bool), 1)
    for head, (axes, weights) in enumerate(zip(grid.flat, maps, strict=False)):
        image = axes.imshow(np.ma.masked_array(weights, unseen), cmap=SEQUENTIAL, norm=PowerNorm(0.5, 0, 1))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(length), attention.tokens, fontsize=8, parse_math=False)
        axes.tick_params(axis="x", rotation=90)
        label_axes(axes, f"head {head}")
        axes.grid(visible=False)
    for axes in grid.flat[len(maps) :]:
        axes.remove()
    picture.colorbar(image, ax=picture.axes, label="attention weight", ticks=(0, 0.05, 0.25, 0.5, 1), shrink=0.7)
    number = layer % len(attention.maps)
    picture.suptitle(f"Layer {number}: rows are tokens, columns what they attend to", fontsize=11)
    return picture


# ---- expectations ----------------------------------------------------------------------------------------------------


class Expectation(NamedTuple):
    """A model's prediction at one position, and the actual token."""

    text: str  # of the actual token
    probability: float  # of the actual token, in [0, 1]
    alternatives: list[tuple[str, float]]  # the most probable tokens, in order, and their probabilities


@torch.no_grad()
def predictions(model: Pretrained, ids: Sequence[int], context: int) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield all tokens but the first with the logits that predict them, in parts: n ids and `(n, V)`.

    `context` tokens of the two or more are read at once; nothing before these is known.
    """
    for first in range(0, len(ids) - 1, context):
        window = ids[first : first + context + 1]
        logits = model.decoder(torch.tensor([window[:-1]], device=model.device))[0]  # (T, V)
        for start in range(0, len(logits), CHUNK):
            yield window[start + 1 : start + 1 + CHUNK], logits[start : start + CHUNK]


def expectations(model: Pretrained, text: str | Written, alternatives: int = 5) -> list[Expectation]:
    """A model's prediction at every token of a text, with the most probable alternatives.

    A text begins as documents do; of what a model with the same tokenizer has written, the prompt comes before it.
    One longer than the context is cut into windows; nothing before a window is known in it.
    """
    encode, decode, eos_id = model.tokenizer.encode, model.tokenizer.decode, model.tokenizer.eos_id
    if isinstance(text, Written):
        before, ids = encode(text.prompt) or [eos_id], [token.id for token in text.tokens]
    else:
        before, ids = [eos_id], encode(text)
    results: list[Expectation] = []
    for expected, logits in predictions(model, before + ids, model.config.max_position_embeddings):
        logs = logits.float().log_softmax(-1).cpu()
        likely = logs.topk(min(alternatives, logs.shape[-1]))
        chosen = logs.gather(-1, torch.tensor(expected)[:, None])  # (n, 1)
        for place, token in enumerate(expected):
            others = zip(likely.indices[place].tolist(), likely.values[place].exp().tolist(), strict=True)
            likely_others = [(decode([other]), probability) for other, probability in others]
            results.append(Expectation(decode([token]), math.exp(chosen[place].item()), likely_others))
    return results[len(before) - 1 :]


def color_expectations(expected: Sequence[Expectation]) -> Html:
    """The text, coloured by how unlikely each token was; the alternatives appear under the pointer."""
    notes = [
        f"probability {token.probability:.3g}\nmost probable: "
        + ", ".join(f"{visible(text)} {probability:.3g}" for text, probability in token.alternatives)
        for token in expected
    ]
    return colored_text([token.text for token in expected], [token.probability for token in expected], notes)


def color_written(written: Written) -> Html:
    """A prompt in grey and its continuation, coloured by how unlikely each token was."""
    pieces = [token.text for token in written.tokens]
    chances = [math.exp(token.log_probability) for token in written.tokens]
    return colored_text([written.prompt, *pieces], [None, *chances])
