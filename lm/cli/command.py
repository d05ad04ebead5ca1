"""The command line: a table of commands, each imported when it is typed, and one line for every error."""

import logging
import os
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lm import __version__
from lm.errors import LmError, RequestError
from lm.system import process
from lm.system.stop_signals import STOP


class Command(NamedTuple):
    """A command and the function that runs it.

    `kind` says what the function takes. Only a "function" is imported before its arguments are read and checked; the
    others import PyTorch, which takes seconds.
    "function": its own parameters, such as `lm runs ls --json`.
    "dataclass": a dataclass, whose fields are the options, such as `lm generate --prompt Hello`.
    "overrides": a dataclass, and options that override a run's config, such as `lm branch`.
    "request": a `Request`, made of a config and options that override it, such as `lm fit --config tiny.yaml`.
    """

    name: str
    target: str  # "module of this folder:function"
    kind: Literal["function", "dataclass", "overrides", "request"]
    help: str
    options_class: str = ""  # "module of this folder:dataclass"


# Do not name a "function" as an export of `lm` is named, hence `main_prepare`: jsonargparse looks whether it is that
# export, which imports PyTorch.
TABLE = (
    Command("fit", "fit:fit", "request", "train a model from a config, or resume a run"),
    Command("branch", "branch:branch", "overrides", "a new run from a checkpoint of another: a decay, other data",
            "command_options:BranchOptions"),
    Command("validate", "fit:validate_or_predict", "request",
            "loss, perplexity and bits per byte of a checkpoint on the validation data"),
    Command("test", "fit:validate_or_predict", "request", "the same on all of the test data"),
    Command("predict", "fit:validate_or_predict", "request", "per-token log-probabilities of texts, to Parquet"),
    Command("plan", "plan:plan", "request", "what a config means before it is run, and what is wrong with it"),
    Command("scale", "scale_command:scale", "function",
            "a whole config from a depth or from hours, by published scaling rules"),
    Command("ladder", "ladder:ladder", "overrides",
            "train small models of several sizes, and predict the loss of a large one", "ladder_options:LadderOptions"),
    Command("data prepare", "data:main_prepare", "function", "tokenize texts into Parquet shards"),
    Command("data index", "data:index", "function", "index the shards of another program, to open them at once"),
    Command("data inspect", "data:inspect", "function", "what a data folder holds"),
    Command("data show", "data:show", "function", "the texts that a run saw at a step"),
    Command("generate", "generate:generate", "dataclass",
            "what a checkpoint writes after prompts; interactive without any", "model_options:GenerateOptions"),
    Command("evaluate", "evaluate:evaluate", "dataclass",
            "tasks and bits per byte of a checkpoint, with confidence intervals", "model_options:EvaluateOptions"),
    Command("export", "convert:export", "dataclass", "a Hugging Face folder with a model card, reloaded and compared",
            "model_options:ExportOptions"),
    Command("import", "convert:import_model", "dataclass",
            "a Hugging Face model as a checkpoint that a run starts from", "model_options:ImportOptions"),
    Command("profile", "profile_step:profile", "request", "where the time of a training step goes, by part; a trace"),
    Command("runs ls", "runs:ls", "function", "every run: its status, step, losses, tokens a second and age"),
    Command("runs rm", "runs:rm", "function", "remove runs with their checkpoints"),
    Command("runs show", "runs_show:show", "function",
            "one run on a page: progress, losses, model, checkpoints, machine"),
    Command("runs check", "runs:check", "function", "whether a run ended as its config expects, also as exit code"),
    Command("runs compare", "runs_compare:compare", "function",
            "curves of runs in one chart, and the settings they differ in"),
    Command("runs export", "runs_compare:export", "function",
            "a run for others: metrics, pictures, weights; or one HTML page"),
    Command("runs rebuild", "runs:rebuild", "function", "rebuild the registry of runs from the run folders"),
    Command("monitor", "monitor:monitor", "function", "watch runs live in the terminal, or print their state as JSON"),
    Command("doctor", "doctor:doctor", "function",
            "whether this machine can train: GPU, kernels, disk, each with a fix"),
    Command("schema", "schema:schema", "function", "a JSON schema of a config, for editors"),
    Command("completion", "completion:completion", "function", "completion of options in bash, zsh or fish"),
    Command("bench step", "bench_step:bench_step", "request", "time of a training step, and what a checkpoint costs"),
)  # fmt: skip
TRAINING = ("fit", "branch", "ladder")  # a signal ends these with a checkpoint
COMMANDS = {command.name: command for command in TABLE}
# Names that people may try -> the command.
ALIASES = {name.split()[-1]: name for name in COMMANDS if name.split()[-1] not in COMMANDS} | {
    "train": "fit", "pretrain": "fit", "resume": "fit --ckpt_path auto --run", "finetune": "branch", "eval": "evaluate",
    "sample": "generate", "chat": "generate --chat", "list": "runs ls",
    "runs list": "runs ls", "runs delete": "runs rm", "runs remove": "runs rm",
}  # fmt: skip
# What a value without an option is meant for.
POSITIONAL_HINTS = {
    "generate": "--prompt {value}", "data prepare": "--input {value} --output data/{name}",
    "data show": "--run {value}", "evaluate": "--run {value}", "export": "--run {value}",
    "import": "--input {value} --output models/{name}", "scale": "--depth {value}", "ladder": "--depths {value}",
}  # fmt: skip

HELP = """lm {version}: pretrain a small language model from one YAML file

usage: lm COMMAND [options]        lm COMMAND --help shows the options of one

{commands}

A config that is not in the working directory is looked up in configs/.
Every command takes --debug, which shows where an error came from.
"""


def main(arguments: Sequence[str]) -> int:
    """Run what stands after `lm`: 0 finished, 1 failed, 2 a wrong request, 3 stopped by a guard, 75 interrupted,
    130 interrupted where there is nothing to resume.
    """
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if arguments[:1] == ["help"]:  # `lm help fit`
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP.format(version=__version__, commands=_described(TABLE)), end="")
        return 0
    family = [command for command in TABLE if command.name.startswith(f"{arguments[0]} ")]
    if family and arguments[1:] in (["-h"], ["--help"]):  # `lm runs --help`
        print(_described(family))
        return 0
    if arguments[0] == "--version":
        print(process.lm_version())
        return 0
    logging.basicConfig(handlers=[process.ConsoleHandler()])
    logging.getLogger("lm").setLevel(logging.INFO if process.rank() == 0 else logging.ERROR)
    command = _command(arguments)
    name = command.name if command else arguments[0]
    try:
        if command is None:
            raise RequestError(_unknown_command(arguments))
        return _run(command, arguments[len(name.split()) :])
    except LmError as error:
        if debug:
            raise
        _print_error(f"lm {name}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.filename and error.strerror:  # such as no space left
            message = f"{error.filename}: {error.strerror}"
        else:
            message = f"{type(error).__name__}: {error} ({_error_location(error)}; --debug shows the traceback)"
        _print_error(f"lm {name}: {message}")
        return 1


def _described(commands: Sequence[Command]) -> str:
    width = max(len(command.name) for command in commands)
    return "\n".join(f"  {command.name:<{width}}  {command.help}" for command in commands)


def _run(command: Command, arguments: list[str]) -> int:
    """Read the arguments of a command, then import what runs it, which may take seconds, and call it."""
    if command.kind == "function":
        return _call(_load(command.target), command, arguments) or 0
    process.check_launcher()
    process.import_from_working_directory()
    if command.name in TRAINING:
        STOP.catch()  # a signal that comes while PyTorch is imported ends the command too
    read = _read_request if command.kind == "request" else _read_options
    if values := read(command, arguments):
        if "torch" not in sys.modules and sys.stderr.isatty():
            print("loading PyTorch", file=sys.stderr)
        _load(command.target)(*values)
    return 0


def _read_request(command: Command, arguments: list[str]) -> tuple[Any, ...]:
    """The command's request; nothing if only help or the config is printed."""
    if help_flag := next((flag for flag in ("-h", "--help") if flag in arguments), None):
        from lm.cli.help import print_options

        group = [value for value in arguments[arguments.index(help_flag) + 1 :][:1] if not value.startswith("-")]
        print_options(command.name, command.help, *group)
        return ()
    from lm.cli import request

    settings, run_name = request.read_settings(command.name, arguments)
    if settings.pop("print_config", None) in (True, "true"):
        completed = request.complete_settings(command.name, settings)
        print(request.to_yaml(request.run_settings(command.name, *completed)), end="")
        return ()
    return (request.make_request(command.name, settings, run_name),)


def _read_options(command: Command, arguments: list[str]) -> tuple[Any, ...]:
    """The command's options, and the options that override a run's config if it takes such."""
    from lm.cli.config_files import check_run_exists
    from lm.cli.settings import split_overrides

    options_class, overrides = _load(command.options_class), []
    if command.kind == "overrides":
        arguments, *overrides = split_overrides(arguments, options_class)
    options = _call(options_class, command, arguments)
    check_run_exists(command.name, options)
    return (options, *overrides)


def _call(function: Callable[..., Any], command: Command, arguments: list[str]) -> Any:
    from lm.system.arguments import call

    return call(function, arguments, f"lm {command.name}", POSITIONAL_HINTS.get(command.name))


def _load(target: str) -> Callable[..., Any]:
    """A function or class of this folder, by its module and name."""
    module, _, name = target.partition(":")
    return getattr(import_module(f"lm.cli.{module}"), name)


# ---- errors ----------------------------------------------------------------------------------------------------------


def _error_location(error: Exception) -> str:
    """The innermost line of this project or of a user's file where an exception was: `lm/data/loader.py, line 120`."""
    root, libraries = Path(__file__).parents[2], [sysconfig.get_path(name) for name in ("stdlib", "purelib")]
    location = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if file.is_relative_to(root / "lm"):
            location = f"{file.relative_to(root)}, line {frame.lineno}"
        elif not any(map(file.is_relative_to, libraries)):
            location = f"{file}, line {frame.lineno}"
    return location


def _print_error(message: str) -> None:
    """Print a message to standard error; where that is a closed terminal or pipe, the exit code has to do."""
    try:
        print(process.harmless(message), file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # or Python's own last flush changes the code


def _command(arguments: Sequence[str]) -> Command | None:
    """The command that a command line begins with."""
    return COMMANDS.get(" ".join(arguments[:2])) or COMMANDS.get(" ".join(arguments[:1]))


def _unknown_command(arguments: list[str]) -> str:
    """The message for a command that does not exist, with what was meant."""
    for start in range(len(arguments) if arguments[0].startswith("-") else 0):
        if command := _command(arguments[start:]):
            words = command.name.split()
            typed = shlex.join([*words, *arguments[:start], *arguments[start + len(words) :]])
            return f"the command comes before its options: `lm {typed}`"
    if arguments[0].partition("=")[0] in ("-c", "--config"):
        return f"the command comes first: `lm {shlex.join(['fit', *arguments])}`"
    typed, options = " ".join(arguments[:2]), arguments[2:]
    families = [name for name in (*COMMANDS, *ALIASES) if " " in name]
    close = get_close_matches(typed, families, 1, cutoff=0.8)
    if not close:
        if family := [name for name in COMMANDS if name.startswith(arguments[0] + " ")]:
            return f"give one of: {', '.join('lm ' + name for name in family)}"
        typed, options = arguments[0], arguments[1:]
        close = get_close_matches(typed, {*COMMANDS, *ALIASES}, 1)
    if not close:
        return f"no command {typed!r}; lm --help lists them"
    meant = shlex.join([*ALIASES.get(close[0], close[0]).split(), *options])
    return f"no command {typed!r}; did you mean `lm {meant}`?"
