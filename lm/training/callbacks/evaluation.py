"""Evaluations on benchmark tasks between training steps."""

from dataclasses import asdict

from lm.evaluation.benchmark import check_items, core, evaluate
from lm.evaluation.tasks import Task, read_tasks
from lm.runs.evaluations import evaluation_metrics, evaluation_record
from lm.training.callbacks.between_steps import BetweenSteps
from lm.training.callbacks.logging import write_state
from lm.training.config import EvaluationConfig
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer


def read_evaluation_tasks(config: EvaluationConfig) -> list[Task]:
    tasks = read_tasks(config.tasks or [], config.num_fewshot)
    for task in tasks:
        check_items(task, config.max_items)
    return tasks


class Evaluations(BetweenSteps):
    """Logs `eval/<task>/accuracy`, `eval/<task>/centered` and `eval/core`, and adds the whole result to the run's
    `evaluations.jsonl`.

    Ranks with a whole model each divide the items; the ranks of a sharded model all evaluate every item.
    """

    name = "evaluation"

    def __init__(self, config: EvaluationConfig) -> None:
        self.config, self.interval = config, config.interval
        self.tasks: list[Task] = []  # while fitting

    def setup(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        if stage == "fit":  # before there is a run folder
            self.tasks = read_evaluation_tasks(self.config)

    def is_due(self, step: int, max_steps: int) -> bool:
        return self.interval is not None and (step % self.interval == 0 or step == max_steps)

    def run(self, trainer: Trainer, pl_module: LanguageModule) -> dict[str, float]:
        run, config = trainer.run, self.config
        write_state(trainer, "evaluating")
        try:
            with trainer.precision_plugin.forward_context():
                results = evaluate(
                    pl_module.decoder,
                    trainer.datamodule.tokenizer,
                    self.tasks,
                    batch_tokens=config.batch_tokens,
                    max_items=config.max_items,
                    rank_and_world=(0, 1) if trainer.sharded else (trainer.global_rank, trainer.world_size),
                )
        finally:
            write_state(trainer)
        tasks = {result.label: result.as_dict() for result in results}
        evaluation = evaluation_record(trainer.global_step, None, tasks, core(results), {}, asdict(config))
        if trainer.is_global_zero:
            run.append("evaluations.jsonl", evaluation)
        return evaluation_metrics(evaluation)
