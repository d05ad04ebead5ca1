"""`lm fit`, `lm validate`, `lm test` and `lm predict`: a finished request, a run and a checkpoint, and LightningCLI.

`cli/request` has read the request; LightningCLI gets it as settings, makes Trainer, model and data, and runs the
command.
"""

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI

from lm.cli.classes_by_path import TrainingParser, with_arguments_of_classes
from lm.cli.command_options import FitOptions
from lm.cli.options import SEED
from lm.cli.request import Request
from lm.cli.start_checks import StartChecks
from lm.data.config import is_prepared
from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.model.build import kernels_missing
from lm.runs.run import Run, check_run_name
from lm.system.process import other_arguments
from lm.training.callbacks.run_folder import RunFolder
from lm.training.callbacks.standard import standard_callbacks
from lm.training.callbacks.summary import Summary
from lm.training.checks import FP8_FROM
from lm.training.config import sections_of_callbacks
from lm.training.module import training_class
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)


def fit(request: Request[FitOptions], callbacks: Sequence[Callback] = (), messages: Sequence[str] = ()) -> Run | None:
    """Train as a request says, and return the run; `messages` are lines to log first.

    `callbacks` are those of the caller, beside those of the config.
    """
    quiet_lightning()
    if request.command_options.hours is not None:
        from lm.cli.hours import with_measured_length

        request, arguments = with_measured_length(request)
        with other_arguments(arguments):  # so that the other ranks start with the measured length
            return fit(request, callbacks, messages)
    if request.guards.budget.file:
        from lm.training.budget import read_budget_file

        read_budget_file(request.guards.budget)  # a cap that cannot be counted is refused, with `force` too
    request = with_arguments_of_classes(request)
    checkpoint, run = find_start(request)
    if run:
        request = replace(request, run_name=run.name)
    else:
        check_run_name(request.run_name)  # before the data is made
    if run and checkpoint:
        from lm.runs.config_diff import describe_changes
        from lm.runs.resume import check_config_changes

        changed = check_config_changes(run, request.settings, request.run_choice.force)
        before, now = changed.get("trainer.keep_checkpoints", (0, 0))
        if now < before:  # perhaps the option was not typed again
            request = request.with_values({"trainer.keep_checkpoints": before})
            del changed["trainer.keep_checkpoints"]
            messages = [*messages, f"trainer.keep_checkpoints stays {before}, so that no earlier checkpoint is removed"]
        messages = [*messages, *describe_changes(run, changed)]
        if stays_stopped(run, changed):
            log.info(
                "the run has finished: it was stopped early; change trainer.early_stopping, or the callback in "
                "trainer.callbacks that stopped it, to continue it"
            )
            return run
    return run_command(request, checkpoint, run, callbacks, messages).trainer.run or run


def validate_or_predict(request: Request) -> None:
    """Run `validate`, `test` or `predict` on a checkpoint, with what this machine has."""
    quiet_lightning()
    checkpoint, run = find_start(request)
    log.info("run %s, checkpoint %s", run.name if run else "none", checkpoint)
    request, callbacks = with_available_hardware(request), []
    if request.command == "predict":
        from lm.training.callbacks.predictions import Predictions

        request = request.with_values({"trainer.devices": 1, "trainer.num_nodes": 1})
        callbacks = [Predictions()]
    run_command(request, checkpoint, run, callbacks)


def run_command(
    request: Request,
    checkpoint: Path | None,
    run: Run | None,
    callbacks: Sequence[Callback] = (),
    messages: Sequence[str] = (),
) -> "TrainingCLI":
    """Make the callbacks and give all to LightningCLI, which runs the command as soon as it is made.

    At the end of the run, whose lock is free then, the program of `on_event` is started.
    """
    force, auto = request.run_choice.force, request.run_choice.ckpt_path == "auto"
    run_folder = RunFolder(run, request.run_name, request.config_yaml, force, auto=auto, options=request.run_options)
    sections = sections_of_callbacks(vars(request))
    checks = StartChecks(sections)
    checks.set_run(run, force, messages)
    standard = standard_callbacks(request.trainer, run_folder, sections)
    try:
        return TrainingCLI(request, checkpoint, run, [*callbacks, *standard, Summary()], checks)
    finally:
        run_folder.announce_end()


def find_start(request: Request) -> tuple[Path | None, Run | None]:
    """The checkpoint that a request begins from, and the run that it is of or that goes on; None if there is none."""
    reference, root = request.run_choice.ckpt_path, request.trainer.default_root_dir
    if reference is None and request.command == "fit":
        log_resumable_run(root, request.run_name)
        return None, None
    from lm.runs.resume import find_checkpoint

    named = request.run_choice.run is not None
    return find_checkpoint(reference, request.run_name, root, named=named, command=request.command)


def log_resumable_run(root: str, name: str) -> None:
    for run in Run.all(root, name)[-1:]:
        steps, status = list(run.steps()), run.status()
        if status not in ("running", "finished"):
            end = f"{status} " + (f"at step {steps[-1]:,}" if steps else "before its first checkpoint")
            command = run.resume_command()
            log.info("found run %s, %s: `%s` resumes it, and this command starts another", run.path, end, command)


def stays_stopped(run: Run, changed: Mapping[str, Any]) -> bool:
    """Whether a run was stopped early, and nothing that stopped it has changed."""
    stoppers = ("trainer.early_stopping", "trainer.callbacks")
    early = run.read("run.json").get("reason") == "early stopping"
    return early and not any(key.startswith(stoppers) for key in changed)


def with_available_hardware(request: Request) -> Request:
    """The request without kernels and FP8 that this machine lacks, to evaluate a run of another; logs the changes."""
    model, trainer = request.model, request.trainer
    cuda = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    missing = kernels_missing(device)
    changes: dict[str, tuple[str, str]] = {}  # option -> value before and after
    if model.kernels == "on" and missing:
        changes["model.kernels"] = model.kernels, "auto"
    if model.attention != "auto" and not cuda:
        changes["model.attention"] = model.attention, "auto"
    if trainer.precision.startswith("fp8") and (missing or torch.cuda.get_device_capability(device) < FP8_FROM):
        changes["trainer.precision"] = trainer.precision, "bf16-mixed"
    if not changes:
        return request
    described = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in changes.items())
    log.info("evaluated with what this machine has: %s (%s)", described, missing or "no FP8")
    return request.with_values({name: after for name, (_, after) in changes.items()})


class TrainingCLI(LightningCLI):
    """LightningCLI, which makes Trainer, model and data of a request's settings, and runs its command on them."""

    def __init__(
        self, request: Request, checkpoint: Path | None, run: Run | None, callbacks: list[Callback], checks: StartChecks
    ) -> None:
        self.request, self.checkpoint, self.run, self.checks = request, checkpoint, run, checks
        settings = {name: request.settings[name] for name in ("seed_everything", "trainer", "model", "data")}
        settings["ckpt_path"] = str(checkpoint) if checkpoint else None
        if request.command in ("validate", "test"):
            settings["verbose"] = False  # `after_validate` prints the metrics
        # LightningCLI now makes Trainer, model and data, calls `after_instantiate_classes` and `before_fit`, and runs
        # the command, such as `trainer.fit`.
        super().__init__(
            training_class(),
            DataModule,
            trainer_class=Trainer,
            trainer_defaults={"callbacks": [*callbacks, checks]},
            save_config_callback=None,  # RunFolder keeps the config, and only a fit's
            seed_everything_default=SEED.default,
            parser_class=TrainingParser,
            parser_kwargs={"prog": "lm"},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args={"subcommand": request.command, request.command: settings},
        )

    def subcommands(self) -> dict[str, set[str]]:
        """Only the one of the request: making a parser takes a tenth of a second."""
        command = self.request.command
        return {command: LightningCLI.subcommands()[command]}

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError) as error:
            text = " ".join(str(error).split())
            raise RequestError(
                f"trainer: {text.rstrip('!')}; `lm doctor` shows the devices of this machine, and "
                "--trainer.accelerator cpu is always there"
            ) from error

    def after_instantiate_classes(self) -> None:
        check_one_device_in_notebook(self.trainer)
        self.datamodule.set_position(seed=self.request.seed_everything)
        run_choice, run, is_fit = self.request.run_choice, self.run, self.request.command == "fit"
        verified = self.checkpoint if is_fit or run_choice.ckpt_path not in (None, "best", "last") else None
        other_model = run_choice.force or is_fit and run is not None and "branch" in run.read("run.json")
        self.trainer.load_with(optimizer=is_fit, verified=verified, other_model=other_model, new_run=run is None)
        if not is_fit:
            self.trainer.run_state.run = run

    def before_fit(self) -> None:
        """What `lm plan` refuses without the data is refused before hours are spent on making it."""
        if not is_prepared(self.datamodule.options):
            self.checks.check(self.trainer, self.model, self.datamodule, opened=False)

    def after_fit(self) -> None:
        """Record the end of a run that was killed between its last checkpoint and that record."""
        run, has_trained = self.run, self.trainer.run is not None
        if run is None or has_trained or not self.trainer.is_global_zero or run.status() == "running":
            return
        from lm.runs.resume import repair_links

        repair_links(run, self.checkpoint)
        if run.status() not in ("finished", "stopped"):
            from lm.runs.registry import record_run

            run.describe(status="finished", reason="all steps done", step=self.trainer.run_state.start.step)
            record_run(run)

    def after_validate(self) -> None:
        if self.trainer.is_global_zero:
            for name, value in self.trainer.callback_metrics.items():
                print(f"{name} {value.item():.4f}")

    after_test = after_validate


def check_one_device_in_notebook(trainer: Trainer) -> None:
    """Refuse several devices in a notebook: their processes are started by running the program again."""
    devices = trainer.world_size
    if in_notebook() and devices > 1:
        raise RequestError(f"a notebook trains on one device, not {devices}: give devices 1, or train with `lm fit`")


def in_notebook() -> bool:
    return "ipykernel" in sys.modules


def quiet_lightning() -> None:
    """Leave out what Lightning logs about every run, and that LightningCLI is given settings."""
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
