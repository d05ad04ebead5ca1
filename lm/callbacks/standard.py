"""The callbacks of every training, in their order: the run's folder first, so that those after it may write."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback

from lm.callbacks.checkpoints import Checkpoints
from lm.callbacks.curves import Curves
from lm.callbacks.data_wait import DataWait
from lm.callbacks.early_stopping import EarlyStopping
from lm.callbacks.evaluations import EvaluationConfig, Evaluations
from lm.callbacks.guards import GuardsConfig, guard_callbacks
from lm.callbacks.heartbeat import Heartbeat
from lm.callbacks.histograms import Histograms
from lm.callbacks.interrupt import Interrupt
from lm.callbacks.last_step import LastStep
from lm.callbacks.predictions import Predictions
from lm.callbacks.progress import ProgressBar
from lm.callbacks.run_folder import RunFolder
from lm.callbacks.run_log import RunLog
from lm.callbacks.samples import Samples, SamplesConfig
from lm.callbacks.skipped_data import SkippedData
from lm.callbacks.throughput import Throughput


def standard_callbacks(
    trainer: Mapping[str, Any],
    run_folder: RunFolder,
    guards: GuardsConfig,
    samples: SamplesConfig,
    evaluation: EvaluationConfig,
) -> list[Callback]:
    """What `lm fit` hangs on its Trainer.

    Args:
        trainer: what the config says under `trainer:`.
        run_folder: claims the folder that the others write to.
        guards: what it says under `guards:`.
        samples: under `samples:`.
        evaluation: under `evaluation:`.
    """
    early, every = trainer["early_stopping"], trainer["histogram_interval"]
    stopping, asked_for = [], []
    if early.patience is not None:
        stopping.append(EarlyStopping(early.patience, early.min_delta))
    if every is not None:
        asked_for.append(Histograms(every))
    if samples.prompts:
        asked_for.append(Samples(samples))
    if evaluation.tasks:
        asked_for.append(Evaluations(evaluation))
    return [
        run_folder,
        Curves(),
        Heartbeat(),
        LastStep(),
        SkippedData(),
        RunLog(trainer["log_interval"]),
        Throughput(),
        DataWait(),
        *guard_callbacks(guards),
        ProgressBar(),
        *asked_for,
        *stopping,  # after what a validation is followed by, which may be given up and then counts for nothing
        Checkpoints(trainer["checkpoint_interval"], early.min_delta, trainer["keep_checkpoints"]),
        Interrupt(),
        Predictions(),
    ]
