"""Curves as PNG files, drawn without a screen; matplotlib is imported when the first one is wanted."""

from collections.abc import Sequence
from pathlib import Path

from lm.inspection.curves import Series

DASHES = ("-", "--", "-.", ":")  # so that curves are told apart without colour


def draw(path: Path, series: Sequence[Series], x_label: str, y_label: str, title: str = "") -> None:
    """Write a picture of curves over one pair of axes.

    Args:
        path: the PNG file; one that is there is replaced.
        series: the curves; a legend tells them apart where there are several. Values that are not finite leave a gap.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, one in enumerate(series):
        sparse = len(one.x) <= 30  # a curve of few points, such as validations, shows them
        axes.plot(
            list(one.x), list(one.y), DASHES[index % len(DASHES)], label=one.name, linewidth=1.4,
            marker="o" if sparse else None, markersize=3,
        )  # fmt: skip
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(frameon=False)
    figure.savefig(path, format="png")
