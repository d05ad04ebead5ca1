"""Where a model's parameters are."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from lm.inspection.drawing import BLUE, figure, finish
from lm.inspection.html import Html, table
from lm.model.decoder import Decoder
from lm.model.huggingface import to_huggingface


class Part(NamedTuple):
    """All weights of one kind."""

    name: str  # as in Hugging Face's files, without the layer: `self_attn.q_proj`
    number: int  # of such weights: one a layer for what blocks hold
    shape: tuple[int, ...]  # of each
    parameters: int
    share: float  # of all parameters, in [0, 1]
    bytes: int


def parameter_parts(decoder: Decoder) -> list[Part]:
    """The parameters by kind, in the order of the model. An output matrix that is the embedding counts once.

    Args:
        decoder: in any precision, on any device.
    """
    weights = to_huggingface(dict(decoder.named_parameters()), decoder.config)
    total = sum(weight.numel() for weight in weights.values())
    kinds: dict[str, list] = {}
    for name, weight in weights.items():
        kinds.setdefault(kind_of(name), []).append(weight)
    return [
        Part(kind, len(same), tuple(same[0].shape), count, count / total, count * same[0].element_size())
        for kind, same in kinds.items()
        for count in (sum(weight.numel() for weight in same),)
    ]


def kind_of(name: str) -> str:
    """What a weight is, without its layer: `model.layers.3.mlp.up_proj.weight` is a `mlp.up_proj`."""
    return _trimmed(name).split(".", 2)[2] if layer_of(name) is not None else _trimmed(name)


def layer_of(name: str) -> int | None:
    """Which layer a weight is of, from 0; None for embedding, last norm and output matrix."""
    name = _trimmed(name)
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def _trimmed(name: str) -> str:
    return name.removeprefix("model.").removesuffix(".weight")


def parameter_table(parts: Sequence[Part]) -> Html:
    """The parts and their sum as a table."""
    rows = [
        (part.name, part.number, " × ".join(map(str, part.shape)), part.parameters, 100 * part.share,
         part.bytes / 2**20)
        for part in parts
    ]  # fmt: skip
    parameters, size = sum(part.parameters for part in parts), sum(part.bytes for part in parts)
    rows.append(("all", sum(part.number for part in parts), "", parameters, 100.0, size / 2**20))
    return table(rows, ("part", "weights", "shape of each", "parameters", "share (%)", "MiB"))


def draw_parameters(parts: Sequence[Part]) -> Figure:
    """The parts as bars, the share of each at its end."""
    picture, axes = figure(height=0.9 + 0.32 * len(parts))
    bars = axes.barh([part.name for part in parts], [part.parameters for part in parts], color=BLUE)
    axes.bar_label(bars, [_percent(part.share) for part in parts], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    finish(axes, f"{sum(part.parameters for part in parts):,} parameters by part", "parameters")
    axes.grid(visible=False, axis="y")
    return picture


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "< 0.1%"
