"""The style of all figures and tables of `lm.inspection`: readable sizes, colours for every kind of colour vision.

Figures are made without pyplot, so none is kept in memory, and a notebook shows one that a cell ends with; a script
writes it by `figure.savefig("name.png")`. Tables and coloured text are HTML that reads on a light and on a dark page.
"""

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from numbers import Integral
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from lm.runs.history import Series

# Eight colours that people with every kind of colour vision tell apart (Okabe and Ito, "Color Universal Design", 2008).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
STYLES = ("-", "--", "-.", ":")  # so that curves differ without colour
BLUE, ORANGE, _, VERMILION, *_, BLACK = COLORS
# For amounts: lightness grows evenly, so it works in grey, too. Lines leave out the brightest colours.
SEQUENTIAL = colormaps["viridis"]
COLORMAP_OF_LINES = ListedColormap(SEQUENTIAL(range(226)), "lines")
LEGEND = (1.0, 0.5, 0.1, 0.01, 0.001)


class Picture(Figure):
    """A matplotlib figure that a notebook shows by itself."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def figure(
    rows: int = 1, columns: int = 1, width: float = 8, height: float = 4.5, **options: Any
) -> tuple[Figure, Any]:
    """Make a figure, `width` and `height` in inches, and its axes: one or an array, as `Figure.subplots` returns them.

    `options` are for `subplots`, such as `sharey=True`.
    """
    picture = Picture(figsize=(width, height), dpi=110, layout="constrained")
    return picture, picture.subplots(rows, columns, **options)


def label_axes(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Call after drawing: add a title, labels of x and y, a grid, and a legend if curves have names."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9)


def plot_curves(axes: Axes, series: Sequence[Series]) -> None:
    """Plot curves, named if there are several; few points are marked."""
    shown = [index for index, line in enumerate(series) if np.isfinite(line.y).any()]
    for index in shown:
        line, style = series[index], STYLES[(index + index // len(COLORS)) % len(STYLES)]
        marker = "o" if len(line.x) <= 30 else None
        name = line.name if len(shown) > 1 else None
        look = {"color": COLORS[index % len(COLORS)], "marker": marker, "markersize": 3.5, "linewidth": 1.6}
        axes.plot(line.x, line.y, style, label=name, **look)
    if not shown:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="gray")


def draw_curves(series: Sequence[Series], x: str, y: str, title: str = "", scale: str = "linear") -> Figure:
    """Draw curves on one pair of axes with these labels; non-finite values leave a gap."""
    picture, axes = figure()
    plot_curves(axes, series)
    label_axes(axes, title, x, y)
    axes.set_yscale(scale)
    return picture


# ---- tables and text -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Html:
    """A piece of HTML that a notebook displays."""

    source: str

    def _repr_html_(self) -> str:
        return self.source


def table(rows: Sequence[Sequence[Any]], columns: Sequence[str], caption: str = "") -> Html:
    """A table. Whole numbers have commas, others four significant digits; numbers are right-aligned."""
    sides = [_side(value) for value in rows[0]] if rows else ["left"] * len(columns)
    head = "".join(
        f"<th style='text-align:{side};padding:2px 10px'>{html.escape(column)}</th>"
        for column, side in zip(columns, sides, strict=True)
    )
    lines = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    title = f"<caption style='text-align:left'>{html.escape(caption)}</caption>" if caption else ""
    return Html(f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>")


def colored_text(
    pieces: Sequence[str], probabilities: Sequence[float | None], notes: Sequence[str] | None = None
) -> Html:
    """Text with backgrounds that show how unlikely each piece was, with a legend below.

    Pieces with probability None were given, and are grey. A piece's note appears when the pointer is on it;
    without notes, it is the probability.
    """
    notes = notes or ["" if p is None else f"probability {p:.3g}" for p in probabilities]
    spans = "".join(_span(*piece) for piece in zip(pieces, probabilities, notes, strict=True))
    legend = " ".join(_span(f"\u00a0{p:g}\u00a0", p, "") for p in LEGEND)
    return Html(
        "<div style='background:#fff;color:#000;padding:0.8em;line-height:1.7'>"
        f"<div style='white-space:pre-wrap;font-family:monospace'>{spans}</div>"
        f"<div style='margin-top:0.8em;font-size:85%'>probability: {legend}</div></div>"
    )


def visible(text: str) -> str:
    """A token's text with visible blanks and line ends."""
    return text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍") or "∅"


def wrapped(text: str, width: int) -> str:
    """Wrap a text to lines of at most `width` characters; its own line ends stay."""
    return "\n".join(textwrap.fill(line, width) for line in text.split("\n"))


def _span(piece: str, probability: float | None, note: str) -> str:
    if probability is None:
        style = "color:#666"
    else:
        surprise = -math.log2(max(probability, 2.0**-12)) / 12  # 0 to 1: the strongest for 1 in 4,096
        style = f"background:{VERMILION}{round(255 * surprise):02x}"
    title = f" title='{html.escape(note, quote=True)}'" if note else ""
    return f"<span style='{style}'{title}>{html.escape(piece)}</span>"


def _cell(value: Any) -> str:
    if isinstance(value, str):
        text = html.escape(value)
    else:
        text = f"{value:,}" if isinstance(value, Integral) else "" if math.isnan(value) else f"{value:.4g}"
    return f"<td style='text-align:{_side(value)};padding:2px 10px;white-space:pre'>{text}</td>"


def _side(value: Any) -> str:
    return "left" if isinstance(value, str) else "right"
