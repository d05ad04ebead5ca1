"""Samples of text between training steps."""

import textwrap
from itertools import takewhile
from typing import cast

from lm.inference.completion import gather_texts, generate_text
from lm.inference.sampling import Sampling
from lm.system.files import append_line
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
        self.prompts = config.prompts or []

    def run(self, trainer: Trainer, pl_module: LanguageModule) -> dict[str, float]:
        if self.prompts and (trainer.is_global_zero or trainer.sharded):
            texts = self.written(trainer, pl_module)
            if trainer.is_global_zero:
                self._write_samples(trainer, texts)
        return {}

    def written(self, trainer: Trainer, pl_module: LanguageModule) -> list[str]:
        config, tokenizer = self.config, trainer.datamodule.tokenizer
        sampling = Sampling(
            config.temperature,
            config.top_k,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
            ignore_eos=True,  # ranks of a sharded model must all take the same number of steps
        )
        with trainer.precision_plugin.forward_context():
            news = generate_text(pl_module.decoder, tokenizer, self.prompts, sampling)
            written = gather_texts(self.prompts, news)
        documents = [takewhile(lambda token: token.id != tokenizer.eos_id, each.tokens) for each in written]
        return ["".join(token.text for token in document) for document in documents]

    def _write_samples(self, trainer: Trainer, texts: list[str]) -> None:
        step, event_file = trainer.global_step, cast(EventFile, trainer.loggers[0])
        for index, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True)):
            # TensorBoard renders Markdown; indented text is shown as it is.
            shown = textwrap.indent(prompt + text, "    ", lambda line: True)
            event_file.experiment.add_text(f"sample/{index}", shown, global_step=step)
            line = {"step": step, "tokens": trainer.tokens_seen, "prompt": prompt, "text": text}
            append_line(trainer.run.path / "samples.jsonl", line)
