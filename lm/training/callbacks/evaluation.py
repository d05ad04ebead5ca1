"""Samples of text and benchmark results between training steps, and `lm predict`."""

import logging
import textwrap
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from lm.data.loader import Batch
from lm.data.tokenizer import Tokenizer
from lm.errors import LmError, RequestError, first_line
from lm.evaluation.benchmark import check_items, core, evaluate
from lm.evaluation.tasks import Task, read_tasks
from lm.inference.generation import Sampling, generate
from lm.runs.metrics import evaluation_metrics, evaluation_record
from lm.system.files import append_line
from lm.training.callback import Callback
from lm.training.callbacks.guards import not_training
from lm.training.callbacks.logging import RunLog
from lm.training.config import EvaluationConfig, SamplesConfig
from lm.training.distributed import FullyShardedStrategy
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)


class BetweenSteps(Callback, ABC):
    """Does something with the model every `interval` optimizer steps, or after every validation.

    A failure is logged and does not end the training. It comes after `RunLog` in the list of callbacks. A resumed run
    repeats later steps; the later line of a file counts.
    """

    name: str  # name of the action, for messages
    interval: int | None  # None: after every validation

    def on_train_batch_end(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
        if self.is_due(trainer.global_step, trainer.max_steps):
            self._run(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.fitting and self.interval is None:
            self._run(trainer, pl_module)

    def is_due(self, step: int, max_steps: int) -> bool:
        return self.interval is not None and step % self.interval == 0

    @abstractmethod
    def run(self, trainer: Trainer, pl_module: LanguageModule, sharded: bool) -> dict[str, float]:
        """Run it, on every rank, and return metrics. The ranks of a sharded model must compute together."""

    def _run(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        sharded = isinstance(trainer.strategy, FullyShardedStrategy)
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()  # queued work belongs to the training
        try:
            metrics = self.run(trainer, pl_module, sharded)
        except Exception as error:  # such as of a custom model that computes no logits without labels
            foreseen = isinstance(error, LmError | OSError)
            if sharded and not foreseen:
                raise  # the other ranks may be waiting for this one's part of the weights
            what = str(error) if foreseen else f"{type(error).__name__}: {first_line(error)}"
            log.warning("no %s at step %d: %s", self.name, trainer.global_step, what)
            return
        if metrics:
            RunLog.of(trainer).log_metrics(trainer, pl_module, metrics)


# ---- samples ---------------------------------------------------------------------------------------------------------


class Samples(BetweenSteps):
    """Writes texts to TensorBoard (`sample/0`, `sample/1`, ...) and to the run's `samples.jsonl`."""

    name = "samples"

    def __init__(self, config: SamplesConfig) -> None:
        self.config, self.interval = config, config.interval
        self.texts = config.prompts or []
        self.prompts: list[list[int]] = []  # their token ids, while fitting

    def setup(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        if stage == "fit":
            tokenizer = trainer.datamodule.tokenizer
            self.prompts = [tokenizer.encode(text) or [tokenizer.eos_id] for text in self.texts]

    def run(self, trainer: Trainer, pl_module: LanguageModule, sharded: bool) -> dict[str, float]:
        if self.prompts and (trainer.is_global_zero or sharded):
            with not_training(trainer):
                texts = self.written(trainer, pl_module)
                if trainer.is_global_zero:
                    self._write_samples(trainer, texts)
        return {}

    def written(self, trainer: Trainer, pl_module: LanguageModule) -> list[str]:
        config, tokenizer = self.config, trainer.datamodule.tokenizer
        sampling = Sampling(config.temperature, config.top_k, max_new_tokens=config.max_new_tokens, seed=config.seed)
        tokens: list[list[int]] = [[] for _ in self.prompts]
        with trainer.precision_plugin.forward_context():
            # No token ends a row here: ranks of a sharded model must all take the same number of steps.
            for new in generate(pl_module.decoder, self.prompts, sampling):
                tokens[new.row].append(new.token)
        return [continued(tokenizer, *pair) for pair in zip(self.prompts, tokens, strict=True)]

    def _write_samples(self, trainer: Trainer, texts: list[str]) -> None:
        step = trainer.global_step
        for index, (prompt, text) in enumerate(zip(self.texts, texts, strict=True)):
            # TensorBoard renders Markdown; indented text is shown as it is.
            shown = textwrap.indent(prompt + text, "    ", lambda line: True)
            trainer.loggers[0].experiment.add_text(f"sample/{index}", shown, global_step=step)
            line = {"step": step, "tokens": trainer.tokens_seen, "prompt": prompt, "text": text}
            append_line(trainer.run.path / "samples.jsonl", line)


def continued(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The text that tokens add to a prompt, up to the end of the document."""
    if tokenizer.eos_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_id)]
    together = tokenizer.decode(prompt + tokens)  # a blank before a word may depend on the word before it
    return together[len(tokenizer.decode(prompt)) :]


# ---- evaluations -----------------------------------------------------------------------------------------------------


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

    def run(self, trainer: Trainer, pl_module: LanguageModule, sharded: bool) -> dict[str, float]:
        run, run_log, config = trainer.run, RunLog.of(trainer), self.config
        run_log.write_state(trainer, "evaluating")
        try:
            with not_training(trainer), trainer.precision_plugin.forward_context():
                results = evaluate(
                    pl_module.decoder, trainer.datamodule.tokenizer, self.tasks, batch_tokens=config.batch_tokens,
                    max_items=config.max_items, share=(0, 1) if sharded else (trainer.global_rank, trainer.world_size),
                )  # fmt: skip
        finally:
            run_log.write_state(trainer)
        tasks = {result.label: result.as_dict() for result in results}
        evaluation = evaluation_record(trainer.global_step, None, tasks, core(results), {}, asdict(config))
        if trainer.is_global_zero:
            run.append("evaluations.jsonl", evaluation)
        return evaluation_metrics(evaluation)


# ---- predictions -----------------------------------------------------------------------------------------------------

SCHEMA = pa.schema(
    [
        ("document", pa.string()),  # where the text came from
        ("start", pa.int64()),  # index of the row's first token in its document
        ("token_ids", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.string())),
        ("log_probs", pa.list_(pa.float32())),  # natural logarithm, given the earlier tokens of the row
    ]
)


class Predictions(Callback):
    """`lm predict`: writes the log-probability of every token to Parquet, one row per window of a document."""

    def __init__(self) -> None:
        self._writer: pq.ParquetWriter | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.run is None:
            raise RequestError("predict needs a run to write to; name one with --run or --ckpt_path")
        self.path = trainer.run.path / "predictions.parquet"
        self._writer = pq.ParquetWriter(self.path, SCHEMA, compression="zstd")

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LanguageModule, outputs: Tensor, batch: Batch, *args: Any
    ) -> None:
        datamodule = trainer.datamodule
        rows = []
        for log_probs, labels in zip(outputs.float().cpu(), batch.labels.cpu(), strict=True):
            counts = labels != -100
            if not counts.any():  # a row that fills up the last batch
                continue
            document, start = datamodule.predicted.popleft()
            ids = labels[counts].tolist()
            rows.append(
                {
                    "document": document,
                    "start": start,
                    "token_ids": ids,
                    "tokens": [datamodule.tokenizer.decode([token]) for token in ids],
                    "log_probs": log_probs[counts].tolist(),
                }
            )
        self._writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))

    def on_predict_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self._writer.close()
        print(self.path)
