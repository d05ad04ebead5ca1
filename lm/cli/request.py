"""From a command line to a `Request`: the dataclasses of its settings, without importing PyTorch.

The way of `lm fit --config tiny.yaml --model.optimizer.lr 1e-3`:

    settings.read_options   [("config", "tiny.yaml"), ("model.optimizer.lr", "1e-3")]
    settings.combine        {"model": {"optimizer": {"lr": "1e-3", ...}, ...}, ...}: the file, options set over it
    complete_settings       {"model": {"optimizer": {"lr": 0.001, ...}, ...}, ...}: with types and all defaults
    make_request            Request(model=ModelConfig(optimizer=OptimizerConfig(lr=0.001, ...), ...), ...)
    fit.TrainingCLI         LightningCLI makes LanguageModule, DataModule and Trainer of the settings, and trains
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from inspect import signature
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import yaml
from jsonargparse import Namespace
from jsonargparse.typing import register_type

from lm.cli.command_options import COMMAND_OPTIONS, FitOptions, RunChoice
from lm.cli.options import SEED
from lm.cli.settings import check_names, combine, read_settings, set_option
from lm.data.config import DataConfig
from lm.errors import RequestError, require
from lm.system import process
from lm.system.arguments import Parser
from lm.system.dataclass_arguments import arguments_from
from lm.system.units import shown
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


def read(command: str, arguments: list[str]) -> Request[Any]:
    """The request of a command line; RequestError says what is wrong, where, and what to give instead."""
    return make_request(command, *read_settings(command, arguments))


def override(settings: Mapping[str, Any], typed: Sequence[tuple[str, Any]]) -> Request[FitOptions]:
    """The request of a fit with the settings of a run, and options of a command line set over them."""
    check_names("fit", typed)
    kept = {name: value for name, value in settings.items() if name not in ("run", "ckpt_path")}
    return make_request("fit", combine("fit", [kept], typed))


# ---- dataclasses -----------------------------------------------------------------------------------------------------


def make_request(command: str, settings: dict[str, Any], run_name: str = "run") -> Request[Any]:
    """Make the dataclasses of settings, which check their values.

    RequestError for a value that is wrong by itself, and for a length or a batch that does not come out even.
    """
    complete = complete_settings(command, settings)
    values = complete.parser.instantiate_classes(complete.values)  # dataclasses, but for trainer, model and data
    choice, own = take_fields(RunChoice, values), COMMAND_OPTIONS.get(command)
    model_fields = {option.name for option in fields(ModelConfig)}
    request = Request(
        command=command, run_name=choice.run or run_name, choice=choice,
        options=take_fields(own, values) if own else None, settings=complete.of_training,
        seed_everything=values.seed_everything, run_options=take_fields(RunOptions, values),
        trainer=take_fields(TrainerConfig, values.trainer), model=take_fields(ModelConfig, values.model),
        data=take_fields(DataConfig, values.data),
        custom_arguments={name: value for name, value in vars(values.model).items() if name not in model_fields},
        guards=values.guards, samples=values.samples, evaluation=values.evaluation,
    )  # fmt: skip
    check_request(request)
    return request


def check_request(request: Request[Any]) -> None:
    """Raise RequestError for values that are wrong together, as far as they can be known without the machine."""
    command, trainer, data = request.command, request.trainer, request.data
    if not 0 <= request.seed_everything < 2**32:
        raise RequestError(f"seed_everything {request.seed_everything} must be a whole number from 0 to {2**32 - 1}")
    timed = command == "fit" and request.options.hours is not None  # its length follows
    if command in ("fit", "bench step", "profile") and not timed and str(trainer.devices) in ("1", "auto"):
        plan_steps(world_size=1, max_steps=trainer.max_steps, max_tokens=trainer.max_tokens, seq_len=data.seq_len,
                   micro_batch_size=data.micro_batch_size, global_batch_tokens=data.global_batch_tokens)  # fmt: skip
    if command == "predict":
        from lm.data.text_files import find_files

        require(bool(data.texts), "nothing to predict on: give text files, JSONL or Parquet with --data.texts")
        find_files(data.texts)  # raises if one is missing


class CompleteSettings(NamedTuple):
    """Settings with types and all defaults."""

    parser: Parser
    values: Namespace
    of_training: dict[str, Any]  # without the command's own, as a YAML file has them


def complete_settings(command: str, settings: dict[str, Any]) -> CompleteSettings:
    """Give each setting its type and each missing one its default."""
    check_nulls(settings)
    parser = make_parser(command)
    config = parser.parse_object(settings)
    link_seq_len(config)
    plain = json.loads(parser.dump(config, format="json", skip_none=False, skip_check=True))
    kinds = filter(None, (RunChoice, COMMAND_OPTIONS.get(command)))
    not_of_training = {option.name for kind in kinds for option in fields(kind)}
    of_training = {name: value for name, value in plain.items() if name not in not_of_training}
    return CompleteSettings(parser, config, of_training)


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
