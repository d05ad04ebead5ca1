"""Safe parsing of JSON and YAML, and values of such documents. Nothing here imports torch."""

import json
import math
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lm.errors import RequestError

# Errors from reading a file that does not have the expected content.
DAMAGE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text; ValueError also for integers of more than 64 bits and for values nested too deep."""
    try:
        return _JSON.decode(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("values are nested too deep to be read") from None


def _integer(digits: str) -> int:
    number = int(digits)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"a number of {len(digits)} digits")
    return number


_JSON = json.JSONDecoder(parse_int=_integer)  # `json.loads` would make a decoder for every line of a file


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file; RequestError if it is damaged."""
    try:
        document = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise RequestError(f"{file} cannot be read ({error}); is it damaged?") from error
    if not isinstance(document, dict):
        raise RequestError(f"{file} is damaged: it is not a JSON object")
    return document


def parse_yaml(text: str | bytes) -> Any:
    """Parse a YAML text into plain values: tags cannot make other objects. `1e-3` is a number and a date is text.

    ValueError also if a key occurs twice, of which YAML would keep the last, or if values are nested too deep.
    """
    import yaml

    try:
        return yaml.load(text, _yaml_loader())
    except yaml.YAMLError as error:
        raise ValueError(_describe(error, text)) from error
    except RecursionError:
        raise ValueError("values are nested too deep to be read") from None
    except DAMAGE_ERRORS as error:  # `!!int x`
        raise ValueError(f"a value does not fit its tag ({error})") from error


def _describe(error: Exception, text: str | bytes) -> str:
    """What is wrong with a YAML text, and in which line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    lines = (text if isinstance(text, str) else text.decode(errors="replace")).split("\n")[: mark.line + 1]
    for number, line in enumerate(lines, 1):  # YAML reads `lr:1` as a text, and stumbles over the lines after it
        if key := re.match(r"[ -]*([a-z_.]+:)[^\s:/]", line):
            return f"line {number}, {line.strip()[:60]!r}: write a space after {key[1]}"
    shown = f", {lines[-1].strip()[:60]!r}" if len(lines) > mark.line else ""
    problem = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
    if "<block end>" in problem:
        problem = "its indentation does not fit the lines above it"
    elif "mapping values are not allowed" in problem:
        problem = "a colon is not possible here: is it indented as the line above, with a space after that one's colon?"
    elif "could not find expected ':'" in problem:
        problem = "this line or the one above lacks a colon, or the space after it"
    elif "'\\t'" in problem:
        problem = "it is indented with a tab: use spaces"
    return f"line {mark.line + 1}{shown}: {problem}"


@cache
def _yaml_loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):  # in Python: the C parser crashes the process on deep nesting
        def construct_scalar(self, node: Any) -> Any:
            return expand_home(super().construct_scalar(node))

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            first: dict[str, yaml.Mark] = {}
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key.start_mark) != key.start_mark:
                    line, before = key.start_mark.line + 1, first[key.value].line + 1
                    raise yaml.YAMLError(f"line {line}: {key.value} is there a second time, after line {before}")
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    # `1e-3`, which YAML 1.1 takes for text: it wants a point and a sign
    exponent = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+.0123456789"))
    return Loader


def expand_home(text: str) -> str:
    """A path below `~` with the home folder in its place, as a shell writes it."""
    return os.path.expanduser(text) if text.startswith("~/") else text


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line of JSON; {} if a kill cut it short."""
    try:
        entry = parse_json(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def finite_or_none(value: Any) -> Any:
    """Copy a tree of values with None for non-finite numbers, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: finite_or_none(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any) -> str:
    """Encode as JSON, with null for NaN and Inf."""
    return json.dumps(finite_or_none(value), ensure_ascii=False, allow_nan=False)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested config to dotted keys; lists of options, such as the sources of a mixture, use their names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        listed = isinstance(value, list) and value
        if listed and all(isinstance(item, dict) and "class_path" not in item for item in value):
            value = {str(item.get("name", index)): item for index, item in enumerate(value)}
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def nonnegative(value: Any) -> float | None:
    """Return a value of a JSON document if it is a finite number >= 0, otherwise None."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return float(value) if number else None
