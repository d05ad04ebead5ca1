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
from lm.system.process import ConsoleHandler, harmless, import_from_working_directory, lm_version, rank
from lm.system.stop_signals import STOP


class Command(NamedTuple):
    """A command and what runs it.

    A `light` function imports no PyTorch. A `training` function takes a `Request`. A `model` function has parameters of
    its own, and so has `overriding`, which also takes options of a training, as a command line.
    """

    name: str
    target: str  # "module of this folder:function"
    kind: Literal["light", "model", "overriding", "training"]
    help: str


# A target is no function that `lm` has, such as `lm.generate`: jsonargparse would look whether it is the same, and so
# import PyTorch before it reads what was typed.
TABLE = (
    Command("fit", "fit:fit", "training", "train a model from a config, or resume a run"),
    Command("branch", "branch:main", "overriding", "a new run from a checkpoint of another: a decay, other data"),
    Command("validate", "fit:evaluate", "training",
            "loss, perplexity and bits per byte of a checkpoint on the validation data"),
    Command("test", "fit:evaluate", "training", "the same on all of the test data"),
    Command("predict", "fit:evaluate", "training", "per-token log-probabilities of texts, to Parquet"),
    Command("plan", "plan:plan", "training", "what a config means before it is run, and what is wrong with it"),
    Command("scale", "scale_command:scale", "light",
            "a whole config from a depth or from hours, by published scaling rules"),
    Command("ladder", "ladder:main", "overriding",
            "train small models of several sizes, and predict the loss of a large one"),
    Command("data prepare", "data:main_prepare", "light", "tokenize texts into Parquet shards"),
    Command("data inspect", "data:inspect", "light", "what a data folder holds"),
    Command("data show", "data:show", "light", "the texts that a run saw at a step"),
    Command("generate", "generate:main", "model", "what a checkpoint writes after prompts; interactive without any"),
    Command("evaluate", "evaluate:main", "model",
            "tasks and bits per byte of a checkpoint, with confidence intervals"),
    Command("export", "convert:export", "model", "a Hugging Face folder with a model card, reloaded and compared"),
    Command("import", "convert:import_model", "model",
            "a Hugging Face model as a checkpoint that a training starts from"),
    Command("profile", "measure:profile", "training", "where the time of a training step goes, by part; a trace"),
    Command("runs ls", "runs:ls", "light", "every run: its status, step, losses, tokens a second and age"),
    Command("runs show", "runs_show:show", "light", "one run on a page: progress, losses, model, checkpoints, machine"),
    Command("runs check", "runs:check", "light", "whether a run ended as its config expects, also as exit code"),
    Command("runs compare", "runs_compare:compare", "light",
            "curves of runs in one chart, and the settings they differ in"),
    Command("runs export", "runs_compare:export", "light",
            "a run for others: metrics, pictures, weights; or one HTML page"),
    Command("runs rebuild", "runs:rebuild", "light", "rebuild the registry of runs from the run folders"),
    Command("monitor", "monitor:monitor", "light", "watch runs live in the terminal, or print their state as JSON"),
    Command("doctor", "doctor:doctor", "model", "whether this machine can train: GPU, kernels, disk, each with a cure"),
    Command("bench step", "measure:bench_step", "training", "time of a training step, and what a checkpoint costs"),
)  # fmt: skip
COMMANDS = {command.name: command for command in TABLE}
# Names that people may try -> the command.
OTHER_NAMES = {name.split()[-1]: name for name in COMMANDS} | {
    "train": "fit", "pretrain": "fit", "resume": "fit --ckpt_path auto --run", "finetune": "branch", "eval": "evaluate",
    "sample": "generate", "chat": "generate", "list": "runs ls",
}  # fmt: skip
# What a value without an option is meant for.
MEANT = {
    "generate": "--prompt {value}", "data prepare": "--input {value} --output data/{name}",
    "data show": "--run {value}", "evaluate": "--run {value}", "export": "--run {value}",
    "import": "--input {value} --output models/{name}", "scale": "--depth {value}",
}  # fmt: skip

HELP = """lm {version}: pretrain a small language model from one YAML file

usage: lm COMMAND [options]        lm COMMAND --help shows the options of one

{commands}

A config that is not in the working directory is looked up in configs/.
Every command takes --debug, which shows where an error came from.
"""


def main(arguments: Sequence[str]) -> int:
    """Run what stands after `lm`: 0 finished, 1 failed, 2 a wrong request, 3 stopped by a guard, 75 interrupted."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if arguments[:1] == ["help"]:  # `lm help fit`
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        commands = "\n".join(f"  {command.name:<{width}}  {command.help}" for command in TABLE)
        print(HELP.format(version=__version__, commands=commands), end="")
        return 0
    if arguments[0] == "--version":
        print(lm_version())
        return 0
    logging.basicConfig(handlers=[ConsoleHandler()])
    logging.getLogger("lm").setLevel(logging.INFO if rank() == 0 else logging.ERROR)
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
            _print_error(f"lm {name}: {error.filename}: {error.strerror}")
            return 1
        _print_error(f"lm {name}: {type(error).__name__}: {error} ({_place(error)}; --debug shows the traceback)")
        return 1


def _run(command: Command, arguments: list[str]) -> int:
    """Read the arguments of a command, then import what runs it, which may take seconds, and call it."""
    import_from_working_directory()
    if command.name in ("fit", "branch", "ladder"):
        STOP.catch()  # a signal that comes while PyTorch is imported ends the command too
    if command.kind == "training":
        from lm.cli import options, request

        if asked := next((flag for flag in ("-h", "--help") if flag in arguments), None):
            group = [value for value in arguments[arguments.index(asked) + 1 :][:1] if not value.startswith("-")]
            options.print_options(command.name, command.help, *group)
            return 0
        asked = request.read(command.name, arguments)
        if "--print_config" in arguments:
            print(request.to_yaml(asked.settings), end="")
            return 0
        _load(command)(asked)
        return 0
    if command.kind != "light":
        from lm.cli.request import require_run

        require_run(command.name, arguments)
    if command.kind == "overriding":
        _load(command)(arguments)
        return 0
    from lm.system.arguments import call

    return call(_load(command), arguments, f"lm {command.name}", MEANT.get(command.name)) or 0


def _load(command: Command) -> Callable[..., Any]:
    if command.kind != "light" and "torch" not in sys.modules and sys.stderr.isatty():
        print("loading PyTorch", file=sys.stderr)
    module, _, function = command.target.partition(":")
    return getattr(import_module(f"lm.cli.{module}"), function)


# ---- errors ----------------------------------------------------------------------------------------------------------


def _place(error: Exception) -> str:
    """The innermost line of this project or of a user's file where an exception was: `lm/data/loader.py, line 120`."""
    root, libraries = Path(__file__).parents[2], [sysconfig.get_path(name) for name in ("stdlib", "purelib")]
    own = [frame for frame in traceback.extract_tb(error.__traceback__)
           if Path(frame.filename).is_relative_to(root / "lm")
           or not any(Path(frame.filename).is_relative_to(library) for library in libraries)]  # fmt: skip
    file = Path(own[-1].filename)
    return f"{file.relative_to(root) if file.is_relative_to(root) else file}, line {own[-1].lineno}"


def _print_error(message: str) -> None:
    """Print a message to standard error; where that is a closed terminal or pipe, the exit code has to do."""
    try:
        print(harmless(message), file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # or Python's own last flush changes the code


def _command(arguments: Sequence[str]) -> Command | None:
    """The command that a command line begins with."""
    return COMMANDS.get(" ".join(arguments[:2])) or COMMANDS.get(" ".join(arguments[:1]))


def _unknown_command(arguments: list[str]) -> str:
    """The message for a command that does not exist, with what was meant."""
    from lm.system.other_names import REMOVED_COMMANDS

    for place in range(len(arguments) if arguments[0].startswith("-") else 0):
        if command := _command(arguments[place:]):
            words = command.name.split()
            typed = shlex.join([*words, *arguments[:place], *arguments[place + len(words) :]])
            return f"the command comes before its options: `lm {typed}`"
    if arguments[0] in ("-c", "--config"):
        return f"the command comes first: `lm {shlex.join(['fit', *arguments])}`"
    if gone := REMOVED_COMMANDS.get(arguments[0]):
        return f"no command {arguments[0]!r}; {gone}"
    family = [name for name in COMMANDS if name.startswith(arguments[0] + " ")]
    two = get_close_matches(" ".join(arguments[:2]), [name for name in COMMANDS if " " in name], 1, cutoff=0.8)
    if family and not two:
        return f"give one of: {', '.join('lm ' + name for name in family)}"
    close = two or get_close_matches(arguments[0], {*COMMANDS, *OTHER_NAMES}, 1)
    typed, rest = arguments[: 1 + len(two)], arguments[1 + len(two) :]
    if not close:
        return f"no command {typed[0]!r}; lm --help lists them"
    meant = shlex.join([*OTHER_NAMES.get(close[0], close[0]).split(), *rest])
    return f"no command {' '.join(typed)!r}; did you mean `lm {meant}`?"
