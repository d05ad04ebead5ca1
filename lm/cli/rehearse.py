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
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import SimpleNamespace
from typing import Any

from jsonargparse import Namespace

from lm.errors import GuardStop
from lm.model.config import DecoderConfig
from lm.runs.metrics import METRICS
from lm.runs.run import Run
from lm.system.files import nonnegative
from lm.system.units import format_count
from lm.training.alerts import CLOCKS, NAMES, AlertEvaluator
from lm.training.callback import Callback, call_hook
from lm.training.callbacks.budget import Budget, BudgetConfig, Cost, Meter
from lm.training.callbacks.guards import Alerts, NotFinite, Rollback
from lm.training.callbacks.throughput import ThroughputFloor
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

    Attributes:
        events: log lines of guards, each with where the run stood and what followed.
    """

    def __init__(
        self, config: Namespace, decoder: DecoderConfig, steps: dict[str, Any], seconds: float, meter: Meter, run: Run,
        callbacks: list[Callback],
    ) -> None:  # fmt: skip
        super().__init__()
        self.callbacks = [*callbacks, self]
        self.steps, self.max_steps = SimpleNamespace(**steps), steps["max_steps"]
        self.log_interval = config.trainer.log_interval
        self.val_interval, self.checkpoint_interval = config.trainer.val_interval, config.trainer.checkpoint_interval
        self.datamodule = SimpleNamespace(has_validation=True)
        self.precision_plugin, self.checkpoint_callback = SimpleNamespace(), self
        self.precision, self.world_size, self.is_global_zero, self.run = config.trainer.precision, 1, True, run
        self.module = SimpleNamespace(
            config=decoder, recent_steps=[], schedule_config=config.model.schedule, device=SimpleNamespace(type="cpu"),
            attention_kernels="not chosen yet", kernels_taken="not chosen yet", decoder=SimpleNamespace(fused=True),
        )  # fmt: skip
        self.seconds, self.now = seconds, 0.0  # of a step, and on the clock
        self.meter = meter
        self.global_step, self.stop, self.requested = 0, None, False
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
                            "guard": None, "action": None, "checkpoint": False, "exit_code": None})  # fmt: skip

    def on_guard(self, trainer: Any, pl_module: Any, guard: str, action: str, message: str) -> None:
        self.events[-1].update(guard=guard, action=action)

    def play(self, act: Callable[[], Any]) -> None:
        """Call something that a training would call, and keep what the guards log and do."""
        logger = logging.getLogger("lm.training.callbacks")
        propagate, logger.propagate = logger.propagate, False
        logger.addHandler(self)
        try:
            with suppress(GuardStop):
                act()
        finally:
            logger.removeHandler(self)
            logger.propagate = propagate
        if self.events and self.requested:
            self.events[-1]["checkpoint"] = True
        if self.events and self.stop is not None:
            self.events[-1]["exit_code"] = self.stop.exit_code
        self.requested = False

    def start(self) -> None:
        self.play(lambda: call_hook(self, "on_train_start", self.module))

    def line(self, metrics: Line) -> None:
        """The next log line, `log_interval` steps after the one before."""
        self.global_step = min(self.max_steps, self.global_step + self.log_interval)
        self.now += self.log_interval * self.seconds
        self.play(lambda: call_hook(self, "on_metrics", self.module, metrics))


# ---- invented lines --------------------------------------------------------------------------------------------------


def healthy(step: int, config: Namespace, decoder: DecoderConfig, steps: dict[str, Any], rate: float) -> Line:
    """The log line of a run in which nothing is wrong; the loss falls from that of an untrained model.

    Args:
        rate: tokens a second.
    """
    first, done = math.log(decoder.vocab_size), step / steps["max_steps"]
    loss = first * (FINAL_LOSS + (1 - FINAL_LOSS) * math.exp(-5 * done))
    peak = config.model.optimizer.lr * lr_fraction(max(0, step - 1), steps["max_steps"], config.model.schedule)
    return {
        **TYPICAL, **dict.fromkeys(("train/loss", "train/max_loss", "val/loss"), loss), "optim/lr": peak,
        **dict.fromkeys(("train/perplexity", "val/perplexity"), math.exp(loss)), "perf/tokens_per_second": rate,
    }  # fmt: skip


def troubled(text: str, line: Callable[[int], Line], stage: Stage) -> tuple[int, int, Line] | None:
    """How an alert becomes true: the step of the first of some healthy log lines, that of the line after them, and the
    metrics in which this one differs; None where no line that was tried does it."""
    evaluator = AlertEvaluator([text])
    depths = evaluator.expressions[0].depths
    names = [NAMES[name] for name in depths.keys() - CLOCKS]
    interval, before = stage.log_interval, max(depths.values()) + 2  # so that windows are full
    for step in (stage.max_steps - 3 * interval, stage.max_steps // 2, interval * (before + 1)):
        first = step - before * interval
        if first < 1 or step > stage.max_steps:
            continue
        for at in range(first, step, interval):
            clocks = {"step": at, "data/tokens": at * stage.steps.tokens_per_step}
            was = evaluator.evaluate(line(at) | clocks)
        if any(was.values()):
            continue
        clocks = {"step": step, "data/tokens": step * stage.steps.tokens_per_step}
        history = evaluator.history.state_dict()
        for changed in (names, *([name] for name in names)):
            for factor in FACTORS:
                evaluator.history.load_state_dict(history)
                bad = {name: factor * line(step)[name] for name in changed}
                if any(evaluator.evaluate(line(step) | bad | clocks).values()):
                    return first, step, bad
    return None


# ---- scenarios -------------------------------------------------------------------------------------------------------


def rehearse(config: Namespace, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Play the guards of a config through.

    Args:
        found: the facts of the plan.

    Returns:
        Scenarios, each with its `events`.

    Raises:
        RequestError: the budget cannot be counted.
    """
    steps, time, guards = found["steps"], found.get("time", {}), config.guards
    seconds = (time.get("seconds") or SECONDS_PER_STEP * steps["max_steps"]) / steps["max_steps"]
    decoder = replace(config.model.decoder, vocab_size=found.get("model", {}).get("vocab_size") or 2**15)
    file = guards.budget.read_file()
    rate = nonnegative(file.get("rate_usd_per_hr")) or guards.budget.rate_usd_per_hr or config.rate_usd_per_hr
    before = Cost(nonnegative(file.get("hours_elapsed")) or 0.0, nonnegative(file.get("spent_usd")))
    tokens_per_second = time.get("tokens_per_second") or steps["tokens_per_step"] / seconds

    def line(step: int) -> Line:
        return healthy(step, config, decoder, steps, max(tokens_per_second, 2 * (guards.throughput.floor or 0)))

    with TemporaryDirectory() as folder:
        def stage(*callbacks: Callback) -> Stage:
            run = Run(Path(mkdtemp(dir=folder)) / found["config"])
            run.path.mkdir()
            meter = Meter(rate, before, 0.0, clock=lambda: 0.0)
            return Stage(config, decoder, steps, seconds, meter, run, list(callbacks))

        played = [_run_as_invented(stage(Alerts(guards.alerts), RehearsedRollback(guards.max_rollbacks)), line)]
        played += [_alert(stage, text, config, line) for text in guards.alerts]
        played += _not_finite(stage, config, line)
        if guards.throughput.floor is not None:
            played.append(_slow(stage(ThroughputFloor(guards.throughput)), guards.throughput.floor, line))
        if guards.budget.cap_usd or guards.budget.max_hours or guards.budget.max_rate_usd_per_hr:
            played += _budget(stage, guards.budget, file, before, rate or RATE, Path(folder), line)
    return played


def _scenario(name: str, stage: Stage) -> dict[str, Any]:
    return {"scenario": name, "events": stage.events}


def _run_as_invented(stage: Stage, line: Callable[[int], Line]) -> dict[str, Any]:
    stage.start()
    while stage.stop is None and stage.global_step < stage.max_steps:
        stage.line(line(min(stage.max_steps, stage.global_step + stage.log_interval)))
    first, last = line(1)["train/loss"], line(stage.max_steps)["train/loss"]
    return _scenario(f"nothing wrong: the loss falls from {first:.3g} to {last:.3g}", stage)


def _alert(
    stage_of: Callable[..., Stage], text: str, config: Namespace, line: Callable[[int], Line]
) -> dict[str, Any]:  # fmt: skip
    rollback = RehearsedRollback(config.guards.max_rollbacks)
    stage = stage_of(Alerts({text: config.guards.alerts[text]}), rollback)
    trouble = troubled(text, line, stage)
    if trouble is None:
        return _scenario(f"alert `{text}`: no invented line makes it true after one at which it is false", stage)
    stage.global_step, step, bad = trouble
    stage.start()
    stage.global_step -= stage.log_interval
    stage.now = stage.global_step * stage.seconds
    while stage.global_step + stage.log_interval < step:
        stage.line(line(stage.global_step + stage.log_interval))
    stage.line(line(step) | bad)
    if rollback.done:  # and the one that is too many
        rollback.done = rollback.max_rollbacks
        stage.line(line(step))
        stage.line(line(step) | bad)
    changed = ", ".join(f"{METRICS[name].alert} {value:.4g}" for name, value in bad.items()) or "as in a healthy run"
    return _scenario(f"alert `{text}`: {changed}", stage)


def _not_finite(
    stage_of: Callable[..., Stage], config: Namespace, line: Callable[[int], Line]
) -> Iterator[dict[str, Any]]:  # fmt: skip
    guards = config.guards
    for count, name in ((1, "a step is not finite"), (guards.max_skipped, "no step is finite any more")):
        stage = stage_of(NotFinite(guards.not_finite, guards.max_skipped))
        while count > 0 and stage.stop is None and stage.global_step < stage.max_steps:
            steps = range(stage.global_step + 1, stage.global_step + stage.log_interval + 1)
            stage.module.recent_steps = [StepRecord(step, math.nan, math.nan, False) for step in steps][:count]
            count -= len(stage.module.recent_steps)
            stage.line(line(stage.global_step + stage.log_interval))
        yield _scenario(name, stage)


def _slow(stage: Stage, floor: int, line: Callable[[int], Line]) -> dict[str, Any]:
    stage.start()
    while not stage.events and stage.global_step < stage.max_steps:
        stage.line(line(stage.global_step + stage.log_interval) | {"perf/tokens_per_second": floor / 2})
    return _scenario(f"{format_count(floor / 2)} tokens/s, half of the floor", stage)


def _budget(
    stage_of: Callable[[], Stage], config: BudgetConfig, file: dict[str, Any], before: Cost, rate: float, folder: Path,
    line: Callable[[int], Line],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Runs at the planned speed, that take less than the budget and more, all of it at once, and too high a rate."""
    lefts = [(config.cap_usd - (before.usd or 0.0)) / rate] if config.cap_usd else []
    lefts += [config.max_hours - before.hours] if config.max_hours else []
    left = 3600 * max(0.0, min(lefts)) if lefts else 0.0  # seconds
    at = f"of what is left at {rate:,.2f} USD an hour"
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
        stage.start()
        while stage.stop is None and stage.global_step < stage.max_steps:
            if stage.global_step >= stage.max_steps // 2:
                rate_now, stage.now, stall = later_rate, stage.now + stall, 0.0
            else:
                rate_now = rate
            _count_on(copy, file, stage, rate_now, before)
            stage.line(line(min(stage.max_steps, stage.global_step + stage.log_interval)))
        yield _scenario(f"budget: {name}", stage)


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


def show_rehearsal(played: list[dict[str, Any]]) -> None:
    """Print the scenarios: every log line with where the run stands, and what is done."""
    for scenario in played:
        print(scenario["scenario"])
        for event in scenario["events"]:
            usd = "" if event["spent_usd"] is None else f", {event['spent_usd']:,.2f} USD"
            print(f"  step {event['step']:,}, {event['hours']:,.2f} h{usd}")
            print(f"    log   {event['log']}")
            does = ["a checkpoint"] * event["checkpoint"]
            if event["exit_code"]:
                does += [*["no checkpoint"] * (not does), f"the run ends with exit code {event['exit_code']}"]
            print(f"    then  {', '.join(does) or 'the run continues'}")
        if not scenario["events"]:
            print("  nothing is logged or done")
