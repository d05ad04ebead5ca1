"""Time in which a training does something else, which those who measure it are told of."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lm.trainer import Trainer


@contextmanager
def not_training(trainer: Trainer) -> Iterator[None]:
    """What is done meanwhile is no training: callbacks with `on_pause` are told afterwards how many seconds it took."""
    began = time.monotonic()
    trainer.repeatable = trainer.validating  # then it comes again with the validation
    try:
        yield
    finally:
        trainer.repeatable = False
        seconds = time.monotonic() - began
        for callback in trainer.callbacks:
            if hasattr(callback, "on_pause"):
                callback.on_pause(trainer, seconds)
