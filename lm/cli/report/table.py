"""Tables in the terminal: without borders, text on the left, numbers on the right."""

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text


def plain_table(heads: Sequence[str], kinds: str, rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table in which nothing is markup; a short row leaves the last columns empty.

    `kinds` has a letter for each column: `t` a text, which may need several lines, or `n` a number, never broken.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head, kind in zip(heads, kinds, strict=True):
        number = kind == "n"
        table.add_column(Text(head), overflow="fold", no_wrap=number, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
