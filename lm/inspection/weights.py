"""The weights of a model: their distribution, and the differences between two models."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor, nn

from lm.errors import RequestError
from lm.inference.pretrained import Pretrained
from lm.inspection.data import jensen_shannon
from lm.inspection.drawing import BLACK, BLUE, COLORMAP_OF_LINES, ORANGE, figure, label_axes
from lm.inspection.text_views import predictions
from lm.model.builtin import has_usual_weights
from lm.model.decoder import Decoder
from lm.model.huggingface import to_huggingface

COLUMNS = 3  # panels side by side


def named_weights(decoder: nn.Module) -> dict[str, Tensor]:
    """Weights by their names in Hugging Face's format, with fused ones split; a custom model's by its own names."""
    weights = {name: weight.detach() for name, weight in decoder.named_parameters()}
    usual = isinstance(decoder, Decoder) and has_usual_weights(decoder)
    return to_huggingface(weights, decoder.config) if usual else weights


def kind_and_layer(name: str) -> tuple[str, int | None]:
    """The kind of a weight and its layer, from 0: `model.layers.3.mlp.up_proj.weight` is `mlp.up_proj` of layer 3.

    Embedding, last norm and output matrix have no layer.
    """
    layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    kind = name.removeprefix(layer[0] if layer else "model.").removesuffix(".weight")
    return kind, int(layer[1]) if layer else None


# ---- weights ---------------------------------------------------------------------------------------------------------


Histogram = tuple[np.ndarray, np.ndarray]  # as of `np.histogram`: density (bins,) of probability, edges (bins + 1,)


def weight_histograms(decoder: Decoder, bins: int = 80) -> dict[str, Histogram]:
    """A histogram of every matrix, with at most `bins` bins of equal width; small matrices have fewer."""
    histograms = {}
    for name, weight in named_weights(decoder).items():
        if weight.ndim == 2:
            values = weight.float().cpu().numpy().ravel()
            histograms[name] = np.histogram(values, min(bins, math.isqrt(values.size)), density=True)
    return histograms


def draw_histograms(histograms: Mapping[str, Histogram]) -> Figure:
    """A panel for each kind of matrix with a curve for each layer, dark for the first and bright for the last."""
    kinds: dict[str, dict[int | None, Histogram]] = {}
    for name, histogram in histograms.items():
        kind, layer = kind_and_layer(name)
        kinds.setdefault(kind, {})[layer] = histogram
    layers = 1 + max(layer or 0 for same in kinds.values() for layer in same)
    colors = ScalarMappable(Normalize(0, max(1, layers - 1)), COLORMAP_OF_LINES)
    rows = -(-len(kinds) // COLUMNS)
    picture, grid = figure(rows, COLUMNS, width=10, height=0.8 + 2.6 * rows, squeeze=False)
    for axes, (kind, same) in zip(grid.flat, kinds.items(), strict=False):
        for layer, (density, edges) in same.items():
            density = np.where(density > 0, density, np.nan)  # an empty bin leaves a gap
            color = BLACK if layer is None else colors.to_rgba(layer)
            axes.stairs(density, edges, baseline=None, color=color, linewidth=1.2)
        axes.set_yscale("log")
        axes.locator_params(axis="x", nbins=5)
        label_axes(axes, kind, "weight", "density (log scale)")
    for axes in grid.flat[len(kinds) :]:
        axes.remove()
    picture.colorbar(colors, ax=picture.axes, label="layer", ticks=range(0, layers, -(-layers // 12)), shrink=0.8)
    picture.suptitle("How the weights are distributed")
    return picture


# ---- drift -----------------------------------------------------------------------------------------------------------


class Divergence(NamedTuple):
    """The difference of two models' distributions of the next token, for N predicted tokens."""

    tokens: list[str]  # N, the text of each predicted token
    divergence: np.ndarray  # (N,) Jensen-Shannon, in bits: 0 for the same distribution, 1 for nothing in common
    agree: np.ndarray  # (N,) bool: whether the argmax is the same


def distribution_drift(before: Pretrained, after: Pretrained, texts: Sequence[str]) -> Divergence:
    """The difference of the predictions of two models with the same tokenizer, at every token of some texts.

    Each text begins like a document; a text longer than the shorter context is cut into windows.
    """
    if before.tokenizer.sha256 != after.tokenizer.sha256:
        raise RequestError(f"{before.path} and {after.path} have different tokenizers: their tokens cannot be compared")
    size = before.tokenizer.vocab_size  # a model may have rows for more tokens, which never occur
    context = min(model.config.max_position_embeddings for model in (before, after))
    tokens, divergence, agree = [], [], []
    for text in texts:
        ids = [before.tokenizer.eos_id, *before.tokenizer.encode(text)]
        both = zip(predictions(before, ids, context), predictions(after, ids, context), strict=True)
        for (expected, logits), (_, others) in both:
            first, second = (part[:, :size].double().softmax(-1).cpu().numpy() for part in (logits, others))  # (n, V)
            tokens += [before.tokenizer.decode([token]) for token in expected]
            divergence.append(jensen_shannon(first, second))
            agree.append(first.argmax(-1) == second.argmax(-1))
    return Divergence(tokens, np.concatenate(divergence), np.concatenate(agree))


def draw_divergence(divergence: Divergence) -> Figure:
    """The distribution of the divergence over tokens."""
    picture, axes = figure()
    mean = divergence.divergence.mean()
    axes.hist(divergence.divergence, bins=np.linspace(0, 1, 41), color=BLUE)
    axes.axvline(mean, color=ORANGE, linewidth=2, label=f"mean {mean:.3f} bits")
    title = f"Same most probable token: {divergence.agree.mean():.0%}"
    label_axes(axes, title, "Jensen-Shannon divergence (bits)", "tokens")
    return picture
