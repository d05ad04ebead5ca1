"""The budget of a run: it ends before it costs too much, and `budget.json` has its cost."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lm.errors import RequestError
from lm.runs.run import Run
from lm.system.files import write_atomically
from lm.system.parsing import nonnegative
from lm.system.process import seconds_since_process_start
from lm.training.budget import Budget, Cost
from lm.training.callbacks.guards import Guard, act
from lm.training.callbacks.logging import remaining
from lm.training.config import BudgetConfig
from lm.training.guards import Finding, Line
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer


class BudgetGuard(Guard):
    """The clock starts with the process, since the machine is paid for from then on."""

    def __init__(self, config: BudgetConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = Budget(config, clock)

    def observe(self, line: Line) -> list[Finding]:
        return self.budget.observe(line)

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        spent = []
        if trainer.is_global_zero:
            spent = self.budget.begin(_spent_before(trainer.run), seconds_since_process_start())
            self._write(trainer)
        for finding in trainer.strategy.broadcast(spent):
            act(trainer, pl_module, finding)
            if trainer.run_state.stop is not None:
                raise trainer.run_state.stop

    def on_pause(self, trainer: Trainer, seconds: float, kind: str) -> None:
        self.budget.pace.add_pause(trainer.global_step, seconds, kind)

    def on_metrics(self, trainer: Trainer, pl_module: LanguageModule, metrics: Mapping[str, float]) -> None:
        super().on_metrics(trainer, pl_module, metrics)
        self._write(trainer)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self._write(trainer)

    on_exception = on_train_end  # pyright: ignore[reportAssignmentType]

    def _write(self, trainer: Trainer) -> None:
        budget = self.budget
        if budget.meter is None:  # on other ranks, and before a training
            return
        trainer.run_state.usd_per_hour = budget.meter.rate
        path = trainer.run.path / "budget.json"
        if budget.config.file and Path(budget.config.file).resolve() == path.resolve():
            return  # the other program's own
        cost, end = budget.meter.read(), budget.projection(*remaining(trainer))
        content = {
            "spent_usd": cost.usd,
            "rate_usd_per_hr": budget.meter.rate,
            "hours_elapsed": cost.hours,
            "projected_total_usd": end and end.usd,
            "cap_usd": budget.config.cap_usd,
            "last_update_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        with suppress(OSError):  # a full disk; a checkpoint that cannot be written is an error
            write_atomically(path, json.dumps(content) + "\n", durable=False)


def _spent_before(run: Run) -> Cost:
    """The cost of the run's earlier sessions. If the file is damaged, counting from 0 would spend the cap twice."""
    before = run.read("budget.json")
    hours, usd = before.get("hours_elapsed"), before.get("spent_usd")  # without a rate there are no dollars
    stated = [number for number in (hours, usd) if number is not None]
    if (run.path / "budget.json").exists() and (not stated or None in map(nonnegative, stated)):
        raise RequestError(
            f"{run.path / 'budget.json'} is damaged, so what the run has cost is not known: write "
            '{"hours_elapsed": H, "spent_usd": S} into it, or remove it to count from 0'
        )
    return Cost(hours or 0.0, usd)
