"""From a command line and YAML files to dataclasses, without importing PyTorch: `read` merges the files, sets the
options of the command line over them, and makes a `Request`.

LightningCLI is given the result, to build what only a class can: Trainer, model, data, callbacks and loggers.
"""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Any, Generic, TypeVar, get_args

import yaml
from jsonargparse import Namespace, get_loader
from jsonargparse.typing import register_type

import lm
from lm.cli.options import COMMAND_OPTIONS, NAMES, SEED, FitOptions, RunChoice, option_groups, training_options
from lm.data.config import DataConfig
from lm.errors import RequestError
from lm.model.config import CUSTOM_MODEL_TYPE
from lm.runs.run import ROOT, Run, is_of_a_run
from lm.system import process
from lm.system.arguments import Parser, arguments_from, nearest_option, shown, typed_options, unknown_options
from lm.system.files import parse_yaml, read_object
from lm.system.other_names import without_removed
from lm.training.config import (
    SECTIONS,
    EvaluationConfig,
    GuardsConfig,
    ModelConfig,
    RunOptions,
    SamplesConfig,
    TrainerConfig,
)
from lm.training.schedule import plan_steps


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The sections of a config."""

    trainer: TrainerConfig
    model: ModelConfig
    data: DataConfig
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


CommandOptions = TypeVar("CommandOptions")  # `FitOptions`, `PlanOptions` ...


@dataclass(frozen=True, kw_only=True)
class Request(Sections, Generic[CommandOptions]):
    """A command with its own options, and all options of a training; callbacks and loggers are not built yet."""

    command: str
    run_name: str  # as typed, else that of the config's file
    settings: dict[str, Any]  # all options of the training, as a YAML file has them
    choice: RunChoice
    options: CommandOptions
    seed_everything: int
    run_options: RunOptions
    custom_arguments: dict[str, Any]  # further ones of the user's subclass of `LanguageModule`

    @property
    def text(self) -> str:
        """The content of a run's config.yaml."""
        return to_yaml({"run": self.run_name, **self.settings})

    def with_values(self, values: Mapping[str, Any]) -> "Request[CommandOptions]":
        """The same request with other values of a training's options, by their dotted names."""
        settings = copy.deepcopy(self.settings)
        for name, value in values.items():
            set_option(settings, name, value)
        changed = make_request(self.command, {**settings, **vars(self.choice)}, self.run_name)
        return replace(changed, options=self.options)


def to_yaml(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, allow_unicode=True, sort_keys=False)


# ---- a command line and its configs ----------------------------------------------------------------------------------


def read(command: str, arguments: list[str]) -> Request[Any]:
    """The request of a command line; RequestError says what is wrong, where, and what to give instead."""
    return make_request(command, *read_settings(command, arguments))


def read_settings(command: str, arguments: list[str]) -> tuple[dict[str, Any], str]:
    """The settings that a command line and its configs give, and the name of the run: that of the config's file."""
    if arguments and not arguments[0].startswith("-"):
        path = find_config(arguments[0])
        raise RequestError(f"{arguments[0]!r} is not an option; did you mean `lm {command} --config {path}`?")
    typed = read_options(command, arguments)
    files = [find_config(value) for name, value in typed if name == "config" and value]
    configs = {path: read_config(path) for path in files}
    check_names(command, typed, configs)
    printed = "print_config" in dict(typed)  # may be the defaults alone
    typed = [(name, value) for name, value in typed if name not in ("config", "print_config")]
    lengths = [name for name, value in typed if name in ("trainer.max_steps", "trainer.max_tokens") and value != "null"]
    if lengths and command == "fit" and dict(typed).get("hours", "null") != "null":
        raise RequestError(f"--{lengths[0]} gives the length of the run, and so does --hours: give one of them")
    if not files and (run := run_with_config(command, dict(typed))):
        files, configs = [run.config], {run.config: read_config(run.config)}
        check_names(command, [], configs)
        typed += [("run", run.name), ("trainer.default_root_dir", str(run.path.parent))]
    elif not (files or printed or command == "fit" and any(name.startswith("data.") for name, _ in typed)):
        raise RequestError(f"give a config with --config, such as `lm {command} --config tiny.yaml`")
    return combine(command, configs.values(), typed), files[0].stem if files else "run"


def override(settings: Mapping[str, Any], typed: Sequence[tuple[str, Any]]) -> Request[FitOptions]:
    """The request of a fit with the settings of a run, and options of a command line set over them."""
    check_names("fit", typed)
    kept = {name: value for name, value in settings.items() if name not in ("run", "ckpt_path")}
    return make_request("fit", combine("fit", [kept], typed))


def split_overrides(arguments: list[str]) -> tuple[list[str], list[tuple[str, Any]]]:
    """Split a command line into the command's own arguments and the options of a training, which `override` takes."""
    fit_only = {option.name for kind in (RunChoice, FitOptions) for option in fields(kind)} | {"config"}
    training = {option.name for option in training_options("fit")} - fit_only | {"seed"}
    command_arguments: list[str] = []
    overrides: list[str] = []
    part = command_arguments
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.removeprefix("--").partition("=")[0].removesuffix("+")
            part = overrides if "." in name or name in training else command_arguments
        part.append(argument)
    return command_arguments, read_options("fit", overrides)


def read_options(command: str, arguments: list[str]) -> list[tuple[str, Any]]:
    """The options of a command line by their full names, with the values as typed; None where there is none."""
    options = training_options(command)
    flags = [option.name for option in options if option.kind == "bool"]
    lists = [option.name for option in options if "list of str" in option.kind]
    typed = typed_options(arguments, ["print_config"], lists)
    for option, word in typed:
        if not option:
            hint = f"; did you mean --{word}?" if "=" in str(word) else ""
            raise RequestError(f"{shown(word)} belongs to no option{hint}")
    short = {"-c": "config", "--seed": SEED.name}
    named = [(short.get(option) or option.removeprefix("--"), value) for option, value in typed]
    return [(name, "true" if value is None and name in flags else value) for name, value in named]


# Of two options that say the same thing in different ways, the later one counts: option -> options of earlier configs
# that become null. `--data.path` replaces all other data, for example.
CLEARED_BY = {
    "data.path": ("data.train", "data.sources", "data.phases", "data.prepare"),
    "data.train": ("data.path", "data.sources", "data.phases", "data.prepare"),
    "data.sources": ("data.path", "data.train", "data.val", "data.test", "data.tokenizer", "data.prepare"),
    "trainer.max_steps": ("trainer.max_tokens",), "trainer.max_tokens": ("trainer.max_steps",),
}  # fmt: skip


def combine(command: str, configs: Iterable[Mapping[str, Any]], typed: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Merge configs, of which later ones override earlier ones, and set the options of a command line over them."""
    groups = option_groups(option.name for option in training_options(command))
    given: list[tuple[str, Any]] = []
    for name, value in typed:
        if name in groups and isinstance(value, str):  # as in `--model.schedule '{name: wsd}'`
            value = load_yaml(value, f"--{name}")
        given += dotted(value, groups, f"{name}.") if name in groups and isinstance(value, Mapping) else [(name, value)]
    settings: dict[str, Any] = {}
    for options in [*(list(dotted(config, groups)) for config in configs), given]:
        names = {".".join(name.split(".")[:2]) for name, _ in options}
        for name in CLEARED_BY.keys() & {name for name, value in options if value not in (None, "null")}:
            for other in CLEARED_BY[name]:
                if other not in names and settings:
                    set_option(settings, other, None)
        for name, value in options:
            set_option(settings, name, value)
    return settings


def dotted(settings: Mapping[str, Any], groups: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as pairs of a dotted name and a value; an empty group has none."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name in groups and isinstance(value, Mapping):
            yield from dotted(value, groups, f"{name}.")
        else:
            yield name, value


def set_option(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set an option in nested settings, in place, by its dotted name; `trainer.callbacks+` adds to a list."""
    *groups, last = argument_of_class(name).split(".")
    parent: Any = settings
    for group in groups:
        child = parent.get(group)
        if isinstance(child, list) and child:  # the last of several callbacks or loggers
            parent, group, child = child, -1, child[-1]
        if isinstance(child, str):
            child = {"class_path": child}
        parent[group] = child if isinstance(child, dict) else {}
        parent = parent[group]
    if last.endswith("+"):
        last = last.removesuffix("+")
        before = parent.get(last) or []
        added = load_yaml(value, f"--{name}") if isinstance(value, str) else value
        value = [*(before if isinstance(before, list) else [before]), added]
    parent[last] = value


def load_yaml(text: str, option: str) -> Any:
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError as error:
        raise RequestError(f"{option} {shown(text)} cannot be read: {' '.join(str(error).split())}") from error


def argument_of_class(name: str) -> str:
    """`trainer.logger.save_dir`, an argument of the logger's class, is `trainer.logger.init_args.save_dir`."""
    for option in ("trainer.callbacks", "trainer.logger"):
        argument = name.removeprefix(f"{option}.")
        if argument != name and argument.partition(".")[0] not in ("class_path", "init_args", "dict_kwargs"):
            return f"{option}.init_args.{argument}"
    return name


# ---- dataclasses -----------------------------------------------------------------------------------------------------


def make_request(command: str, settings: dict[str, Any], run_name: str = "run") -> Request[Any]:
    """Make the dataclasses of settings, which check their values.

    RequestError for a value that is wrong by itself, and for a length or a batch that does not come out even.
    """
    parser, config, complete = complete_settings(command, settings)
    values = parser.instantiate_classes(config)  # nested dataclasses are made, those of the sections are not
    if not 0 <= values.seed_everything < 2**32:
        raise RequestError(f"seed_everything {values.seed_everything} must be a whole number from 0 to {2**32 - 1}")
    trainer, data = take_fields(TrainerConfig, values.trainer), take_fields(DataConfig, values.data)
    timed = command == "fit" and values.hours is not None  # its length follows
    if command in ("fit", "bench step", "profile") and not timed and str(trainer.devices) in ("1", "auto"):
        plan_steps(world_size=1, max_steps=trainer.max_steps, max_tokens=trainer.max_tokens, seq_len=data.seq_len,
                   micro_batch_size=data.micro_batch_size, global_batch_tokens=data.global_batch_tokens)  # fmt: skip
    if command == "predict" and data.texts:
        from lm.data.text_files import find_files

        find_files(data.texts)  # raises if one is missing
    choice, own = take_fields(RunChoice, values), COMMAND_OPTIONS.get(command)
    model_fields = {option.name for option in fields(ModelConfig)}
    return Request(
        command=command, run_name=choice.run or run_name, choice=choice,
        options=take_fields(own, values) if own else None,
        settings=complete,
        seed_everything=values.seed_everything, run_options=take_fields(RunOptions, values), trainer=trainer, data=data,
        model=take_fields(ModelConfig, values.model),
        custom_arguments={name: value for name, value in vars(values.model).items() if name not in model_fields},
        guards=values.guards, samples=values.samples, evaluation=values.evaluation,
    )  # fmt: skip


def complete_settings(command: str, settings: dict[str, Any]) -> tuple[Parser, Namespace, dict[str, Any]]:
    """Give each setting its type and each missing one its default: a parser, its values, and those of the training as
    a YAML file has them.
    """
    check_nulls(settings)
    parser = make_parser(command)
    config = parser.parse_object(settings)
    link_seq_len(config)
    plain = json.loads(parser.dump(config, format="json", skip_none=False, skip_check=True))
    kinds = filter(None, (RunChoice, COMMAND_OPTIONS.get(command)))
    not_of_training = {option.name for kind in kinds for option in fields(kind)}
    return parser, config, {name: value for name, value in plain.items() if name not in not_of_training}


def take_fields(kind: type, values: Namespace) -> Any:
    """A dataclass of those values that are its fields."""
    return kind(**{option.name: values[option.name] for option in fields(kind)})


class NotBuilt:
    """The type of callbacks and loggers here, which leaves what a config says of them as it is.

    With their own types, and with `Any`, jsonargparse would import the class that the config names.
    """


register_type(NotBuilt, serializer=lambda value: value, deserializer=lambda value: value,
              type_check=lambda value, kind: True)  # fmt: skip


class TrainerOptions:
    """The options of `lm.training.trainer.Trainer`."""

    @arguments_from(TrainerConfig, Callback=NotBuilt, Logger=NotBuilt)
    def __init__(self, config: TrainerConfig) -> None: ...


def make_parser(command: str) -> Parser:
    """The parser of a training's options and of the command's own."""
    parser = Parser(prog=f"lm {command}", allow_abbrev=False)
    parser.add_argument(f"--{SEED.name}", type=int, default=SEED.default)
    custom = process.module_class
    for name, kind in {"trainer": TrainerOptions, "model": custom or ModelConfig, "data": DataConfig}.items():
        added = parser.add_class_arguments(kind, name, instantiate=False)
        if kind is custom:
            check_arguments(custom, {option.split(".")[1] for option in added})
    allow_class_path(parser)
    for section in SECTIONS:
        if section.name not in ("trainer", "model", "data"):
            parser.add_class_arguments(section.options, section.name or None)
    for options in filter(None, (RunChoice, COMMAND_OPTIONS.get(command))):
        parser.add_class_arguments(options)
    return parser


def allow_class_path(parser: Any) -> None:
    """Let `model.optimizer.class_path` be an option; jsonargparse takes it for the class of `OptimizerConfig`."""
    for action in parser._actions:
        if action.dest == "model.optimizer":
            action.basetype = None


def check_arguments(custom: type, arguments: set[str]) -> None:
    """Raise RequestError for a subclass of `LanguageModule` that does not take what every training gives it."""
    if missing := [option.name for option in fields(ModelConfig) if option.name not in arguments]:
        raise RequestError(f"{custom.__name__}.__init__ does not take {missing[0]} and other options of LanguageModule"
                           ": let it end with **options, and begin with `super().__init__(**options)`")  # fmt: skip
    if reserved := [name for name in signature(custom).parameters if hasattr(Namespace, name)]:
        raise RequestError(f"{custom.__name__}.__init__ has an argument {reserved[0]}, which jsonargparse keeps for "
                           "itself: give it another name")  # fmt: skip


def check_nulls(settings: Mapping[str, Any]) -> None:
    """Refuse a null where it means nothing, and a value in place of a group of options; jsonargparse takes both."""
    for section in SECTIONS:
        prefix = f"{section.name}." if section.name else ""
        _check_nulls(section.options, settings.get(section.name, {}) if prefix else settings, prefix)


def _check_nulls(options: type, group: Any, prefix: str) -> None:
    if not isinstance(group, Mapping):
        raise RequestError(f"{prefix.removesuffix('.')} is a group of options and not {shown(group)}")
    for option in fields(options):
        kinds = get_args(option.type) or (option.type,)
        inner = next((kind for kind in kinds if is_dataclass(kind)), None)
        value = group.get(option.name, ...)
        if value in (None, "null") and NoneType not in kinds:
            raise RequestError(
                f"{prefix}{option.name} is null, which means nothing there: leave it out for its default"
            )
        if inner is not None and value not in (None, "null", ...):
            _check_nulls(inner, value, f"{prefix}{option.name}.")


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


# ---- names -----------------------------------------------------------------------------------------------------------


def check_names(command: str, typed: Iterable[tuple[str, Any]], configs: Mapping[Any, Mapping[str, Any]] = {}) -> None:
    """Raise RequestError for names that no option has, in a command line and in configs, and for a missing value."""
    leaves = {option.name for option in training_options(command)}
    leaves |= {option.name for option in fields(RunChoice)}  # a config may carry those of a fit
    groups = option_groups(leaves)
    values = {name.removesuffix("+"): value for name, value in typed if name != "print_config"}
    names = {f"config {path}: ": dict(dotted(config, groups)) for path, config in configs.items()} | {"": values}
    unknown = {
        source: [name for name in given if not _is_known(name, leaves, groups)] for source, given in names.items()
    }
    if any(unknown.values()):
        known = sorted(leaves | groups)
        raise RequestError("; ".join(
            source + unknown_options({name: nearest_option(name, known) or f"`lm {command} --help all` lists them"
                                      for name in given})
            for source, given in unknown.items() if given
        ))  # fmt: skip
    if missing := [name for name, value in values.items() if value is None]:
        raise RequestError(f"--{missing[0]} needs a value")


def _is_known(name: str, leaves: set[str], groups: set[str]) -> bool:
    """Whether a name is an option or a group of them, or is within the value of an option."""
    parts = name.split(".")
    return name in groups or any(".".join(parts[:count]) in leaves for count in range(1, len(parts) + 1))


# ---- configs and runs ------------------------------------------------------------------------------------------------

CONFIGS = (Path("configs"), Path(lm.__file__).parent / "configs")


def find_config(name: str) -> Path:
    """A config as typed, else under `configs/`."""
    for path in (Path(name), *(folder / name for folder in CONFIGS), *(folder / f"{name}.yaml" for folder in CONFIGS)):
        if path.is_file():
            return path
    present = sorted({path.name for folder in CONFIGS for path in folder.glob("*.yaml")})
    folder = Path(name).parent
    nearby = {str(path) for path in (*folder.glob("*.y*ml"), *folder.parent.glob(f"*/{Path(name).name}"))}
    close = get_close_matches(name, [*sorted(nearby), *present], 3, cutoff=0.75)
    hint = f"did you mean {' or '.join(close)}?" if close else f"configs/ has: {', '.join(present) or 'none'}"
    raise RequestError(f"no config {name!r} here or in configs/; {hint}")


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config, without the options that are gone and have their default."""
    try:
        text = without_removed(path.read_text(encoding="utf-8"))
        document = parse_yaml(text)  # raises if a key is there twice
    except (OSError, ValueError) as error:
        raise RequestError(f"config {path} cannot be read: {error}") from error
    if document is None:
        raise RequestError(f"config {path} is empty; configs/tiny.yaml is one to begin with")
    if not isinstance(document, dict):
        raise RequestError(f"config {path} holds {shown(document)} where options such as `trainer:` belong")
    for name in NAMES:
        if not isinstance(document.get(name, {}), dict):
            raise RequestError(f"config {path}: {name} is a group of options and not {shown(document[name])}: give "
                               f"them in lines below `{name}:`, indented, or leave it out")  # fmt: skip
    return get_loader("yaml")(text)  # numbers such as 1e-3, which YAML 1.1 takes for text


def run_with_config(command: str, values: Mapping[str, Any]) -> Run | None:
    """The run whose config counts where none is given: that of `--run`, that of the checkpoint, or the newest."""
    if command not in ("validate", "test", "predict") and not (
        command == "fit" and {"run", "ckpt_path"} <= values.keys()
    ):
        return None
    from lm.runs.find import find_run
    from lm.runs.resume import checkpoint_folder

    checkpoint, run = values.get("ckpt_path", "best"), None
    if "run" not in values and not is_of_a_run(checkpoint):
        folder = checkpoint_folder(checkpoint).resolve().parent
        run = Run(folder) if (folder / "run.json").exists() else None
    if run is None:
        root = values.get("trainer.default_root_dir", str(ROOT))
        run = find_run(values.get("run"), root, otherwise=", or give --config")
    check_model_class(run)
    return run


def check_model_class(run: Run) -> None:
    """Raise RequestError if a class of the user's builds the run's model, and this process does not have it: options
    of that class in the run's config would be unknown ones.
    """
    newest = run.link("last")
    document = read_object(newest / "config.json") if newest and (newest / "config.json").exists() else {}
    if document.get("model_type") == CUSTOM_MODEL_TYPE:
        from lm.model.custom import known_class

        known_class(document, process.module_class, str(run.path), run.script)


# Commands that take no config but a run -> what to give instead, where there is no run at all.
NEEDS_RUN = dict.fromkeys(("generate", "evaluate", "export"), ", or give a --ckpt_path") | {"branch": ""}


def check_run_exists(command: str, arguments: list[str]) -> None:
    """Raise RequestError if a command takes a run and it is not there, before the seconds of importing PyTorch."""
    values: dict[str, Any] = dict(typed_options(arguments))
    positional = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if command not in NEEDS_RUN or {"-h", "--help"} & values.keys() or not is_of_a_run(values.get("--ckpt_path")):
        return
    if (positional is not None) == (command == "branch"):  # else the parser says how to name it
        from lm.runs.find import find_run

        find_run(positional or values.get("--run"), values.get("--root") or ROOT, otherwise=NEEDS_RUN[command])
