"""Post-mortems of loss spikes and NaNs, written while training.

Nothing of a batch is kept for them: a step's samples are determined by the step, so they can be read again. Their
losses are computed anew by the weights as they are now, which leaves no trace in the training: it draws no random
numbers, as there is no dropout, and compiles nothing.
"""

import logging
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

from lm.data.loader import Batch
from lm.errors import Interrupted
from lm.model.decoder import IGNORED, evaluating
from lm.runs import postmortem
from lm.runs.postmortem import Incident, Sample
from lm.system.process import steady_time
from lm.system.units import utc
from lm.training.callback import Callback, call_hook, not_training
from lm.training.config import Action
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)
MAX_POSTMORTEMS = 5  # of a run
BASELINE_LINES = 5  # log lines whose median is the loss before a spike
RECOVERY_LINES = 50  # log lines within which the loss must be back to its level before
LINES_DRAWN = 300  # the newest lines of metrics.jsonl, in the curves


class PostMortem(Callback):
    """Writes a post-mortem when a guard acts, and closes it when the loss is back to its level before.

    It is written for the guards `spike`, `not-finite` and `drill`, and for any guard that does more than warn; but not
    for cost and speed, which do not depend on samples and weights. While one is open, no other begins.
    This callback must precede those that change weights.
    """

    def __init__(self) -> None:
        self._open: Incident | None = None  # on every rank

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        """Continue a post-mortem that an earlier process of the run left open."""
        incident = trainer.strategy.broadcast(postmortem.still_open(trainer.run) if trainer.is_global_zero else None)
        if incident is not None and incident.step <= trainer.global_step:  # else its step is still to come
            self._open = incident

    def on_guard(self, trainer: Trainer, pl_module: LanguageModule, guard: str, action: Action, message: str) -> None:
        if guard in ("budget", "throughput") or (action == "warn" and guard not in ("spike", "not-finite", "drill")):
            return
        if self._open is not None and guard == "drill":
            self._close(trainer, "not recovered", "The loss was not as low as before when a drill began.")
        if self._open is None:
            incident = _new_incident(trainer, guard, action, message) if trainer.is_global_zero else (None, False)
            self._open, is_new = trainer.strategy.broadcast(incident)
            if is_new:
                with not_training(trainer):
                    _write(trainer, pl_module, self._open)

    def on_metrics(self, trainer: Trainer, pl_module: LanguageModule, metrics: dict[str, float]) -> None:
        """Close the post-mortem when the loss is back to its level before, or has not been for too long."""
        incident, loss, step = self._open, metrics.get("train/loss"), trainer.global_step
        if incident is None or loss is None or step <= incident.step:
            return
        now = f"{loss:.4f} in the log line of step {step}"
        if incident.baseline is not None and loss <= incident.baseline:
            self._close(trainer, "recovered", f"The loss was as low as before: {now}, {incident.baseline:.4f} before.")
        elif step >= incident.step + RECOVERY_LINES * trainer.options.log_interval:
            self._close(trainer, "not recovered", f"{RECOVERY_LINES} log lines later the loss was {now}.")

    def on_train_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if self._open is not None:
            self._close(trainer, "ended", f"The training ended at step {trainer.global_step}.")

    def on_exception(self, trainer: Trainer, pl_module: LanguageModule, exception: BaseException) -> None:
        if not isinstance(exception, Interrupted):  # such a run is resumed, and its post-mortem with it
            self.on_train_end(trainer, pl_module)

    def _close(self, trainer: Trainer, how: str, text: str) -> None:
        incident, self._open = self._open, None
        assert incident is not None
        with _failure_logged("closed"), not_training(trainer):
            if trainer.is_global_zero:
                postmortem.close_postmortem(trainer.run, incident, how, text)
                _draw(trainer, incident)
                log.info("post-mortem %s: %s", postmortem.folder_of(trainer.run, incident.step), text)


def _new_incident(trainer: Trainer, guard: str, action: str, message: str) -> tuple[Incident | None, bool]:
    """The incident, None if it has no post-mortem, and whether one is to be written."""
    steps, known = trainer.run_state.stats.recent, postmortem.steps_of(trainer.run)
    # It may be there already, from before a resume from an earlier step, and a person may have edited it.
    is_new = trainer.global_step not in known
    if not steps or (is_new and len(known) >= MAX_POSTMORTEMS and guard != "drill"):
        return None, False
    injected = [step for step in steps if injected_rows(trainer, step.step) is not None]
    broken = [  # a GradScaler also skips steps, which alone is no incident
        step for step in steps if not (math.isfinite(step.loss) and (step.applied or guard != "not-finite"))
    ]
    worst = broken[0] if broken else max(injected or steps, key=lambda step: step.loss)
    before = [
        line["train/loss"] for line in trainer.run.metrics() if "train/loss" in line and line["step"] < steps[0].step
    ]
    return Incident(
        run=trainer.run.name,
        step=trainer.global_step,
        time=utc(steady_time()),
        guard=guard,
        action=action,
        message=message,
        worst=worst.step,
        steps=[tuple(step) for step in steps],
        baseline=statistics.median(before[-BASELINE_LINES:]) if before else None,
        injected=worst in injected,
    ), is_new


def _write(trainer: Trainer, module: LanguageModule, incident: Incident) -> None:
    samples = []
    if trainer.is_global_zero or trainer.sharded:  # no rank can compute alone if it is sharded
        with _failure_logged("filled"):
            samples = _read_samples(trainer, module, incident.worst)
    if trainer.is_global_zero:
        with _failure_logged("written"):
            folder = postmortem.write_postmortem(trainer.run, incident, samples, trainer.datamodule.tokenizer.decode)
            _draw(trainer, incident)
            log.warning("post-mortem: %s", folder / "postmortem.md")


def _read_samples(trainer: Trainer, module: LanguageModule, step: int) -> list[Sample]:
    """The samples of a step with the loss of each token, the worst first."""
    first, count = trainer.steps.samples(step - 1), trainer.steps.global_batch
    batch, places = trainer.datamodule.read_samples(first, count)
    injected = injected_rows(trainer, step)
    if injected is not None:
        batch.tokens = torch.from_numpy(injected)
    losses, labels = _token_losses(trainer, module, batch), batch.labels
    samples = []
    for i, (shard, window) in enumerate(places):
        of_targets = zip(losses[i].tolist(), labels[i].tolist())
        of_tokens = [None, *(None if label == IGNORED else loss for loss, label in of_targets)]
        origin = f"{shard}, window {window}" if injected is None else "injected"
        samples.append(Sample(first + i, origin, batch.tokens[i].tolist(), of_tokens))
    return sorted(samples, key=lambda sample: sample.loss, reverse=True)


def _token_losses(trainer: Trainer, module: LanguageModule, batch: Batch) -> torch.Tensor:
    """The loss of every target of a batch: `(N, T)` fp32, in nats; inf for NaN."""
    micro_batches = batch.split(trainer.datamodule.micro_batch_size)
    with evaluating(module), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        parts = [module.losses(part.to(module.device)).per_token.float().cpu() for part in micro_batches]
    if trainer.sharded:  # it keeps some weights gathered, which a rollback may change next
        cast(Any, module.decoder).reshard()
    return torch.cat(parts).nan_to_num(nan=math.inf, posinf=math.inf)


def injected_rows(trainer: Trainer, step: int) -> np.ndarray | None:
    """`(G, T + 1)` samples that a callback put in place of a step's own; None: it did not."""
    return next((rows for rows in call_hook(trainer, "rows_of_step", step) if rows is not None), None)


def _draw(trainer: Trainer, incident: Incident) -> None:
    from lm.inspection.run_views import draw_incident  # matplotlib takes half a second

    for name, picture in draw_incident(incident, trainer.run.metrics()[-LINES_DRAWN:]).items():
        picture.savefig(postmortem.folder_of(trainer.run, incident.step) / name)


@contextmanager
def _failure_logged(what: str) -> Iterator[None]:
    """Log a failure of the block: a post-mortem must not end a training."""
    try:
        yield
    except Exception as error:
        log.warning("the post-mortem could not be %s: %s: %s", what, type(error).__name__, error)
