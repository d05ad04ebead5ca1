"""Test equipment that a config names: a machine whose clock is set anew while it trains."""

import time

from recorder import AtMicroBatches


class Jump(AtMicroBatches):
    """Sets the clock of this process.

    Args:
        at: micro-batches of this process, counted over the run.
        seconds: by how much the clock is off from each on.
    """

    def __init__(self, at: list[int], seconds: list[float]) -> None:
        self.jumps = dict(zip(at, seconds, strict=True))
        self.true = time.time

    def before_micro_batch(self, trainer, pl_module, index):
        if (off := self.jumps.get(index)) is not None:
            time.time = lambda: self.true() + off
