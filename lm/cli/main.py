"""The command line: one table of names, imported on use, so that `lm --help` and `lm runs ls` never import torch."""

import logging
import os
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from lm import __version__
from lm.errors import LmError, RequestError
from lm.system.other_names import REMOVED_COMMANDS
from lm.system.process import HarmlessFormatter, harmless, import_from_working_directory, lm_version, rank
from lm.system.stop_signals import STOP

# name -> "module:function" and what it does. None is called as a function that `lm` has, such as `lm.generate`, since
# jsonargparse would look whether it is the same, and so import PyTorch and Lightning before it reads what was typed.
COMMANDS = {
    "fit": ("lm.cli.config:main", "train a model from a config, or resume a run"),
    "branch": ("lm.cli.branch:main", "a new run from a checkpoint of another: a decay, other data"),
    "validate": ("lm.cli.config:main", "loss, perplexity and bits per byte of a checkpoint on the validation data"),
    "test": ("lm.cli.config:main", "the same on all of the test data"),
    "predict": ("lm.cli.config:main", "per-token log-probabilities of texts, to Parquet"),
    "plan": ("lm.cli.config:main", "what a config means before it is run, and what is wrong with it"),
    "scale": ("lm.cli.scale_command:scale", "a whole config from a depth or from hours, by published scaling rules"),
    "ladder": ("lm.cli.ladder:main", "train small models of several sizes, and predict the loss of a large one"),
    "data prepare": ("lm.cli.data:main_prepare", "tokenize texts into Parquet shards"),
    "data inspect": ("lm.cli.data:inspect", "what a data folder holds"),
    "data show": ("lm.cli.data:show", "the texts that a run saw at a step"),
    "generate": ("lm.cli.generate:main", "what a checkpoint writes after prompts; interactive without any"),
    "evaluate": ("lm.cli.evaluate:main", "tasks and bits per byte of a checkpoint, with confidence intervals"),
    "export": ("lm.cli.convert:export", "a Hugging Face folder with a model card, reloaded and compared"),
    "import": ("lm.cli.convert:import_model", "a Hugging Face model as a checkpoint that a training starts from"),
    "profile": ("lm.cli.measure:profile", "where the time of a training step goes, by part; a trace"),
    "runs ls": ("lm.cli.runs:ls", "every run: its status, step, losses, tokens a second and age"),
    "runs show": ("lm.cli.runs_show:show", "one run on a page: progress, losses, model, checkpoints, machine"),
    "runs check": ("lm.cli.runs:check", "whether a run ended as its config expects, also as exit code"),
    "runs compare": ("lm.cli.runs_compare:compare", "curves of runs in one chart, and the settings they differ in"),
    "runs export": ("lm.cli.runs_compare:export", "a run for others: metrics, pictures, weights; or one HTML page"),
    "runs rebuild": ("lm.cli.runs:rebuild", "rebuild the registry of runs from the run folders"),
    "monitor": ("lm.cli.monitor:monitor", "watch runs live in the terminal, or print their state as JSON"),
    "doctor": ("lm.cli.doctor:doctor", "whether this machine can train: GPU, kernels, disk, each with a cure"),
    "bench step": ("lm.cli.measure:bench_step", "time of a training step, and what a checkpoint costs"),
}

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
# Modules of commands that import no torch.
LIGHT = ("lm.cli.data", "lm.cli.monitor", "lm.cli.runs", "lm.cli.runs_compare", "lm.cli.runs_show",
         "lm.cli.scale_command")  # fmt: skip
# Those that take a training's config, and so all of its options.
TRAINING = ("fit", "validate", "test", "predict", "plan", "profile", "bench step")

HELP = """lm {version}: pretrain a small language model from one YAML file

usage: lm COMMAND [options]        lm COMMAND --help shows the options of one

{commands}

A config that is not in the working directory is looked up in configs/.
Every command takes --debug, which shows where an error came from.
"""


def main(arguments: Sequence[str]) -> int:
    """Run what stands after `lm`: 0 finished, 1 failed, 2 a wrong request, 3 stopped by a guard, 75 interrupted."""
    arguments = list(arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if arguments[:1] == ["help"]:  # `lm help fit`
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        commands = "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items())
        print(HELP.format(version=__version__, commands=commands), end="")
        return 0
    if arguments[0] == "--version":
        print(lm_version())
        return 0
    logging.basicConfig(handlers=[ConsoleHandler()])
    logging.getLogger("lm").setLevel(logging.INFO if rank() == 0 else logging.ERROR)
    name = _command(arguments)
    try:
        if name is None:
            raise RequestError(_unknown_command(arguments))
        return _dispatch(name, arguments[len(name.split()) :])
    except LmError as error:
        if debug:
            raise
        _print_error(f"lm {name or arguments[0]}: {error}")
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


class ConsoleHandler(logging.StreamHandler):
    """Writes to `sys.stderr`, or `sys.stdout`, as it is at the moment: a progress bar puts its own there."""

    def __init__(self, stream: Literal["stdout", "stderr"] = "stderr") -> None:
        super().__init__()
        self.of_sys = stream
        # A line a log interval, unless a progress bar shows it.
        self.addFilter(lambda record: record.name != "lm.lines" or not sys.stderr.isatty())
        self.setFormatter(HarmlessFormatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = getattr(sys, self.of_sys)
        super().emit(record)


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


def _dispatch(name: str, rest: list[str]) -> int:
    """Import a command and run it; the signals of a fit are caught before its imports, which take seconds."""
    module, _, function = COMMANDS[name][0].partition(":")
    import_from_working_directory()
    if module not in LIGHT:  # answer before the seconds that importing PyTorch takes
        from lm.cli import early, options

        if name in TRAINING:
            if asked := next((flag for flag in ("-h", "--help") if flag in rest), None):
                following = [value for value in rest[rest.index(asked) + 1 :][:1] if not value.startswith("-")]
                options.print_options(name, COMMANDS[name][1], *following)
                return 0
            rest = [options.SEED_ALIAS.sub(f"--{options.SEED.name}", one) for one in options.replace_settings(rest)]
            if name == "fit":
                STOP.catch()
            options.refuse_unknown_options(name, rest)
            early.refuse_wrong_values(name, rest)
        early.refuse_missing_run(name, rest)
        if name == "fit" and any(one.partition("=")[0] == "--hours" for one in rest):
            rest = _load("lm.cli.hours", "with_length")(rest)
        if name in TRAINING:
            _load(module, function)([name, *rest] if module == "lm.cli.config" else rest)
            return 0
    if name in ("branch", "ladder"):  # which take options of a training too
        STOP.catch()
        _load(module, function)(rest)
        return 0
    from lm.system.arguments import call

    return call(_load(module, function), rest, f"lm {name}", MEANT.get(name)) or 0


def _load(module: str, function: str) -> Callable[..., Any]:
    if module not in LIGHT and "torch" not in sys.modules and sys.stderr.isatty():
        print("loading PyTorch", file=sys.stderr)
    return getattr(import_module(module), function)


def _command(arguments: list[str]) -> str | None:
    """The command that a command line begins with."""
    return next((" ".join(arguments[:n]) for n in (2, 1) if " ".join(arguments[:n]) in COMMANDS), None)


def _unknown_command(arguments: list[str]) -> str:
    from difflib import get_close_matches

    for place in range(len(arguments) * arguments[0].startswith("-")):
        if command := _command(arguments[place:]):
            words = command.split()
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
