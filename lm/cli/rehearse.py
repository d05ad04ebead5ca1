"""`lm plan --rehearse`: the guards of a config on invented log lines: what they would log, do and end the run with.

The callbacks are those of a training and decide by themselves. Only what they act on is a stand-in: the trainer, the
module, the clock, checkpoints, and a copy of `guards.budget.file` that goes on counting.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import SimpleNamespace
from typing import Any

from jsonargparse import Namespace

from lm.errors import GuardStop
from lm.model.build import NOT_BUILT
from lm.runs.metrics import METRICS
from lm.runs.run import Run
from lm.system.files import nonnegative
from lm.system.units import format_count, format_figure
from lm.training.alerts import CLOCKS, NAMES
from lm.training.callback import Callback, call_hook
from lm.training.callbacks.budget import Budget, Cost, Meter, read_budget_file
from lm.training.callbacks.guards import Alerts, NotFinite, Rollback
from lm.training.callbacks.throughput import ThroughputFloor
from lm.training.config import Action, Alert, BudgetConfig
from lm.training.run_state import RunState
from lm.training.schedule import lr_fraction
from lm.training.step_stats import StepRecord

Line = dict[str, float]  # metrics of a log line
SECONDS_PER_STEP = 1.0  # where the plan knows none
RATE = 1.0  # US dollars an hour, where a cap is counted by a file that has none
FINAL_LOSS = 0.25  # of an untrained model's, at the end of an invented run
TYPICAL = {  # other metrics of a healthy run
    "optim/grad_norm": 1.0, "optim/param_norm": 100.0, "eval/core": 0.1, "val/bpb": 1.0, "perf/mfu": 0.4,
    "perf/data_wait": 0.01, "perf/gpu_load": 99.0, "perf/gpu_temperature": 60.0, "perf/gpu_power": 400.0,
    "perf/cpu_load": 50.0, "mem/process_gib": 4.0, "mem/gpu_gib": 40.0, "mem/cuda_peak_gib": 40.0,
}  # fmt: skip
FACTORS = (1.2, 2.0, 10.0, 1e3, 1e6, 0.8, 0.5, 0.1, 0.0, -1.0)  # of the metrics of an alert, until it is true


class RehearsedRollback(Rollback):
    """A rollback to the newest checkpoint that a run with this config would have; nothing is loaded."""

    def _last_good(self, trainer: "Stage") -> Path | None:
        step = self._good - self._good % trainer.checkpoint_interval
        return Path(f"step-{step:08d}") if step else None

    def _load(self, trainer: "Stage", pl_module: Any, folder: Path) -> None:
        pass


class Stage(logging.Handler):
    """A trainer without a training, for callbacks of guards: it plays log lines and keeps what they cause.

    Args:
        config: of the training.
        found: the facts of the plan.
        seconds: of a step.
        meter: the cost so far, and the rate.
        folder: for the files of the run.

    Attributes:
        events: log lines of guards, each with where the run stood and what followed.
    """

    def __init__(
        self, config: Namespace, found: dict[str, Any], seconds: float, meter: Meter, folder: str, *callbacks: Callback
    ) -> None:  # fmt: skip
        super().__init__()
        self.callbacks = [*callbacks, self]
        self.config, self.seconds, self.meter, self.now = config, seconds, meter, 0.0
        self.steps, self.max_steps = SimpleNamespace(**found["steps"]), found["steps"]["max_steps"]
        self.log_interval, self.precision = config.trainer.log_interval, config.trainer.precision
        self.val_interval, self.checkpoint_interval = config.trainer.val_interval, config.trainer.checkpoint_interval
        self.datamodule, self.precision_plugin = SimpleNamespace(has_validation=True), SimpleNamespace()
        self.checkpoint_callback, self.world_size, self.is_global_zero = self, 1, True
        self.run = Run(Path(mkdtemp(dir=folder)) / found["config"])
        self.run.path.mkdir()
        decoder = replace(config.model.decoder, vocab_size=found.get("model", {}).get("vocab_size") or 2**15)
        self.module = SimpleNamespace(
            config=decoder, options=SimpleNamespace(schedule=config.model.schedule), device=SimpleNamespace(type="cpu"),
            built=NOT_BUILT, decoder=None,
        )  # fmt: skip
        rate = found.get("time", {}).get("tokens_per_second") or self.steps.tokens_per_step / seconds
        self.tokens_per_second = max(rate, 2 * (config.guards.throughput.floor or 0))
        self.run_state = RunState(run=self.run)
        self.global_step, self.requested = 0, False
        self.events: list[dict[str, Any]] = []

    @property
    def tokens_seen(self) -> int:
        return self.global_step * self.steps.tokens_per_step

    def request(self) -> None:
        """A checkpoint after this step, as of `Checkpoints`."""
        self.requested = True

    def emit(self, record: logging.LogRecord) -> None:
        budgets = [callback for callback in self.callbacks if isinstance(callback, Budget)]
        hours, usd = budgets[0].meter.read() if budgets else self.meter.read(ahead=self.now)
        self.events.append({"step": self.global_step, "hours": hours, "spent_usd": usd, "log": record.getMessage(),
                            "guard": None, "action": None, "checkpoint": False, "exit_code": None,
                            "reason": None})  # fmt: skip

    def on_guard(self, trainer: Any, pl_module: Any, guard: str, action: str, message: str) -> None:
        self.events[-1].update(guard=guard, action=action)

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of the callbacks, and keep what the guards log and do."""
        logger = logging.getLogger("lm.training.callbacks")
        propagate, logger.propagate = logger.propagate, False
        logger.addHandler(self)
        try:
            with suppress(GuardStop):
                call_hook(self, hook, self.module, *arguments)
        finally:
            logger.removeHandler(self)
            logger.propagate = propagate
        if self.events and self.requested:
            self.events[-1]["checkpoint"] = True
        if self.events and self.run_state.stop is not None:
            self.events[-1].update(exit_code=self.run_state.stop.exit_code, reason=str(self.run_state.stop))
        self.requested = False

    def healthy(self, step: int) -> Line:
        """The log line of a run in which nothing is wrong; the loss falls from that of an untrained model."""
        first, done = math.log(self.module.config.vocab_size), (step - 1) / self.max_steps
        loss = first * (FINAL_LOSS + (1 - FINAL_LOSS) * math.exp(-5 * done))
        model = self.config.model
        return {
            **TYPICAL, **dict.fromkeys(("train/loss", "train/max_loss", "val/loss"), loss),
            **dict.fromkeys(("train/perplexity", "val/perplexity"), math.exp(loss)),
            "optim/lr": model.optimizer.lr * lr_fraction(max(0, step - 1), self.max_steps, model.schedule),
            "perf/tokens_per_second": self.tokens_per_second,
        }  # fmt: skip

    def line(self, changed: Line = {}) -> None:
        """The next log line, `log_interval` steps after the one before: a healthy one but for what is changed."""
        self.global_step = min(self.max_steps, self.global_step + self.log_interval)
        self.now += self.log_interval * self.seconds
        self.call("on_metrics", self.healthy(self.global_step) | changed)

    @property
    def ended(self) -> bool:
        return self.run_state.stop is not None or self.global_step >= self.max_steps


# ---- scenarios -------------------------------------------------------------------------------------------------------


def rehearse(config: Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Play the guards of a config through.

    Args:
        found: the facts of the plan.

    Returns:
        What is assumed, and under `rehearsal` the scenarios, each with its `events`.

    Raises:
        RequestError: the budget cannot be counted.
    """
    time, guards, max_steps = found.get("time", {}), config.guards, found["steps"]["max_steps"]
    seconds = time["seconds"] / max_steps if time.get("seconds") else SECONDS_PER_STEP
    basis = time["basis"] if time.get("seconds") else "assumed: --peak_tflops N or --bench FILE gives the speed"
    file = read_budget_file(guards.budget)
    rate = nonnegative(file.get("rate_usd_per_hr")) or guards.budget.rate_usd_per_hr or config.rate_usd_per_hr
    spent = Cost(nonnegative(file.get("hours_elapsed")) or 0.0, nonnegative(file.get("spent_usd")))
    meter = Meter(rate, spent, 0.0, clock=lambda: 0.0)
    with TemporaryDirectory() as folder:
        stage = partial(Stage, config, found, seconds, meter, folder)
        played = [_nothing_wrong(stage(Alerts(guards.alerts), RehearsedRollback(guards.max_rollbacks)))]
        for text, action in guards.alerts.items():
            played.append(_alert(stage, text, action, guards.max_rollbacks))
        for count, name in ((1, "a step is not finite"), (guards.max_skipped, "no step is finite any more")):
            played.append((name, _not_finite(stage(NotFinite(guards.not_finite, guards.max_skipped)), count)))
        if guards.throughput.floor is not None:
            played.append(_slow(stage(ThroughputFloor(guards.throughput)), guards.throughput.floor))
        if guards.budget.cap_usd or guards.budget.max_hours or guards.budget.max_rate_usd_per_hr:
            played += _budget(stage, guards.budget, file, meter, Path(folder))
    return {"seconds_per_step": seconds, "basis": basis,
            "rehearsal": [{"scenario": name, "events": stage.events} for name, stage in played]}  # fmt: skip


Played = tuple[str, Stage]  # a scenario and its name


def _nothing_wrong(stage: Stage) -> Played:
    stage.call("on_train_start")
    while not stage.ended:
        stage.line()
    first, last = (stage.healthy(step)["train/loss"] for step in (1, stage.max_steps))
    return f"nothing wrong: the loss falls from {first:.3g} to {last:.3g}", stage


def _alert(stage_of: Callable[..., Stage], text: str, action: Action | Alert, max_rollbacks: int) -> Played:
    """Healthy log lines, late in the run if possible, and then the first change of a line that makes the alert true."""
    for late in range(3):
        alerts, rollback = Alerts({text: action}), RehearsedRollback(max_rollbacks)
        stage, evaluator, (expression,) = stage_of(alerts, rollback), alerts.evaluator, alerts.evaluator.expressions
        interval, before = stage.log_interval, max(expression.depths.values()) + 2  # so that windows are full
        step = (stage.max_steps - 3 * interval, stage.max_steps // 2, interval * (before + 1))[late]
        if not (before + 1) * interval <= step <= stage.max_steps:
            continue
        stage.global_step = step - (before + 1) * interval
        stage.now = stage.global_step * stage.seconds
        stage.call("on_train_start")
        for _ in range(before):
            stage.line()
        if stage.events or expression.holds(evaluator.history):
            continue
        history, healthy = evaluator.history.state_dict(), stage.healthy(step)
        clocks = {"step": step, "data/tokens": step * stage.steps.tokens_per_step}
        names = [NAMES[name] for name in expression.depths.keys() - CLOCKS]
        for changed, factor in product((names, *([name] for name in names)), FACTORS):
            bad = {name: factor * healthy[name] for name in changed}
            holds = any(evaluator.evaluate(healthy | bad | clocks).values())
            evaluator.history.load_state_dict(history)
            if holds:
                stage.line(bad)
                if rollback.done:  # and the one that is too many
                    rollback.done = max_rollbacks
                    stage.line()
                    stage.line(bad)
                values = ", ".join(f"{METRICS[name].alert} {value:.4g}" for name, value in bad.items())
                return f"alert `{text}`: {values or 'as in a healthy run'}", stage
    return f"alert `{text}`: no invented line makes it true after one at which it is false", stage_of()


def _not_finite(stage: Stage, count: int) -> Stage:
    while count > 0 and not stage.ended:
        steps = range(stage.global_step + 1, stage.global_step + stage.log_interval + 1)
        stage.run_state.stats.recent = [StepRecord(step, math.nan, math.nan, False) for step in steps][:count]
        count -= len(stage.run_state.stats.recent)
        stage.line()
    return stage


def _slow(stage: Stage, floor: int) -> Played:
    stage.call("on_train_start")
    while not stage.events and not stage.ended:
        stage.line({"perf/tokens_per_second": floor / 2})
    return f"{format_count(floor / 2)} tokens/s, half of the floor", stage


def _budget(
    stage_of: Callable[[], Stage], config: BudgetConfig, file: dict[str, Any], meter: Meter, folder: Path
) -> Iterator[Played]:
    """Runs at the planned speed, that take less than the budget and more, all of it at once, and too high a rate."""
    before, rate = meter.read(), meter.rate or RATE
    lefts = [(config.cap_usd - (before.usd or 0.0)) / rate] if config.cap_usd else []
    lefts += [config.max_hours - before.hours] if config.max_hours else []
    left = 3600 * max(0.0, min(lefts)) if lefts else 0.0  # seconds
    at = f"of what is left{f' at {format_figure(rate)} USD an hour' if config.cap_usd else ''}"
    cases = [("the run at the planned speed", None, 0.0, rate)]
    if left:
        cases += [(f"a run that takes 95% {at}", 0.95, 0.0, rate), (f"a run that takes 150% {at}", 1.5, 0.0, rate),
                  ("the machine stands still until all is spent", 0.95, 0.6 * left, rate)]  # fmt: skip
    if file and config.max_rate_usd_per_hr:
        cases.append(("the file raises the rate", 0.95 if left else None, 0.0, 1.1 * config.max_rate_usd_per_hr))
    copy = folder / "file.json"
    for name, part, stall, later_rate in cases:
        stage = stage_of()
        stage.seconds = stage.seconds if part is None else part * left / stage.max_steps
        budget = Budget(replace(config, file=str(copy)) if file else config, partial(getattr, stage, "now"), 0.0)
        stage.callbacks.insert(0, budget)
        _count_on(copy, file, stage, rate, before)
        stage.call("on_train_start")
        while not stage.ended:
            later = stage.global_step >= stage.max_steps // 2
            stage.now, stall = stage.now + stall * later, stall * (not later)
            _count_on(copy, file, stage, later_rate if later else rate, before)
            stage.line()
        yield f"budget: {name}", stage


def _count_on(copy: Path, file: dict[str, Any], stage: Stage, rate: float, before: Cost) -> None:
    """Write what the program that keeps the file, if there is one, would write now."""
    if not file:
        return
    hours = stage.now / 3600
    end = (before.usd or 0.0) + stage.seconds * stage.max_steps / 3600 * rate
    counted = {"spent_usd": (before.usd or 0.0) + hours * rate, "rate_usd_per_hr": rate,
               "hours_elapsed": before.hours + hours, "projected_total_usd": end}  # fmt: skip
    content = {name: value for name, value in counted.items() if name in file}
    copy.write_text(json.dumps(content | {"last_update_utc": str(datetime.now(UTC) + timedelta(hours=hours))}))


# ---- the page --------------------------------------------------------------------------------------------------------


def show_rehearsal(played: dict[str, Any]) -> None:
    """Print the scenarios: every log line with where the run stands, and what is done."""
    print(f"{format_figure(played['seconds_per_step'])} s a step ({played['basis']})")
    for scenario in played["rehearsal"]:
        print(scenario["scenario"])
        for event in scenario["events"]:
            usd = "" if event["spent_usd"] is None else f", {format_figure(event['spent_usd'])} USD"
            print(f"  step {event['step']:,}, {format_figure(event['hours'])} h{usd}")
            print(f"    log   {event['log']}")
            does = ["a checkpoint"] * event["checkpoint"]
            if event["exit_code"]:
                more = event["reason"].removeprefix(event["log"].removesuffix(": rollback"))  # than is in the log
                ends = f"the run ends with exit code {event['exit_code']}"
                does += [*["no checkpoint"] * (not does), ends + more * (more != event["reason"])]
            print(f"    then  {', '.join(does) or 'the run continues'}")
        if not scenario["events"]:
            print("  nothing is logged or done")
