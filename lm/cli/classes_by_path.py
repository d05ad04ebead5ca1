"""Callbacks and loggers that a config names by their class path."""

from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import set_dumper
from lightning.pytorch import Callback, callbacks, loggers
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from lm.cli.request import Request, allow_class_path
from lm.errors import RequestError
from lm.system.arguments import OneLineErrors


class TrainingParser(OneLineErrors, LightningArgumentParser):
    """LightningCLI's parser with errors of one line, which name the callback or the logger that cannot be made."""

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        added = super().add_class_arguments(*args, **kwargs)
        allow_class_path(self)
        return added

    def instantiate_classes(self, *args: Any, **kwargs: Any) -> Any:
        failures: list[RequestError] = []  # jsonargparse's own error is about every type that it tried

        def make(kind: type, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return kind(*args, **kwargs)
            except Exception as error:
                option = "callbacks" if issubclass(kind, Callback) else "logger"
                failures.append(RequestError(f"trainer.{option}: {kind.__name__}: {' '.join(str(error).split())}"))
                raise

        for base in (Callback, Logger):
            self.add_instantiator(make, base)
        try:
            return super().instantiate_classes(*args, **kwargs)
        except ValueError as error:
            if failures:
                raise failures[0] from error
            raise


class TextDumper(yaml.SafeDumper):
    """Writes what YAML has no type for as text: the arguments of a callback may be an enum or a torch.device."""


TextDumper.add_multi_representer(object, lambda dumper, item: dumper.represent_str(f"{getattr(item, 'value', item)}"))
set_dumper("text", lambda content: yaml.dump(content, Dumper=TextDumper))


class TrainerClasses:
    """The options of the Trainer that are classes by path."""

    def __init__(
        self, callbacks: list[Callback] | None = None, logger: Logger | list[Logger] | None = None
    ) -> None: ...


def find_class(option: str, given: Any) -> Any:
    """A callback or logger of a config with the full path of its class.

    RequestError for a module that is not there, a name without one that Lightning does not have, and an argument that
    the class does not take.
    """
    entry = given if isinstance(given, dict) else {"class_path": given}
    path, place = entry.get("class_path"), f"trainer.{option}: {entry.get('class_path')}"
    if not isinstance(path, str):
        return given
    module, _, name = path.rpartition(".")
    if name == "py":
        raise RequestError(f"{place} is a file: give the class in it, as {module}.NAME")
    if not module:
        package = {"callbacks": callbacks, "logger": loggers}[option]
        names = [each for each in dir(package) if each[:1].isupper()]
        if name not in names:
            close = [each for each in names if each.lower().startswith(name.lower())]
            close = close or get_close_matches(name, names, 1, cutoff=0.8)
            own = f"give its path, such as my_file.{name} for one in my_file.py"
            fix = f"did you mean {close[0]}?" if close else own
            raise RequestError(f"trainer.{option}: Lightning has no {name}; {fix}")
        module = package.__name__
    try:
        kind = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        fix = f"a file {module.partition('.')[0]}.py is looked for in the folder where lm is started, {Path.cwd()}"
        raise RequestError(f"{place}: there is no module {error.name}; {fix}") from error
    except AttributeError as error:
        raise RequestError(f"{place}: {module} has no {name}") from error
    parameters = signature(kind).parameters
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    if unknown := [] if takes_all else sorted((entry.get("init_args") or {}).keys() - parameters.keys()):
        raise RequestError(f"{place} takes no argument {unknown[0]}; it takes {', '.join(parameters) or 'none'}")
    return {**entry, "class_path": f"{module}.{name}"}


def parse_classes(request: Request) -> tuple[TrainingParser, Any]:
    """A parser of callbacks and loggers, and those of a request, with all arguments of their classes."""
    parser = TrainingParser(prog="lm")
    parser.add_class_arguments(TrainerClasses, "trainer", instantiate=False, fail_untyped=False)
    classes = {"callbacks": request.trainer.callbacks, "logger": request.trainer.logger}
    for option, given in classes.items():
        several = isinstance(given, list)
        classes[option] = [find_class(option, each) for each in given] if several else find_class(option, given)
    return parser, parser.parse_object({"trainer": classes})


def with_arguments_of_classes(request: Request) -> Request:
    """The request whose settings have all arguments of callbacks and loggers, as the run keeps them, also defaults."""
    if not (request.trainer.callbacks or request.trainer.logger):
        return request
    parser, config = parse_classes(request)
    complete = yaml.safe_load(parser.dump(config, format="text", skip_none=False, skip_check=True))["trainer"]
    return replace(request, settings={**request.settings, "trainer": {**request.settings["trainer"], **complete}})


def with_classes(request: Request) -> Request:
    """The request with its callbacks and loggers built, for a command that LightningCLI does not run."""
    parser, config = parse_classes(request)
    built = parser.instantiate_classes(config).trainer
    return replace(request, trainer=replace(request.trainer, callbacks=built.callbacks, logger=built.logger))
