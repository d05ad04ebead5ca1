"""`lm plan --rehearse`: run the guards of a config on invented log lines, and show what they would log and do.

The observers are the same as in training. The clock, the checkpoints and the program that counts the cost are
simulated, like the log lines.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from jsonargparse import Namespace

from lm.errors import GuardStop
from lm.model.build import NOT_BUILT
from lm.runs.metrics import METRICS
from lm.system.files import nonnegative
from lm.system.units import format_count, format_figure
from lm.training.alerts import CLOCKS, NAMES
from lm.training.budget import Budget, Cost, Meter, read_budget_file, validations_left
from lm.training.config import Action, BudgetConfig
from lm.training.guards import Alerts, Finding, Line, NotFinite, Observer, Rollbacks, ThroughputFloor
from lm.training.schedule import lr_fraction
from lm.training.step_stats import StepRecord

Metrics = dict[str, float]  # of a log line
SECONDS_PER_STEP = 1.0  # if the plan does not know the speed
RATE = 1.0  # US dollars an hour, if neither the budget file nor an option gives a rate
FINAL_LOSS = 0.25  # as a share of an untrained model's, at the end of an invented run
TYPICAL = {  # other metrics of a healthy run
    "optim/grad_norm": 1.0, "optim/param_norm": 100.0, "eval/core": 0.1, "val/bpb": 1.0, "perf/mfu": 0.4,
    "perf/data_wait": 0.01, "perf/gpu_load": 99.0, "perf/gpu_temperature": 60.0, "perf/gpu_power": 400.0,
    "perf/cpu_load": 50.0, "mem/process_gib": 4.0, "mem/gpu_gib": 40.0, "mem/cuda_peak_gib": 40.0,
}  # fmt: skip
FACTORS = (1.2, 2.0, 10.0, 1e3, 1e6, 0.8, 0.5, 0.1, 0.0, -1.0)  # tried on the metrics of an alert, until it is true


class InventedRun:
    """Passes invented log lines to guards, and records in `events` what they log, at which step, and what follows.

    `found` has the facts of the plan, `seconds` is the time of a step, and the meter has the cost so far and the rate.
    """

    def __init__(
        self, config: Namespace, found: dict[str, Any], seconds: float, meter: Meter, *observers: Observer
    ) -> None:  # fmt: skip
        self.config, self.name, self.seconds, self.observers = config, found["config"], seconds, observers
        self.max_steps, self.tokens_per_step = found["steps"]["max_steps"], found["steps"]["tokens_per_step"]
        self.log_interval = config.trainer.log_interval
        self.first_loss = math.log(found.get("model", {}).get("vocab_size") or 2**15)
        rate = found.get("time", {}).get("tokens_per_second") or self.tokens_per_step / seconds
        self.tokens_per_second = max(rate, 2 * (config.guards.throughput.floor or 0))
        self.rollbacks = Rollbacks(config.guards.max_rollbacks)
        self.step, self.now, self.stopped = 0, 0.0, False
        self.rolled_back = 0  # the step of the newest rollback, of which there is a checkpoint
        self.cost: Callable[[], Cost] = lambda: meter.read(ahead=self.now)
        self.events: list[dict[str, Any]] = []

    @property
    def ended(self) -> bool:
        return self.stopped or self.step >= self.max_steps

    def healthy(self, step: int) -> Metrics:
        """The metrics of a run without problems; the loss falls from that of an untrained model."""
        done, model = (step - 1) / self.max_steps, self.config.model
        loss = self.first_loss * (FINAL_LOSS + (1 - FINAL_LOSS) * math.exp(-5 * done))
        return {
            **TYPICAL, **dict.fromkeys(("train/loss", "train/max_loss", "val/loss"), loss),
            **dict.fromkeys(("train/perplexity", "val/perplexity"), math.exp(loss)),
            "optim/lr": model.optimizer.lr * lr_fraction(max(0, step - 1), self.max_steps, model.schedule),
            "perf/tokens_per_second": self.tokens_per_second,
        }  # fmt: skip

    def begin_after(self, step: int) -> None:
        """Move the run to this step; the next log line comes after it."""
        self.step = self.rollbacks.good = step
        self.now = step * self.seconds

    def line(self, changed: Metrics = {}, steps: Sequence[StepRecord] = ()) -> None:
        """Pass the next log line to the guards, `log_interval` steps later: healthy metrics, updated with `changed`."""
        self.step = min(self.max_steps, self.step + self.log_interval)
        self.now += self.log_interval * self.seconds
        metrics, interval = self.healthy(self.step) | changed, self.config.trainer.val_interval
        line = Line(
            self.name, self.step, self.max_steps, self.step * self.tokens_per_step, metrics, self.log_interval,
            self.config.model.schedule, validations_left(self.step, self.max_steps, interval), steps,
        )  # fmt: skip
        for observer in self.observers:
            self.act(observer.observe(line))
        self.rollbacks.note(self.step, metrics)

    def act(self, findings: list[Finding]) -> None:
        """Record what `callbacks/guards` would do."""
        for finding in findings:
            reason = f"{finding.guard}: {finding.message}"
            stops = finding.action == "stop"
            self._note(str(finding), finding, finding.save, reason if stops else None)
            if finding.action != "rollback":
                continue
            for observer in self.observers:
                observer.forget_newest()
            if self.rollbacks.asked:
                continue
            interval = self.config.trainer.checkpoint_interval
            to, text = self.rollbacks.ask(self.step, lambda good: max(self.rolled_back, good - good % interval) or None)
            if to is None:
                self._end(f"{reason}; {text}")
            else:
                self.rolled_back = self.step
                self._note(text, finding, checkpoint=True)

    def _note(self, log: str, finding: Finding, checkpoint: bool = False, reason: str | None = None) -> None:
        hours, usd = self.cost()
        self.events.append({"step": self.step, "hours": hours, "spent_usd": usd, "log": log, "guard": finding.guard,
                            "action": finding.action, "checkpoint": checkpoint, "exit_code": None,
                            "reason": None})  # fmt: skip
        if reason is not None:
            self._end(reason)

    def _end(self, reason: str) -> None:
        self.events[-1].update(exit_code=GuardStop.exit_code, reason=reason)
        self.stopped = True


# ---- scenarios -------------------------------------------------------------------------------------------------------

Played = tuple[str, InventedRun]  # a scenario's name, and how it went


def rehearse(config: Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Run the guards through scenarios; returns the assumed speed, and `rehearsal`, the scenarios with `events`."""
    time, guards, max_steps = found.get("time", {}), config.guards, found["steps"]["max_steps"]
    seconds = time["seconds"] / max_steps if time.get("seconds") else SECONDS_PER_STEP
    basis = time["basis"] if time.get("seconds") else "assumed: --peak_tflops N or --bench FILE gives the speed"
    file = read_budget_file(guards.budget)
    rate = nonnegative(file.get("rate_usd_per_hr")) or guards.budget.rate_usd_per_hr or config.rate_usd_per_hr
    spent = Cost(nonnegative(file.get("hours_elapsed")) or 0.0, nonnegative(file.get("spent_usd")))
    meter = Meter(rate, spent, 0.0, clock=lambda: 0.0)
    run = partial(InventedRun, config, found, seconds, meter)
    played = [_nothing_wrong(run(Alerts(guards.alerts)))]
    played += [_alert(run, text, action) for text, action in guards.alerts.items()]
    for count, name in ((1, "a step is not finite"), (guards.max_skipped, "no step is finite any more")):
        played.append((name, _not_finite(run(NotFinite(guards.not_finite, guards.max_skipped)), count)))
    if guards.throughput.floor is not None:
        floor = ThroughputFloor(guards.throughput)
        floor.begin(f"attention {NOT_BUILT.attention}, kernels {NOT_BUILT.kernels}")
        slow = run(floor)
        while not slow.events and not slow.ended:
            slow.line({"perf/tokens_per_second": guards.throughput.floor / 2})
        played.append((f"{format_count(guards.throughput.floor / 2)} tokens/s, half of the floor", slow))
    if guards.budget.cap_usd or guards.budget.max_hours:
        played += _budget(run, guards.budget, file, meter)
    return {"seconds_per_step": seconds, "basis": basis,
            "rehearsal": [{"scenario": name, "events": one.events} for name, one in played]}  # fmt: skip


def _nothing_wrong(run: InventedRun) -> Played:
    while not run.ended:
        run.line()
    first, last = (run.healthy(step)["train/loss"] for step in (1, run.max_steps))
    return f"nothing wrong: the loss falls from {first:.3g} to {last:.3g}", run


def _alert(run_of: Callable[..., InventedRun], text: str, action: Action) -> Played:
    """Pass healthy log lines, late in the run if possible, and then the first change that makes the alert true."""
    for late in range(3):
        alerts = Alerts({text: action})
        run, evaluator, (expression,) = run_of(alerts), alerts.evaluator, alerts.evaluator.expressions
        interval, before = run.log_interval, max(expression.depths.values()) + 2  # so that windows are full
        step = (run.max_steps - 3 * interval, run.max_steps // 2, interval * (before + 1))[late]
        if not (before + 1) * interval <= step <= run.max_steps:
            continue
        run.begin_after(step - (before + 1) * interval)
        for _ in range(before):
            run.line()
        if run.events or expression.holds(evaluator.history):
            continue
        history, healthy = evaluator.history.state_dict(), run.healthy(step)
        clocks = {"step": step, "data/tokens": step * run.tokens_per_step}
        names = [NAMES[name] for name in expression.depths.keys() - CLOCKS]
        for changed, factor in product((names, *([name] for name in names)), FACTORS):
            bad = {name: factor * healthy[name] for name in changed}
            holds = any(evaluator.evaluate(healthy | bad | clocks).values())
            evaluator.history.load_state_dict(history)
            if holds:
                run.line(bad)
                if run.rollbacks.done:  # then one rollback more than is allowed
                    run.rollbacks.done = run.rollbacks.most
                    run.line()
                    run.line(bad)
                values = ", ".join(f"{METRICS[name].alert} {value:.4g}" for name, value in bad.items())
                return f"alert `{text}`: {values or 'as in a healthy run'}", run
    return f"alert `{text}`: no invented line makes it true after one at which it is false", run_of()


def _not_finite(run: InventedRun, count: int) -> InventedRun:
    while count > 0 and not run.ended:
        steps = range(run.step + 1, run.step + min(run.log_interval, count) + 1)
        run.line(steps=[StepRecord(step, math.nan, math.nan, False) for step in steps])
        count -= len(steps)
    return run


def _budget(
    run_of: Callable[..., InventedRun], config: BudgetConfig, file: dict[str, Any], meter: Meter
) -> Iterator[Played]:  # fmt: skip
    """Simulate runs at the planned speed, below and above the budget, and one in which the machine stalls."""
    before, rate = meter.read(), meter.rate or RATE
    lefts = [(config.cap_usd - (before.usd or 0.0)) / rate] if config.cap_usd else []
    lefts += [config.max_hours - before.hours] if config.max_hours else []
    left = 3600 * max(0.0, min(lefts))  # seconds
    at = f"of what is left{f' at {format_figure(rate)} USD an hour' if config.cap_usd else ''}"
    cases = [("the run at the planned speed", None, 0.0)]
    if left:
        cases += [(f"a run that takes 95% {at}", 0.95, 0.0), (f"a run that takes 150% {at}", 1.5, 0.0),
                  ("the machine stands still until all is spent", 0.95, 0.6 * left)]  # fmt: skip
    for name, part, stall in cases:
        run = run_of()
        run.seconds = run.seconds if part is None else part * left / run.max_steps
        read_file = partial(_counted, file, run, rate, before)
        budget = Budget(config, clock=partial(getattr, run, "now"), read_file=read_file)
        spent = budget.begin(Cost(0.0, None), age=0.0)
        run.observers, run.cost = (budget,), budget.meter.read
        run.act(spent)
        while not run.ended:
            if run.step >= run.max_steps // 2:
                run.now, stall = run.now + stall, 0.0
            run.line()
        yield f"budget: {name}", run


def _counted(file: dict[str, Any], run: InventedRun, rate: float, before: Cost) -> tuple[dict[str, Any] | None, None]:
    """The content of the budget file if another program had written it by now, None without a file; and no error."""
    hours, spent = run.now / 3600, before.usd or 0.0
    counted = {"spent_usd": spent + hours * rate, "rate_usd_per_hr": rate, "hours_elapsed": before.hours + hours,
               "projected_total_usd": spent + run.seconds * run.max_steps / 3600 * rate}  # fmt: skip
    return {name: value for name, value in counted.items() if name in file} or None, None


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
