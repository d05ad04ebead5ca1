"""`lm fit`, `lm validate`, `lm test` and `lm predict`: a finished request, a run and a checkpoint, and LightningCLI.

`cli/request` has read the request; LightningCLI gets it as settings, makes Trainer, model and data, and runs the
command.
"""

import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger

from lm.cli.options import SEED, FitOptions, PlanOptions
from lm.cli.request import Request, Sections, take_class_path
from lm.data.config import is_prepared
from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.model.build import kernels_missing
from lm.runs.resume import find_checkpoint, refuse_changed_config, repair_links
from lm.runs.run import Run
from lm.system.arguments import OneLineErrors
from lm.system.hardware import has_fp8
from lm.system.process import other_arguments
from lm.training.callback import Callback as TypedCallback
from lm.training.callbacks.run_folder import RunFolder
from lm.training.callbacks.standard import standard_callbacks
from lm.training.callbacks.summary import Summary
from lm.training.checks import Finding
from lm.training.module import LanguageModule, training_class
from lm.training.trainer import Trainer
from lm.training.world import EXIT_WAIT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """Where a command begins: the checkpoint and the run that are meant, None if there are none."""

    checkpoint: Path | None
    run: Run | None  # that is resumed, or that the checkpoint is of
    changed: dict[str, list[Any]] = field(default_factory=dict)  # settings that differ from the run's: [before, now]


def fit(request: Request[FitOptions], callbacks: Sequence[Callback] = (), news: Sequence[str] = ()) -> Run | None:
    """Train as a request says, and return the run; `news` are lines to log first.

    `callbacks` are those of the caller, beside those of the config.
    """
    quiet_lightning()
    if request.options.hours is not None:
        from lm.cli.hours import with_length

        request, arguments = with_length(request)
        with other_arguments(arguments):
            return fit(request, callbacks, news)
    if request.guards.budget.file:
        from lm.training.budget import read_budget_file

        read_budget_file(request.guards.budget)  # a cap that cannot be counted is refused, with `force` too
    beginning = find_beginning(request)
    if beginning.run:
        request = replace(request, name=beginning.run.name)
    if beginning.run and beginning.checkpoint:
        changed = refuse_changed_config(beginning.run, request.settings, request.choice.force)
        beginning = replace(beginning, changed=changed)
        if stays_stopped(beginning):
            log.info("the run has finished: it was stopped early; change trainer.early_stopping, or the callback in "
                     "trainer.callbacks that stopped it, to continue it")  # fmt: skip
            return beginning.run
    return run_command(request, beginning, callbacks, news).trainer.run or beginning.run


def evaluate(request: Request) -> None:
    """Run `validate`, `test` or `predict` on a checkpoint, with what this machine has."""
    quiet_lightning()
    if request.command == "predict" and not request.data.texts:
        raise RequestError("nothing to predict on: give text files, JSONL or Parquet with --data.texts")
    beginning = find_beginning(request)
    log.info("run %s, checkpoint %s", beginning.run.name if beginning.run else "none", beginning.checkpoint)
    request = with_available_hardware(request)
    if request.command == "predict":
        request = request.changed({"trainer.devices": 1, "trainer.num_nodes": 1})
    run_command(request, beginning)


def run_command(
    request: Request, beginning: Beginning, callbacks: Sequence[Callback] = (), news: Sequence[str] = ()
) -> "TrainingCLI":
    """Run the command of a request with all callbacks, and then the program of `on_event`, with the run's lock free."""
    choice = request.choice
    run_folder = RunFolder(beginning.run, request.name, request.text, choice.force, auto=choice.ckpt_path == "auto",
                           options=request.notes)  # fmt: skip
    checks = StartChecks(request.of_callbacks())
    checks.resume(beginning.run, choice.force, beginning.changed, news)
    standard = standard_callbacks(request.trainer, run_folder, request.of_callbacks())
    try:
        return TrainingCLI(request, beginning, [*callbacks, *standard, Summary(), checks])
    finally:
        run_folder.announce_end()


def find_beginning(request: Request) -> Beginning:
    return Beginning(*find_checkpoint(
        request.choice.ckpt_path, request.name, request.trainer.default_root_dir,
        named=request.choice.run is not None, command=request.command,
    ))  # fmt: skip


def stays_stopped(beginning: Beginning) -> bool:
    """Whether the run was stopped early, and nothing that stopped it has changed."""
    early = beginning.run is not None and beginning.run.read("run.json").get("reason") == "early stopping"
    stoppers = ("trainer.early_stopping", "trainer.callbacks")
    return early and not any(key.startswith(stoppers) for key in beginning.changed)


def with_available_hardware(request: Request) -> Request:
    """The request without kernels and FP8 that this machine lacks, to evaluate a run of another; logs the changes."""
    model, trainer, changes = request.model, request.trainer, {}
    cuda = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if model.kernels == "on" and (missing := kernels_missing(device)):
        changes["model.kernels"] = ("auto", f" ({missing})")
    if model.attention != "auto" and not cuda:
        changes["model.attention"] = ("auto", "")
    if trainer.precision.startswith("fp8") and (not has_fp8(device) or kernels_missing(device)):
        changes["trainer.precision"] = ("bf16-mixed", "")
    if not changes:
        return request
    before = {"model.kernels": "on", "model.attention": model.attention, "trainer.precision": trainer.precision}
    log.info("evaluated with what this machine has: %s",
             ", ".join(f"{name} {before[name]} -> {value}{why}" for name, (value, why) in changes.items()))  # fmt: skip
    return request.changed({name: value for name, (value, _) in changes.items()} | {"trainer.fp8_keep": None})


# ---- LightningCLI ----------------------------------------------------------------------------------------------------


class TrainingParser(OneLineErrors, LightningArgumentParser):
    """LightningCLI's parser with errors of one line, which name the callback or the logger that cannot be made."""

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        added = super().add_class_arguments(*args, **kwargs)
        take_class_path(self)
        return added

    def instantiate_classes(self, *args: Any, **kwargs: Any) -> Any:
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


class TrainingCLI(LightningCLI):
    """LightningCLI, which makes Trainer, model and data of a request's settings, and runs its command on them."""

    def __init__(self, request: Request, beginning: Beginning, callbacks: list[Callback]) -> None:
        self.request, self.beginning = request, beginning
        settings = {name: request.settings[name] for name in ("seed_everything", "trainer", "model", "data")}
        settings["ckpt_path"] = str(beginning.checkpoint) if beginning.checkpoint else None
        if request.command in ("validate", "test"):
            settings["verbose"] = False  # `after_validate` prints the metrics
        super().__init__(
            training_class(),
            DataModule,
            trainer_class=Trainer,
            trainer_defaults={"callbacks": callbacks},
            save_config_callback=None,  # RunFolder keeps the config, and only a fit's
            seed_everything_default=SEED.default,
            parser_class=TrainingParser,
            parser_kwargs={"prog": "lm"},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args={"subcommand": request.command, request.command: settings},
        )

    def subcommands(self) -> dict[str, set[str]]:
        """Only the one that is asked for: making a parser takes a tenth of a second."""
        command = self.request.command
        return {command: LightningCLI.subcommands()[command]}

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise RequestError(f"trainer: {' '.join(str(error).split())}") from error

    def after_instantiate_classes(self) -> None:
        refuse_notebook(self.trainer)
        self.datamodule.set_position(seed=self.request.seed_everything)
        choice, run, fits = self.request.choice, self.beginning.run, self.request.command == "fit"
        verified = fits or choice.ckpt_path not in (None, "best", "last")
        branch = fits and run is not None and "branch" in run.read("run.json")
        self.trainer.load_with(fits, self.beginning.checkpoint if verified else None,
                               other_model=branch or choice.force)  # fmt: skip
        if not fits:
            self.trainer.run_state.run = run

    def before_fit(self) -> None:
        """What `lm plan` refuses without the data is refused before hours are spent on making it."""
        if not is_prepared(self.datamodule.options):
            checks = next(callback for callback in self.trainer.callbacks if isinstance(callback, StartChecks))
            checks.refuse(self.trainer, self.model, self.datamodule, opened=False)

    def after_fit(self) -> None:
        """Record the end of a run that was killed between its last checkpoint and that record."""
        run, trained = self.beginning.run, self.trainer.run is not None
        if run is None or trained or not self.trainer.is_global_zero or run.status() == "running":
            return
        repair_links(run, self.beginning.checkpoint)
        if run.status() not in ("finished", "stopped"):
            from lm.runs.registry import record_run

            run.describe(status="finished", reason="all steps done", step=self.trainer.run_state.start.step)
            record_run(run)

    def after_validate(self) -> None:
        if self.trainer.is_global_zero:
            for name, value in self.trainer.callback_metrics.items():
                print(f"{name} {value.item():.4f}")

    after_test = after_validate


def with_classes(request: Request) -> Request:
    """The request with its callbacks and loggers built, for a command that LightningCLI does not run."""
    parser = TrainingParser(prog="lm")
    parser.add_argument("--trainer.callbacks", type=list[Callback] | None)
    parser.add_argument("--trainer.logger", type=Logger | list[Logger] | None)
    given = {"callbacks": request.trainer.callbacks, "logger": request.trainer.logger}
    built = parser.instantiate_classes(parser.parse_object({"trainer": given})).trainer
    return replace(request, trainer=replace(request.trainer, callbacks=built.callbacks, logger=built.logger))


# ---- before the first step -------------------------------------------------------------------------------------------


class StartChecks(TypedCallback):
    """Runs the checks of `lm plan` when a fit begins: logs the warnings, and raises RequestError on errors."""

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self._sections = sections
        self._resumed: Run | None = None
        self._force = False
        self._changed: list[str] = []  # this and `_findings` are logged once the run has a log file
        self._findings: list[str] = []

    def resume(self, run: Run | None, force: bool, changed: dict[str, list[Any]], news: Sequence[str] = ()) -> None:
        """Set the run that the fit resumes, whose warm-up and budget are not checked, and the changes to its config.

        With `force`, errors are only logged, and the run trains; the lines of `news` are logged first.
        """
        self._resumed, self._force = run, force
        self._changed = [
            *news,
            *(f"changed since the run was started: {key}: {old} -> {new}" for key, (old, new) in changed.items()),
        ]

    def setup(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        """Run the checks: the data is open, and the model is not built yet."""
        if stage == "fit":
            self.refuse(trainer, pl_module, trainer.datamodule, opened=True)

    def refuse(self, trainer: Trainer, module: LanguageModule, data: DataModule, opened: bool) -> None:
        """Raise RequestError if the config has an error; with several ranks, rank zero decides and reports.

        If `opened` is false, the data is not prepared yet and ranks cannot communicate, so every rank runs the checks.
        """
        from lm.cli.plan_facts import examine

        ranks = {"num_nodes": trainer.num_nodes, "devices": trainer.world_size // trainer.num_nodes}
        sections = Sections(
            trainer=replace(trainer.options, **ranks),  # as torchrun or SLURM says
            model=module.options,
            data=replace(data.options, seq_len=data.seq_len),
            **self._sections,
        )
        options = PlanOptions(device="cpu" if trainer.options.accelerator == "cpu" else "auto")
        findings: list[Finding] = []
        if trainer.is_global_zero or not opened:
            _, findings = examine(sections, options, data if opened else None, self._resumed)
        if opened:
            findings = trainer.strategy.broadcast(findings)
        errors = [str(finding) for finding in findings if finding.level == "error"]
        if errors and not self._force:
            if not trainer.is_global_zero:
                time.sleep(EXIT_WAIT)  # a launcher may end all ranks with the first one, which is to report
                raise SystemExit(RequestError.exit_code)
            for error in errors[:-1]:
                log.error("%s", error)
            raise RequestError(errors[-1])
        self._findings = [f"{finding.level}: {finding}" for finding in findings]

    def on_fit_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.is_global_zero:
            for line in self._changed:
                log.info("%s", line)
            for line in self._findings:
                log.warning("%s", line)


# ---- surroundings ----------------------------------------------------------------------------------------------------


def refuse_notebook(trainer: Trainer) -> None:
    """Refuse several devices in a notebook: their processes are started by running the program again."""
    if in_notebook() and trainer.world_size > 1:
        raise RequestError(f"a notebook trains on one device, and these are {trainer.world_size}: give trainer.devices "
                           "1, or train with `lm fit`")  # fmt: skip


def in_notebook() -> bool:
    return "ipykernel" in sys.modules


def quiet_lightning() -> None:
    """Leave out what Lightning logs about every training, and that LightningCLI is given settings."""
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
