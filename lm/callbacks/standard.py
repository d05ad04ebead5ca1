"""The callbacks of every training, in their order: the run's folder first, so that those after it may write."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping

from lm.callbacks.checkpoints import Checkpoints
from lm.callbacks.interrupt import Interrupt
from lm.callbacks.last_step import LastStep
from lm.callbacks.predictions import Predictions
from lm.callbacks.progress import ProgressBar
from lm.callbacks.run_folder import RunFolder
from lm.callbacks.run_log import RunLog
from lm.callbacks.throughput import Throughput


def standard_callbacks(trainer: Mapping[str, Any], run_folder: RunFolder) -> list[Callback]:
    """What `lm fit` hangs on its Trainer.

    Args:
        trainer: what the config says under `trainer:`.
        run_folder: claims the folder that the others write to.
    """
    early = trainer["early_stopping"]
    stopping = [] if early.patience is None else [
        EarlyStopping("val/loss", min_delta=early.min_delta, patience=early.patience, check_on_train_epoch_end=False)
    ]
    return [
        run_folder,
        *stopping,
        LastStep(),
        RunLog(trainer["log_interval"]),
        Throughput(),
        ProgressBar(),
        Checkpoints(trainer["checkpoint_interval"], early.min_delta, trainer["keep_checkpoints"]),
        Interrupt(),
        Predictions(),
    ]
