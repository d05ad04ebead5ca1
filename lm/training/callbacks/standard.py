"""The callbacks of every training in their order, made from the sections of its config."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback

from lm.training.callbacks.checkpoints import Checkpoints
from lm.training.callbacks.evaluation import Evaluations, Predictions, Samples
from lm.training.callbacks.events import Events
from lm.training.callbacks.guards import BudgetGuard, Guard, Rollback, ThroughputGuard
from lm.training.callbacks.loggers import Histograms
from lm.training.callbacks.logging import ProgressBar, RunLog, Throughput
from lm.training.callbacks.postmortem import PostMortem, SpikeInjection
from lm.training.callbacks.run_folder import Heartbeat, RunFolder
from lm.training.callbacks.stopping import EarlyStopping, Interrupt
from lm.training.config import TrainerConfig
from lm.training.guards import Alerts, NotFinite, Spike


def standard_callbacks(trainer: TrainerConfig, run_folder: RunFolder, sections: Mapping[str, Any]) -> list[Callback]:
    """The callbacks of `lm fit` in order.

    The run's folder comes first, so that later callbacks may write. Of the guards, those with observers come first,
    then post-mortems, then the rollback. `sections` is the result of `sections_of_callbacks`.
    """
    guards, samples, evaluation = (sections[name] for name in ("guards", "samples", "evaluation"))
    early, every = trainer.early_stopping, trainer.histogram_interval
    callbacks = [
        run_folder,
        Heartbeat(),
        RunLog(trainer.log_interval),
        Throughput(),
        None if guards.inject_step is None else SpikeInjection(guards.inject_step),
        Guard(NotFinite(guards.not_finite, guards.max_skipped)),
        Guard(Alerts(guards.alerts)),
        Guard(Spike(guards.spike)),
        BudgetGuard(guards.budget),
        ThroughputGuard(guards.throughput),
        PostMortem(),
        Rollback(guards.max_rollbacks),
        Events(run_folder.program),
        ProgressBar(),
        None if every is None else Histograms(every),
        Samples(samples) if samples.prompts else None,
        Evaluations(evaluation) if evaluation.tasks else None,
        None if early.patience is None else EarlyStopping(early.patience, early.min_delta),
        Checkpoints(trainer.checkpoint_interval, trainer.keep_checkpoints, trainer.keep_every),
        Interrupt(),
        Predictions(),
    ]
    return [callback for callback in callbacks if callback is not None]
