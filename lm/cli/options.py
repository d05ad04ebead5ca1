"""The options of the commands that take those of a run, read from their dataclasses; `cli/help` prints them.

Nothing here imports PyTorch, which takes seconds: so help answers at once.
"""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import docstring_parser

from lm.cli.command_options import COMMAND_OPTIONS, RunChoice
from lm.system import process
from lm.training.config import SECTIONS

NAMES = [section.name for section in SECTIONS if section.name]
UNIONS = (Union, UnionType)


class Option(NamedTuple):
    """An option as its dataclass declares it."""

    name: str  # with dots, as on the command line
    kind: str  # its type in a word
    default: Any  # None where it needs a value, or has nothing, an empty list or an empty dictionary
    help: str
    hint: Any = str  # its type


CONFIG = Option("config", "file", None, "A YAML file, also looked up in configs/; later files override earlier ones.")
PRINT_CONFIG = Option("print_config", "bool", False, "Print the config with all options instead of running it.")
SEED = Option(
    "seed_everything", "int", 1337, "Seed of the initial weights and the order of the samples; also --seed.", int
)


def all_options(command: str) -> list[Option]:
    """All options of a command: first its own, then those of a run."""
    run_choice = [] if command in ("plan", "bench step", "profile") else options_of(RunChoice)
    options = [CONFIG, PRINT_CONFIG, *run_choice, SEED, *command_options(command)]
    for section in SECTIONS:
        options += options_of(section.options, f"{section.name}." if section.name else "")
        if section.name == "model" and process.module_class:
            known = {option.name for option in options}
            options += [option for option in options_of(process.module_class, "model.") if option.name not in known]
    return options


def command_options(command: str) -> list[Option]:
    """The options of a command besides a config, the choice of a run, and the options of the run."""
    return list(options_of(COMMAND_OPTIONS[command])) if command in COMMAND_OPTIONS else []


def options_of(kind: type, prefix: str = "") -> Iterator[Option]:
    """The arguments of a dataclass or another class, those of the dataclasses among them in their place."""
    helps: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for documented in docstring_parser.parse(inspect.getdoc(base) or "").params:
            helps[documented.arg_name] = " ".join((documented.description or "").split())
    for name, parameter in inspect.signature(kind).parameters.items():
        hint, default = parameter.annotation, parameter.default
        if group := next(filter(is_dataclass, get_args(hint) if get_origin(hint) in UNIONS else [hint]), None):
            yield from options_of(group, f"{prefix}{name}.")
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            has_value = isinstance(default, str | int | float | tuple)  # not None, nor that there is none
            yield Option(prefix + name, _kind(hint), default if has_value else None, helps.get(name, ""), hint)


def _kind(hint: Any) -> str:
    """A type as a word: `count`, `auto|ddp`, `list of str`, `list of {name, weight}`."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is inspect.Parameter.empty:
        return "value"
    if is_dataclass(hint):
        return f"{{{', '.join(option.name for option in options_of(hint))}}}"
    if origin in UNIONS:
        return "|".join(_kind(part) for part in parts if part is not NoneType)
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin is not None:
        return f"{origin.__name__} of {', '.join(map(_kind, parts))}"
    return getattr(hint, "__forward_arg__", getattr(hint, "__name__", str(hint))).lower()  # or a name in quotes


def option_groups(leaves: Iterable[str]) -> set[str]:
    """The groups that options are in, such as `model` and `model.optimizer`."""
    return {".".join(leaf.split(".")[:count]) for leaf in leaves for count in range(1, leaf.count(".") + 1)}
