"""How good the model is at tasks while it learns: the same items again and again."""

import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from lm.callbacks.pauses import not_training
from lm.callbacks.run_log import RunLog
from lm.errors import LmError, RequestError
from lm.evaluation.benchmark import check, core, evaluate
from lm.evaluation.tasks import Task, read_tasks
from lm.evaluation_log import Evaluation, metrics, record
from lm.quantities import Count
from lm.sharding import FullyShardedStrategy
from lm.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass
class EvaluationConfig:
    """Which tasks the model is to do while it learns; none unless task files are given.

    Args:
        tasks: Task files: a YAML in the layout of DCLM, a `.jsonl` or `.parquet` of items, or `embedded:sotu`.
        interval: Optimizer steps between evaluations, and one after the last step; after every validation if not given.
        max_items: The most items of a task, the same ones every time.
        num_fewshot: Solved items before each question; as the task files say if not given.
        batch_tokens: The most tokens that go through the model at once.

    Raises:
        RequestError: where a number means nothing.
    """

    tasks: list[str] | None = None
    interval: Count | None = None
    max_items: Count = Count(200)
    num_fewshot: int | None = None
    batch_tokens: Count = Count(16_384)

    def __post_init__(self) -> None:
        least = {"interval": 1, "max_items": 1, "num_fewshot": 0, "batch_tokens": 1}
        for name, value in {name: getattr(self, name) for name in least}.items():
            if value is not None and value < least[name]:
                raise RequestError(f"evaluation.{name} {value} must be at least {least[name]}")

    def read(self) -> list[Task]:
        """The tasks.

        Raises:
            RequestError: a file is missing or not what it should be, or has too few items.
        """
        tasks = read_tasks(self.tasks or [], self.num_fewshot)
        for task in tasks:
            check(task, self.max_items)
        return tasks


class Evaluations(Callback):
    """Writes `eval/<task>/accuracy`, `eval/<task>/centered` and `eval/core` as the other metrics are written, and all
    that was found to the run's `evaluations.jsonl`.

    It stands after `RunLog` and `Throughput` in the list of callbacks: one writes, the other's clock is stopped. Ranks
    with a whole model each divide the items; those that share one do all of them together. A run that goes on from a
    checkpoint evaluates later steps again; the later line counts.

    Args:
        config: what to ask and when.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        self.config = config
        self.tasks: list[Task] = []  # while fitting

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the tasks, before there is a run folder.

        Raises:
            RequestError: a file is missing or not what it should be, or an evaluation would never come.
        """
        if stage != "fit":
            return
        if self.config.interval is None and not trainer.datamodule.has_validation:
            raise RequestError(
                "evaluation.tasks: evaluations come after validations, and there is no validation data; give "
                "evaluation.interval, in optimizer steps"
            )
        self.tasks = self.config.read()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, interval = trainer.step_taken(batch_idx), self.config.interval
        if step is not None and interval is not None and (step % interval == 0 or step == trainer.max_steps):
            self._evaluate(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fitting and self.config.interval is None:
            self._evaluate(trainer, pl_module)

    def _evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()  # what is still queued is training
        run_log = next(callback for callback in trainer.callbacks if isinstance(callback, RunLog))
        run_log.write_state(trainer, "running", phase="evaluating")
        with not_training(trainer):
            found = self._found(trainer, pl_module)
        if found is None:
            run_log.write_state(trainer, "running")
            return
        if trainer.is_global_zero:
            _keep(trainer, found)
        run_log.tell(trainer, pl_module, metrics(found))

    def _found(self, trainer: Trainer, pl_module: LightningModule) -> Evaluation | None:
        """What was found; None where it failed, which is logged."""
        config = self.config
        together = isinstance(trainer.strategy, FullyShardedStrategy)
        try:
            with trainer.precision_plugin.forward_context():
                results = evaluate(
                    pl_module.decoder, trainer.datamodule.tokenizer, self.tasks, batch_tokens=config.batch_tokens,
                    max_items=config.max_items, share=(0, 1) if together else (trainer.global_rank, trainer.world_size),
                )  # fmt: skip
        except (LmError, torch.OutOfMemoryError) as error:
            if together and isinstance(error, torch.OutOfMemoryError):
                raise  # the other ranks may be waiting for this one's part of the weights
            log.warning("no evaluation at step %d: %s", trainer.global_step, error)
            return None
        tasks = {result.label: result.as_dict() for result in results}
        return record(trainer.global_step, None, tasks, core(results), {}, asdict(config))


def _keep(trainer: Trainer, found: Evaluation) -> None:
    try:
        trainer.run.append_evaluation(found)
    except OSError as error:
        log.warning("the evaluation of step %d is in the metrics alone: %s", trainer.global_step, error)
