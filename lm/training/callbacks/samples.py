"""Samples of text between training steps."""

import textwrap
from typing import cast

from lm.data.tokenizer import Tokenizer
from lm.inference.generation import generate
from lm.inference.sampling import Sampling
from lm.system.files import append_line
from lm.training.callback import not_training
from lm.training.callbacks.between_steps import BetweenSteps
from lm.training.callbacks.tensorboard import EventFile
from lm.training.config import SamplesConfig
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer


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

    def run(self, trainer: Trainer, pl_module: LanguageModule) -> dict[str, float]:
        if self.prompts and (trainer.is_global_zero or trainer.sharded):
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
            for new in generate(pl_module.decoder, self.prompts, sampling, vocab_size=tokenizer.vocab_size):
                tokens[new.row].append(new.token)
        return [continued(tokenizer, *pair) for pair in zip(self.prompts, tokens, strict=True)]

    def _write_samples(self, trainer: Trainer, texts: list[str]) -> None:
        step, event_file = trainer.global_step, cast(EventFile, trainer.loggers[0])
        for index, (prompt, text) in enumerate(zip(self.texts, texts, strict=True)):
            # TensorBoard renders Markdown; indented text is shown as it is.
            shown = textwrap.indent(prompt + text, "    ", lambda line: True)
            event_file.experiment.add_text(f"sample/{index}", shown, global_step=step)
            line = {"step": step, "tokens": trainer.tokens_seen, "prompt": prompt, "text": text}
            append_line(trainer.run.path / "samples.jsonl", line)


def continued(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The text that tokens add to a prompt, up to the end of the document."""
    if tokenizer.eos_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_id)]
    together = tokenizer.decode(prompt + tokens)  # a blank before a word may depend on the word before it
    return together[len(tokenizer.decode(prompt)) :]
