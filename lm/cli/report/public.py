"""What may be shown to others: values and commands without secrets."""

import re
from typing import Any

from lm.system.removed_options import REMOVED

USER = re.compile(r"(?<=://)(?:[^\s/@]*@|[^\s/:]*:(?!\d+/)[^\s]*@)")  # user and password in a URL
QUERY = re.compile(r"(://[^\s?#'\"]*)[?#][^\s'\"]*")  # query of a URL, which may be a signature
SECRET = re.compile(r"passw|secret|credential|(api|access|private)_?key|(auth|access|api|hf|bearer)_?token", re.I)
PRIVATE = ("on_event", *REMOVED)  # it may hold addresses to which anybody who knows them can write


def public(value: Any) -> Any:
    """Copy a tree of values without secrets: users and queries of URLs, values with a secret's name, and `PRIVATE`."""
    if isinstance(value, dict):
        shown = {name: part for name, part in value.items() if name not in PRIVATE}
        secret = {name for name, part in shown.items() if part and SECRET.search(str(name))}
        return {name: "(left out)" if name in secret else public(part) for name, part in shown.items()}
    if isinstance(value, list | tuple):
        return [public(part) for part in value]
    return QUERY.sub(r"\1", USER.sub("", value)) if isinstance(value, str) else value


def public_command(command: list[str]) -> list[str]:
    """A command line without the options that `public` leaves out."""
    shown, private = [], False
    for argument in command:
        if argument.startswith("--"):
            option = argument.partition("=")[0]
            private = option[2:].rstrip("+") in PRIVATE or bool(SECRET.search(option))
        if not private:
            shown.append(public(argument))
    return shown
