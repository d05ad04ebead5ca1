"""Command lines from typed functions and classes: the types, the error line, the nearest name."""

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
    """For parsers: a wrong command line is one line with the nearest name, not fifty lines of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises:
        RequestError: always.
        """
        raise RequestError(shorten(message, known_names(self))) from ex


class Parser(OneLineErrors, ArgumentParser):
    """The parser of the commands that LightningCLI does not drive."""


def call(function: Callable[..., Any], arguments: list[str], prog: str) -> Any:
    """Call a typed function with what a command line says.

    Returns:
        What the function returns.

    Raises:
        RequestError: the command line does not fit the function.
    """
    return auto_cli(function, args=arguments, prog=prog, parser_class=Parser, allow_abbrev=False)


def known_names(parser: Any) -> list[str]:
    """Every option that a parser takes, without the dashes."""
    return [option.lstrip("-") for action in parser._actions for option in action.option_strings]


def shorten(message: str, known: list[str]) -> str:
    """The last, most telling part of jsonargparse's message, in one line, with the nearest name to an unknown one."""
    text = re.sub(r"\s*\n\s*", " ", message).strip()
    text = text.removeprefix("Parser key \"config\": ")
    unknown = re.search(r"(?:Option '([^']+)' is not accepted|unrecognized arguments: --([^\s=]+)|[Kk]ey '([^']+)' is not)", text)
    if unknown:
        name = next(group for group in unknown.groups() if group)
        close = get_close_matches(name, known, 1, cutoff=0.5)
        text = f"there is no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    return text
