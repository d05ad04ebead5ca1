"""What the model writes while it learns: the same prompts and the same random numbers again and again."""

import logging
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from lm.callbacks.pauses import not_training
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError, RunError
from lm.generation import generate
from lm.quantities import Count
from lm.run_files import append_line
from lm.sampling import Sampling
from lm.sharding import FullyShardedStrategy
from lm.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass
class SamplesConfig:
    """What the model is to write while it learns; nothing unless prompts are given.

    Args:
        prompts: Texts to continue; an empty one begins a document.
        interval: Optimizer steps between samples; after every validation if not given.
        max_new_tokens: The most tokens that follow a prompt.
        temperature: Logits are divided by it; 0 takes the likeliest token always.
        top_k: Choose among this many of the likeliest tokens; none: among all.
        seed: Of the random numbers, the same at every step; those of the training are not touched.

    Raises:
        RequestError: where a number means nothing.
    """

    prompts: list[str] | None = None
    interval: Count | None = None
    max_new_tokens: Count = Count(32)
    temperature: float = 0.8
    top_k: Count | None = Count(50)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval < 1:
            raise RequestError(f"samples.interval {self.interval} must be at least 1")
        if self.max_new_tokens < 1:
            raise RequestError(f"samples.max_new_tokens {self.max_new_tokens} must be at least 1")
        try:
            self.sampling()
        except RequestError as error:
            raise RequestError(f"samples.{error}") from error

    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(self.temperature, self.top_k)


class Samples(Callback):
    """Writes texts to TensorBoard (`sample/0`, `sample/1`, ...) and to the run's `samples.jsonl`.

    It stands after `Throughput` in the list of callbacks, whose clock it stops. A run that goes on from a checkpoint
    adds the samples of later steps again; the later line counts.

    Args:
        config: what to write and when.
    """

    def __init__(self, config: SamplesConfig) -> None:
        self.config = config
        self.texts = config.prompts or []
        self.prompts: list[list[int]] = []  # the same as token ids, while fitting

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the prompts, before there is a run folder.

        Raises:
            RequestError: a prompt leaves no room in the context.
        """
        if stage != "fit":
            return
        tokenizer, context = trainer.datamodule.tokenizer, pl_module.config.max_position_embeddings
        self.prompts = [tokenizer.encode(text) or [tokenizer.eos_id] for text in self.texts]
        for text, prompt in zip(self.texts, self.prompts, strict=True):
            if len(prompt) >= context:
                raise RequestError(
                    f"samples.prompts: {textwrap.shorten(text, 40)!r} has {len(prompt)} tokens, which leaves no room "
                    f"in the context of {context}: shorten it by {len(prompt) - context + 1} or more"
                )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.step_taken(batch_idx)
        if step is not None and self.config.interval is not None and step % self.config.interval == 0:
            self._sample(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fitting and self.config.interval is None:
            self._sample(trainer, pl_module)

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Where each rank has a shard of the model only, none can compute without the others.
        together = isinstance(trainer.strategy, FullyShardedStrategy)
        if not self.prompts or not (trainer.is_global_zero or together):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()  # what is still queued is training
        try:
            with not_training(trainer):
                texts = self._written(trainer, pl_module)
                if trainer.is_global_zero:
                    self._write(trainer, texts)
        except (RunError, OSError, torch.OutOfMemoryError) as error:
            if together and isinstance(error, torch.OutOfMemoryError):
                raise  # the other ranks may be waiting for this one's part of the weights
            log.warning("no samples at step %d: %s", trainer.global_step, error)

    def _written(self, trainer: Trainer, pl_module: LightningModule) -> list[str]:
        config, tokenizer = self.config, trainer.datamodule.tokenizer
        with trainer.precision_plugin.forward_context():
            # No token ends a row here: ranks that share a model must all take the same number of steps.
            completions = generate(
                pl_module.decoder, self.prompts, max_new_tokens=config.max_new_tokens, sampling=config.sampling(),
                generator=torch.Generator().manual_seed(config.seed),
            )  # fmt: skip
        pairs = zip(self.prompts, completions, strict=True)
        return [continued(tokenizer, prompt, completion.tokens) for prompt, completion in pairs]

    def _write(self, trainer: Trainer, texts: list[str]) -> None:
        step, lines = trainer.global_step, []
        for index, (prompt, text) in enumerate(zip(self.texts, texts, strict=True)):
            lines.append({"step": step, "tokens": trainer.tokens_seen, "prompt": prompt, "text": text})
            # TensorBoard reads Markdown; indented, a text is shown as it is.
            shown = textwrap.indent(prompt + text, "    ", lambda line: True)
            trainer.loggers[0].experiment.add_text(f"sample/{index}", shown, global_step=step)
        for line in lines:
            append_line(trainer.run.path / "samples.jsonl", line)


def continued(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The text that tokens add to a prompt, up to the end of the document."""
    if tokenizer.eos_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_id)]
    together = tokenizer.decode(prompt + tokens)  # the blank before a word, say, is there only if a word is before it
    return together[len(tokenizer.decode(prompt)) :]
