"""Lightning's loop and a plain one around the same model, in turns, so that their times can be compared.

The whole of a batch's way is in both: stream, decoder, loss, backward pass, clipping, optimizer.
"""

import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback

from lm.callbacks.checkpoints import Checkpoints
from lm.callbacks.pauses import not_training
from lm.data.batch import Batch
from lm.module import LanguageModule
from lm.trainer import Trainer

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "fp8-tensorwise": torch.bfloat16,
            "fp8-rowwise": torch.bfloat16}


class Stretch(NamedTuple):
    """What some consecutive optimizer steps took."""

    seconds: float  # on the clock, with the device caught up at both ends
    cpu_seconds: float  # of all threads of this process


class Saving(NamedTuple):
    """What a checkpoint took."""

    stall_seconds: float  # while training waits
    total_seconds: float  # until it is whole on the disk
    bytes: int


class FirstStep(NamedTuple):
    """How long a training lets one wait for its first optimizer step."""

    seconds: float | None  # from the start of the process to the end of the step; None where the start is not known
    step_seconds: float  # of the step alone, with what is compiled and loaded in it


class Clock:
    """Starts when it is made, with the device caught up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        synchronize(device)
        self._began = time.perf_counter(), time.process_time()

    def read(self) -> Stretch:
        """The time since the start, when the device has caught up."""
        synchronize(self._device)
        seconds, cpu_seconds = self._began
        return Stretch(time.perf_counter() - seconds, time.process_time() - cpu_seconds)


class PlainLoop:
    """A training loop as one writes it by hand. It shares the decoder, the optimizer and what CUDA graph there is with
    Lightning's loop, so both do the same work in the same memory; the batches come from a stream of its own."""

    def __init__(self, trainer: Trainer, module: LanguageModule) -> None:
        self.module = module
        self.micro_step = module.micro_step
        self.device = module.device
        self.optimizer = trainer.optimizers[0]
        self.parameters = list(module.parameters())
        self.batches = iter(trainer.datamodule.train_dataloader())
        self.accumulate = trainer.accumulate_grad_batches
        self.largest_norm = trainer.gradient_clip_val
        self.half = AUTOCAST.get(trainer.precision)
        # A CUDA graph has Lightning's in it.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scaler = scaler or torch.amp.GradScaler(self.device.type, enabled=False)

    def run(self, steps: int) -> Stretch:
        """Take optimizer steps, and say how long they took."""
        self._zero_grad()  # of what Lightning's last step has left
        clock = Clock(self.device)
        for _ in range(steps):
            self.step()
        return clock.read()

    def parts(self, steps: int) -> dict[str, list[float]]:
        """Take optimizer steps, waiting for the device after each part: `data`, `forward` and `backward` of a
        micro-batch, or `replay` where a CUDA graph does these two, and `optimizer` of a step, in seconds."""
        seconds: dict[str, list[float]] = defaultdict(list)
        clock = Clock(self.device)

        def mark(part: str) -> None:
            nonlocal clock
            seconds[part].append(clock.read().seconds)
            clock = Clock(self.device)

        for _ in range(steps):
            self.step(mark)
        return seconds

    def step(self, mark: Callable[[str], None] = lambda part: None) -> None:
        """One optimizer step; `mark` is called at the end of each part."""
        for _ in range(self.accumulate):
            batch = next(self.batches)
            if self.device.type == "cuda":
                batch = batch.pin_memory()
            batch = batch.to(self.device, non_blocking=True)
            mark("data")
            if self.micro_step is None:
                self._forward_backward(batch, mark)
            else:
                self.micro_step(batch.tokens)
                mark("replay")
        if self.largest_norm:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.largest_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._zero_grad()
        mark("optimizer")

    def _forward_backward(self, batch: Batch, mark: Callable[[str], None]) -> None:
        with self._autocast():
            total, each = self.module.losses(batch)  # (), (B, T)
        loss = total / each.numel() / self.accumulate
        mark("forward")
        self.scaler.scale(loss).backward()
        mark("backward")

    def _zero_grad(self) -> None:
        (self.micro_step or self.optimizer).zero_grad()

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, self.half) if self.half else nullcontext()


class Turns(Callback):
    """Lets the two loops take turns while Lightning trains, and times each; then times some checkpoints.

    A stretch of Lightning's loop is timed from the end of this callback's hook to its next call, so everything that
    `lm fit` does for a micro-batch is in it.

    Args:
        warmup: optimizer steps before anything is timed.
        stretch: optimizer steps of a turn.
        rounds: turns of Lightning's loop; the plain one has a turn before and after each.
        checkpoints: checkpoints to take afterwards, one a step.

    Attributes:
        lightning: a stretch for each of Lightning's turns.
        plain: one more, before and after each of those.
        parts: seconds of the parts of a step in the plain loop.
        savings: of the checkpoints.
        first_step: how long it took to come.
        peak_bytes: most memory in use when the warm-up was over; None where it cannot be told.
    """

    def __init__(self, *, warmup: int, stretch: int, rounds: int, checkpoints: int) -> None:
        self.warmup, self.stretch = warmup, stretch
        self.measured = warmup + rounds * stretch
        self.steps = self.measured + checkpoints
        self.lightning: list[Stretch] = []
        self.plain: list[Stretch] = []
        self.parts: dict[str, list[float]] = {}
        self.savings: list[Saving] = []
        self.first_step: FirstStep | None = None
        self.peak_bytes: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self._clock = Clock(pl_module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LanguageModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.step_taken(batch_idx)
        if step == 1:
            alone = self._clock.read().seconds  # waits for the device, so that the age is that of the end, too
            self.first_step = FirstStep(process_age(), alone)
        if step is None or step < self.warmup:
            return
        saving = step > self.measured
        if not saving and (step - self.warmup) % self.stretch:
            return
        if not saving and step > self.warmup:
            self.lightning.append(self._clock.read())
        with not_training(trainer):  # so that the log lines stay true
            if saving:
                self.savings.append(_save(trainer, pl_module.device))
            else:
                self._plain_turn(trainer, pl_module, step)
        self._clock = Clock(pl_module.device)

    def _plain_turn(self, trainer: Trainer, module: LanguageModule, step: int) -> None:
        if step == self.warmup:
            self.peak_bytes = peak_memory(module.device)
            self._loop = PlainLoop(trainer, module)
            self._loop.run(self.warmup)
        self.plain.append(self._loop.run(self.stretch))
        if step == self.measured:
            self.parts = self._loop.parts(self.stretch)
            del self._loop  # and with it the thread that reads for it


def _save(trainer: Trainer, device: torch.device) -> Saving:
    checkpoints: Checkpoints = trainer.checkpoint_callback
    clock = Clock(device)
    checkpoints.save(trainer)
    stall = clock.read().seconds
    trainer.checkpoint_io.drain()
    total = clock.read().seconds
    folder = trainer.run.checkpoint("last")
    return Saving(stall, total, sum(file.stat().st_size for file in folder.iterdir()))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that tensors have held on a GPU so far, or this process in main memory; None on other devices."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu":
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def process_age() -> float | None:
    """Seconds since this process was started; None where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None
