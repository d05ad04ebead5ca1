"""How the weights of a model are distributed, and how many directions its matrices use."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from lm.errors import RequestError
from lm.inspection.drawing import BLACK, COLORMAP_OF_LINES, figure, finish, heat
from lm.inspection.parameters import kind_of, layer_of
from lm.model.decoder import Decoder
from lm.model.huggingface import to_huggingface

COLUMNS = 3  # panels beside each other


class Histogram(NamedTuple):
    """How the values of one weight are distributed."""

    edges: np.ndarray  # (bins + 1,), ascending
    density: np.ndarray  # (bins,), of probability: it integrates to one
    mean: float
    std: float


class Spectrum(NamedTuple):
    """The singular values of one matrix, and two ways to say how many of them count.

    Both are between 1 and the number of singular values, and equal to it where all are alike.
    """

    values: np.ndarray  # (min(rows, columns),), descending
    stable_rank: float  # sum of squares over the largest square (Rudelson and Vershynin, 2007, arXiv:math/0503442)
    effective_rank: float  # exp of the entropy of values / sum(values) (Roy and Vetterli, EUSIPCO 2007)


def matrices(decoder: Decoder) -> dict[str, Tensor]:
    """The matrices of a model in fp32, fused ones taken apart.

    Returns:
        By name, as in Hugging Face's files: `model.layers.0.self_attn.q_proj.weight`.
    """
    weights = to_huggingface({name: weight.detach() for name, weight in decoder.named_parameters()}, decoder.config)
    return {name: weight.float() for name, weight in weights.items() if weight.ndim == 2}


def weight_histograms(decoder: Decoder, bins: int = 80) -> dict[str, Histogram]:
    """A histogram of every matrix, between its smallest and its largest value.

    Args:
        bins: of equal width, at most; small matrices have fewer, so that each holds some values.

    Raises:
        RequestError: a weight is not finite.
    """
    found = {}
    for name, weight in matrices(decoder).items():
        values = _finite(name, weight).cpu().numpy().ravel()
        density, edges = np.histogram(values, min(bins, math.isqrt(values.size)), density=True)
        found[name] = Histogram(edges, density, float(values.mean()), float(values.std()))
    return found


def spectra(decoder: Decoder) -> dict[str, Spectrum]:
    """The singular values of every matrix.

    Raises:
        RequestError: a weight is not finite.
    """
    return {name: spectrum(_finite(name, weight)) for name, weight in matrices(decoder).items()}


def spectrum(matrix: Tensor) -> Spectrum:
    """The singular values of a matrix `(rows, columns)`, and its ranks; these are 0 where it is zero everywhere.

    They are the roots of the smaller Gram matrix's eigenvalues, which takes a twentieth of the time and is exact to
    1e-8 of the largest.
    """
    tall = (matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT).double()
    values = torch.linalg.eigvalsh(tall.mT @ tall).clamp(min=0).sqrt().flip(0).cpu().numpy()
    if not values.any():
        return Spectrum(values, 0.0, 0.0)
    shares = values / values.sum()
    entropy = -(shares * np.log(np.maximum(shares, np.finfo(float).tiny))).sum()
    return Spectrum(values, float((values**2).sum() / values[0] ** 2), float(np.exp(entropy)))


def _finite(name: str, weight: Tensor) -> Tensor:
    if not weight.isfinite().all():
        raise RequestError(f"{name} is not finite everywhere: the weights are broken")
    return weight


def draw_histograms(histograms: Mapping[str, Histogram]) -> Figure:
    """A panel a kind of matrix with a curve a layer, dark for the first and bright for the last."""

    def curve(axes: Axes, one: Histogram, color: Any) -> None:
        density = np.where(one.density > 0, one.density, np.nan)  # an empty bin is a gap and no fall to the bottom
        axes.stairs(density, one.edges, baseline=None, color=color, linewidth=1.2)

    picture = _by_kind(histograms, curve, "weight", "density (log scale)", "log")
    picture.suptitle("How the weights are distributed")
    return picture


def draw_spectra(found: Mapping[str, Spectrum]) -> Figure:
    """A panel a kind of matrix with the singular values of every layer, as shares of the largest."""

    def curve(axes: Axes, one: Spectrum, color: Any) -> None:
        axes.plot(np.arange(1, len(one.values) + 1), one.values / one.values[0], color=color, linewidth=1.2)

    picture = _by_kind(found, curve, "which singular value", "share of the largest")
    picture.suptitle("Singular values")
    return picture


def draw_ranks(found: Mapping[str, Spectrum]) -> Figure:
    """Effective ranks as shares of the largest possible, a row a kind of matrix of the blocks and a column a layer."""
    inside = {name: one for name, one in found.items() if layer_of(name) is not None}
    kinds = list(dict.fromkeys(kind_of(name) for name in inside))
    layers = 1 + max(layer_of(name) for name in inside)
    shares = np.zeros((len(kinds), layers))
    for name, one in inside.items():
        shares[kinds.index(kind_of(name)), layer_of(name)] = one.effective_rank / len(one.values)
    picture, axes = figure(width=max(6, 3.2 + 0.55 * layers), height=1.2 + 0.4 * len(kinds))
    heat(axes, shares, kinds, [str(layer) for layer in range(layers)], 0, 1)
    finish(axes, "Effective rank as a share of the full rank", "layer")
    axes.grid(visible=False)
    return picture


Curve = Callable[[Axes, Any, Any], None]  # draws one weight's numbers in a colour


def _by_kind(found: Mapping[str, Any], curve: Curve, x: str, y: str, scale: str = "linear") -> Figure:
    kinds: dict[str, dict[int | None, Any]] = {}
    for name, one in found.items():
        kinds.setdefault(kind_of(name), {})[layer_of(name)] = one
    layers = 1 + max(layer_of(name) or 0 for name in found)
    colors = ScalarMappable(Normalize(0, max(1, layers - 1)), COLORMAP_OF_LINES)
    rows = -(-len(kinds) // COLUMNS)
    picture, grid = figure(rows, COLUMNS, width=10, height=0.8 + 2.6 * rows, squeeze=False)
    for axes, (kind, same) in zip(grid.flat, kinds.items(), strict=False):
        for layer, one in same.items():
            curve(axes, one, BLACK if layer is None else colors.to_rgba(layer))
        axes.set_yscale(scale)
        axes.locator_params(axis="x", nbins=5)
        finish(axes, kind, x, y)
    for axes in grid.flat[len(kinds) :]:
        axes.remove()
    picture.colorbar(colors, ax=picture.axes, label="layer", ticks=range(0, layers, -(-layers // 12)), shrink=0.8)
    return picture
