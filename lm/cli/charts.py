"""Curves and tables in the terminal.

Curves are lines of braille dots with a marker for each, so that they read without colour too.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rich.table import Table
from rich.text import Text

from lm.runs.history import Series
from lm.system.units import MULTIPLIERS

COLORS = ("cyan", "yellow", "magenta", "green", "red", "blue")
MARKERS = "ox+*#@%&"
# The dots of a braille cell, 4 rows of 2: each has a bit of the code point after U+2800.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
MARKER_EVERY = 12  # cells between two markers of a curve


def chart(
    series: Sequence[Series],
    width: int,
    height: int,
    x_label: str = "",
    title: str = "",
    y_range: tuple[float, float] | None = None,
) -> Text:
    """Curves over one pair of axes with numbers, and a legend where there are several.

    Exactly `height` lines of `width` characters, however small. A later curve is drawn over an earlier one, and what is
    outside of `y_range` on the edge.
    """
    grid = Grid(width, height)
    points = [[(x, y) for x, y in zip(one.x, one.y, strict=True) if math.isfinite(x)] for one in series]
    seen_x = [x for curve in points for x, y in curve if math.isfinite(y)]
    seen_y = [y for curve in points for _, y in curve if math.isfinite(y)]
    top = int(bool(title) or len(series) > 1)  # the line of title and legend
    _legend(grid, series, title)
    if not seen_x:
        grid.put(max(0, (width - 11) // 2), height // 2, "no data yet")
        return grid.text()
    x_axis = _Axis(*_spread(min(seen_x), max(seen_x)))
    y_axis = _Axis(*_spread(*(y_range or (min(seen_y), max(seen_y)))))
    rows = max(1, height - top - 2)
    y_ticks = y_axis.ticks(max(2, rows // 2))
    left = max((len(text) for _, text in y_ticks), default=0) + 1  # columns before the plot, the axis among them
    columns = max(1, width - left)
    for row in range(rows):
        grid.put(left - 1, top + row, "│")
    for value, text in y_ticks:
        row = top + y_axis.dot(value, rows, up=True)
        grid.put(left - 1 - len(text), row, text + "┤")
    grid.put(left - 1, top + rows, "└" + "─" * columns)
    _x_ticks(grid, x_axis, left, columns, top + rows, x_label)
    for index, curve in enumerate(points):
        dots = [
            (x_axis.dot(x, columns * 2), y_axis.dot(y, rows * 4, up=True)) if math.isfinite(y) else None
            for x, y in curve
        ]
        marker = MARKERS[index % len(MARKERS)] if len(series) > 1 else None
        first = MARKER_EVERY * index // len(series)  # so that markers of curves that run together stand side by side
        _draw(grid, dots, left, top, COLORS[index % len(COLORS)], marker, first)
    return grid.text()


class Grid:
    """Characters with colours; text outside of the grid is cut off."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.cells = [[(" ", "")] * width for _ in range(height)]  # (character, colour)

    def put(self, column: int, row: int, text: str, color: str = "") -> None:
        if 0 <= row < self.height:
            for offset, character in enumerate(text):
                if 0 <= column + offset < self.width:
                    self.cells[row][column + offset] = (character, color)

    def text(self) -> Text:
        lines = []
        for row in self.cells:
            pieces = groupby(row, itemgetter(1))
            lines.append(Text.assemble(*(("".join(map(itemgetter(0), cells)), color) for color, cells in pieces)))
        return Text("\n", no_wrap=True).join(lines)


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float

    def dot(self, value: float, count: int, up: bool = False) -> int:
        """Which of `count` dots a value falls on, from 0; `up` counts from the high end, as rows do."""
        share = (value - self.low) / (self.high - self.low)
        share = min(1.0, max(0.0, 1 - share if up else share))
        return min(count - 1, int(share * count))

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """At most so many round values on the axis, with their labels."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [index * step for index in range(first, last + 1)]
        return list(zip(values, _labels(values, step), strict=True))


def _labels(values: list[float], step: float) -> list[str]:
    """Numbers of one axis: the same unit and as many decimals for all of them, as few as tell them apart."""
    largest = max(map(abs, values), default=0.0)
    if largest < 1e-4 or largest >= 1e15:
        return [f"{value:.3g}" for value in values]
    unit = next((unit for unit in "TBMK" if largest >= MULTIPLIERS[unit]), "")
    size = MULTIPLIERS[unit]
    decimals = next((n for n in range(7) if abs(round(step / size, n) - step / size) < 1e-6 * step / size), 6)
    return [f"{value / size:.{decimals}f}{unit if value else ''}" for value in values]


def _spread(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    margin = abs(low) * 0.05 or 0.5
    return low - margin, high + margin


def _legend(grid: Grid, series: Sequence[Series], title: str) -> None:
    grid.put(0, 0, title)
    column = len(title) + 3 if title else 0
    for index, one in enumerate(series if len(series) > 1 else ()):
        color, room = COLORS[index % len(COLORS)], grid.width - column
        text = f"{MARKERS[index % len(MARKERS)]} {one.name}"
        grid.put(column, 0, text if len(text) <= room else text[: max(0, room - 1)] + "…", color)
        column += len(text) + 3


def _x_ticks(grid: Grid, axis: _Axis, left: int, columns: int, row: int, label: str) -> None:
    end = grid.width - len(label) - 2 if label else grid.width  # where the label begins
    grid.put(grid.width - len(label), row + 1, label)
    free = 0  # the first column that no number stands in
    for value, text in axis.ticks(max(2, columns // 10)):
        column = left + axis.dot(value, columns)
        start = min(max(0, column - len(text) // 2), grid.width - len(text))
        if start >= free and start + len(text) <= end:
            grid.put(column, row, "┬")
            grid.put(start, row + 1, text)
            free = start + len(text) + 1


def _draw(
    grid: Grid, dots: list[tuple[int, int] | None], left: int, top: int, color: str, marker: str | None, first: int
) -> None:
    """One curve as a line through its dots, over what is drawn already; then its markers."""
    cells: dict[tuple[int, int], int] = {}  # (column, row) -> bits of braille
    middle: dict[int, int] = {}  # column -> a row that the curve passes
    for x, (low, high) in _strokes(dots).items():
        middle[x // 2] = (low + high) // 2 // 4
        for y in range(low, high + 1):
            cells[x // 2, y // 4] = cells.get((x // 2, y // 4), 0) | DOTS[y % 4][x % 2]
    for (column, row), bits in cells.items():
        grid.put(left + column, top + row, chr(0x2800 + bits), color)
    if len(cells) == 1:  # one dot is easily missed
        marker = marker or MARKERS[0]
    if marker and middle:
        for column in [column for column in middle if column % MARKER_EVERY == first] or [min(middle)]:
            grid.put(left + column, top + middle[column], marker, color)


def _strokes(dots: list[tuple[int, int] | None]) -> dict[int, tuple[int, int]]:
    """The line through dots as a vertical stroke in each column, lowest and highest dot; None is a gap."""
    strokes: dict[int, tuple[int, int]] = {}
    for before, dot in zip([None, *dots], dots, strict=False):
        if dot is None:
            continue
        (start, first), (end, last) = before or dot, dot
        row = first
        for x in range(min(start + 1, end), end + 1):
            previous, row = row, last if x == end else round(first + (last - first) / (end - start) * (x - start))
            low, high = strokes.get(x, (row, row))
            strokes[x] = (min(low, previous, row), max(high, previous, row))
    return strokes


def plain_table(heads: Sequence[str], kinds: str, rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table without borders, in which nothing is markup; a short row leaves the last columns empty.

    `kinds` has a letter for each column: `t` a text, which may need several lines, or `n` a number, never broken.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head, kind in zip(heads, kinds, strict=True):
        number = kind == "n"
        table.add_column(Text(head), overflow="fold", no_wrap=number, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
