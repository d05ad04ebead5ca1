"""A command line and the YAML files that it names become dataclasses: read once, without importing PyTorch.

`read` is the way of a command, `combine` and `make` that of Python and of commands that change another run's settings.
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
from lm.cli.options import (
    COMMAND_OPTIONS,
    NAMES,
    SEED,
    FitOptions,
    RunChoice,
    option_groups,
    training_options,
)
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

CONFIGS = (Path("configs"), Path(lm.__file__).parent / "configs")
# Where an option is typed -> those of the config that say otherwise, or belong to other data.
REPLACED = {
    "data.path": ("data.train", "data.sources", "data.phases", "data.prepare"),
    "data.train": ("data.path", "data.sources", "data.phases", "data.prepare"),
    "data.sources": ("data.path", "data.train", "data.val", "data.test", "data.tokenizer", "data.prepare"),
    "trainer.max_steps": ("trainer.max_tokens",), "trainer.max_tokens": ("trainer.max_steps",),
}  # fmt: skip
CLASSES = ("trainer.callbacks", "trainer.logger")  # options whose values are classes by path, built later
# Commands that take a run's checkpoint -> another cure where there is no run at all.
OF_A_RUN = dict.fromkeys(("generate", "evaluate", "export"), ", or give a --ckpt_path") | {"branch": ""}


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The sections of a config."""

    trainer: TrainerConfig
    model: ModelConfig
    data: DataConfig
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def of_callbacks(self) -> dict[str, Any]:
        """Those that callbacks take."""
        return {section.name: getattr(self, section.name) for section in SECTIONS if section.of_callbacks}


Options = TypeVar("Options")  # `FitOptions`, `PlanOptions` ...


@dataclass(frozen=True, kw_only=True)
class Request(Sections, Generic[Options]):
    """A command with its own options, and all options of a training; callbacks and loggers are not built yet."""

    command: str
    name: str  # of the run: as typed, else that of the config's file
    settings: dict[str, Any]  # the options of the training as plain values
    choice: RunChoice
    options: Options  # of the command
    seed_everything: int
    notes: RunOptions
    own_arguments: dict[str, Any]  # of the model, where a subclass of `LanguageModule` has further ones

    @property
    def text(self) -> str:
        """The content of a run's config.yaml."""
        return to_yaml({"run": self.name, **self.settings})

    def changed(self, values: Mapping[str, Any]) -> "Request[Options]":
        """The same request with other values of a training's options, by their dotted names."""
        settings = copy.deepcopy(self.settings)
        for name, value in values.items():
            assign(settings, name, value)
        return replace(make(self.command, {**settings, **vars(self.choice)}, self.name), options=self.options)


def to_yaml(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, allow_unicode=True, sort_keys=False)


def read(command: str, arguments: list[str]) -> Request[Any]:
    """The request of a command line; RequestError, with the place and what to give, for what cannot be meant."""
    if arguments and not arguments[0].startswith("-"):
        find_config(arguments[0])
        raise RequestError(f"{arguments[0]!r} is not an option; did you mean `lm {command} --config {arguments[0]}`?")
    typed = read_options(command, arguments)
    files = [find_config(str(value)) for name, value in typed if name == "config"]
    documents = {path: read_config(path) for path in files}
    check_names(command, typed, documents)
    typed = [(name, value) for name, value in typed if name not in ("config", "print_config")]
    lengths = [name for name, value in typed if name in ("trainer.max_steps", "trainer.max_tokens") and value != "null"]
    if lengths and "hours" in dict(typed) and command == "fit":
        raise RequestError(f"--{lengths[0]} gives the length of the run, and so does --hours: give one of them")
    if not files and (run := chosen_run(command, dict(typed))):
        files = [run.config]
        documents = {run.config: read_config(run.config)}
        check_names(command, [], documents)
        typed += [("run", run.name), ("trainer.default_root_dir", str(run.path.parent))]
    elif not files and not (command == "fit" and any(name.startswith("data.") for name, _ in typed)):
        raise RequestError(f"give a config with --config, such as `lm {command} --config tiny.yaml`")
    return make(command, combine(command, documents.values(), typed), files[0].stem if files else "run")


def override(settings: Mapping[str, Any], typed: Sequence[tuple[str, Any]], name: str = "run") -> Request[FitOptions]:
    """The request of a fit with the settings of another run, and options that are typed over them."""
    check_names("fit", typed)
    kept = {key: value for key, value in settings.items() if key not in ("run", "ckpt_path")}
    return make("fit", combine("fit", [kept], typed), name)


def read_options(command: str, arguments: list[str]) -> list[tuple[str, str | None]]:
    """The options of a command line by their full names, with the values as typed."""
    options = training_options(command)
    flags = [option.name for option in options if option.kind == "bool"]
    lists = [option.name for option in options if "list of str" in option.kind]
    pairs = typed_options(arguments, [*flags, "print_config"], lists)
    for name, word in pairs:
        if not name:
            hint = f"; did you mean --{word}?" if "=" in str(word) else ""
            raise RequestError(f"{shown(word)} belongs to no option{hint}")
    return [({"c": "config", "seed": SEED.name}.get(name, name), value) for name, value in pairs]


def combine(command: str, documents: Iterable[Mapping[str, Any]], typed: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Settings of configs, of which later ones override earlier ones, with options as they are typed over them.

    What an option replaces in a config becomes null unless it is typed too: `data.path` replaces all other data.
    """
    groups = option_groups(option.name for option in training_options(command))
    settings: dict[str, Any] = {}
    for document in documents:
        for name, value in dotted(document, groups):
            assign(settings, name, value)
    typed = list(typed)
    names = {".".join(name.split(".")[:2]) for name, _ in typed}
    for name in REPLACED.keys() & {name for name, value in typed if value not in (None, "null")}:
        for other in REPLACED[name]:
            if other not in names:
                assign(settings, other, None)
    for name, value in typed:
        group = get_loader("yaml")(value) if name in groups and isinstance(value, str) else None
        for inner, part in dotted(group, groups, f"{name}.") if isinstance(group, dict) else [(name, value)]:
            assign(settings, inner, part)  # a group as in `--model.schedule '{name: wsd}'`
    return settings


def dotted(settings: Mapping[str, Any], groups: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as pairs of dotted names and values; a group that is empty is a value."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name in groups and isinstance(value, Mapping) and value:
            yield from dotted(value, groups, f"{name}.")
        else:
            yield name, value


def assign(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set an option by its dotted name in nested settings, in place.

    `trainer.callbacks+` adds to a list, and what follows a class by path, as in `trainer.logger.save_dir`, is an
    argument of that class, or of the last one in the list.
    """
    for option in CLASSES:
        rest = name.removeprefix(f"{option}.")
        if rest != name and rest.partition(".")[0] not in ("class_path", "init_args", "dict_kwargs"):
            name = f"{option}.init_args.{rest}"
    *groups, last = name.split(".")
    place: Any = settings
    for group in groups:
        inner = place.get(group)
        if isinstance(inner, list) and inner:
            place, group, inner = inner, -1, inner[-1]
        if isinstance(inner, str):
            inner = {"class_path": inner}
        place[group] = inner if isinstance(inner, dict) else {}
        place = place[group]
    if last.endswith("+"):
        last = last.removesuffix("+")
        value = [*(place.get(last) or []), get_loader("yaml")(value) if isinstance(value, str) else value]
    if value != {} or not place.get(last):
        place[last] = value


# ---- dataclasses -----------------------------------------------------------------------------------------------------


class Unread:
    """What stands for a callback or a logger; jsonargparse would import a class by path, also where `Any` stands."""


register_type(Unread, serializer=lambda value: value, deserializer=lambda value: value,
              type_check=lambda value, kind: True)  # fmt: skip


class TrainerOptions:
    """The options of `lm.training.trainer.Trainer`."""

    @arguments_from(TrainerConfig, Callback=Unread, Logger=Unread)
    def __init__(self, config: TrainerConfig) -> None: ...


def make_parser(command: str) -> Parser:
    """The parser of a training's options and of the command's own."""
    parser = Parser(prog=f"lm {command}", allow_abbrev=False)
    parser.add_argument(f"--{SEED.name}", type=int, default=SEED.default)
    own = process.module_class
    for name, kind in {"trainer": TrainerOptions, "model": own or ModelConfig, "data": DataConfig}.items():
        added = parser.add_class_arguments(kind, name, instantiate=False)
        if kind is own:
            check_own_arguments(own, {option.split(".")[1] for option in added})
    take_class_path(parser)
    for section in SECTIONS:
        if section.name not in ("trainer", "model", "data"):
            parser.add_class_arguments(section.options, section.name or None)
    for options in (RunChoice, COMMAND_OPTIONS.get(command)):
        if options:
            parser.add_class_arguments(options)
    return parser


def take_class_path(parser: Any) -> None:
    """Let `model.optimizer.class_path` be an option; jsonargparse takes it for the class of `OptimizerConfig`."""
    for action in parser._actions:
        if action.dest == "model.optimizer":
            action.basetype = None


def check_own_arguments(kind: type, taken: set[str]) -> None:
    """Raise RequestError for a subclass of `LanguageModule` that does not take what every training gives it."""
    if left_out := [option.name for option in fields(ModelConfig) if option.name not in taken]:
        raise RequestError(f"{kind.__name__}.__init__ does not take {left_out[0]} and other options of LanguageModule: "
                           "let it end with **options, and begin with `super().__init__(**options)`")  # fmt: skip
    if reserved := [name for name in signature(kind).parameters if hasattr(Namespace, name)]:
        raise RequestError(f"{kind.__name__}.__init__ has an argument {reserved[0]}, which jsonargparse keeps for "
                           "itself: give it another name")  # fmt: skip


def make(command: str, settings: dict[str, Any], name: str = "run") -> Request[Any]:
    """The request of settings as a config has them, each value of its option's type, or RequestError."""
    parser = make_parser(command)
    check_nulls(settings)
    config = parser.parse_object(settings)
    if not 0 <= config.seed_everything < 2**32:
        raise RequestError(f"seed_everything {config.seed_everything} must be a whole number from 0 to {2**32 - 1}")
    link_seq_len(config)
    plain = json.loads(parser.dump(config, format="json", skip_none=False, skip_check=True))
    built = parser.instantiate_classes(config)

    def take(kind: type) -> Any:
        return kind(**{option.name: built[option.name] for option in fields(kind)})

    model, known = vars(built.model), {option.name for option in fields(ModelConfig)}
    choice, own = take(RunChoice), COMMAND_OPTIONS.get(command)
    trainer, data = TrainerConfig(**vars(built.trainer)), DataConfig(**vars(built.data))
    if command != "plan" and str(trainer.devices) in ("1", "auto"):  # `plan` lists it with all else
        plan_steps(world_size=1, max_steps=trainer.max_steps, max_tokens=trainer.max_tokens, seq_len=data.seq_len,
                   micro_batch_size=data.micro_batch_size, global_batch_tokens=data.global_batch_tokens)  # fmt: skip
    if command == "predict" and data.texts:
        from lm.data.text_files import find_files

        find_files(data.texts)
    of_command = {option.name for kind in (RunChoice, own) if kind for option in fields(kind)}
    return Request(
        command=command, name=choice.run or name, choice=choice, options=take(own) if own else None,
        settings={key: value for key, value in plain.items() if key not in of_command},
        seed_everything=built.seed_everything, notes=take(RunOptions), trainer=trainer, data=data,
        model=ModelConfig(**{key: value for key, value in model.items() if key in known}),
        own_arguments={key: value for key, value in model.items() if key not in known},
        guards=built.guards, samples=built.samples, evaluation=built.evaluation,
    )  # fmt: skip


def check_nulls(settings: Mapping[str, Any]) -> None:
    """Refuse a null where it means nothing, and a value in place of a group of options; jsonargparse takes both."""
    for section in SECTIONS:
        if section.name and section.name in settings:
            _check_nulls(section.options, settings[section.name], section.name)


def _check_nulls(options: type, group: Any, place: str) -> None:
    if not isinstance(group, Mapping):
        raise RequestError(f"{place} is a group of options and not {shown(group)}")
    for option in fields(options):
        kinds = get_args(option.type) or (option.type,)
        inner = next((kind for kind in kinds if is_dataclass(kind)), None)
        value = group.get(option.name, ...)
        if value in (None, "null") and NoneType not in kinds and "None" not in str(option.type):
            raise RequestError(f"{place}.{option.name} is null, which means nothing there: leave it out for its "
                               "default")  # fmt: skip
        if inner is not None and value not in (None, "null", ...):
            _check_nulls(inner, value, f"{place}.{option.name}")


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


def check_names(
    command: str, typed: Iterable[tuple[str, Any]], documents: Mapping[Any, Mapping[str, Any]] = {}
) -> None:
    """Raise RequestError for names that no option has, in a command line and in configs, and for a missing value."""
    leaves = {option.name for option in training_options(command)}
    leaves |= {option.name for option in fields(RunChoice)}  # a config may carry those of a fit
    groups = option_groups(leaves)
    values = {name.removesuffix("+"): value for name, value in typed if name != "print_config"}
    names = {f"config {path}: ": dict(dotted(document, groups)) for path, document in documents.items()} | {"": values}
    unknown = {place: [name for name in given if not _is_known(name, leaves, groups)] for place, given in names.items()}
    if any(unknown.values()):
        known = sorted(leaves | groups)
        raise RequestError("; ".join(
            place + unknown_options({name: nearest_option(name, known) or f"`lm {command} --help all` lists them"
                                     for name in given})
            for place, given in unknown.items() if given
        ))  # fmt: skip
    if missing := [name for name, value in values.items() if value is None]:
        raise RequestError(f"--{missing[0]} needs a value")


def _is_known(name: str, leaves: set[str], groups: set[str]) -> bool:
    """Whether a name is an option, a group of options, or within an option's value or a class by path."""
    parts = name.split(".")
    within = any(".".join(parts[:count]) in leaves for count in range(1, len(parts) + 1))
    return within or name in groups or not {"class_path", "init_args", "dict_kwargs"}.isdisjoint(parts)


def split_overrides(arguments: list[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Split a command line into the command's own arguments and the options of a training, as `override` takes them."""
    of_fit = {option.name for kind in (RunChoice, COMMAND_OPTIONS["fit"]) for option in fields(kind)} | {"config"}
    of_a_training = {option.name for option in training_options("fit")} - of_fit | {"seed"}
    own: list[str] = []
    overrides: list[str] = []
    part = own
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.removeprefix("--").partition("=")[0]
            part = overrides if "." in name or name in of_a_training else own
        part.append(argument)
    return own, read_options("fit", overrides)


# ---- configs and runs ------------------------------------------------------------------------------------------------


def find_config(name: str) -> Path:
    """A config as typed, else under `configs/`."""
    for path in (Path(name), *(folder / name for folder in CONFIGS), *(folder / f"{name}.yaml" for folder in CONFIGS)):
        if path.is_file():
            return path
    have = sorted({path.name for folder in CONFIGS for path in folder.glob("*.yaml")})
    here = Path(name).parent
    nearby = {str(path) for path in (*here.glob("*.y*ml"), *here.parent.glob(f"*/{Path(name).name}"))}
    close = get_close_matches(name, [*sorted(nearby), *have], 3, cutoff=0.75)
    hint = f"did you mean {' or '.join(close)}?" if close else f"configs/ has: {', '.join(have) or 'none'}"
    raise RequestError(f"no config {name!r} here or in configs/; {hint}")


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config, without the options that are gone and have their default."""
    try:
        text = without_removed(path.read_text(encoding="utf-8"))
        document = parse_yaml(text)  # refuses a key that is there twice
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


def chosen_run(command: str, values: Mapping[str, Any]) -> Run | None:
    """The run of a command without `--config`: that of `--run`, that of the checkpoint, or the newest."""
    of_a_run = command in ("validate", "test", "predict") or command == "fit" and {"run", "ckpt_path"} <= values.keys()
    if not of_a_run:
        return None
    from lm.runs.find import find_run
    from lm.runs.resume import checkpoint_folder

    checkpoint = values.get("ckpt_path", "best")
    if "run" not in values and not is_of_a_run(checkpoint):
        folder = checkpoint_folder(checkpoint).resolve()
        if (folder.parent / "run.json").exists():
            return require_model_class(Run(folder.parent))
    root = values.get("trainer.default_root_dir", str(ROOT))
    return require_model_class(find_run(values.get("run"), root, otherwise=", or give --config"))


def require_model_class(run: Run) -> Run:
    """The run, whose model this process can build: its options would be unknown ones where its class is not known."""
    newest = run.link("last")
    document = read_object(newest / "config.json") if newest and (newest / "config.json").exists() else {}
    if document.get("model_type") == CUSTOM_MODEL_TYPE:
        from lm.model.custom import known_class

        known_class(document, process.module_class, str(run.path), run.script)
    return run


def require_run(command: str, arguments: list[str]) -> None:
    """Refuse the name of a run that is not there, or no name where there is no run, before PyTorch is imported."""
    values = dict(typed_options(arguments))
    positional = values.get("")
    other = {"h", "help"} & values.keys() or (command == "branch") == (positional is None)
    if command in OF_A_RUN and not other and is_of_a_run(values.get("ckpt_path")):
        from lm.runs.find import find_run

        find_run(positional or values.get("run"), values.get("root") or ROOT, otherwise=OF_A_RUN[command])
