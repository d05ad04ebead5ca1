"""Command lines from typed functions and classes: lists and flags as people type them, and one-line errors."""

import json
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import register_type

from lm.errors import RequestError
from lm.system.parsing import expand_home
from lm.system.units import Count, parse_count, shown

OPTION = re.compile(r"--|-[a-z]$")
NEGATIVE = re.compile(r"-[\d.]+(e[+-]?\d+)?", re.IGNORECASE)
MAX_MESSAGE = 300

register_type(Count, serializer=int, deserializer=parse_count, type_check=lambda value, kind: type(value) is kind)


class OneLineErrors:
    """Mixin for parsers: a wrong command line gives a one-line error with the nearest name, instead of the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise RequestError with the message in one line."""
        missing = re.search(r"the following arguments are required: (\S+)", message)
        if missing:
            raise RequestError(self.describe_missing(missing[1])) from ex
        for name in re.findall(r"^unrecognized arguments: --(\w+)", message, re.IGNORECASE):
            positional = [action.dest for action in self._actions if not action.option_strings]
            if name in positional or f"{name}s" in positional:
                raise RequestError(f"give the {name} without a name: `{self.prog} {name.upper()}`") from ex
        raise RequestError(shorten(message, known_names(self))) from ex

    def describe_missing(self, name: str) -> str:
        """The message for an option or argument that has no default and no value."""
        if "." in name:  # of the model's class; LightningCLI puts its subcommand before the name
            name = name.partition(".")[2] if self.prog == "lm" else name
            return f"give --{name}, or {name} in the config: it has no default"
        if self.prog.startswith("lm "):
            hint = "`lm runs ls` lists them" if name == "run" else f"`{self.prog} --help` shows what to give"
            return f"give a {name}, as in `{self.prog} {name.upper()}`; {hint}"
        return f"{name} is missing"  # of an entry of a list, or of a class that the config names


class Parser(OneLineErrors, ArgumentParser):
    """The parser of the commands that LightningCLI does not drive."""


def call(function: Callable[..., Any], arguments: list[str], prog: str, meant: str | None = None) -> Any:
    """Call a typed function with the values of a command line; parameters without a default are positional.

    `meant` is the suggestion for a value without an option, with `{value}` and its short form `{name}`.
    """
    return function(**parse(function, arguments, prog, meant))


def options_of_function(function: Callable[..., Any]) -> list[tuple[str, str, str]]:
    """The options that `call` takes for a function: name, type or choices in words, and help."""
    parser = Parser(allow_abbrev=False)
    parser.add_function_arguments(function, as_group=False, as_positional=True)
    return [
        (action.dest, "bool" if getattr(action, "_typehint", None) is bool else "value", str(action.help or ""))
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    ]


def parse(
    function: Callable[..., Any], arguments: list[str], prog: str, meant: str | None = None, defaults: bool = True
) -> dict[str, Any]:
    """The values of a command line for a typed function: of all parameters, or without `defaults` of those typed."""
    parser = Parser(prog=prog, allow_abbrev=False, description=(function.__doc__ or "").partition("\n\n")[0])
    parser.add_function_arguments(function, as_group=False, as_positional=True)
    if meant and arguments and not arguments[0].startswith("-"):
        value, *arguments = arguments
        name = re.sub(r"\W+", "-", Path(value).stem)
        if "--output" in meant and arguments and not arguments[0].startswith("-"):  # as in `cp FROM TO`
            meant = meant.partition(" --output ")[0] + " --output " + shlex.quote(arguments.pop(0))
        if meant.split()[0] in (argument.partition("=")[0] for argument in arguments):  # `generate tiny --prompt The`
            meant = "--run {value}"
        fixed = meant.format(value=shlex.quote(value), name=name)
        arguments = [re.sub(r"^(-o|--out(_dir)?)(?==|$)", "--output", argument) for argument in arguments]
        if any(argument.partition("=")[0] == "--output" for argument in arguments):
            fixed = fixed.partition(" --output ")[0]
        command = " ".join([prog, fixed, *map(shlex.quote, arguments)])
        raise RequestError(f"{shown(value)} belongs to no option; did you mean `{command}`?")
    kinds = {action.dest: str(getattr(action, "_typehint", "")) for action in parser._actions}
    flags = [name for name, kind in kinds.items() if kind == "<class 'bool'>"]
    lists = [name for name, kind in kinds.items() if "list[" in kind]
    for action in parser._actions:
        if action.dest in lists:
            action.metavar = f"{action.dest.upper()} ..."
    typed = typed_options(arguments, flags, lists)
    words: Any = [value for option, value in typed if not option]
    if any(action.dest in lists and not action.option_strings for action in parser._actions):
        words = [as_list(words)]
    spelled = [(option, as_list(value) if isinstance(value, list) else value) for option, value in typed if option]
    options = [option if value is None else f"{option}={value}" for option, value in spelled]
    return parser.instantiate_classes(parser.parse_args([*words, *options], defaults=defaults)).as_dict()


def typed_options(
    arguments: list[str], flags: Iterable[str] = (), lists: Iterable[str] = ()
) -> list[tuple[str, str | list[str] | None]]:
    """The options of a command line in order, as `--name`, with their values; None where there is none.

    A flag alone is `true`. A list is several words, a repeated option, JSON, or YAML, as in `--input '[a, b]'`; texts
    such as `--prompt '[Applause]'` are YAML only after an equals sign. `--input=null` is no list, nor is `null` after
    an option of a config, which has a dot. A word that belongs to no option has an empty name.
    """
    typed: list[tuple[str, str | list[str] | None]] = []
    repeated: dict[str, list[str]] = {}
    words = [expand_home(word) for word in arguments]
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        value = expand_home(value)
        name = option.lstrip("-")
        null = value == "null" if equals else words[:1] == ["null"] and "." in name
        if not word.startswith("-"):
            typed.append(("", word))
        elif name in lists and (equals or words) and not null:
            values = [value] if equals else []
            while not equals and words and not OPTION.match(words[0]):
                values.append(words.pop(0))
            as_yaml = bool(equals) or name.rpartition(".")[2] not in ("prompt", "prompts", "stop")
            if option not in repeated:
                typed.append((option, repeated.setdefault(option, [])))
            repeated[option] += _listed(values[0], as_yaml) if len(values) == 1 else values
        elif equals:
            typed.append((option, value))
        elif name in flags and not (words and words[0].lower() in ("true", "false", "yes", "no")):
            typed.append((option, "true"))
        elif words and (not words[0].startswith("-") or NEGATIVE.fullmatch(words[0])):
            typed.append((option, words.pop(0)))
        else:
            typed.append((option, None))
    return typed


def _listed(text: str, as_yaml: bool) -> list[str]:
    """Parse a JSON or YAML list of strings; any other text, even in brackets, is a single item."""
    try:
        items = yaml.safe_load(text) if as_yaml else json.loads(text)
    except (ValueError, yaml.YAMLError):
        return [text]
    return items if isinstance(items, list) and all(isinstance(item, str) for item in items) else [text]


def as_list(values: list[str]) -> str:
    """Strings as a YAML list on one line, with non-ASCII characters escaped."""
    return yaml.safe_dump(values, default_style='"', default_flow_style=True, width=float("inf")).strip()


def known_names(parser: Any) -> list[str]:
    """Every option of a parser, without the dashes."""
    return sorted({option.lstrip("-") for action in parser._actions for option in action.option_strings})


def shorten(message: str, known: list[str]) -> str:
    """Shorten jsonargparse's message to one line; add the nearest names for an unknown option or choice."""
    from lm.system.other_names import nearest_option, unknown_options

    if unrecognized := re.search(r"unrecognized arguments: (.*)", message):
        names = [word.lstrip("-").partition("=")[0] for word in unrecognized[1].split() if word.startswith("-")]
        if not names:
            hint = f"; did you mean --{unrecognized[1]}?" if "=" in unrecognized[1] else ""
            return f"{shown(unrecognized[1])} belongs to no option{hint}"
        return unknown_options({name: nearest_option(name, known) or "--help lists them" for name in names})
    unknown = re.search(r"(?:Group '(\S+)' )?does not accept option '([^']+)'|[Kk]ey '([^']+)' is not", message)
    if unknown:
        name = ".".join(filter(None, unknown.groups()))
        return unknown_options({name: nearest_option(name, known) or "--help lists them"})
    # For a type such as `int | None`, keep the error of each part, but not the list of parts or the error for None.
    key = next(iter(re.findall(r'\AParser key "(.+?)":', message)), None)
    indent = re.search(r"Errors:\n( *)- ", message)
    errors = re.findall(rf"\n{indent[1]}- (.*(?:\n{indent[1]} {{4}}.*)*)", message) if indent else []
    if reasons := [each for each in errors if "NoneType" not in each]:
        of_class, whole = r"class_path'?[=:] ?'(\S+?)'", re.search(r"(?s)Given value: (.*)", message)
        several = len(set(re.findall(of_class, message))) > 1  # of which one is wrong
        value = None if several else re.search(of_class, message) or whole
        # Keep the error of a class itself, not that the value is of no other type.
        text = ", or ".join([each for each in reasons if not each.startswith(("Expected", "Not a"))] or reasons)
        text += f", got {value[1]}" if value and not re.search("[Gg]ot |class_path| is missing", text) else ""
    else:
        text = message.partition('":')[2] if key else message
    text = re.sub(r"[Ee]xpected a <class '(?:\w+\.)*(\w+)'>", r"expected \1", " ".join(text.split()))
    text = re.sub(r"[Ee]xpected a typing\.Literal\[(.*?)\]", r"expected one of \1", text)
    text = text.replace("', or expected one of '", "', '")
    text = text.replace(". Got value:", ", got").replace("Not of type Count: ", "")
    text = re.sub(r"expected dict, got ([^\[{].*)", r"expected keys and values: '{\1: ...}'", text)
    # The value of a list may contain a password.
    text = re.sub("expected (list|tuple), got .*", "expected a list: [a, b], or lines that begin with a dash", text)
    text = re.sub("Unable to load config .*", "this is a group of options: give each with its name", text)
    if missing := re.fullmatch(r"(\w+) is missing", text):
        of_class = key in ("trainer.callbacks", "trainer.logger")
        value = "val/loss" if missing[1] == "monitor" else "VALUE"
        text += f"; give --{key}.init_args.{missing[1]} {value}" if of_class else f": `{{{missing[1]}: ..., ...}}`"
    if key == "hours":
        text += "; minutes are sixtieths: 0.5 for 30"
    text = f"{key}: {text}" if key else text
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
