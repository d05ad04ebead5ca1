"""How far two models are apart: their weights, matrix by matrix, and what they expect of a text.

Two checkpoints of a run, before and after a fine-tuning, or a spike.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lm.errors import RequestError
from lm.inspection.divergence import jensen_shannon
from lm.inspection.drawing import BLUE, ORANGE, figure, finish, heat
from lm.inspection.html import Html, table
from lm.inspection.parameters import kind_of, layer_of
from lm.inspection.probabilities import windows
from lm.inspection.weights import spectrum
from lm.model.decoder import Decoder
from lm.model.huggingface import to_huggingface
from lm.pretrained import Pretrained

LEADING = 8  # singular directions that are compared
CHUNK = 128  # tokens whose distributions are compared at a time


class Change(NamedTuple):
    """How one weight differs between two models."""

    name: str  # as in Hugging Face's files
    relative: float  # Frobenius norm of the difference over that of the first; infinite where the first is zero
    cosine: float  # between the two as vectors, in [-1, 1]
    # How much of the space of the first's LEADING singular directions, of inputs and of outputs, the second's keep, in
    # [0, 1]; by chance LEADING over rows or columns. NaN for what is no matrix.
    directions: float
    stable_rank: float  # of the difference: 1 where one direction changed; NaN for what is no matrix or did not change


class Divergence(NamedTuple):
    """How two models' distributions of the next token differ over texts of N predicted tokens."""

    tokens: list[str]  # N, the text of each token that was to be predicted
    divergence: np.ndarray  # (N,) Jensen-Shannon, in bits: 0 for the same distribution, 1 for nothing in common
    agree: np.ndarray  # (N,) bool: the same token is the likeliest
    bits: np.ndarray  # (N, 2), what the token cost under the first and under the second model, in bits


@torch.no_grad()
def weight_drift(before: Decoder, after: Decoder) -> list[Change]:
    """How every weight differs between two models of the same shape, in the order of the model.

    Raises:
        RequestError: they are of different shapes.
    """
    if before.config != after.config:
        raise RequestError(f"the models differ in shape: {before.config} and {after.config}")
    first, second = (to_huggingface(dict(model.named_parameters()), model.config) for model in (before, after))
    return [_change(name, old.double().cpu(), second[name].double().cpu()) for name, old in first.items()]


def _change(name: str, old: Tensor, new: Tensor) -> Change:
    difference = new - old
    changed = bool(difference.any())
    relative = (difference.norm() / old.norm()).item() if changed else 0.0
    cosine = torch.nn.functional.cosine_similarity(old.flatten(), new.flatten(), dim=0).clamp(-1, 1).item()
    if old.ndim != 2:
        return Change(name, relative, cosine, math.nan, math.nan)
    kept = [(a.mT @ b).square().sum() / a.shape[1] for a, b in zip(_leading(old), _leading(new), strict=True)]
    rank = spectrum(difference).stable_rank if changed else math.nan
    return Change(name, relative, cosine, min(1.0, (sum(kept) / 2).item()), rank)


def _leading(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal bases of the leading singular directions: of outputs `(rows, n)` and of inputs `(columns, n)`."""
    if matrix.shape[0] < matrix.shape[1]:
        inputs, outputs = _leading(matrix.mT)
        return outputs, inputs
    inputs = torch.linalg.eigh(matrix.mT @ matrix)[1][:, -LEADING:]  # the smaller of the two Gram matrices
    return torch.linalg.qr(matrix @ inputs)[0], inputs


@torch.no_grad()
def distribution_drift(before: Pretrained, after: Pretrained, texts: Sequence[str]) -> Divergence:
    """How two models differ in what they expect next, at every token of some texts.

    The texts begin as documents do. What is longer than the shorter context is cut into windows, and every token is
    predicted once.

    Args:
        before, after: of the same tokenizer; the rest may differ.
        texts: at least one with a token.

    Raises:
        RequestError: the tokenizers differ, or there is no token.
    """
    if before.tokenizer.sha256 != after.tokenizer.sha256:
        raise RequestError(f"{before.path} and {after.path} have different tokenizers: their tokens cannot be compared")
    size = before.tokenizer.vocab_size  # a model may have rows for more tokens, which never come
    context = min(model.config.max_position_embeddings for model in (before, after))
    tokens, divergence, agree, bits = [], [], [], []
    for text in texts:
        ids = [before.tokenizer.eos_id, *before.tokenizer.encode(text)]
        for window in windows(ids, context):
            hidden = [_states(model.decoder, window[:-1]) for model in (before, after)]
            for start in range(0, len(window) - 1, CHUNK):
                first, second = (
                    _probabilities(model.decoder, states[start : start + CHUNK], size)
                    for model, states in zip((before, after), hidden, strict=True)
                )  # (T, V) each
                expected = window[start + 1 : start + 1 + CHUNK]
                tokens += [before.tokenizer.decode([token]) for token in expected]
                divergence.append(jensen_shannon(first, second))
                agree.append(first.argmax(-1) == second.argmax(-1))
                of_it = np.arange(len(expected)), expected
                bits.append(-np.log2(np.stack([first[of_it], second[of_it]], -1)))
    if not tokens:
        raise RequestError("the texts have no token to predict")
    return Divergence(tokens, np.concatenate(divergence), np.concatenate(agree), np.concatenate(bits))


def _states(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    device = decoder.embed_tokens.weight.device
    return decoder.hidden_states(torch.tensor([list(ids)], device=device))[0]  # (T, C)


def _probabilities(decoder: Decoder, states: Tensor, size: int) -> np.ndarray:
    logits = states @ decoder.output_weight[:size].to(states.dtype).mT  # (T, V)
    return logits.double().softmax(-1).cpu().numpy()


def change_table(changes: Sequence[Change]) -> Html:
    """The weights and how they changed, the most changed first."""
    ordered = sorted(changes, key=lambda change: change.relative, reverse=True)
    columns = ("weight", "relative change", "cosine", "directions kept", "stable rank of the change")
    return table(ordered, columns)


def draw_weight_drift(changes: Sequence[Change]) -> Figure:
    """Relative change and kept directions of the blocks' matrices, a row a kind and a column a layer."""
    inside = [change for change in changes if layer_of(change.name) is not None and not math.isnan(change.directions)]
    kinds = list(dict.fromkeys(kind_of(change.name) for change in inside))
    layers = 1 + max(layer_of(change.name) for change in inside)
    picture, pair = figure(1, 2, width=max(9, 4 + 1.1 * layers), height=1.2 + 0.4 * len(kinds), sharey=True)
    for axes, field, title in zip(pair, ("relative", "directions"), (
        "Size of the change, as a share of the weights", f"How much of the {LEADING} leading directions is kept",
    ), strict=True):  # fmt: skip
        values = np.full((len(kinds), layers), np.nan)
        for change in inside:
            values[kinds.index(kind_of(change.name)), layer_of(change.name)] = getattr(change, field)
        top = 1.0 if field == "directions" else max(np.nanmax(values), 1e-12)
        heat(axes, values, kinds, [str(layer) for layer in range(layers)], 0, top)
        finish(axes, title, "layer")
        axes.grid(visible=False)
    return picture


def draw_divergence(found: Divergence) -> Figure:
    """How the divergence is distributed over tokens, and what the tokens cost under both models."""
    picture, (left, right) = figure(1, 2, width=10, height=4.2)
    left.hist(found.divergence, bins=np.linspace(0, 1, 41), color=BLUE)
    left.axvline(found.divergence.mean(), color=ORANGE, linewidth=2, label=f"mean {found.divergence.mean():.3f} bits")
    finish(left, f"Same likeliest token: {found.agree.mean():.0%}", "Jensen-Shannon divergence (bits)", "tokens")
    top = found.bits.max()
    right.scatter(*found.bits.T, s=8, alpha=0.5, color=BLUE, linewidths=0)
    right.plot((0, top), (0, top), color=ORANGE, linewidth=1.2, label="the same under both")
    means = found.bits.mean(0)
    finish(right, f"Bits a token: {means[0]:.2f} before, {means[1]:.2f} after", "before (bits)", "after (bits)")
    return picture
