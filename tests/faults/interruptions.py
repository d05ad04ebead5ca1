"""Test equipment that a config names: what keeps a training waiting when a signal comes."""

import json
import time
from concurrent.futures import Future
from pathlib import Path

from lightning.pytorch import Callback
from recorder import AtMicroBatches


class SlowSteps(AtMicroBatches):
    """Every micro-batch takes so many seconds; the file `slow-steps` says that the first has begun.

    Args:
        seconds: how many.
        step: only those of this optimizer step, where it is given (1 is the first).
    """

    def __init__(self, seconds: float, step: int | None = None) -> None:
        self.seconds, self.step = seconds, step

    def before_micro_batch(self, trainer, pl_module, index):
        if self.step in (None, trainer.global_step + 1):
            Path("slow-steps").touch()
            time.sleep(self.seconds)


class Sleep(Callback):
    """One rank does nothing more from an optimizer step on, and listens to nobody, as one that waits for a GPU."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            time.sleep(100)


class Validations(Callback):
    """Notes every batch of a validation in `validations.jsonl`; from the given one on, each takes some seconds."""

    def __init__(self, slow_from: int = 10_000, seconds: float = 1.0) -> None:
        self.slow_from, self.seconds = slow_from, seconds

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        with open("validations.jsonl", "a") as file:
            file.write(json.dumps([trainer.global_step, batch_idx]) + "\n")
        if batch_idx >= self.slow_from:
            time.sleep(self.seconds)


class Stall(Callback):
    """The data ends in a wait for something that never comes.

    Args:
        step: the first that is not there; of the session, from 0.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def setup(self, trainer, pl_module, stage):
        loader = trainer.datamodule.train_dataloader

        def stalling():
            for index, batch in enumerate(loader()):
                if index == self.step:
                    Future().result()
                yield batch

        trainer.datamodule.train_dataloader = lambda: Batches(stalling)


class Batches:
    def __init__(self, begin):
        self.begin = begin

    def __iter__(self):
        return self.begin()


class EndlessSamples(Callback):
    """After this step the model writes its samples and never gets to their end."""

    def __init__(self, step: int) -> None:
        self.step = step

    def setup(self, trainer, pl_module, stage):
        from lm.inference import completion

        generate = completion.generate

        def endless(*args, **kwargs):
            while trainer.global_step == self.step:
                time.sleep(1.0)
            return generate(*args, **kwargs)

        completion.generate = endless
