"""Test equipment that a config names: what keeps a training waiting when a signal comes."""

import json
import time
from concurrent.futures import Future
from pathlib import Path

from lightning.pytorch import Callback


class SlowSteps(Callback):
    """Every micro-batch takes so many seconds; the file `slow-steps` says that the first has begun."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        Path("slow-steps").touch()
        time.sleep(self.seconds)


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
        micro_batch: the first that is not there; of the session.
    """

    def __init__(self, micro_batch: int) -> None:
        self.micro_batch = micro_batch

    def setup(self, trainer, pl_module, stage):
        loader = trainer.datamodule.train_dataloader

        def stalling():
            for index, batch in enumerate(loader()):
                if index == self.micro_batch:
                    Future().result()
                yield batch

        trainer.datamodule.train_dataloader = lambda: Batches(stalling)


class EndlessForward(Callback):
    """The forward pass of this micro-batch never ends."""

    def __init__(self, micro_batch: int) -> None:
        self.micro_batch = micro_batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.micro_batch:
            pl_module.losses = lambda batch: time.sleep(10_000)


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
        from lm.training.callbacks import evaluation

        generate = evaluation.generate

        def endless(*args, **kwargs):
            while trainer.global_step == self.step:
                time.sleep(1.0)
            return generate(*args, **kwargs)

        evaluation.generate = endless
