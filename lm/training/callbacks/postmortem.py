"""Post-mortems of loss spikes and NaNs, written while training.

Only a few numbers per step are kept for them: a step's samples are determined by the step, so they can be read again.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.data.loader import Batch
from lm.data.rare import RARE_FRACTION, rare_rows, rare_tokens
from lm.errors import Interrupted
from lm.runs import postmortem
from lm.runs.postmortem import Evidence, Incident
from lm.system.process import steady_time
from lm.system.units import plural
from lm.training.alerts import AlertEvaluator
from lm.training.callback import Callback
from lm.training.callbacks.guards import act, not_training
from lm.training.config import Action
from lm.training.guards import Finding
from lm.training.module import LanguageModule
from lm.training.probe import gather_evidence, injected_rows, is_sharded
from lm.training.step_stats import StepRecord
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)
MAX_POSTMORTEMS = 5  # of a run
BASELINE_LINES = 5  # log lines whose median is the loss before a spike
RECOVERY_LINES = 50  # log lines within which the loss must be back to its level before
STEPS_KEPT = 1000
LINES_KEPT = 200  # log lines in the curves before


class PostMortem(Callback):
    """Writes a post-mortem when a guard acts, and closes it when the loss is back to its level before.

    It is written for the guards `spike` and `not-finite`, for any guard that does more than warn, and for a drill, even
    if it causes no spike; but not for cost and speed, which do not depend on samples and weights.
    While a post-mortem is open, guards add their actions to it. This callback must precede those that change weights.
    `drill` is the first step of `SpikeInjection`, if there is one.
    """

    def __init__(self, spike: str | None = None, drill: int | None = None) -> None:
        self._drill = range(0) if drill is None else range(drill, drill + DRILL_STEPS)
        self._evaluator = AlertEvaluator([] if spike is None else [spike])
        self._spiking = False  # a spike was reported and continues
        self._steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._losses: deque[tuple[int, float]] = deque(maxlen=BASELINE_LINES + 1)  # step and loss of log lines
        self._open: Incident | None = None
        self._lines = 0  # number of log lines since it was opened
        self._known: list[int] = []  # steps with a post-mortem

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        """Continue a post-mortem that an earlier process of the run left open."""
        known = [], None, []
        if trainer.is_global_zero:
            losses = [(line["step"], line["train/loss"]) for line in trainer.run.metrics() if "train/loss" in line]
            losses = losses[-BASELINE_LINES - 1 :]
            known = (postmortem.steps_of(trainer.run), postmortem.still_open(trainer.run), losses)
        self._known, incident, losses = trainer.strategy.broadcast(known)
        self._losses.extend(losses)
        if incident is not None and incident.step <= trainer.global_step:  # else its step is still to come
            self._open = incident

    def on_metrics(self, trainer: Trainer, pl_module: LanguageModule, metrics: dict[str, float]) -> None:
        new_steps = self._note_steps(trainer)
        loss = metrics.get("train/loss")
        if loss is not None:
            self._losses.append((trainer.global_step, loss))
        if self._open is not None and loss is not None and new_steps:
            self._follow(trainer, loss)
        line = {**metrics, "step": trainer.global_step, "data/tokens": trainer.tokens_seen}
        message = trainer.strategy.broadcast(self._spike_in(line))
        if message is not None:
            act(trainer, pl_module, Finding("spike", "warn", message))
        self._write_drill(trainer, pl_module)

    def _write_drill(self, trainer: Trainer, module: LanguageModule) -> None:
        """Write a post-mortem of the drill, if its steps have just been logged and are no spike."""
        drilled = any(step.step in self._drill for step in trainer.run_state.stats.recent)
        if drilled and not any(step >= self._drill.start for step in self._known):
            if self._open is not None:
                text = f"The loss was not as low as before when the drill began, in step {self._drill.start}."
                self._close(trainer, "not recovered", text)
            act(trainer, module, Finding("drill", "warn", "samples of rare tokens (guards.inject_step)"))

    def on_guard(self, trainer: Trainer, pl_module: LanguageModule, guard: str, action: Action, message: str) -> None:
        if action == "warn" and guard not in ("spike", "not-finite", "drill"):
            return
        new_steps = self._note_steps(trainer)
        if self._open is not None:
            if new_steps:
                self._open.update_highest(trainer.run_state.stats.recent)
            with _failure_logged("continued"):
                if trainer.is_global_zero:
                    postmortem.add_action(trainer.run, self._open, trainer.global_step, guard, action, message)
        elif (
            guard not in ("budget", "throughput")
            and trainer.run_state.stats.recent
            and (len(self._known) < MAX_POSTMORTEMS or trainer.global_step in self._known or guard == "drill")
        ):
            self._lines = 0
            self._open = self._incident(trainer, guard, action, message)
            with not_training(trainer):
                self._write(trainer, pl_module, self._open)

    def on_train_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if self._drill:
            trainer.run_state.stats.metrics()  # steps since the last log line, if the run stops early
            self._write_drill(trainer, pl_module)
        self._end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LanguageModule, exception: BaseException) -> None:
        if not isinstance(exception, Interrupted):  # such a run is resumed, and its post-mortem with it
            self._end(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {**self._evaluator.history.state_dict(), "spiking": self._spiking}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._evaluator.history.load_state_dict(state_dict)
        self._spiking = state_dict["spiking"]

    def _spike_in(self, line: dict[str, float]) -> str | None:
        """A message if a spike has just begun, otherwise None."""
        for condition, holds in self._evaluator.evaluate(line).items():
            began, self._spiking = holds and not self._spiking, bool(holds)
            if began:
                return condition.explain(self._evaluator.history, line["step"])
        return None

    def _note_steps(self, trainer: Trainer) -> bool:
        """Record the steps since the last log line; returns whether there are new ones."""
        recent = trainer.run_state.stats.recent
        if not recent or (self._steps and self._steps[-1] is recent[-1]):
            return False
        self._steps.extend(recent)
        return True

    def _follow(self, trainer: Trainer, loss: float) -> None:
        """Close the open post-mortem when the loss is back to its level before, or has not been for too long."""
        incident, step = self._open, trainer.global_step
        self._lines += 1
        incident.update_highest(trainer.run_state.stats.recent)
        if incident.baseline is not None and loss <= incident.baseline:
            after = step - incident.worst
            text = (
                f"The loss was as low as before in the log line of step {step}: {self._beside(loss)}. That is "
                f"{plural(after, 'step')} and {after * incident.tokens_per_step:,} tokens after step {incident.worst}."
            )
            self._close(trainer, "recovered", text)
        elif self._lines >= RECOVERY_LINES:
            text = f"The loss was not as low as before after {RECOVERY_LINES} log lines: {self._beside(loss)} in that "
            self._close(trainer, "not recovered", f"{text}of step {step}.")

    def _beside(self, loss: float) -> str:
        before = self._open.baseline
        return f"{loss:.4f}" if before is None else f"{loss:.4f}, where it was {before:.4f} before"

    def _end(self, trainer: Trainer) -> None:
        if self._open is None:
            return
        step, loss = self._losses[-1] if self._losses else (trainer.global_step, math.nan)
        last, worst = trainer.global_step, self._open.worst
        text = (
            f"The training ended at step {last}, {plural(last - worst, 'step')} after step {worst}. "
            f"In the log line of step {step} the loss was {self._beside(loss)}."
        )
        self._close(trainer, "ended", text)

    def _close(self, trainer: Trainer, how: str, text: str) -> None:
        incident, self._open = self._open, None
        if incident.highest is not None:
            text += f"\n\nAt its highest it was {incident.highest[1]:.4f}, in step {incident.highest[0]}."
        with _failure_logged("closed"), not_training(trainer):
            if trainer.is_global_zero:
                postmortem.close_postmortem(trainer.run, incident, how, text)
                folder = postmortem.folder_of(trainer.run, incident.step)
                lines = trainer.run.metrics()
                _save_pictures(folder, incident, [line for line in lines if line.get("time", 0) > incident.time])
                log.info("post-mortem %s: %s", folder, text.partition("\n")[0])

    def _incident(self, trainer: Trainer, guard: str, action: str, message: str) -> Incident:
        steps = trainer.run_state.stats.recent
        broken = [  # a GradScaler also skips steps, which alone is no incident
            step for step in steps if not (math.isfinite(step.loss) and (step.applied or guard != "not-finite"))
        ]
        drilled = [step for step in steps if guard == "drill" and step.step in self._drill]
        worst = broken[0] if broken else max(drilled or steps, key=lambda step: step.loss)
        before = [loss for step, loss in self._losses if step < steps[0].step and math.isfinite(loss)][-BASELINE_LINES:]
        return Incident(
            run=trainer.run.name, step=trainer.global_step, time=steady_time(), guard=guard, action=action,
            message=message, tokens_per_step=trainer.steps.tokens_per_step, worst=worst.step,
            steps=[tuple(step) for step in steps], baseline=statistics.median(before) if before else None,
            injected=injected_rows(trainer, worst.step) is not None,
        )  # fmt: skip

    def _write(self, trainer: Trainer, module: LanguageModule, incident: Incident) -> None:
        if trainer.is_global_zero:
            incident.lines = trainer.run.metrics()[-LINES_KEPT:]
        if incident.step in self._known:  # written before a resume from an earlier step; it may have been edited
            return
        self._known.append(incident.step)
        evidence = Evidence()
        if trainer.is_global_zero or is_sharded(module):  # a sharded model computes on all ranks, or on none
            with _failure_logged("filled"):
                worst = next(step for step in self._steps if step.step == incident.worst)
                evidence = gather_evidence(trainer, module, worst, self._ordinary(trainer, incident.worst))
        if trainer.is_global_zero:
            with _failure_logged("written"):
                folder = postmortem.write_postmortem(trainer.run, incident, evidence)
                _save_pictures(folder, incident)
                log.warning("post-mortem: %s", folder / "postmortem.md")

    def _ordinary(self, trainer: Trainer, worst: int) -> StepRecord | None:
        """The newest step before the worst one whose loss was at most the median of the steps before."""
        before = [step for step in self._steps
                  if step.step < worst and step.applied and injected_rows(trainer, step.step) is None]  # fmt: skip
        if not before:
            return None
        middle = statistics.median(step.loss for step in before[-100:])
        return next(step for step in reversed(before) if step.loss <= middle)


def _save_pictures(folder: Path, incident: Incident, after: Sequence[dict[str, Any]] = ()) -> None:
    from lm.inspection.run_views import draw_incident  # matplotlib takes half a second

    for name, picture in draw_incident(incident, after).items():
        picture.savefig(folder / name)


@contextmanager
def _failure_logged(what: str) -> Iterator[None]:
    """Log a failure of the block: a post-mortem must not end a training."""
    try:
        yield
    except Exception as error:
        log.warning("the post-mortem could not be %s: %s: %s", what, type(error).__name__, error)


# ---- drill -----------------------------------------------------------------------------------------------------------

DRILL_STEPS = 5


class SpikeInjection(Callback):
    """A drill: replaces the samples of optimizer steps `first` to `first + 4` by sequences of rare tokens.

    `run.json` lists the steps under `injected`. A resume from before them removes them from the list, and they are
    injected again, as in a run that was never stopped.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self._rare: np.ndarray | None = None  # token ids, computed when needed
        self._done: list[int] = []  # the injected steps

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        noted = trainer.run.read("run.json").get("injected", {}).get("steps", []) if trainer.is_global_zero else []
        noted = trainer.strategy.broadcast(noted)
        self._done = [step for step in noted if step <= trainer.global_step]
        if self._done != noted:
            self._save_steps(trainer)
        if not self._done and self.first <= trainer.global_step:
            log.warning("guards.inject_step %d is past: the run is at step %d", self.first, trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LanguageModule, batch: Batch, batch_idx: int) -> None:
        step = trainer.global_step + 1
        rows = self.rows_of_step(trainer, step)
        if rows is None:
            return
        own = Batch(torch.from_numpy(rows[trainer.global_rank :: trainer.world_size]))  # (G / ranks, T + 1)
        pl_module.on_before_batch_transfer(own, 0)  # counts documents, of which there may be more than before
        batch.tokens.copy_(own.tokens)
        batch.row_documents = own.row_documents
        if step not in self._done:
            self._done.append(step)
            self._save_steps(trainer)
            if step == self.first:
                log.warning(
                    "step %d: the samples of steps %d to %d are replaced by rare tokens (guards.inject_step), drawn "
                    "from %d tokens, the bottom %.0f %% of the text", step, step, step + DRILL_STEPS - 1,
                    len(self._rare), 100 * RARE_FRACTION,
                )  # fmt: skip

    def rows_of_step(self, trainer: Trainer, step: int) -> np.ndarray | None:
        """The injected samples of a step, `(G, T + 1)`, determined by the seed and the step; None if it has none."""
        if not self.first <= step < self.first + DRILL_STEPS:
            return None
        data = trainer.datamodule
        if self._rare is None:
            train = data.shards["train"]
            self._rare = rare_tokens(train, data.tokenizer.vocab_size).astype(train.column.row_dtype)
        return rare_rows(self._rare, data.seed, step, trainer.steps.global_batch, data.seq_len + 1)

    def logged_metrics(self, trainer: Trainer, pl_module: LanguageModule) -> dict[str, float]:
        injected = any(step.step in self._done for step in trainer.run_state.stats.recent)
        return {"data/injected": 1.0} if injected else {}

    def _save_steps(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            trainer.run.describe(injected={"steps": self._done})
