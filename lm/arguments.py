"""Command lines from typed functions and classes: the types, the error line, the nearest name."""

import inspect
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, auto_cli
from jsonargparse.typing import register_type

from lm.errors import RequestError
from lm.quantities import Count, parse_count

register_type(Count, serializer=int, deserializer=parse_count, type_check=lambda value, kind: type(value) is kind)


class OneLineErrors:
    """For parsers: a wrong command line is one line with the nearest name, not fifty lines of usage.

    Attributes:
        elsewhere: options that people may expect and that have another name here -> what to use instead.
    """

    elsewhere: dict[str, str] = {}

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises:
        RequestError: always.
        """
        raise RequestError(shorten(message, known_names(self), self.elsewhere)) from ex


class Parser(OneLineErrors, ArgumentParser):
    """The parser of the commands that LightningCLI does not drive."""


def call(function: Callable[..., Any], arguments: list[str], prog: str) -> Any:
    """Call a typed function with what a command line says.

    Returns:
        What the function returns.

    Raises:
        RequestError: the command line does not fit the function.
    """
    flags = {name for name, parameter in inspect.signature(function).parameters.items() if parameter.annotation is bool}
    return auto_cli(
        function, args=spell_out(arguments, flags), prog=prog, parser_class=Parser, allow_abbrev=False
    )


def spell_out(arguments: list[str], flags: set[str]) -> list[str]:
    """`--json` as `--json=true`, for options that are yes or no and stand without a value."""
    values = ("true", "false", "yes", "no")
    following = [*arguments[1:], ""]
    return [
        f"{argument}=true" if argument.removeprefix("--") in flags and value.lower() not in values else argument
        for argument, value in zip(arguments, following, strict=True)
    ]


def known_names(parser: Any) -> list[str]:
    """Every option that a parser takes, without the dashes."""
    return [option.lstrip("-") for action in parser._actions for option in action.option_strings]


def shorten(message: str, known: list[str], elsewhere: dict[str, str]) -> str:
    """jsonargparse's message in one line; for an unknown option the one to use instead, or the nearest name."""
    text = re.sub(r"\s*\n\s*", " ", message).strip()
    text = re.sub(r'^Parser key "([^"]+)": (?:Not of type Count: )?', r"\1: ", text)
    unknown = re.search(r"(?:Option '([^']+)' is not accepted|unrecognized arguments: --([^\s=]+)|[Kk]ey '([^']+)' is not)", text)
    if not unknown:
        return text
    name = next(group for group in unknown.groups() if group)
    if name in elsewhere:
        return f"there is no option {name!r}: {elsewhere[name]}"
    close = get_close_matches(name, known, 1, cutoff=0.5)
    return f"there is no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
