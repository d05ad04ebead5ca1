"""The options of the commands that take a training's, read from their dataclasses, and their help.

Nothing here imports PyTorch, which takes seconds: so help answers at once.
"""

import inspect
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import docstring_parser

from lm.cli.command_options import COMMAND_OPTIONS, RunChoice
from lm.errors import RequestError
from lm.system import process
from lm.system.parsing import flatten
from lm.system.units import Count, spelled_count
from lm.training.config import SECTIONS

NAMES = [section.name for section in SECTIONS if section.name]
# Options that a first training needs; `--help all` shows the others too.
FREQUENT = [f"{section.name}.{option}" for section in SECTIONS for option in section.frequent]
FREQUENT_WITHOUT_FIT = ["trainer.precision", "trainer.accelerator", "data.val", "data.test", "data.texts",
                        "data.val_tokens", "data.micro_batch_size"]  # fmt: skip
COLUMN = 38  # where the help of an option begins
UNIONS = (Union, UnionType)


class Option(NamedTuple):
    """An option as its dataclass declares it."""

    name: str  # with dots, as on the command line
    kind: str  # its type in a word
    default: Any  # None where it needs a value, or has nothing, an empty list or an empty dictionary
    help: str


CONFIG = Option("config", "file", None, "A YAML file, also looked up in configs/; later files override earlier ones.")
PRINT_CONFIG = Option("print_config", "bool", False, "Print the config with all options instead of running it.")
SEED = Option("seed_everything", "int", 1337, "Seed of the initial weights and the order of the samples; also --seed.")


# ---- options of a training -------------------------------------------------------------------------------------------


def all_options(command: str) -> list[Option]:
    """All options of a command: first its own, then those of a training."""
    choice = [] if command in ("plan", "bench step", "profile") else list(_options_of(RunChoice))
    found = [CONFIG, PRINT_CONFIG, *choice, SEED, *own_options(command)]
    for section in SECTIONS:
        found += _options_of(section.options, f"{section.name}." if section.name else "")
        if section.name == "model" and process.module_class:
            known = {option.name for option in found}
            found += [option for option in _options_of(process.module_class, "model.") if option.name not in known]
    return found


def own_options(command: str) -> list[Option]:
    """The options of a command besides those of a training, a run and a config."""
    return list(_options_of(COMMAND_OPTIONS[command])) if command in COMMAND_OPTIONS else []


def _options_of(kind: type, prefix: str = "") -> Iterator[Option]:
    """The arguments of a dataclass or another class, those of the dataclasses among them in their place."""
    documented = [
        one for base in reversed(kind.__mro__) for one in docstring_parser.parse(inspect.getdoc(base) or "").params
    ]
    helps = {one.arg_name: " ".join((one.description or "").split()) for one in documented}
    for name, parameter in inspect.signature(kind).parameters.items():
        hint, default = parameter.annotation, parameter.default
        if inside := next(filter(is_dataclass, get_args(hint) if get_origin(hint) in UNIONS else [hint]), None):
            yield from _options_of(inside, f"{prefix}{name}.")
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            given = isinstance(default, str | int | float | tuple)  # not None, nor that there is none
            yield Option(prefix + name, _kind(hint), default if given else None, helps.get(name, ""))


def _kind(hint: Any) -> str:
    """A type as a word: `count`, `auto|ddp`, `list of str`, `list of {name, weight}`."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is inspect.Parameter.empty:
        return "value"
    if is_dataclass(hint):
        return f"{{{', '.join(option.name for option in _options_of(hint))}}}"
    if origin in UNIONS:
        return "|".join(_kind(one) for one in inside if one is not NoneType)
    if origin is Literal:
        return "|".join(map(str, inside))
    if origin is not None:
        return f"{origin.__name__} of {', '.join(map(_kind, inside))}"
    return getattr(hint, "__forward_arg__", getattr(hint, "__name__", str(hint))).lower()  # or a name in quotes


def changed_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a resolved config that are not the defaults, by their names with dots."""
    defaults = {option.name: option.default for option in all_options("fit")}
    defaults |= {name: list(default) for name, default in defaults.items() if isinstance(default, tuple)}  # as in YAML
    empty = ([], {}, ())
    defaults |= {name: None for name, default in defaults.items() if default in empty}
    return {name: value for name, value in flatten(config).items()
            if (None if value in empty else value) != defaults.get(name)}  # fmt: skip


def option_groups(leaves: Iterable[str]) -> set[str]:
    """The groups that options are in, such as `model` and `model.optimizer`."""
    return {".".join(leaf.split(".")[:count]) for leaf in leaves for count in range(1, leaf.count(".") + 1)}


# ---- help ------------------------------------------------------------------------------------------------------------


def print_options(command: str, what: str, chosen: str | None = None) -> None:
    """Print what a command does and its options: those of the `chosen` group, `all`, or else the frequent ones."""
    options = all_options(command)
    if chosen not in (None, "all") and chosen not in option_groups(option.name for option in options):
        raise RequestError(f"no group of options {chosen!r}: give all, or one of {', '.join(NAMES)}")
    width, frequent, usage = min(110, shutil.get_terminal_size().columns), FREQUENT, "--config FILE"
    if command in ("validate", "test", "predict"):
        frequent, usage = FREQUENT_WITHOUT_FIT, "[--run NAME] [--ckpt_path PATH]"
    print(f"lm {command}: {what}\n\nusage: lm {command} {usage} [--OPTION VALUE ...]\n")
    group = ""
    for option in options:
        own = option.name.partition(".")[0] not in NAMES
        if chosen is None and not own and option.name not in frequent:
            continue
        if chosen not in (None, "all") and not option.name.startswith(f"{chosen}."):
            continue
        if not own and option.name.partition(".")[0] != group:
            group = option.name.partition(".")[0]
            print(f"\n{group}:")
        _print_option(option, width, short=chosen is None)
    if chosen is None:
        print(f"\nAll options: lm {command} --help all; those of a group: lm {command} --help data")
        print("In the YAML an option has the same name, with a level for each dot.")


def _print_option(option: Option, width: int, short: bool) -> None:
    """With the first sentence of the help beside its name, or with all of it below."""
    value = spelled_count(option.default) if isinstance(option.default, Count) else option.default
    default = f" [{value}]" if option.default else ""
    if not short:
        print(f"  --{option.name}{'' if option.kind == 'bool' else f' {option.kind}'}{default}")
        print(textwrap.fill(option.help, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
        return
    sentence = option.help.partition(". ")[0].partition("; ")[0].removesuffix(".")
    left, *others = textwrap.wrap(sentence[:1].upper() + sentence[1:] + default, max(20, width - COLUMN))
    name = f"  --{option.name}"
    print(f"{name:<{COLUMN}}{left}" if len(name) < COLUMN - 1 else f"{name}\n{'':{COLUMN}}{left}")
    for line in others:
        print(f"{'':{COLUMN}}{line}")
