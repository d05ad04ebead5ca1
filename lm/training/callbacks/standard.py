"""The callbacks of every training in their order, made from the sections of its config."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lightning.pytorch import Callback as LightningCallback

from lm.training.callback import Callback
from lm.training.callbacks.checkpoints import Checkpoints
from lm.training.callbacks.guards import NotFinite, Rollback
from lm.training.callbacks.heartbeat import Heartbeat
from lm.training.callbacks.logging import ProgressBar, RunLog, Throughput
from lm.training.callbacks.run_folder import RunFolder
from lm.training.callbacks.stopping import Interrupt
from lm.training.config import TrainerConfig
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer


def standard_callbacks(
    trainer: TrainerConfig, run_folder: RunFolder, sections: Mapping[str, Any]
) -> list[LightningCallback]:
    """The callbacks of `lm fit` in order.

    The run's folder comes first, so that later callbacks may write. Post-mortems come after the guards, and then the
    rollback. `sections` is the result of `sections_of_callbacks`. What a config may leave out is a row of three: file,
    class, and the options to make it from; without any, the file is not imported.
    """
    guards, samples, evaluation = (sections[name] for name in ("guards", "samples", "evaluation"))
    early, budget, throughput = trainer.early_stopping, guards.budget, guards.throughput
    rows = [
        run_folder,
        Heartbeat(),
        RunLog(trainer.log_interval),
        Throughput(),
        ("bigram_init", "BigramInit", trainer.bigram_init or None),
        ("spike_injection", "SpikeInjection", guards.inject_step),
        NotFinite(guards.not_finite, guards.max_skipped),
        ("alerts", "Alerts", guards.alerts or None),
        ("alerts", "Spike", guards.spike or None),
        ("budget", "BudgetGuard", budget if budget.wanted else None),
        ("throughput_floor", "ThroughputFloor", None if throughput.floor is None else throughput),
        PostMortemOnGuard(),
        Rollback(guards.max_rollbacks),
        ("events", "Events", run_folder if run_folder.options.on_event else None),
        ProgressBar(),
        ("samples", "Samples", samples if samples.prompts else None),
        ("evaluation", "Evaluations", evaluation if evaluation.tasks else None),
        ("stopping", "EarlyStopping", None if early.patience is None else early),
        Checkpoints(trainer.checkpoint_interval, trainer.keep_checkpoints, trainer.keep_every),
        Interrupt(),
    ]
    wanted_rows = [row for row in rows if not (isinstance(row, tuple) and row[2] is None)]
    return [_make(*row) if isinstance(row, tuple) else row for row in wanted_rows]


def _make(file: str, name: str, *options: Any) -> Any:
    return getattr(import_module(f"lm.training.callbacks.{file}"), name)(*options)


class PostMortemOnGuard(Callback):
    """Becomes `PostMortem`, which most runs never need, when a guard acts, or where an earlier process wrote one."""

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        exists = trainer.is_global_zero and any(trainer.run.path.glob("postmortem-*"))
        if trainer.strategy.broadcast(exists):
            self._replace(trainer).on_train_start(trainer, pl_module)

    def on_guard(self, trainer: Trainer, *args: Any) -> None:
        self._replace(trainer).on_guard(trainer, *args)

    def _replace(self, trainer: Trainer) -> Any:
        callback = _make("postmortem", "PostMortem")
        trainer.callbacks[trainer.callbacks.index(self)] = callback
        return callback
