"""A prompt on the terminal: a line goes in, what the model makes of it comes out, and settings change in between."""

import difflib
import logging
import random
import sys
import typing
from dataclasses import replace
from typing import Any

from lm.commands.writer import Settings, show
from lm.decode_step import Step
from lm.errors import LmError, RequestError
from lm.pretrained import Pretrained
from lm.quantities import parse_count
from lm.terminal import harmless

log = logging.getLogger(__name__)

HELP = """A line is a prompt, and the model goes on from it. An empty line goes on with the text that is there.
  {names}
                 shows a setting; with a value after it, such as /temperature 0.7 or /top_k none, changes it
  /settings      shows all of them
  /reset         forgets the text and puts the settings back
  /quit          leaves, as Ctrl-D does
  /help          shows this
Ctrl-C ends a text, Ctrl-D leaves."""
LARGEST_SEED = 2**32


class Repl:
    """Reads lines until the input ends.

    Args:
        model: that writes.
        settings: to begin with.
        step: how the decoder is run.
    """

    def __init__(self, model: Pretrained, settings: Settings, step: Step) -> None:
        self.model, self.step = model, step
        self.settings = self.given = settings
        self.text = ""

    def run(self) -> None:
        """Read and write, until Ctrl-D."""
        try:
            import readline  # noqa: F401  it gives `input` a history and keys to edit with
        except ImportError:  # not on every system
            pass
        print("A line is a prompt. /help tells more; Ctrl-D leaves.")
        while True:
            try:
                line = input("> ")
                self.command(line[1:]) if line.startswith("/") else self.write(line)
            except LmError as error:
                print(harmless(str(error)), file=sys.stderr)
            except KeyboardInterrupt:
                print()
            except EOFError:
                print()
                return
            except UnicodeDecodeError as error:
                print(f"this is no UTF-8 text: {error}", file=sys.stderr)

    def write(self, line: str) -> None:
        """Go on from a line; from all that is there where it is empty."""
        seed = self.settings.seed
        seed = random.randrange(LARGEST_SEED) if seed is None else seed
        prompt = line or self.text
        shown = show(self.model, prompt, replace(self.settings, seed=seed), self.step, begin=line)
        self.text = prompt + shown.text
        print(shown.sentence(seed))

    def command(self, line: str) -> None:
        """Do what stands after a slash.

        Raises:
            RequestError: there is no such command, or its value means nothing.
        """
        name, _, value = line.partition(" ")
        names = list(self.settings.described())
        if name in ("quit", "exit"):
            raise EOFError
        if name == "help":
            print(HELP.format(names=" ".join("/" + name for name in names)))
        elif name == "settings":
            for each in names:
                self._tell(each)
        elif name == "reset":
            self.settings, self.text = self.given, ""
        elif name in names:
            if value.strip():
                value = value if name == "stop" else value.strip()
                self.settings = replace(self.settings, **{name: _read(name, value)})
            self._tell(name)
        else:
            close = difflib.get_close_matches(name, [*names, "help", "settings", "reset"], 1)
            hint = f"did you mean /{close[0]}?" if close else "/help lists them"
            raise RequestError(f"there is no /{name}; {hint}")

    def _tell(self, name: str) -> None:
        value = getattr(self.settings, name)
        print(f"{name} {'none' if value in (None, ()) else value}")


def _read(name: str, value: str) -> Any:
    """A setting's value from what a person typed.

    Raises:
        RequestError: it is of another kind.
    """
    kind = typing.get_type_hints(Settings)[name]
    if value.lower() in ("none", "null") and type(None) in typing.get_args(kind):
        return None
    if name == "stop":
        return () if value.lower() == "none" else (value.replace("\\n", "\n").replace("\\t", "\t"),)
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            raise RequestError(f"{name} {value!r}: give one of {', '.join(typing.get_args(kind))}")
        return value
    if kind is bool:
        if value.lower() not in ("true", "false", "yes", "no", "on", "off"):
            raise RequestError(f"{name} {value!r}: give true or false")
        return value.lower() in ("true", "yes", "on")
    try:
        return float(value) if float in (kind, *typing.get_args(kind)) else int(parse_count(value))
    except ValueError as error:
        raise RequestError(f"{name} {value!r} is no number that it can be") from error
