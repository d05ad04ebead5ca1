"""Lightning's loop with everything that `lm fit` has, beside a loop written by hand around the same model, in turns.

    python tests/benchmarks/bench_loop.py --config X [--steps N] [options of a training]

It prints the JSON object of `lm bench step` with the plain loop's times and the overhead beside it.
"""

import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # lm, which may not be installed

from lm.cli.bench import WARMUP, Clock, StepTimer, Stretch, fit_briefly, report
from lm.cli.config import config_parser
from lm.data.loader import Batch
from lm.system.units import Count
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

FORMULAS = {
    "overhead.ratio": "median over Lightning's turns: seconds / mean seconds of the plain turns before and after - 1",
    "overhead.cpu_time_ratio": "the same of the CPU time of this process, which busy neighbours disturb less",
}


def main(arguments: list[str]) -> None:
    parser = config_parser("bench_loop.py")
    parser.add_argument("--steps", type=Count, default=Count(50), help="Optimizer steps of each loop that are timed.")
    config = parser.read(arguments)
    stretch = min(config.steps, config.trainer.log_interval)
    turns = Turns(warmup=WARMUP, stretch=stretch, rounds=config.steps // stretch, checkpoints=3)
    trainer = fit_briefly(config, turns.steps, [turns], checkpoint_interval=turns.steps + 1)
    found = report(config, turns, trainer)
    ratio, cpu_ratio = overhead(turns.stretches, turns.plain)
    found["plain"] = {
        "ms_per_step": statistics.median(turn.seconds for turn in turns.plain) / stretch * 1e3,
        "cpu_ms_per_step": statistics.median(turn.cpu_seconds for turn in turns.plain) / stretch * 1e3,
    }
    found["overhead"] = {"ratio": ratio, "cpu_time_ratio": cpu_ratio}
    found["formulas"] = {**found["formulas"], **FORMULAS}
    print(json.dumps(found, indent=1))


def overhead(lightning: list[Stretch], plain: list[Stretch]) -> tuple[float, float]:
    """How much longer Lightning's turns took, by the clock and in CPU time, as `FORMULAS` says.

    Args:
        lightning: its turns, n.
        plain: the turns before and after each, n + 1.
    """
    around = list(zip(plain, plain[1:], strict=False))
    ratios = (
        [turn[i] / ((before[i] + after[i]) / 2) - 1 for turn, (before, after) in zip(lightning, around, strict=True)]
        for i in range(len(Stretch._fields))
    )
    return tuple(statistics.median(ratio) for ratio in ratios)


class Turns(StepTimer):
    """Lets the plain loop take a turn before and after each of Lightning's."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.plain: list[Stretch] = []

    def between_stretches(self, trainer: Trainer, module: LanguageModule, step: int) -> None:
        if step > self.measured:
            super().between_stretches(trainer, module, step)
            return
        if step == self.warmup:
            self._loop = PlainLoop(trainer, module)
            self._loop.run(self.warmup)
        self.plain.append(self._loop.run(self.stretch))
        if step == self.measured:
            del self._loop  # and with it the thread that reads for it


class PlainLoop:
    """A training loop as one writes it by hand.

    It shares the decoder, the optimizer and the CUDA graph with Lightning's loop, so both do the same work in the same
    memory. Its batches come from a stream of its own.
    """

    def __init__(self, trainer: Trainer, module: LanguageModule) -> None:
        self.module = module
        self.step = module.step
        self.graphed = module.step.forward_backward if module.options.cuda_graphs else None
        self.device = module.device
        self.optimizer = trainer.optimizers[0]
        self.parameters = list(module.parameters())
        self.batches = iter(trainer.datamodule.train_dataloader())
        self.steps = trainer.steps
        self.largest_norm = trainer.run_state.clip
        # A CUDA graph has Lightning's in it.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scaler = scaler or torch.amp.GradScaler(self.device.type, enabled=False)

    def run(self, steps: int) -> Stretch:
        """Take optimizer steps and time them."""
        self.step.zero_grad()  # what Lightning's last step has left
        clock = Clock(self.device)
        for _ in range(steps):
            self._step()
        return clock.read()

    def _step(self) -> None:
        batch = next(self.batches)
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        batch = batch.to(self.device, non_blocking=True)
        for micro_batch in batch.split(self.steps.micro_batch_size):
            if self.graphed is None:
                self._forward_backward(micro_batch)
            else:
                self.graphed(micro_batch)
        if self.largest_norm:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.largest_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step.zero_grad()

    def _forward_backward(self, batch: Batch) -> None:
        total, per_token = self.module.losses(batch)  # (), (b, T)
        loss = total / per_token.numel() / self.steps.accumulate
        self.scaler.scale(loss).backward()


if __name__ == "__main__":
    main(sys.argv[1:])
