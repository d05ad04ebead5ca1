"""YAML and JSON that may hold anything: damaged, nested without end, swelling when its aliases are written out.

Whatever is wrong with a text is a ValueError here, so a reader has one kind of failure to name its file in.
"""

import json
import math
from collections.abc import Iterable
from types import FunctionType
from typing import Any

DEEPEST = 32  # values inside values of a YAML
LARGEST = 20_000_000  # characters and values of a YAML, each counted as often as an alias repeats it


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is no JSON, no UTF-8, nested too deep, or has a whole number of more than 64 bits.
    """
    try:
        return _JSON.decode(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("values are nested too deep to be read") from None


def _whole(digits: str) -> int:
    number = int(digits)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"a number of {len(digits)} digits")
    return number


_JSON = json.JSONDecoder(parse_int=_whole)  # `json.loads` would make one for every line of a file


def fits(value: Any, shape: Any) -> bool:
    """Whether a value has the shape that a reader relies on.

    Args:
        value: out of a JSON document.
        shape: a type, where `float` is any finite number; None; a function that says it; a list of the shape of its
            entries; a dict of the shapes that must be under its keys, or under every key where the key is `...`; or a
            tuple of shapes, of which one fits.
    """
    if isinstance(shape, tuple):
        return any(fits(value, each) for each in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(entry, shape[0]) for entry in value)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        every = all(fits(entry, shape[...]) for entry in value.values()) if ... in shape else True
        return every and all(key in value and fits(value[key], shape[key]) for key in shape.keys() - {...})
    if isinstance(shape, FunctionType):
        return shape(value)
    if shape is float:
        return type(value) is int or type(value) is float and math.isfinite(value)
    return value is None if shape is None else type(value) is shape


def parse_yaml(text: str | bytes) -> Any:
    """What a YAML text says, in plain values: no tag makes an object of another kind.

    Raises:
        ValueError: it is no YAML, no UTF-8, nested deeper than `DEEPEST`, or larger than `LARGEST` with its aliases.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, and not in every build of PyYAML
    try:
        _measure(yaml.parse(text, loader))
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split()).replace('in "<byte string>", ', "at ")) from error
    except (AttributeError, LookupError, TypeError, ArithmeticError) as error:  # a tag on what is not of its kind
        raise ValueError(f"a value is not what its tag says ({error})") from error


def _measure(events: Iterable[Any]) -> None:
    """Refuse what would exhaust the stack or the memory of who builds it; to go through its events takes neither."""
    import yaml

    sizes: dict[str, int] = {}  # of what an anchor marks, once it is whole
    open_values: list[tuple[str | None, int]] = []  # the anchor of each, and how much came before it
    size = 0
    for event in events:
        before, size = size, size + 1
        match event:
            case yaml.CollectionStartEvent():
                open_values.append((event.anchor, before))
            case yaml.CollectionEndEvent():
                anchor, before = open_values.pop()
                sizes[anchor] = size - before
            case yaml.ScalarEvent():
                size += len(event.value)
                sizes[event.anchor] = size - before
            case yaml.AliasEvent() if event.anchor not in sizes:
                raise ValueError(f"alias {event.anchor} stands for nothing, or for what it stands in")
            case yaml.AliasEvent():
                size += sizes[event.anchor]
        if len(open_values) > DEEPEST:
            raise ValueError(f"values are nested deeper than {DEEPEST}")
        if size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} characters when its aliases are written out")


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def number(value: Any) -> float | None:
    """A finite number >= 0 out of a file that may hold anything, else None."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return float(value) if fits else None
