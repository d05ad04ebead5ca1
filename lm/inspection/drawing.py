"""The style of all pictures of `lm.inspection`: sizes that read well on a page, colours for every kind of sight.

Figures are made without pyplot, so nothing is kept behind, and a notebook shows one that a cell ends with. Anywhere
else `figure.savefig("name.png")` writes it.
"""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from cycler import cycler
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

# Eight colours that people with every kind of colour vision tell apart (Okabe and Ito, "Color Universal Design", 2008).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, BLACK = COLORS
# For amounts: lightness grows evenly, so it reads in grey, too. Lines leave out the brightest, which white swallows.
SEQUENTIAL = colormaps["viridis"]
COLORMAP_OF_LINES = ListedColormap(SEQUENTIAL(range(226)), "lines")
DPI = 110


class Picture(Figure):
    """A matplotlib figure that a notebook shows by itself."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def figure(
    rows: int = 1, columns: int = 1, width: float = 8, height: float = 4.5, **options: Any
) -> tuple[Figure, Any]:
    """A figure in the house's style.

    Args:
        rows, columns: of pairs of axes.
        width, height: of the whole, in inches.
        options: for matplotlib's `Figure.subplots`, such as `sharey=True`.

    Returns:
        The figure, and its `Axes`: one, or an array of them as `Figure.subplots` gives it.
    """
    made = Picture(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = made.subplots(rows, columns, **options)
    for each in made.axes:
        each.set_prop_cycle(cycler(color=COLORS))
    return made, axes


def finish(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Give axes their words and their grid, and a legend where there are curves with names.

    Args:
        axes: with everything drawn on them.
        title: what they show.
        x, y: what is on the axes, with the unit.
    """
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9)


def heat(
    axes: Axes, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], low: float, high: float,
    digits: int = 2,
) -> None:  # fmt: skip
    """A heat map with the number in every cell.

    Args:
        axes: where it goes.
        values: `(rows, columns)`; what is not finite stays white.
        rows, columns: their names.
        low, high: the values of the darkest and of the brightest colour.
        digits: of a number, after the point.
    """
    axes.pcolormesh(np.ma.masked_invalid(values), cmap=SEQUENTIAL, vmin=low, vmax=high, edgecolors="white")
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.tick_params(length=0)
    axes.set_ylim(len(rows), 0)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            ink = "black" if value > low + 0.6 * (high - low) else "white"
            middle = (column + 0.5, row + 0.5)
            axes.annotate(f"{value:.{digits}f}", middle, color=ink, ha="center", va="center", fontsize=8)
