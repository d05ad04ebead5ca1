"""What is refused before the seconds that importing PyTorch and Lightning takes: wrong values, and missing runs.

`cli/options` refuses unknown names, and `cli/config` all the rest.
"""

from dataclasses import fields, is_dataclass
from itertools import pairwise
from types import NoneType
from typing import Any, get_args

from jsonargparse import ActionConfigFile, Namespace  # pyright: ignore[reportPrivateImportUsage]
from jsonargparse.typing import register_type

from lm.cli.options import COMMAND_OPTIONS, CONFIG, SEED, find_config, read_config, training_options
from lm.data.config import DataConfig
from lm.data.text_files import find_files
from lm.errors import RequestError
from lm.runs.registry import find_run
from lm.runs.run import ROOT, is_of_a_run
from lm.system import process
from lm.system.arguments import Parser, arguments_from, shown, spell_out
from lm.system.other_names import without_removed
from lm.training.config import SECTIONS, ModelConfig, TrainerConfig
from lm.training.schedule import plan_steps

LISTS = tuple(option.name for option in training_options("fit") if "list of str" in option.kind)
# Commands that take a run's checkpoint -> another cure where there is no run at all.
OF_A_RUN = dict.fromkeys(("generate", "evaluate", "export"), ", or give a --ckpt_path") | {"branch": ""}
OF_A_RUN |= dict.fromkeys(("validate", "test", "predict"), ", or give --config")


class ConfigFile(ActionConfigFile):
    """`--config`, looked up in `configs/` too."""

    @staticmethod
    def apply_config(parser: Any, cfg: Any, dest: str, value: Any) -> None:
        path = find_config(value)
        read_config(path)
        text = path.read_text(encoding="utf-8")
        used = without_removed(text)
        ActionConfigFile.apply_config(parser, cfg, dest, str(path) if used == text else used)
        cfg[dest][-1] = cfg[dest][-1] or path


def add_sections(parser: Any) -> None:
    """Add the sections whose dataclasses are made as they stand, and the options in no section."""
    for section in SECTIONS:
        if section.name not in ("trainer", "model", "data"):
            parser.add_class_arguments(section.options, section.name or None)


def add_training(parser: Any, classes: dict[str, type], options: type | None) -> tuple[str, ...]:
    """Add the options of a training, those of three classes by section, and a command's own; returns its flags."""
    parser.add_argument("-c", "--config", action=ConfigFile, help=CONFIG.help)
    parser.add_argument(f"--{SEED.name}", type=int, default=SEED.default)
    for name in ("run", "ckpt_path"):  # a config may carry them, and they are `fit`'s
        parser.add_argument(f"--{name}", type=str | None, default=None)
    for name, kind in classes.items():
        parser.add_class_arguments(kind, name, instantiate=False)
    add_sections(parser)
    if options is None:
        return ()
    parser.add_class_arguments(options)
    return tuple(option.name for option in fields(options) if option.type is bool)


class Unread:
    """What stands for a callback or a logger; jsonargparse would import a class by path, also where `Any` stands."""


register_type(Unread, type_check=lambda value, kind: True)


class TrainerOptions:
    """The options of `lm.training.trainer.Trainer`."""

    @arguments_from(TrainerConfig, Callback=Unread, Logger=Unread)
    def __init__(self, config: TrainerConfig) -> None: ...


def refuse_wrong_values(command: str, arguments: list[str]) -> None:
    """Refuse what the options of a training cannot be, in a command line and in its configs.

    Lists and classes by path are left to the parser of `cli/config`, and so is all of a config that has a wrong one.
    """
    # A class that `lm.run` was given has options of its own.
    if process.module_class or {"--print_config", "--verbose"} & set(arguments):
        return
    parser = Parser(prog=f"lm {command}", allow_abbrev=False)
    parser.add_argument("--force", type=bool, default=False)
    if command == "fit":
        parser.add_argument("--hours", type=float)
    classes = {"trainer": TrainerOptions, "model": ModelConfig, "data": DataConfig}
    flags = add_training(parser, classes, COMMAND_OPTIONS.get(command))
    try:
        config = parser.parse_args(spell_out(arguments, (*flags, "force"), LISTS))
    except RequestError as error:
        name = str(error).partition(": ")[0]
        plain = [option.name for option in training_options(command) if " of " not in option.kind]
        if name in plain or "belongs to no option" in str(error):
            raise
        return
    if command == "predict" and config.data.texts:
        find_files(config.data.texts)
    if config.config or command == "fit" and not config.run:
        refuse_seed(config.seed_everything)
        refuse_nulls(config)
        link_seq_len(config)
        parser.instantiate_classes(config)  # each dataclass refuses what it cannot be
        if command != "plan" and str(config.trainer.devices) in ("1", "auto"):  # `plan` lists it with all else
            refuse_length(config)


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


# ---- checks of a parsed config -------------------------------------------------------------------------------------


def refuse_seed(seed: int) -> None:
    """Raise RequestError for a seed that the generators do not take."""
    if isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise RequestError(f"seed_everything {seed} must be a whole number from 0 to {2**32 - 1}")


def refuse_nulls(config: Namespace) -> None:
    """Refuse a null where it means nothing, and a value in place of a group of options; the parser takes both."""
    for section in SECTIONS:
        if section.name:
            _refuse_nulls(section.options, config[section.name], section.name)


def _refuse_nulls(options: type, group: Any, place: str) -> None:
    if not isinstance(group, Namespace | dict | options):
        raise RequestError(f"{place} is a group of options and not {shown(group)}")
    values = group if isinstance(group, dict) else vars(group)
    for option in fields(options):
        kinds = get_args(option.type) or (option.type,)
        inner = next((kind for kind in kinds if is_dataclass(kind)), None)
        value = values.get(option.name, ...)
        if value is None and NoneType not in kinds:
            raise RequestError(
                f"{place}.{option.name} is null, which means nothing there: leave it out for its default"
            )
        if inner is not None and value not in (None, ...):
            _refuse_nulls(inner, value, f"{place}.{option.name}")


def link_seq_len(config: Namespace) -> None:
    """Set the context of the data to the model's unless the data asks for a shorter one."""
    most = config.model.decoder.max_position_embeddings
    if config.data.seq_len is None:
        config.data.seq_len = most
    if config.data.seq_len > most:
        raise RequestError(
            f"data.seq_len {config.data.seq_len} is longer than model.decoder.max_position_embeddings {most}: leave it "
            f"out, or give --model.decoder.max_position_embeddings {config.data.seq_len}"
        )


def refuse_length(config: Namespace) -> None:
    """Refuse a length that is not one, and a step that is not whole micro-batches on one device."""
    steps = {name: config.trainer[name] for name in ("max_steps", "max_tokens")}
    of_a_step = {name: config.data[name] for name in ("seq_len", "micro_batch_size", "global_batch_tokens")}
    plan_steps(world_size=1, **steps, **of_a_step)
