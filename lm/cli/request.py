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
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from inspect import signature
from types import NoneType
from typing import Any, Generic, TypeVar, get_args

import yaml
from jsonargparse import Namespace
from jsonargparse.typing import register_type

from lm.cli.command_options import COMMAND_OPTIONS, FitOptions, RunChoice, take_fields
from lm.cli.options import SEED, all_options, command_options, options_of
from lm.cli.settings import check_names, combine, load_yaml, read_settings, set_option
from lm.data.config import DataConfig
from lm.errors import RequestError, require
from lm.system import process
from lm.system.arguments import Parser
from lm.system.dataclass_arguments import arguments_from
from lm.training.config import (
    SECTIONS,
    EvaluationConfig,
    GuardsConfig,
    ModelConfig,
    RunOptions,
    SamplesConfig,
    TrainerConfig,
)
from lm.training.schedule import Steps, plan_steps

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sections:
    trainer: TrainerConfig
    model: ModelConfig
    data: DataConfig
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def steps(self, world_size: int) -> Steps:
        """The optimizer steps of the run; RequestError for a length or a batch that does not come out even."""
        trainer = self.trainer
        if trainer.max_epochs and trainer.max_steps is None and trainer.max_tokens is None:
            from lm.cli.scale import manifest

            if tokens := manifest(self.data.path or "").get("splits", {}).get("train", {}).get("tokens"):
                raise RequestError(
                    f"trainer.max_epochs {trainer.max_epochs:g} is only a limit: give the length too, such as "
                    f"--trainer.max_tokens {math.ceil(tokens * trainer.max_epochs)}"
                )
        return plan_steps(self.data, world_size, trainer.max_steps, trainer.max_tokens)


CommandOptions = TypeVar("CommandOptions")  # `FitOptions`, `PlanOptions` ...


@dataclass(frozen=True, kw_only=True)
class Request(Sections, Generic[CommandOptions]):
    """A command with its own options, and the options of a run; callbacks and loggers are not built yet."""

    command: str
    run_name: str  # as typed, else that of the config's file
    settings: dict[str, Any]  # all options of the run, as a YAML file has them
    run_choice: RunChoice
    command_options: CommandOptions
    seed_everything: int
    run_options: RunOptions
    custom_arguments: dict[str, Any]  # further ones of the user's subclass of `LanguageModule`

    @property
    def config_yaml(self) -> str:
        """The content of a run's config.yaml."""
        return to_yaml({"run": self.run_name, **self.settings})

    def with_values(self, values: Mapping[str, Any]) -> "Request[CommandOptions]":
        """The same request with other values of a run's options, by their dotted names."""
        settings = copy.deepcopy(self.settings)
        for name, value in values.items():
            set_option(settings, name, value)
        changed = make_request(self.command, {**settings, **vars(self.run_choice)}, self.run_name)
        return replace(changed, command_options=self.command_options)


def to_yaml(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, allow_unicode=True, sort_keys=False)


def read(command: str, arguments: list[str]) -> Request[Any]:
    """The request of a command line; RequestError says what is wrong, where, and what to give instead."""
    return make_request(command, *read_settings(command, arguments))


def override(settings: Mapping[str, Any], typed: Sequence[tuple[str, Any]]) -> Request[FitOptions]:
    """The request of a fit with the settings of a run, and options of a command line set over them."""
    check_names("fit", typed)
    config = {name: value for name, value in settings.items() if name not in ("run", "ckpt_path")}
    return make_request("fit", combine("fit", [config], typed))


def make_request(command: str, settings: dict[str, Any], run_name: str = "run") -> Request[Any]:
    """Make the dataclasses of settings, which check their values.

    RequestError for a value that is wrong by itself, and for a length or a batch that does not come out even.
    """
    parser, completed = complete_settings(command, settings)
    values = parser.instantiate_classes(completed)  # dataclasses, but for trainer, model and data
    run_choice, options_class = take_fields(RunChoice, values), COMMAND_OPTIONS.get(command)
    sections = {
        section.name: take_fields(section.options, getattr(values, section.name))
        for section in SECTIONS
        if section.name
    }
    model_fields = {option.name for option in fields(ModelConfig)}
    request = Request(
        command=command,
        run_name=run_name if run_choice.run is None else run_choice.run,
        run_choice=run_choice,
        command_options=take_fields(options_class, values) if options_class else None,
        settings=run_settings(command, parser, completed),
        seed_everything=values.seed_everything,
        run_options=take_fields(RunOptions, values),
        custom_arguments={name: value for name, value in vars(values.model).items() if name not in model_fields},
        **sections,
    )
    check_request(request)
    return request


def check_request(request: Request[Any]) -> None:
    """Raise RequestError for values that are wrong together, as far as they can be known without the machine."""
    command = request.command
    if not 0 <= request.seed_everything < 2**32:
        raise RequestError(f"seed_everything {request.seed_everything} must be a whole number from 0 to {2**32 - 1}")
    timed = command == "fit" and request.command_options.hours is not None  # its length follows
    if command in ("fit", "bench step", "profile") and not timed and str(request.trainer.devices) in ("1", "auto"):
        request.steps(world_size=1)  # raises
    samples, seq_len = request.data.val_tokens, request.data.seq_len
    if samples and seq_len and samples < seq_len:
        raise RequestError(f"data.val_tokens {samples} is less than a sample, which has {seq_len:,} tokens: give more")
    if command == "predict":
        from lm.data.text_files import find_files

        require(bool(request.data.texts), "nothing to predict on: give text files, JSONL or Parquet with --data.texts")
        find_files(request.data.texts)  # raises if one is missing


# ---- the parser ------------------------------------------------------------------------------------------------------


def complete_settings(command: str, settings: dict[str, Any]) -> tuple[Parser, Namespace]:
    """Give each setting its type and each missing one its default; also the parser that did it."""
    check_nulls(settings)
    callbacks = settings.get("trainer", {}).get("callbacks")
    if isinstance(callbacks, str | dict) and not str(callbacks).startswith(("[", "null")):  # one, and no list
        settings["trainer"]["callbacks"] = [callbacks]
    parser = make_parser(command)
    try:
        completed = parser.parse_object(settings)
    except RequestError as error:
        raise RequestError(describe_option(command, str(error))) from error
    link_seq_len(completed)
    clear_tied_output(completed)
    return parser, completed


def describe_option(command: str, message: str) -> str:
    """The message about a value with what its option takes, as the help has it."""
    from lm.system.other_names import OTHER_PRECISIONS

    name, _, problem = message.partition(": ")
    if problem.endswith(", got"):
        return f"{name} needs a value"
    value = problem.rpartition("got ")[2].strip("'")
    if meant := _meant_value(value, problem):
        ratio = f"{name.removesuffix('_steps')}_ratio"
        if value.endswith("%") and ratio in [option.name for option in all_options(command)]:
            return f"{message}; a share of the steps is --{ratio} {meant}"
        if not value.endswith("%") or "expected float" in problem:
            return f"{message}; did you mean {meant}?"
    if name == "model.optimizer.name":
        return f"{message}; for another class give model.optimizer.class_path in its place, such as torch.optim.SGD"
    if name == "trainer.precision" and (near := OTHER_PRECISIONS.get(value)):
        device = ", on an NVIDIA GPU from Hopper on" if near.startswith("fp8") else ""
        return f"{message}; did you mean {near}{device}?"
    if name == "data.path" and value.startswith("["):
        return f"{name} is one folder; several are data.sources, such as [{{name: a, path: data/a, weight: 1}}, ...]"
    for option in all_options(command):
        example = re.search("such as `.*?`", option.help)
        if option.name == name and example and re.match("expected (a list|dict|keys)|Expected a dot", problem):
            kind = "keys and values" if option.kind.startswith("dict") else option.kind
            return f"{name}: expected {kind}, {example[0]}"
        if name in re.split(r"\W+", option.kind.partition("{")[2]):  # of an entry of a list
            return f"{option.name}: {message}"
    return message


def _meant_value(value: str, problem: str) -> str:
    """Our spelling of a value that is written as elsewhere: `10%`, a decimal comma, `off` in place of `none`."""
    if re.fullmatch(r"\d+(\.\d+)?%", value):
        return f"{float(value[:-1]) / 100:g}"
    if "expected float" in problem and re.fullmatch(r"\d+,\d+(e[+-]?\d+)?", value):
        return value.replace(",", ".")
    return "none" if "'none'" in problem and value.lower() in ("off", "false", "no") else ""


def run_settings(command: str, parser: Parser, completed: Namespace) -> dict[str, Any]:
    """Completed settings as a YAML file has them, without the command's own."""
    plain = json.loads(parser.dump(completed, format="json", skip_none=False, skip_check=True))
    of_command = {option.name for option in (*options_of(RunChoice), *command_options(command))}
    return {name: value for name, value in plain.items() if name not in of_command}


class NotBuilt:
    """The type of callbacks and loggers here, which leaves what a config says of them as it is.

    With their own types, and with `Any`, jsonargparse would import the class that the config names.
    """


register_type(NotBuilt, lambda value: value, lambda value: value, type_check=lambda value, kind: True)


class TrainerOptions:
    """The options of `lm.training.trainer.Trainer`."""

    @arguments_from(TrainerConfig, Callback=NotBuilt, Logger=NotBuilt)
    def __init__(self, config: TrainerConfig) -> None: ...


def make_parser(command: str) -> Parser:
    parser = Parser(prog=f"lm {command}", allow_abbrev=False)
    parser.add_argument(f"--{SEED.name}", type=int, default=SEED.default)
    custom = process.module_class
    for name, kind in {"trainer": TrainerOptions, "model": custom or ModelConfig, "data": DataConfig}.items():
        arguments = parser.add_class_arguments(kind, name, instantiate=False)
        if kind is custom:
            check_arguments(custom, {argument.split(".")[1] for argument in arguments})
    allow_class_path(parser)
    for section in SECTIONS:
        if section.name not in ("trainer", "model", "data"):
            parser.add_class_arguments(section.options, section.name or None)
    for options_class in filter(None, (RunChoice, COMMAND_OPTIONS.get(command))):
        parser.add_class_arguments(options_class)
    return parser


def allow_class_path(parser: Any) -> None:
    """Let `model.optimizer.class_path` be an option; jsonargparse takes it for the class of `OptimizerConfig`."""
    for action in parser._actions:
        if action.dest == "model.optimizer":
            action.basetype = None


# ---- what jsonargparse takes, and should not -------------------------------------------------------------------------


def check_arguments(custom: type, arguments: set[str]) -> None:
    """Raise RequestError for a subclass of `LanguageModule` that does not take what every run gives it."""
    if missing := [option.name for option in fields(ModelConfig) if option.name not in arguments]:
        raise RequestError(
            f"{custom.__name__}.__init__ does not take {missing[0]} and other options of LanguageModule: let it end "
            "with **options, and begin with `super().__init__(**options)`"
        )
    if reserved := [name for name in signature(custom).parameters if hasattr(Namespace, name)]:
        raise RequestError(
            f"{custom.__name__}.__init__ has an argument {reserved[0]}, which jsonargparse keeps: rename it"
        )


def check_nulls(settings: Mapping[str, Any]) -> None:
    """Refuse a null where it means nothing, and a value in place of a group of options; jsonargparse takes both."""
    for section in SECTIONS:
        group, prefix = (settings.get(section.name, {}), f"{section.name}.") if section.name else (settings, "")
        _check_nulls(section.options, group, prefix)


def _check_nulls(options: type, group: Any, prefix: str) -> None:
    for option in fields(options):
        name, value = f"{prefix}{option.name}", group.get(option.name, ...)
        kinds = get_args(option.type) or (option.type,)
        null = value in (None, "null")
        if null and NoneType not in kinds:
            choices = f"give one of {', '.join(map(str, kinds))}, or " if "none" in kinds else ""
            raise RequestError(f"{name} is null, which means nothing there: {choices}leave it out for its default")
        item_class = next((item for kind in kinds for item in get_args(kind) if is_dataclass(item)), None)
        if item_class is not None and isinstance(value, str):
            value = load_yaml(value, f"--{name}")
        for item in value if item_class is not None and isinstance(value, list) else ():
            known = [field.name for field in fields(item_class)]
            for key in item.keys() - {*known} if isinstance(item, Mapping) else ():
                from lm.system.other_names import nearest_option

                raise RequestError(f"{name} has no {key!r}; {nearest_option(key, known)}")
        group_class = next((kind for kind in kinds if is_dataclass(kind)), None)
        if group_class is not None and not null and value is not ...:
            _check_nulls(group_class, value, f"{name}.")


def clear_tied_output(config: Namespace) -> None:
    """Leave out settings of the output matrix where it is the embedding."""
    output = config.model.optimizer.groups.output
    if config.model.decoder.tie_word_embeddings and any(value is not None for value in vars(output).values()):
        log.info("model.decoder.tie_word_embeddings: model.optimizer.groups.output is left out of the config")
        config.model.optimizer.groups.output = Namespace(dict.fromkeys(vars(output)))


def link_seq_len(config: Namespace) -> None:
    """Set the context of the data to the model's unless the data asks for a shorter one."""
    context = config.model.decoder.max_position_embeddings
    if config.data.seq_len is None:
        config.data.seq_len = context
    if config.data.seq_len > context:
        raise RequestError(
            f"data.seq_len {config.data.seq_len} is longer than model.decoder.max_position_embeddings {context}: leave "
            f"it out, or give --model.decoder.max_position_embeddings {config.data.seq_len}"
        )
