"""Attention maps: what every head of a model attends to in a sentence.

They are computed from the queries and keys of the model's plain forward pass, after their norm and rotation.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from lm.errors import RequestError
from lm.inference.pretrained import Pretrained
from lm.inspection.drawing import SEQUENTIAL, figure, label_axes, visible
from lm.model.attention import AttentionMask, dense_mask
from lm.model.decoder import Block, Decoder, SelfAttention
from lm.model.fused import is_fused

COLUMNS = 4  # heads beside each other


class Attention(NamedTuple):
    """The attention maps of a text."""

    tokens: list[str]  # T, the text of each, with visible blanks and line ends
    maps: np.ndarray  # (layers, heads, T, T), as from `attention_maps`


@torch.no_grad()
def attention_maps(decoder: Decoder, ids: Sequence[int]) -> np.ndarray:
    """The attention weights of a sequence of T tokens, at most the context: `(layers, heads, T, T)` float32.

    `[l, h, t, s]` is how much token `t` takes from token `s`. Rows sum to one, and are 0 beyond `t` and before a
    layer's window. The decoder is in evaluation mode.
    """
    if not isinstance(decoder, Decoder) or any(type(block.self_attn) is not SelfAttention for block in decoder.layers):
        raise RequestError("attention maps are of this project's SelfAttention, and this model has its own")
    if not len(ids):
        raise RequestError("there is no token to attend to")
    maps: list[Tensor] = []
    x = decoder.embed(torch.tensor([list(ids)], device=decoder.embed_tokens.weight.device))  # (1, T, C)
    rotary, masks = decoder.rotary_and_masks(x)
    for block, mask in zip(decoder.layers, masks, strict=True):
        queries, keys, _ = block.self_attn.queries_keys_values(block.input_layernorm(x), rotary)
        maps.append(_weights(queries, keys, mask)[0].cpu())
        kind = Block if is_fused(decoder) else type(block)
        x = kind.forward(block, x, rotary, mask)  # also where `block.forward` is compiled or fused
    return torch.stack(maps).numpy()


def _weights(queries: Tensor, keys: Tensor, mask: AttentionMask) -> Tensor:
    """`(B, H, T, T)` fp32 from queries `(B, T, H, D)` and keys `(B, T, KV, D)`."""
    groups = queries.shape[2] // keys.shape[2]
    queries = queries.float().transpose(1, 2)  # (B, H, T, D)
    keys = keys.float().transpose(1, 2).repeat_interleave(groups, dim=1)  # (B, H, T, D)
    scores = queries @ keys.mT * queries.shape[-1] ** -0.5
    seen = dense_mask(queries.shape[2], mask.window, None, queries.device).dense  # (1, 1, T, T)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


def attention_of(model: Pretrained, text: str) -> Attention:
    """The attention maps of a text, which begins as documents do, after the token that ends one."""
    ids = [model.tokenizer.eos_id, *model.tokenizer.encode(text)]
    return Attention([visible(model.tokenizer.decode([token])) for token in ids], attention_maps(model.decoder, ids))


def draw_attention(attention: Attention, layer: int, heads: Sequence[int] | None = None) -> Figure:
    """A heat map of each head of a layer, or of some heads, all counted from 0; a text of up to 40 tokens reads well.

    The colour grows with the square root of the weight.
    """
    maps = attention.maps[layer]
    heads = range(len(maps)) if heads is None else heads
    length = len(attention.tokens)
    columns = min(len(heads), 2 if length > 12 else COLUMNS)
    rows, side = -(-len(heads) // columns), 1.5 + 0.17 * length
    picture, grid = figure(rows, columns, width=max(6, side * columns + 0.8), height=side * rows + 0.6, squeeze=False)
    for axes, head in zip(grid.flat, heads, strict=False):
        image = _map(axes, maps[head])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(length), attention.tokens, fontsize=8, parse_math=False)
        axes.tick_params(axis="x", rotation=90)
        label_axes(axes, f"head {head}")
        axes.grid(visible=False)
    for axes in grid.flat[len(heads) :]:
        axes.remove()
    _scale(picture, image)
    picture.suptitle(f"Layer {layer}: rows are tokens, columns what they attend to", fontsize=11)
    return picture


def draw_all_heads(maps: np.ndarray) -> Figure:
    """A small heat map for every head of every layer, to find those worth a closer look."""
    layers, heads = maps.shape[:2]
    picture, grid = figure(layers, heads, width=max(5, 1.2 + 1.2 * heads), height=0.8 + 1.2 * layers, squeeze=False)
    for (layer, head), axes in np.ndenumerate(grid):
        image = _map(axes, maps[layer, head])
        axes.set(xticks=[], yticks=[])
        if head == 0:
            axes.set_ylabel(f"layer {layer}", fontsize=9)
        if layer == 0:
            axes.set_title(f"head {head}", fontsize=9)
    _scale(picture, image)
    picture.suptitle("All heads: rows are tokens, columns what they attend to", fontsize=11)
    return picture


def _map(axes: Any, weights: np.ndarray) -> Any:
    unseen = np.triu(np.ones_like(weights, dtype=bool), 1)
    return axes.imshow(np.ma.masked_array(weights, unseen), cmap=SEQUENTIAL, norm=PowerNorm(0.5, 0, 1))


def _scale(picture: Figure, image: Any) -> None:
    picture.colorbar(image, ax=picture.axes, label="attention weight", ticks=(0, 0.05, 0.25, 0.5, 1), shrink=0.7)
