"""A run's data to look at: documents, tokens, the vocabulary, what a step saw, and how texts differ."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lm.data.shards import Shards
from lm.data.tokenizer import Tokenizer
from lm.inspection.drawing import BLUE, COLORS, VERMILION, figure, finish, heat
from lm.inspection.html import Html, table, wrapped
from lm.inspection.seen import Sample
from lm.inspection.tokens import Documents
from lm.inspection.vocabulary import Moved, TokenCount, VocabularyUse, token_text
from lm.quantities import format_count

BINS = 40
FEW = 50  # documents that make no histogram
UNUSED_SHOWN = 40  # tokens that never occur, in a table
TEXT_WIDTH = 90  # characters of a line of a sample


# ---- figures ---------------------------------------------------------------------------------------------------------


def draw_document_lengths(splits: Mapping[str, Documents], context: int) -> Figure:
    """How long documents are, as shares of each split.

    Args:
        splits: by name.
        context: tokens that the model sees at once, which is marked.
    """
    made, axes = figure(1, 1, width=8, height=4)
    _draw_histograms(axes, {name: one.tokens for name, one in splits.items()})
    axes.axvline(context, color=VERMILION, linestyle="--", label=f"context, {context:,} tokens")
    finish(axes, "length of documents", "tokens", "% of the documents")
    return made


def draw_bytes_per_token(splits: Mapping[str, Documents]) -> Figure:
    """How many bytes a token of each document stands for; dashed lines are the split as a whole."""
    made, axes = figure(1, 1, width=8, height=4)
    _draw_histograms(axes, {name: one.bytes / one.tokens for name, one in splits.items()})
    for index, one in enumerate(splits.values()):
        axes.axvline(one.bytes_per_token, color=COLORS[index], linestyle="--", linewidth=1)
    finish(axes, "what the tokenizer makes of the documents", "UTF-8 bytes a token", "% of the documents")
    return made


def draw_frequencies(counts: np.ndarray, frequent: Sequence[TokenCount]) -> Figure:
    """The most frequent tokens with their text, and how fast frequency falls with rank.

    Args:
        counts: (V,) of all tokens.
        frequent: `most_frequent`.
    """
    made, (bars, ranks) = figure(1, 2, width=11, height=max(3.5, 0.21 * len(frequent)), width_ratios=[3, 2])
    places = np.arange(len(frequent))
    bars.barh(places, [100 * one.share for one in frequent], color=BLUE)
    bars.set_yticks(places, [one.text for one in frequent], fontsize=9, parse_math=False)
    bars.invert_yaxis()
    finish(bars, "most frequent tokens", "% of all tokens", "")
    bars.grid(False, axis="y")
    falling = np.sort(counts[counts > 0])[::-1]
    ranks.loglog(np.arange(1, len(falling) + 1), falling, color=BLUE, linewidth=1.8)
    finish(ranks, "frequency by rank", "rank (logarithmic)", "occurrences (logarithmic)")
    return made


def draw_coverage(uses: Mapping[str, np.ndarray]) -> Figure:
    """How much of each text the most frequent tokens make up.

    Args:
        uses: name of a text -> (V,) counts.
    """
    made, axes = figure(1, 1, width=8, height=4)
    for index, (name, counts) in enumerate(uses.items()):
        covered = 100 * np.cumsum(np.sort(counts)[::-1]) / counts.sum()
        axes.plot(np.arange(1, len(covered) + 1), covered, ("-", "--")[index % 2], linewidth=1.8, label=name)
    axes.set_xscale("log")
    finish(axes, "how much of the text the most frequent tokens make up", "tokens of the vocabulary, the most frequent "
           "first (logarithmic)", "% of the text")  # fmt: skip
    return made


def draw_divergences(divergences: np.ndarray, names: Sequence[str], what: str = "") -> Figure:
    """How far texts are apart, two by two.

    Args:
        divergences: (P, P) in bits.
        names: of the P texts.
        what: the names are of.
    """
    made, axes = figure(1, 1, width=8, height=1.2 + 0.42 * len(names))
    heat(axes, divergences, names, names, 0.0, float(np.nanmax(divergences)) or 1.0, digits=3)
    finish(axes, "Jensen-Shannon divergence of the distributions of tokens (bits)", what, what)
    axes.grid(False)
    return made


def _draw_histograms(axes: Axes, values: Mapping[str, np.ndarray]) -> None:
    """Shares of each in the same bins; where there are few, a mark for each on the axis instead."""
    edges, logarithmic = _bins(np.concatenate(list(values.values())))
    for index, (name, one) in enumerate(values.items()):
        label = f"{name}, {len(one):,} documents"
        if len(one) < FEW:
            low_down = np.full(len(one), 0.03)
            axes.plot(one, low_down, "|", color=COLORS[index], markersize=14, markeredgewidth=2.5, label=label,
                      transform=axes.get_xaxis_transform())  # fmt: skip
            continue
        shares = np.full(len(one), 100 / len(one))
        axes.hist(one, edges, weights=shares, histtype="stepfilled", alpha=0.5, color=COLORS[index], label=label)
    axes.set_ylim(bottom=0)
    if logarithmic:
        axes.set_xscale("log")


def _bins(values: np.ndarray) -> tuple[np.ndarray, bool]:
    """Edges of bins, and whether they grow evenly in logarithm, as they do for values of several sizes."""
    if not len(values):
        return np.array([0.0, 1.0]), False
    low, high = float(values.min()), float(values.max())
    if values.dtype.kind in "iu" and high - low < BINS:
        return np.arange(low - 0.5, high + 1), False  # one for each whole number
    if low > 0 and high > 10 * low:
        return np.geomspace(low, high, BINS + 1), True
    return np.linspace(low, max(high, low + 1e-6), BINS + 1), False


# ---- tables ----------------------------------------------------------------------------------------------------------


def splits_table(shards: Mapping[str, Shards], documents: Mapping[str, Documents]) -> Html:
    """What there is to train and to validate on.

    Args:
        shards: by split.
        documents: likewise; of the part that was looked at.
    """
    rows = []
    for name, one in documents.items():
        longest = int(one.tokens.max()) if len(one.tokens) else 0
        middle = int(np.median(one.tokens)) if len(one.tokens) else 0
        rows.append((name, shards[name].tokens, len(shards[name].fingerprint()), int(one.tokens.sum()),
                     len(one.tokens), middle, longest, one.bytes_per_token))  # fmt: skip
    names = ("split", "tokens", "shards", "tokens looked at", "documents in them", "median length (tokens)",
             "longest (tokens)", "bytes a token")  # fmt: skip
    return table(rows, names)


def use_table(uses: Mapping[str, VocabularyUse]) -> Html:
    """How much of the vocabulary texts use.

    Args:
        uses: by name of the text.
    """
    shares = list(next(iter(uses.values())).needed)
    rows = [
        (name, one.size, len(one.unused), f"{len(one.unused) / one.size:.1%}", *one.needed.values(), one.entropy)
        for name, one in uses.items()
    ]
    names = [f"tokens that make up {share:.0%}" for share in shares]
    return table(rows, ("text", "vocabulary", "never used", "share", *names, "entropy (nats a token)"))


def unused_table(use: VocabularyUse, tokenizer: Tokenizer) -> Html:
    """Tokens that never occur: those with the highest ids, which the tokenizer learnt last."""
    shown = use.unused[::-1][:UNUSED_SHOWN].tolist()
    texts = wrapped("  ".join(token_text(tokenizer, token) for token in shown), TEXT_WIDTH)
    return table([(len(use.unused), texts)], ("never used", f"of them, the last {len(shown)} by id"))


def moved_table(moved: Sequence[Moved], before: str, after: str) -> Html:
    """The tokens that make up most of a divergence.

    Args:
        before, after: names of the two texts.
    """
    rows = [
        (one.text, f"{one.before:.3%}", f"{one.after:.3%}", "more" if one.after > one.before else "less", one.part)
        for one in moved
    ]
    return table(rows, ("token", f"share of {before}", f"share of {after}", f"in {after}", "part (bits)"))


def seen_table(samples: Sequence[Sample], documents: Sequence[Sequence[str]], most: int = 600) -> Html:
    """Samples of a step as text.

    Args:
        samples: `read_step`.
        documents: of each sample, `split_documents`.
        most: characters of each document.
    """
    rows = []
    for sample, texts in zip(samples, documents, strict=True):
        where = "rare tokens of a drill"
        if sample.shard is not None:
            where = f"{'/'.join(sample.shard.split('/')[-2:])}, window {sample.window}"
        shown = "\n-- a document ends, another begins --\n".join(wrapped(text[:most], TEXT_WIDTH) for text in texts)
        rows.append((sample.sample, where, shown))
    return table(rows, ("sample", "from", "text"))


def part_names(parts: int, tokens: int) -> list[str]:
    """Names of equal parts of a text: the token that each begins with, counted from 0.

    Args:
        parts: how many.
        tokens: of the whole.
    """
    return [format_count(tokens * part // parts) for part in range(parts)]
