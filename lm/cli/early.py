"""What is refused before the seconds that importing PyTorch and Lightning takes: wrong values, and missing runs.

`cli/options` refuses unknown names, and `cli/config` all the rest.
"""

import sys
from dataclasses import fields
from itertools import pairwise
from typing import Any

from jsonargparse import ActionConfigFile

from lm.cli.options import COMMAND_OPTIONS, CONFIG, FIT, SEED, find_config, read_config, training_options
from lm.data.config import DATA_PATH_CURE
from lm.errors import RequestError
from lm.runs.registry import find_run
from lm.runs.run import ROOT, is_of_a_run
from lm.system.arguments import Parser, arguments_from, spell_out
from lm.system.files import refuse_url
from lm.training.config import SECTIONS, TrainerConfig

LISTS = tuple(option.name for option in training_options("fit") if "list of str" in option.kind)
# Commands that take a run's checkpoint -> another cure where there is no run at all.
OF_A_RUN = dict.fromkeys(("generate", "evaluate", "export"), ", or give a --ckpt_path") | {"average": "", "branch": ""}
OF_A_RUN |= dict.fromkeys(("validate", "test", "predict"), ", or give --config")


class ConfigFile(ActionConfigFile):
    """`--config`, looked up in `configs/` too."""

    @staticmethod
    def apply_config(parser: Any, cfg: Any, dest: str, value: Any) -> None:
        path = find_config(value)
        read_config(path)
        ActionConfigFile.apply_config(parser, cfg, dest, str(path))


class TrainerOptions:
    """The options of `lm.training.trainer.Trainer`; its callbacks and loggers may be anything here."""

    @arguments_from(TrainerConfig, Callback=Any, Logger=Any)
    def __init__(self, config: TrainerConfig) -> None: ...


def refuse_wrong_values(command: str, arguments: list[str]) -> None:
    """Refuse a number, a count or a choice that is none, in a command line and in its configs.

    Options of other types are left to the parser of `cli/config`, which knows classes by path.
    """
    custom = sys.modules.get("lm.model.custom")  # there where `lm.run` was given a class, whose options are its own
    if custom and custom.module_class() or {"--print_config", "--verbose"} & set(arguments):
        return
    parser = Parser(prog=f"lm {command}", allow_abbrev=False)
    parser.add_argument("-c", "--config", action=ConfigFile, help=CONFIG.help)
    parser.add_argument(f"--{SEED.name}", type=int, default=SEED.default)
    for option in FIT:
        if option not in (CONFIG, SEED):
            parser.add_argument(f"--{option.name}", type=bool if option.kind == "bool" else str | None)
    for section in SECTIONS:
        options = TrainerOptions if section.name == "trainer" else section.options
        parser.add_class_arguments(options, section.name or None)
    flags = ["force"]
    if command in COMMAND_OPTIONS:
        parser.add_class_arguments(COMMAND_OPTIONS[command])
        flags += [option.name for option in fields(COMMAND_OPTIONS[command]) if option.type is bool]
    try:
        config = parser.parse_args(spell_out(arguments, flags, LISTS))
    except RequestError as error:
        name = str(error).partition(": ")[0]
        if any(option.name == name and " of " not in option.kind for option in training_options(command)):
            raise
        return
    if command == "fit" and config.data.path:
        refuse_url("data.path", config.data.path, DATA_PATH_CURE)


def refuse_missing_run(command: str, arguments: list[str]) -> None:
    """Refuse the name of a run that is not there, or no name where there is no run, for commands that load a model."""
    given, run = typed_options(arguments), arguments[0] if arguments and not arguments[0].startswith("-") else None
    other = {"-c", "--config", "-h", "--help"} & given.keys() or (command == "branch") == (run is None)
    if command in OF_A_RUN and not other and is_of_a_run(given.get("--ckpt_path")):
        root = given.get("--root") or given.get("--trainer.default_root_dir") or ROOT
        find_run(run or given.get("--run"), root, otherwise=OF_A_RUN[command])


def typed_options(arguments: list[str]) -> dict[str, str]:
    """What is typed after each option, as `--run mine` or `--run=mine`."""
    options = dict(pairwise([*arguments, ""]))
    return options | dict(one.split("=", 1) for one in arguments if one.startswith("--") and "=" in one)
