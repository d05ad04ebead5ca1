"""Tables and coloured text for notebooks, as HTML that reads on a light and on a dark page."""

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

VERMILION = "#D55E00"  # as in drawing.py, which is not imported: what is made here needs no matplotlib
MOST_BITS = 12  # a surprise from which on the colour is as strong as it gets: one in 4,096
LEGEND = (1.0, 0.5, 0.1, 0.01, 0.001)


@dataclass(frozen=True)
class Html:
    """A piece of a page; a notebook shows it by itself.

    Attributes:
        source: the HTML.
    """

    source: str

    def _repr_html_(self) -> str:
        return self.source


def table(rows: Sequence[Sequence[Any]], columns: Sequence[str], caption: str = "") -> Html:
    """A table, numbers to the right.

    Args:
        rows: of values; whole numbers are written with commas, others with four significant digits.
        columns: the names above them, with units.
        caption: a sentence over it.
    """
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
    """Text whose background says how little each piece was expected, with a legend below.

    Args:
        pieces: of the text, in order.
        probabilities: of each, in [0, 1]; None: it was given and not predicted, and stands in grey.
        notes: what appears when the pointer rests on a piece; its probability if not given.
    """
    notes = notes or ["" if p is None else f"probability {p:.3g}" for p in probabilities]
    spans = "".join(_span(*each) for each in zip(pieces, probabilities, notes, strict=True))
    legend = " ".join(_span(f"\u00a0{p:g}\u00a0", p, "") for p in LEGEND)
    return Html(
        "<div style='background:#fff;color:#000;padding:0.8em;line-height:1.7'>"
        f"<div style='white-space:pre-wrap;font-family:monospace'>{spans}</div>"
        f"<div style='margin-top:0.8em;font-size:85%'>probability: {legend}</div></div>"
    )


def visible(text: str) -> str:
    """A token's text with its blanks and line ends to be seen."""
    return text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍") or "∅"


def wrapped(text: str, width: int) -> str:
    """A text with lines of at most so many characters; its own line ends stay."""
    return "\n".join(textwrap.fill(line, width) for line in text.split("\n"))


def _span(piece: str, probability: float | None, note: str) -> str:
    if probability is None:
        style = "color:#666"
    else:
        surprise = -math.log2(max(probability, 2.0**-MOST_BITS)) / MOST_BITS  # 0 to 1
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
