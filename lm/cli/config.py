"""The parsers of the one YAML, and the commands that take it: `fit`, `validate`, `test`, `predict`, `plan`.

`cli/options` finds the file, and has refused unknown names before this module is imported.
"""

import logging
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace, set_dumper
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger

from lm.cli.early import (
    LISTS,
    ConfigFile,
    add_sections,
    add_training,
    link_seq_len,
    refuse_nulls,
    refuse_seed,
    typed_options,
)
from lm.cli.options import CONFIG, SEED, PlanOptions, refuse_unknown_options
from lm.cli.plan import PlanChecks, plan
from lm.cli.plan_facts import is_prepared
from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.model.build import kernels_missing
from lm.model.huggingface import MODEL_TYPE
from lm.runs.registry import find_run, record_run
from lm.runs.resume import checkpoint_folder, find_checkpoint, refuse_changed_config, repair_links
from lm.runs.run import ROOT, Run, is_of_a_run
from lm.system import process
from lm.system.arguments import OneLineErrors, Parser, spell_out
from lm.system.files import read_object
from lm.system.hardware import has_fp8
from lm.system.process import command_line
from lm.training.budget import read_budget_file
from lm.training.callbacks.run_folder import RunFolder
from lm.training.callbacks.standard import standard_callbacks
from lm.training.callbacks.summary import Summary
from lm.training.config import ModelConfig, RunOptions, TrainerConfig, refuse_remote_root, sections_of_callbacks
from lm.training.module import LanguageModule, training_class
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)


class TrainingOptions:
    """For parsers: `model.optimizer.class_path` is an option like others; a callback or logger that fails is named."""

    def add_class_arguments(self, theclass: type, *args: Any, **kwargs: Any) -> list[str]:
        added = super().add_class_arguments(theclass, *args, **kwargs)
        if issubclass(theclass, LanguageModule):
            taken = {name.split(".")[1] for name in added}
            left_out = [option.name for option in fields(ModelConfig) if option.name not in taken]
            if left_out:
                raise RequestError(
                    f"{theclass.__name__}.__init__ does not take {left_out[0]} and other options of LanguageModule: "
                    "let it end with **options, and begin with `super().__init__(**options)`"
                )
            if reserved := [name for name in signature(theclass).parameters if hasattr(Namespace, name)]:
                raise RequestError(f"{theclass.__name__}.__init__ has an argument {reserved[0]}, which jsonargparse "
                                   "keeps for itself: give it another name")  # fmt: skip
        for action in self._actions:
            if action.dest == "model.optimizer":  # jsonargparse takes a class_path for one of `OptimizerConfig` itself
                action.basetype = None
        return added

    def instantiate_classes(self, *args: Any, **kwargs: Any) -> Namespace:
        failures: list[RequestError] = []  # jsonargparse's own error is about every type that it tried

        def make(kind: type, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return kind(*args, **kwargs)
            except Exception as error:
                option = "callbacks" if issubclass(kind, Callback) else "logger"
                failures.append(RequestError(f"trainer.{option}: {kind.__name__}: {' '.join(str(error).split())}"))
                raise

        for base in (Callback, Logger):
            self.add_instantiator(make, base)
        try:
            return super().instantiate_classes(*args, **kwargs)
        except ValueError as error:
            if failures:
                raise failures[0] from error
            raise


class ConfigParser(TrainingOptions, Parser):
    """Reads a training's config, for a command that is not `fit`. `config_parser` makes one."""

    flags: tuple[str, ...] = ()  # options that need no value

    def read(self, arguments: list[str]) -> Namespace:
        """The config that a command line gives, its dataclasses built."""
        config = self.parse_args(spell_out(arguments, self.flags, LISTS))
        if not config.config:
            raise RequestError("give a training's config with --config, such as --config tiny.yaml")
        refuse_seed(config.seed_everything)
        refuse_nulls(config)
        link_seq_len(config)
        return self.instantiate_classes(config)


def config_parser(prog: str, options: type | None = None) -> ConfigParser:
    """A parser of a training's config, of overrides of it, and of the command's own `options`, a dataclass.

    What stands under `trainer`, `model` and `data` comes back as keyword arguments of the three classes: nothing that
    is large, or that opens a file, has been built by then.
    """
    parser = ConfigParser(prog=prog, allow_abbrev=False)
    classes = {"trainer": Trainer, "model": training_class(), "data": DataModule}
    parser.flags = add_training(parser, classes, options)
    return parser


def resolved_text(settings: dict[str, Any], overrides: list[str] | None = None) -> str:
    """The content of a config, with options as they are typed in place of its own values, and all others, as YAML."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump({key: value for key, value in settings.items() if key != "run"}))
        arguments = spell_out(["--config", str(file), *(overrides or [])], (), LISTS)
        refuse_unknown_options("fit", arguments)
        parser = config_parser("lm fit")
        parser.read(arguments)  # refuses what does not fit
        config = parser.parse_args(arguments)
        link_seq_len(config)
        config.pop("run")
        return config_text(parser, config)


class ConfigDumper(yaml.SafeDumper):
    """Writes what YAML has no type for as text: the arguments of a callback may be an enum or a torch.device."""


ConfigDumper.add_multi_representer(
    object, lambda dumper, value: dumper.represent_str(f"{getattr(value, 'value', value)}")
)
set_dumper("config", lambda content: yaml.dump(content, Dumper=ConfigDumper, allow_unicode=True, sort_keys=False))


def config_text(parser: ArgumentParser, config: Namespace) -> str:
    """A parsed config as YAML, with all options but those of the command that was typed."""
    kept = config.clone()
    for name in ("config", "ckpt_path", "force"):
        kept.pop(name, None)
    return parser.dump(kept, format="config", skip_none=False, skip_check=True)


def fall_back_to_available_hardware(config: Namespace) -> None:
    """Replace kernels and FP8 that this machine lacks, to evaluate a run of another machine; logs what it changes."""
    model = config.model
    cuda = config.trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    instead = []
    if model.kernels in ("on", True) and (missing := kernels_missing(device)):
        instead.append(f"model.kernels on -> auto ({missing})")
        model.kernels = "auto"
    if model.attention != "auto" and not cuda:
        instead.append(f"model.attention {model.attention} -> auto")
        model.attention = "auto"
    if config.trainer.precision.startswith("fp8") and (not has_fp8(device) or kernels_missing(device)):
        instead.append(f"trainer.precision {config.trainer.precision} -> bf16-mixed")
        config.trainer.precision, config.trainer.fp8_keep = "bf16-mixed", None
    if instead:
        log.info("evaluated with what this machine has: %s", ", ".join(instead))


def config_name(config: Namespace) -> str:
    """The name of the config's file, and so of its runs; the first one's, where others amend it."""
    files = config.get("config") or []
    return Path(str(files[0])).stem if files else "run"


# ---- fit, validate, test, predict ------------------------------------------------------------------------------------


class TrainingParser(TrainingOptions, OneLineErrors, LightningArgumentParser):
    """LightningCLI's parser with errors of one line."""


class TrainingCLI(LightningCLI):
    """LightningCLI whose classes are fixed, so that a config needs no `class_path`."""

    def __init__(self, arguments: list[str], callbacks: Sequence[Callback] = (), news: Sequence[str] = ()) -> None:
        self.own_callbacks, self.typed, self.news = callbacks, arguments[0], news
        super().__init__(
            training_class(),
            DataModule,
            trainer_class=Trainer,
            parser_class=TrainingParser,
            save_config_callback=None,  # RunFolder keeps the config, and only a fit's
            seed_everything_default=SEED.default,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=arguments,
        )

    def subcommands(self) -> dict[str, set[str]]:
        """Only the subcommand that was typed: making a parser takes a tenth of a second."""
        return {self.typed: LightningCLI.subcommands()[self.typed]}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = self.parser_class(**kwargs, allow_abbrev=False, prog="lm")
        parser.add_argument("-c", "--config", action=ConfigFile, help=CONFIG.help)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run", type=str | None, default=None)
        parser.add_argument("--force", type=bool, default=False)
        add_sections(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        super().parse_arguments(parser, args)
        refuse_seed(self.config[self.config.subcommand].seed_everything)

    def _parse_ckpt_path(self) -> None:
        """Nothing: a checkpoint here is a folder and never overrides the command line."""

    # ---- between parsing and building ---------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Find the run and the checkpoint that are meant, and compare the config with the run's."""
        config, fit = self.config[self.subcommand], self.subcommand == "fit"
        root, name = config.trainer.default_root_dir, config.run or config_name(config)
        refuse_nulls(config)
        refuse_remote_root(root)
        link_seq_len(config)
        if self.subcommand == "predict" and not config.data.texts:
            raise RequestError("nothing to predict on: give text files, JSONL or Parquet with --data.texts")
        self.checkpoint, self.resumed_run = find_checkpoint(
            config.ckpt_path, name, root, named=config.run is not None, command=self.subcommand
        )
        if not fit:
            log.info("run %s, checkpoint %s", self.resumed_run.name if self.resumed_run else "none", self.checkpoint)
            fall_back_to_available_hardware(config)
        if self.subcommand == "predict":
            config.trainer.devices, config.trainer.num_nodes = 1, 1
        config.run = self.resumed_run.name if self.resumed_run and fit else name
        self.config_text = config_text(self._parser(self.subcommand), config)
        self.stays_stopped, self.changed = False, {}
        if fit and self.resumed_run and self.checkpoint:
            self.changed = refuse_changed_config(self.resumed_run, yaml.safe_load(self.config_text), config.force)
            early = self.resumed_run.read("run.json").get("reason") == "early stopping"
            stoppers = ("trainer.early_stopping", "trainer.callbacks")
            self.stays_stopped = early and not any(key.startswith(stoppers) for key in self.changed)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer_config = {**self._get(self.config_init, "trainer"), **kwargs}
        config, fit = self.config[self.subcommand], self.subcommand == "fit"
        options = RunOptions(**{option.name: config[option.name] for option in fields(RunOptions)})
        self.run_folder = RunFolder(
            self.resumed_run, config.run, self.config_text, config.force, auto=config.ckpt_path == "auto",
            options=options,
        )  # fmt: skip
        sections = sections_of_callbacks(self.config_init[self.subcommand])
        standard = standard_callbacks(TrainerConfig(**trainer_config), self.run_folder, sections)
        callbacks = [*self.own_callbacks, *standard, Summary()]
        if fit:
            read_budget_file(sections["guards"].budget)  # refuses a cap that cannot be counted
            self.checks = PlanChecks(sections)
            self.checks.resume(self.resumed_run, config.force, self.changed, self.news)
            callbacks.append(self.checks)
        try:
            trainer: Any = self._instantiate_trainer(trainer_config, callbacks)
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise RequestError(f"trainer: {' '.join(str(error).split())}") from error
        refuse_notebook(trainer)
        return trainer

    def before_fit(self) -> None:
        """What `lm plan` refuses without the data is refused before hours are spent on making it."""
        if not is_prepared(self.datamodule.options):
            self.checks.refuse(self.trainer, self.model, self.datamodule, opened=False)

    def _run_subcommand(self, subcommand: str) -> None:
        if self.stays_stopped:
            log.info("the run has finished: it was stopped early; change trainer.early_stopping, or the callback in "
                     "trainer.callbacks that stopped it, to continue it")  # fmt: skip
            return
        try:
            super()._run_subcommand(subcommand)
        finally:
            self.run_folder.announce_end()

    def after_fit(self) -> None:
        """Record the end of a run that was killed between its last checkpoint and that record."""
        run, trained = self.resumed_run, self.trainer.run is not None
        if run is None or trained or not self.trainer.is_global_zero or run.status() == "running":
            return
        repair_links(run, self.checkpoint)
        if run.status() not in ("finished", "stopped"):
            run.describe(status="finished", reason="all steps done", step=self.trainer.run_state.start.step)
            record_run(run)

    def after_validate(self) -> None:
        if self.trainer.is_global_zero:
            for name, value in self.trainer.callback_metrics.items():
                print(f"{name} {value.item():.4f}")

    after_test = after_validate

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        self.datamodule.set_position(seed=self.config[subcommand].seed_everything)
        verified = subcommand == "fit" or self.config[subcommand].ckpt_path not in (None, "best", "last")
        fit, force = subcommand == "fit", self.config[subcommand].force
        branch = fit and self.resumed_run is not None and "branch" in self.resumed_run.read("run.json")
        self.trainer.load_with(fit, self.checkpoint if verified else None, other_model=branch or force)
        if subcommand != "fit":
            self.trainer.run_state.run = self.resumed_run
        path = str(self.checkpoint) if self.checkpoint else None
        table = {"verbose": False} if subcommand in ("validate", "test") else {}  # `after_validate` prints the metrics
        return {**super()._prepare_subcommand_kwargs(subcommand), **table, "ckpt_path": path}


def _chosen_run(arguments: list[str]) -> Run:
    """The run of a command without `--config`: that of `--run`, that of the checkpoint, or the newest."""
    options = typed_options(arguments)
    root = options.get("--trainer.default_root_dir", str(ROOT))
    checkpoint = options.get("--ckpt_path", "best")
    if "--run" not in options and not is_of_a_run(checkpoint):
        folder = checkpoint_folder(checkpoint).resolve()
        if (folder.parent / "run.json").exists():
            return Run(folder.parent)
    return find_run(options.get("--run"), root, otherwise=", or give --config")


def refuse_notebook(trainer: Trainer) -> None:
    """Refuse several devices in a notebook: their processes are started by running the program again."""
    if in_notebook() and trainer.world_size > 1:
        raise RequestError(f"a notebook trains on one device, and these are {trainer.world_size}: give trainer.devices "
                           "1, or train with `lm fit`")  # fmt: skip


def in_notebook() -> bool:
    return "ipykernel" in sys.modules


def quiet_lightning() -> None:
    """Leave out what Lightning logs about every training."""
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def refuse_unknown_class(run: Run) -> None:
    """Refuse a run whose model another class builds than this process has, before its options are unknown ones."""
    newest = run.link("last")
    if newest and (newest / "config.json").exists():
        document = read_object(newest / "config.json")
        if document.get("model_type") == MODEL_TYPE:
            from lm.model.custom import known_class

            known_class(document, process.module_class, str(run.path), run.script)


def main(arguments: list[str]) -> None:
    """Run `lm fit|validate|test|predict|plan ...`."""
    quiet_lightning()
    command, rest = arguments[0], arguments[1:]
    if command == "plan":
        config = config_parser("lm plan", PlanOptions).read(rest)
        return plan(config, config.run or config_name(config))
    resumes = {"--run", "--ckpt_path"} <= typed_options(rest).keys()
    if (command != "fit" or resumes) and not {"-c", "--config"} & typed_options(rest).keys():
        run = _chosen_run(rest)
        refuse_unknown_class(run)
        there = ["--run", run.name, "--trainer.default_root_dir", str(run.path.parent)]
        rest = ["--config", str(run.config), *rest, *there]
    with command_line([command, *rest]):
        TrainingCLI([command, *spell_out(rest, ("force",), LISTS)])
