"""The one YAML: how it is found, and a parser of it for commands that look at a training without running one."""

from pathlib import Path
from typing import Any

from jsonargparse import SUPPRESS, ActionConfigFile, Namespace

from lm.arguments import OneLineErrors, Parser
from lm.callbacks.evaluations import EvaluationConfig
from lm.callbacks.guards import GuardsConfig
from lm.callbacks.samples import SamplesConfig
from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.module import LanguageModule
from lm.trainer import Trainer

# What a config has beside trainer, model and data.
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
        ActionConfigFile.apply_config(parser, cfg, dest, find_config(value))


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
    for name, kind in {"trainer": Trainer, "model": LanguageModule, "data": DataModule}.items():
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
