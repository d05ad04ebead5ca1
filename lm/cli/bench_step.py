"""`lm bench step`: the time of whole training steps on this machine, then of some checkpoints."""

import json
import resource
import statistics
import sys
from typing import Any

import torch
from lightning.pytorch import Callback
from rich.console import Console

from lm.cli.brief_fit import WARMUP, describe_training, fit_briefly, now, print_heading
from lm.cli.command_options import BenchOptions
from lm.cli.hours import options_of_length, steps_of_hours, validation_tokens
from lm.cli.request import Request
from lm.model.estimates import describe_mfu
from lm.model.memory import training_memory
from lm.system.files import check_local_path, folder_bytes, write_atomically
from lm.system.process import seconds_since_process_start
from lm.system.units import format_bytes, format_count
from lm.training.callback import not_training
from lm.training.module import LanguageModule
from lm.training.optim import state_size
from lm.training.out_of_memory import step_of
from lm.training.trainer import Trainer


def bench_step(config: Request[BenchOptions]) -> None:
    """Time a training step: `lm bench step --config X [--steps N] [--checkpoints N] [--json] [--output FILE]`."""
    options = config.command_options
    check_local_path("--output", options.output or "")
    validated = 0 if options.hours is None else validation_tokens(config)  # before the measurement, which takes time
    steps = min(options.steps, config.trainer.log_interval)
    timer = StepTimer(steps_per_round=steps, rounds=options.steps // steps, checkpoints=options.checkpoints)
    # The checkpoints that the timer saves are the only ones.
    trainer = fit_briefly(config, timer.steps, [timer], checkpoint_interval=timer.steps + 1)
    if not trainer.is_global_zero:
        return
    result = describe_times(config, timer, trainer)
    if options.output:
        write_atomically(options.output, json.dumps(result, indent=2) + "\n")
    if options.hours is not None:
        length = options_of_length(config, steps_of_hours(config, options.hours, result, validated))
        print(" ".join(f"--{option} {value}" for option, value in length.items()))
    elif options.json:
        print(json.dumps(result))
    else:
        show_times(result)


class StepTimer(Callback):
    """Times rounds of optimizer steps after the warm-up, then some checkpoints, one a step.

    A round is timed from the end of this callback's hook to a later call, so it includes all that `lm fit` does.
    """

    def __init__(self, *, steps_per_round: int, rounds: int, checkpoints: int) -> None:
        self.steps_per_round = steps_per_round
        self.measured = WARMUP + rounds * steps_per_round
        self.steps = self.measured + checkpoints
        self.seconds: list[float] = []  # of each round; the device is synchronized before and after it
        self.optimizer_seconds: list[float] = []  # of each timed step
        self.savings: list[tuple[float, float]] = []  # seconds that training waits, and until a checkpoint is on disk
        self.first_step_age = 0.0  # seconds from the start of the process to the end of the first step
        self.peak_bytes: int | None = None  # most memory in use during the warm-up
        self._optimizer_spans: list[tuple[Any, Any]] = []  # timestamps before and after, since the last round

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        device, optimizer, begun = pl_module.device, pl_module.optimizers().optimizer, []  # torch's, inside Lightning's

        def after(*_: Any) -> None:
            self._optimizer_spans.append((begun.pop(), timestamp(device)))
            if trainer.global_step < WARMUP and (bytes := peak_memory(device)) is not None:
                self.peak_bytes = max(self.peak_bytes or 0, bytes)  # log lines reset the device's peak

        optimizer.register_step_pre_hook(lambda *_: begun.append(timestamp(device)))
        optimizer.register_step_post_hook(after)
        self.computed = step_of(trainer)  # which reads the data
        self._began = now(device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LanguageModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, device = trainer.global_step, pl_module.device
        if step == 1:
            now(device)
            self.first_step_age = seconds_since_process_start()
        if step < WARMUP or step <= self.measured and (step - WARMUP) % self.steps_per_round:
            return
        if WARMUP < step <= self.measured:
            self.seconds.append(now(device) - self._began)
            self.optimizer_seconds += [seconds_between(*span) for span in self._optimizer_spans]
        if step > self.measured:
            with not_training(trainer):  # so that log lines do not count this time
                began = now(device)
                trainer.checkpoint_callback.save(trainer)
                stall = now(device) - began
                trainer.checkpoint_io.drain()
                self.savings.append((stall, now(device) - began))
            if trainer.is_global_zero:  # each rank has a folder of its own, and this one writes
                self.checkpoint_bytes = folder_bytes(trainer.run.checkpoint("last"))
        self._optimizer_spans.clear()
        self._began = now(device)


def timestamp(device: torch.device) -> Any:
    """The current time: on CUDA an event, without synchronizing; on other devices seconds, after synchronizing."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return now(device)


def seconds_between(begun: Any, ended: Any) -> float:
    """The time from one `timestamp` to a later one; waits for the device."""
    if isinstance(begun, float):
        return ended - begun
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3


def peak_memory(device: torch.device) -> int | None:
    """Peak bytes so far: of tensors on a GPU, of this process on a CPU; None on other devices."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu":
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def describe_times(config: Request, timer: StepTimer, trainer: Trainer) -> dict[str, Any]:
    """What `lm bench step --json` prints: medians of times, in milliseconds."""
    steps, module = trainer.steps, trainer.lightning_module
    peak = trainer.device_peak
    ms_per_step = statistics.median(timer.seconds) / timer.steps_per_round * 1e3
    rate = steps.tokens_per_step / ms_per_step * 1e3
    flops = {full: module.flops_per_token(full_attention=full) for full in (False, True)}
    optimizer_ms = statistics.median(timer.optimizer_seconds) * 1e3
    predicted = training_memory(module.config, timer.computed, state_size(module.options.optimizer))["peak"]
    return {
        **describe_training(config, trainer),
        "turns": len(timer.seconds),
        "steps_per_turn": timer.steps_per_round,
        "ms_per_step": ms_per_step,
        "ms_per_micro_batch": ms_per_step / steps.accumulate,
        "tokens_per_second": rate,
        "mfu": rate * flops[False] / peak if peak else None,
        "mfu_full_attention": rate * flops[True] / peak if peak else None,
        "optimizer": {"ms_per_step": optimizer_ms, "share": optimizer_ms / ms_per_step},
        "first_step_s": timer.first_step_age,
        "peak_memory_bytes": timer.peak_bytes,
        "predicted_memory_bytes": predicted,  # of tensors; on a CPU, the memory of the process itself is not included
        "checkpoint": checkpoint_cost(timer, config.trainer.checkpoint_interval, ms_per_step),
        "flops_per_token": flops[False],
        "flops_per_token_full_attention": flops[True],
    }


def checkpoint_cost(timer: StepTimer, interval: int, ms_per_step: float) -> dict[str, Any] | None:
    """Time, size and share of the time of a checkpoint every `interval` steps; None if none was timed.

    The first one is apart where there are others: it may have to wait for memory that the others find.
    """
    if not timer.savings:
        return None
    stall, total = (statistics.median(seconds) * 1e3 for seconds in zip(*timer.savings[1:] or timer.savings))
    return {
        "first_stall_ms": timer.savings[0][0] * 1e3,
        "stall_ms": stall,
        "total_ms": total,
        "bytes": timer.checkpoint_bytes,
        "interval_steps": interval,
        "stall_share": stall / (interval * ms_per_step),
    }


def show_times(result: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    print_heading(console, result)
    checkpoint, memory, optimizer = result["checkpoint"], result["peak_memory_bytes"], result["optimizer"]
    console.print(
        f"a step: {result['ms_per_step']:.2f} ms, {result['ms_per_micro_batch']:.2f} ms a micro-batch; "
        f"{format_count(result['tokens_per_second'])} tokens/s"
    )
    console.print(f"MFU: {describe_mfu(result['mfu'], result['mfu_full_attention'])}")
    console.print(f"the optimizer: {optimizer['ms_per_step']:.2f} ms, {optimizer['share']:.1%} of a step")
    console.print(f"first step: done {result['first_step_s']:.1f} s after the start of the process")
    peak = "unknown" if memory is None else format_bytes(memory)
    owner = "the whole process" if result["accelerator"] == "cpu" else "tensors"
    predicted = format_bytes(result["predicted_memory_bytes"])
    console.print(f"peak memory of {owner}: {peak}; `lm plan` expects {predicted} of tensors, without its reserve")
    if checkpoint is None:
        return
    console.print(
        f"a checkpoint of {format_bytes(checkpoint['bytes'])}: training waits {checkpoint['stall_ms']:.1f} ms "
        f"({checkpoint['stall_share']:.2%} of the time, every {checkpoint['interval_steps']} steps), for the first "
        f"{checkpoint['first_stall_ms']:.1f} ms; on the disk after {checkpoint['total_ms']:.0f} ms"
    )
