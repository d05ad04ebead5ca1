"""`fit`, `validate`, `test`, `predict`: LightningCLI with fixed classes, runs found by name, and one-line errors."""

import logging
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lm.arguments import spell_out
from lm.callbacks.registration import Registration
from lm.callbacks.run_folder import RunFolder
from lm.callbacks.standard import standard_callbacks
from lm.config_file import BESIDE, ConfigFile, TrainingErrors, config_name, link_seq_len, refuse_nulls
from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.module import LanguageModule
from lm.registry import record
from lm.resume import compare, find_checkpoint, settle
from lm.runs import ROOT, Run
from lm.trainer import Trainer

log = logging.getLogger(__name__)
FLAGS = ("force",)
LISTS = ("data.train", "data.val", "data.test", "data.texts", "data.prepare.input", "samples.prompts",
         "evaluation.tasks")  # fmt: skip


class Parser(TrainingErrors, LightningArgumentParser):
    """LightningCLI's parser with errors of one line."""


class TrainingCLI(LightningCLI):
    """LightningCLI whose classes are fixed, so that a config needs no `class_path`."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(
            LanguageModule,
            DataModule,
            trainer_class=Trainer,
            parser_class=Parser,
            save_config_callback=None,  # RunFolder keeps the config, and only a fit's
            seed_everything_default=1337,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=arguments,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = self.parser_class(**kwargs, allow_abbrev=False, prog="lm")
        parser.add_argument("-c", "--config", action=ConfigFile, help="A YAML file; looked up in configs/ too.")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run", type=str | None, default=None, help="Name of the run; the config's if not given.")
        parser.add_argument("--force", type=bool, default=False, help="Go on though it is another run by now.")
        for name, kind in BESIDE.items():
            parser.add_class_arguments(kind, name)

    def _parse_ckpt_path(self) -> None:
        """Nothing: a checkpoint here is a folder and never overrides the command line."""

    # ---- between parsing and building ---------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        refuse_nulls(config)
        root = config.trainer.default_root_dir
        link_seq_len(config)
        name = config.run or config_name(config)
        self.checkpoint, self.resumed_run = find_checkpoint(
            config.ckpt_path, name, root, named=config.run is not None, command=self.subcommand
        )
        if self.subcommand != "fit":
            log.info("run %s, checkpoint %s", self.resumed_run.name if self.resumed_run else "none", self.checkpoint)
            config.trainer.devices, config.trainer.num_nodes = (
                (1, 1) if self.subcommand == "predict" else (config.trainer.devices, config.trainer.num_nodes)
            )
        config.run = self.resumed_run.name if self.resumed_run and self.subcommand == "fit" else name
        self.config_text = self._resolved_config(config)
        self.stays_stopped = False
        if self.subcommand == "fit" and self.resumed_run and self.checkpoint:
            changed = compare(self.resumed_run, yaml.safe_load(self.config_text), force=config.force)
            early = self.resumed_run.read("run.json").get("reason") == "early stopping"
            self.stays_stopped = early and not any(key.startswith("trainer.early_stopping") for key in changed)

    def _resolved_config(self, config: Namespace) -> str:
        kept = config.clone()
        for name in ("config", "ckpt_path", "force"):
            kept.pop(name, None)
        return self._parser(self.subcommand).dump(kept, skip_none=False, skip_check=True)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer_config = {**self._get(self.config_init, "trainer"), **kwargs}
        config = self.config[self.subcommand]
        auto = config.ckpt_path == "auto"
        run_folder = RunFolder(self.resumed_run, config.run, self.config_text, config.force, auto=auto)
        beside = {name: self._get(self.config_init, name) for name in BESIDE}
        callbacks = standard_callbacks(trainer_config, run_folder, **beside)
        try:
            return self._instantiate_trainer(trainer_config, [*callbacks, Registration()])
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise RequestError(f"trainer: {' '.join(str(error).split())}") from error

    def _run_subcommand(self, subcommand: str) -> None:
        if self.stays_stopped:
            log.info("the run has finished: it was stopped early; change trainer.early_stopping to go on")
            return
        super()._run_subcommand(subcommand)

    def after_fit(self) -> None:
        """A run that was killed between its last checkpoint and the note that it has finished gets the note now."""
        run, trained = self.resumed_run, self.trainer.run is not None
        if run is None or trained or not self.trainer.is_global_zero or run.status() == "running":
            return
        settle(run, self.checkpoint)
        if run.status() not in ("finished", "stopped"):
            run.describe(status="finished", reason="all steps done", step=self.trainer.steps.max_steps)
            record(run)

    def after_validate(self) -> None:
        self._print_metrics()

    def after_test(self) -> None:
        self._print_metrics()

    def _print_metrics(self) -> None:
        if self.trainer.is_global_zero:
            for name, value in self.trainer.callback_metrics.items():
                print(f"{name} {value.item():.4f}")

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        self.datamodule.seed = self.config[subcommand].seed_everything
        self.trainer.checkpoint_io.load_optimizer = subcommand == "fit"
        if subcommand != "fit":
            self.trainer.run = self.resumed_run
        path = str(self.checkpoint) if self.checkpoint else None
        return {**super()._prepare_subcommand_kwargs(subcommand), "ckpt_path": path}


def _chosen_run(arguments: list[str]) -> Run:
    """The run whose config a command without `--config` takes: `--run`, the one a checkpoint is in, or the newest."""
    options = dict(pairwise([*arguments, ""]))
    options |= dict(a.split("=", 1) for a in arguments if a.startswith("--") and "=" in a)
    root = options.get("--trainer.default_root_dir", str(ROOT))
    if "--run" in options:
        return Run.named(options["--run"], root)
    path = Path(options.get("--ckpt_path", "")).resolve().parent
    if options.get("--ckpt_path") not in (None, "best", "last", "auto") and (path / "run.json").exists():
        return Run(path)
    run = Run.newest(root)
    if run is None:
        raise RequestError(f"no run under {root} yet: start one with `lm fit --config tiny.yaml`, or give --config")
    return run


def main(arguments: list[str]) -> None:
    """Run `lm fit|validate|test|predict ...`."""
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    command, rest = arguments[0], arguments[1:]
    if command != "fit" and not any(a in ("-c", "--config", "-h", "--help") or a.startswith("--config=") for a in rest):
        run = _chosen_run(rest)
        rest = ["--config", str(run.config), "--run", run.name, *rest]
    sys.argv = [sys.argv[0], *arguments]
    TrainingCLI([command, *spell_out(rest, FLAGS, LISTS)])
