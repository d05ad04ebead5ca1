"""The one YAML: how it is found, and a parser of it for commands that look at a training without running one."""

from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from jsonargparse import SUPPRESS, ActionConfigFile, Namespace

from lm.arguments import OneLineErrors, Parser, shown
from lm.callbacks.evaluations import EvaluationConfig
from lm.callbacks.guards import GuardsConfig
from lm.callbacks.samples import SamplesConfig
from lm.data.datamodule import DataModule
from lm.documents import parse_yaml
from lm.errors import RequestError
from lm.module import LanguageModule
from lm.trainer import Trainer

CLASSES = {"trainer": Trainer, "model": LanguageModule, "data": DataModule}
# What a config has beside them.
BESIDE = {"guards": GuardsConfig, "samples": SamplesConfig, "evaluation": EvaluationConfig}
CONFIGS = (Path("configs"), Path(__file__).parent.parent / "configs")


class TrainingErrors(OneLineErrors):
    """One-line errors that know what Lightning users may expect to find."""

    elsewhere = {
        "trainer.accumulate_grad_batches": "it follows from data.global_batch_tokens and data.micro_batch_size",
        "trainer.val_check_interval": "give trainer.val_interval, in optimizer steps",
        "trainer.limit_val_batches": "give data.val_tokens",
        "trainer.max_epochs": "give trainer.max_steps or trainer.max_tokens",
        "trainer.log_every_n_steps": "give trainer.log_interval",
        "trainer.logger": "TensorBoard and metrics.jsonl are always written to the run folder",
        "data.batch_size": "give data.micro_batch_size, and data.global_batch_tokens for the optimizer step",
    }


class ConfigFile(ActionConfigFile):
    """`--config`, looked up in `configs/` too."""

    @staticmethod
    def apply_config(parser: Any, cfg: Any, dest: str, value: Any) -> None:
        path = find_config(value)
        refuse_what_is_no_config(Path(path))
        ActionConfigFile.apply_config(parser, cfg, dest, path)


class ConfigParser(TrainingErrors, Parser):
    """Reads a training's config, for a command that is not `fit`. `config_parser` makes one."""

    def read(self, arguments: list[str]) -> Namespace:
        """The config that a command line gives, its dataclasses built.

        Raises:
            RequestError: no config is named, or it does not fit.
        """
        config = self.parse_args(arguments)
        if not config.config:
            raise RequestError("give a training's config with --config, such as --config tiny.yaml")
        refuse_nulls(config)
        link_seq_len(config)
        return self.instantiate_classes(config)


def config_parser(prog: str) -> ConfigParser:
    """A parser of a training's config and of overrides of it; a command adds its own options.

    What stands under `trainer`, `model` and `data` comes back as keyword arguments of the three classes: nothing that
    is large, or that opens a file, has been built by then.

    Args:
        prog: the command as it is typed.
    """
    parser = ConfigParser(prog=prog, allow_abbrev=False)
    parser.add_argument("-c", "--config", action=ConfigFile, help="A YAML file; looked up in configs/ too.")
    parser.add_argument("--seed_everything", type=int, default=1337, help="Seed of the weights and of the order.")
    for name in ("run", "ckpt_path"):  # a config may carry them, and they are `fit`'s
        parser.add_argument(f"--{name}", type=str | None, default=None, help=SUPPRESS)
    for name, kind in CLASSES.items():
        parser.add_class_arguments(kind, name, instantiate=False)
    for name, kind in BESIDE.items():
        parser.add_class_arguments(kind, name)
    return parser


def find_config(name: str) -> str:
    """A config as typed, else under `configs/`.

    Raises:
        RequestError: it is in neither.
    """
    for path in (Path(name), *(folder / name for folder in CONFIGS), *(folder / f"{name}.yaml" for folder in CONFIGS)):
        if path.is_file():
            return str(path)
    have = ", ".join(sorted({path.name for folder in CONFIGS for path in folder.glob("*.yaml")})) or "none"
    raise RequestError(f"no config {name!r} here or in configs/; configs/ has: {have}")


def refuse_what_is_no_config(path: Path) -> None:
    """Refuse what no parser should be given, before one is.

    Raises:
        RequestError: a file that is damaged, or that has something else where a group of options belongs.
    """
    try:
        document = parse_yaml(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RequestError(f"config {path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise RequestError(f"config {path} is no list of options such as `trainer:`, but {shown(document)}")
    for name in (*CLASSES, *BESIDE):
        group = document.get(name, {})
        if not isinstance(group, dict):
            raise RequestError(f"config {path}: {name} is a group of options and not {shown(group)}")


def refuse_nulls(config: Namespace) -> None:
    """The parser takes a null for anything, and leaves a list where a group of options belongs.

    Raises:
        RequestError: one stands where it means nothing; names the key.
    """
    for name, kind in (CLASSES | BESIDE).items():
        _refuse_nulls(kind, config[name], name)


def _refuse_nulls(kind: type, group: Any, place: str) -> None:
    if not isinstance(group, Namespace | dict | kind):
        raise RequestError(f"{place} is a group of options and not {shown(group)}")
    values = group if isinstance(group, dict) else vars(group)
    for name, hint in get_type_hints(kind.__init__).items():
        hints = get_args(hint) or (hint,)
        inner = next((each for each in hints if is_dataclass(each)), None)
        value = values.get(name, ...)
        if value is None and NoneType not in hints:
            raise RequestError(f"{place}.{name} is null, which means nothing there: leave it out for its default")
        if inner is not None and value not in (None, ...):
            _refuse_nulls(inner, value, f"{place}.{name}")


def link_seq_len(config: Namespace) -> None:
    """The context is the model's unless the data asks for less.

    Raises:
        RequestError: the data asks for more.
    """
    most = config.model.decoder.max_position_embeddings
    if config.data.seq_len is None:
        config.data.seq_len = most
    if config.data.seq_len > most:
        raise RequestError(
            f"data.seq_len {config.data.seq_len} is longer than model.decoder.max_position_embeddings {most}"
        )


def config_name(config: Namespace) -> str:
    """The name of the config's file, and so of its runs; the first one's, where others amend it."""
    files = config.get("config") or []
    return Path(str(files[0])).stem if files else "run"
