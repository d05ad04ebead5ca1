"""The page that `lm monitor` shows: runs as lines of text, never more or wider than there is room for.

`watch` finds what is shown, `dashboard_figures` puts it into words and `charts` draws the curves. Nothing here reads a
file or knows of a terminal.
"""

import math
from collections.abc import Sequence
from typing import Any

from rich.ansi import AnsiDecoder
from rich.text import Text

from lm.commands.charts import chart
from lm.commands.dashboard_figures import Fact, alerts, checkpoints, machine, plain, progress, title, training
from lm.commands.watch import Watch
from lm.inspection.curves import Series, smooth

LEAST = 76  # columns of a run beside another one
WIDE = 110  # columns from which on the figures stand beside the chart
SIDE = 46  # columns that they take at least
LOSS = 6, 12  # rows of the smallest chart of the loss, and of the smallest that has others below it
BELOW = 7, 15  # least and most rows of the charts below
SMALL = (("optim/grad_norm", "gradient norm"), ("optim/lr", "learning rate"), ("perf/tokens_per_second", "tokens/s"))


def page(watches: Sequence[Watch], width: int, height: int) -> list[Text]:
    """Several runs on one screen: side by side where it is wide, stacked where not, fewer lines each the more they are.

    Returns:
        At most `height` lines of at most `width` cells.
    """
    if len(watches) > max(1, height):
        rest = Text(f"and {len(watches) - height + 1} more")
        return [*page(watches[: height - 1], width, height - 1), *fit([rest], width, 1)]
    across = max(1, min(width // LEAST, math.ceil(len(watches) / 2)))
    down = math.ceil(len(watches) / across)
    lines: list[Text] = []
    for row in range(down):
        room = (height - len(lines)) // (down - row)
        wide, apart = (width + 1) // across - 1, int(room > 5 and row < down - 1)
        blocks = [block(watch, wide, room - apart) for watch in watches[row * across : (row + 1) * across]]
        lines += [*beside(blocks, width, [wide] * len(blocks)), *[Text()] * apart]
    return lines


def block(watch: Watch, width: int, height: int) -> list[Text]:
    """One run in `height` lines of `width` cells: what matters most stands at the top, the chart takes what is left."""
    state = watch.state
    head = [title(state, width), progress(state, width)]
    if state.get("reason") and state["status"] not in ("running", "dead"):
        head.append(Text(f"{state['status']}: {plain(state['reason'])}"))
    if width >= WIDE and height >= 14 and watch.curves["train/loss"].points()[0]:
        return fit([*head, *_wide(watch, width, height - len(head))], width, height)
    numbers, said = row(training(state), width), alerts(state, 3)
    below = [*row(machine(state, 2), width), *row(checkpoints(state), width)]
    room = height - sum(map(len, (head, numbers, said, below)))
    if room >= LOSS[0]:
        numbers += _loss(watch, width, room)
    return fit([*head, *numbers, *said, *below], width, height)


def _wide(watch: Watch, width: int, height: int) -> list[Text]:
    right = max(SIDE, width // 4)
    sides = (_side(watch.state, right, gpus, airy) for gpus, airy in ((8, True), (1, True), (1, False)))
    side = next((side for side in sides if len(side) <= height), _side(watch.state, right, 1, False))
    left = width - right - 2
    small = min(BELOW[1], height // 3)
    if height - small < LOSS[1] or small < BELOW[0]:
        curves = _loss(watch, left, height)
    else:
        curves = [*_loss(watch, left, height - small), *_small(watch, left, small)]
    return beside([curves, side], width, [left, right])


def _side(state: dict[str, Any], width: int, gpus: int, airy: bool) -> list[Text]:
    """All figures below each other, with headings where there is room for them."""
    lines: list[Text] = []
    for heading, facts in (
        ("training", column(training(state))), ("machine", column(machine(state, gpus))),
        ("checkpoints", column(checkpoints(state))), ("alerts", alerts(state, 5, width)),
    ):  # fmt: skip
        if facts:
            lines += [*[Text(), Text(heading, "bold")] * airy, *facts]
    return lines[int(airy) :]


# ---- curves ----------------------------------------------------------------------------------------------------------


def _loss(watch: Watch, width: int, height: int) -> list[Text]:
    """The training loss, a smoothed line through it, and the validations."""
    steps, losses = watch.curves["train/loss"].points()
    smoothed = smooth(losses, 1 - 1 / max(1.0, len(losses) / 60))
    validation = watch.curves["val/loss"].points()
    curves = [Series("loss", steps, losses), Series("smoothed", steps, smoothed), Series("validation", *validation)]
    shown = [curve for curve in curves if curve.x and (curve.name != "smoothed" or len(steps) > 30)]
    return draw(shown, width, height, "" if len(shown) > 1 else "loss", later(losses + validation[1], losses))


def later(values: list[float], losses: list[float]) -> tuple[float, float] | None:
    """The range of a curve without its first tenth, which falls so far that the rest would look flat."""
    known = [value for value in values if math.isfinite(value)]
    rest = [value for value in losses[len(losses) // 10 :] if math.isfinite(value)]
    if len(rest) < 20:
        return None
    low, high = min(known), max(rest)
    return (low, high) if high > low else None


def _small(watch: Watch, width: int, height: int) -> list[Text]:
    wide = (width - 2 * (len(SMALL) - 1)) // len(SMALL)
    curves = [(Series(label, *watch.curves[name].points(most=wide)), label) for name, label in SMALL]
    blocks = [draw([curve], wide, height, label) for curve, label in curves]
    return beside(blocks, width, [wide] * len(SMALL))


def draw(
    curves: list[Series], width: int, height: int, heading: str = "", y_range: tuple[float, float] | None = None
) -> list[Text]:
    """A chart as lines; none before there are points."""
    if not any(curve.x for curve in curves):
        return []
    text = chart(curves, width, height, color=True, x_label="step", title=heading, y_range=y_range)
    return list(AnsiDecoder().decode(text))


# ---- lines -----------------------------------------------------------------------------------------------------------


def fit(lines: Sequence[Text], width: int, height: int) -> list[Text]:
    """The first `height` lines, filled up or cut to `width` cells."""
    lines = [line.copy() for line in lines[:height]]
    for line in lines:
        line.truncate(width, overflow="ellipsis", pad=True)
    return [*lines, *(Text(" " * width) for _ in range(height - len(lines)))]


def beside(blocks: list[list[Text]], width: int, widths: list[int]) -> list[Text]:
    """Blocks of lines next to each other, what is over of the width between them."""
    height = max(map(len, blocks))
    columns = [fit(lines, wide, height) for lines, wide in zip(blocks, widths, strict=True)]
    gap = Text(" " * ((width - sum(widths)) // (len(blocks) - 1))) if len(blocks) > 1 else Text()
    return [gap.join(cells) for cells in zip(*columns, strict=True)]


def row(facts: list[Fact], width: int) -> list[Text]:
    """Facts one after the other, in as many lines as it takes."""
    lines: list[Text] = []
    for label, value, style in facts:
        text = Text().append(label + " ", "dim").append(value, style)
        if lines and lines[-1].cell_len + 3 + text.cell_len <= width:
            lines[-1].append("   ").append_text(text)
        else:
            lines.append(text)
    return lines


def column(facts: list[Fact]) -> list[Text]:
    """Facts below each other, their values in line."""
    wide = max((len(label) for label, _, _ in facts), default=0) + 2
    return [Text().append(label.ljust(wide), "dim").append(value, style) for label, value, style in facts]
