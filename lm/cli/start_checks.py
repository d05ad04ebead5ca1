"""What `lm plan` would refuse is refused when a fit begins, too."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lm.cli.command_options import PlanOptions
from lm.cli.request import Sections
from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.runs.run import Run
from lm.training.callback import Callback
from lm.training.checks import Finding
from lm.training.config import ModelConfig
from lm.training.module import LanguageModule
from lm.training.schedule import lr_fraction
from lm.training.trainer import Trainer
from lm.training.world import EXIT_WAIT

log = logging.getLogger(__name__)
STEADY_RATE = 0.1  # of the learning rate: a smaller rise is not warned of


class StartChecks(Callback):
    """Runs the checks of `lm plan` when a fit begins: logs the warnings, and raises RequestError on errors."""

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self._sections = sections
        self._resumed: Run | None = None
        self._force = False
        self._messages: Sequence[str] = ()  # this and `_findings` are logged once the run has a log file
        self._findings: list[str] = []

    def set_run(self, run: Run | None, force: bool, messages: Sequence[str] = ()) -> None:
        """Set the run that the fit resumes, whose warm-up and budget are not checked, and lines to log first.

        With `force`, errors are only logged, and the run trains.
        """
        self._resumed, self._force, self._messages = run, force, messages

    def setup(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        """Run the checks: the data is open, and the model is not built yet."""
        if stage == "fit":
            self.check(trainer, pl_module, trainer.datamodule, opened=True)

    def check(self, trainer: Trainer, module: LanguageModule, data: DataModule, opened: bool) -> None:
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
            for line in self._messages:
                log.info("%s", line)
            for line in self._findings:
                log.warning("%s", line)
            if self._resumed:
                warn_of_rising_rate(self._resumed, trainer, pl_module.options)


def warn_of_rising_rate(run: Run, trainer: Trainer, model: ModelConfig) -> None:
    """Log a warning where a resume with more steps, or another schedule, undoes a decay of the learning rate."""
    step = trainer.run_state.start.step
    rates = [line["optim/lr"] for line in run.metrics("optim/lr") if line["step"] <= step]
    rate = model.optimizer.lr * lr_fraction(step, trainer.max_steps, model.schedule)
    if rates and rates[-1] < max(rates) and rate > rates[-1] * (1 + STEADY_RATE):
        rise = f"rises from {rates[-1]:.2e} to {rate:.2e} in step {step + 1}, as the config now has it"
        if earlier := [saved for saved in run.steps() if saved < step]:
            rise += f"; if that is not meant, end this run now and `lm branch {run.name} --at {earlier[0]}`"
        log.warning("the learning rate %s", rise)
