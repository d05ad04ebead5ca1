"""`lm schema`: a JSON schema of a config, by which an editor completes its options and underlines what is wrong."""

import json
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from lm.cli.options import CONFIG, PRINT_CONFIG, UNIONS, Option, all_options, command_options, options_of
from lm.system.units import Count

# YAML 1.2, which editors read, has no digits grouped by underscores: they are text to it.
NUMBER = r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?$"
COUNT = r"^[0-9][0-9_,]*(\.[0-9]+)?([eE][-+]?[0-9]+)?([kKmMbBgGtT]i?)?$"
ANYTHING: dict[str, Any] = {}
TYPES = {
    bool: {"type": "boolean"},
    int: {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": NUMBER}]},
    float: {"anyOf": [{"type": "number"}, {"type": "string", "pattern": NUMBER}]},
    Count: {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": COUNT}]},
    str: {"type": ["string", "number"]},
    NoneType: {"type": "null"},
}


def schema() -> None:
    """Print the JSON schema of a config: write it to lm.schema.json beside the config, whose header names it."""
    print(json.dumps(config_schema(), indent=1))


def config_schema() -> dict[str, Any]:
    typed = {option.name for option in (CONFIG, PRINT_CONFIG, *command_options("fit"))}  # on the command line alone
    options = [option for option in all_options("fit") if option.name not in typed]
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "a config of lm"} | _group(options)


def _group(options: list[Option]) -> dict[str, Any]:
    """The schema of options, those with a dot in their name in groups."""
    groups: dict[str, list[Option]] = {}
    for option in options:
        head, _, rest = option.name.partition(".")
        groups.setdefault(head, []).append(option._replace(name=rest))
    properties = {name: _group(some) if some[0].name else _leaf(some[0]) for name, some in groups.items()}
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}  # null clears a group


def _leaf(option: Option) -> dict[str, Any]:
    described = {"description": option.help, "default": option.default}
    return _type_schema(option.hint) | {name: value for name, value in described.items() if value is not None}


def _type_schema(hint: Any) -> dict[str, Any]:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in UNIONS:
        kinds = [_type_schema(part) for part in parts]
        return ANYTHING if ANYTHING in kinds else {"anyOf": kinds}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (list, tuple):
        items = _type_schema(parts[0])
        return {"anyOf": [{"type": "array", "items": items}, *([TYPES[str]] if parts[0] is str else [])]}
    if origin is dict:
        return {"type": "object"}
    if is_dataclass(hint):
        return _group(list(options_of(hint)))
    return TYPES.get(hint, ANYTHING)
