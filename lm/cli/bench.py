"""`lm bench step`: what a training step of a config takes on this machine, and what a checkpoint costs.

`fit_briefly` is the training that `lm bench step` and `lm profile` measure: everything that `lm fit` has, for a few
steps, in a folder that is removed afterwards.
"""

import json
import logging
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import models

from lm.cli.config import config_name, config_parser
from lm.cli.options import BenchOptions
from lm.cli.plan_facts import find_tokenizer, with_vocabulary
from lm.cli.runs import folder_bytes
from lm.data.datamodule import DataModule
from lm.data.parquet import COLUMN, LAYOUT, ROW_GROUP_TOKENS, ShardWriter
from lm.data.tokenizer import END_OF_TEXT, Tokenizer
from lm.errors import Interrupted, RequestError, RunError, require_at_least
from lm.model.estimates import describe_mfu, flops_per_token, training_memory
from lm.system.files import refuse_url, write_atomically
from lm.system.hardware import device_name
from lm.system.process import run_facts, seconds_since_process_start
from lm.system.units import format_bytes, format_count, plural
from lm.training.callbacks.guards import not_training
from lm.training.callbacks.run_folder import RunFolder
from lm.training.callbacks.standard import standard_callbacks
from lm.training.config import DistributedConfig, TrainerConfig, sections_of_callbacks
from lm.training.distributed import srun_world, torchrun_world
from lm.training.module import LanguageModule, training_class
from lm.training.optim import state_size
from lm.training.out_of_memory import step_of
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)
WARMUP = 5  # optimizer steps: more than the micro-batches after which a CUDA graph is recorded
FORMULAS = {
    "mfu": "flops_per_token x tokens_per_second / dense peak of the device in this precision",
    "mfu_full_attention": "the same with flops_per_token_full_attention, as nanochat and the PaLM paper count",
    "flops_per_token": "6 x parameters without input embedding + 12 x heads x head_dim x mean attended length, summed "
    "over the layers",
    "flops_per_token_full_attention": "the same with the whole sequence or window in place of the attended length",
    "optimizer.ms_per_step": "median over the timed steps of the time inside the optimizer's step(), on the device",
    "optimizer.share": "optimizer.ms_per_step / ms_per_step",
    "checkpoint.stall_share": "stall_ms / (interval_steps x ms_per_step)",
    "first_step_s": "from the start of the process to the end of the first optimizer step",
    "first_step.warm_up_s": "the first step less a later one: compiling, loading kernels, first allocations",
}


def step(arguments: list[str]) -> None:
    """Time a training step: `lm bench step --config X [--steps N] [--checkpoints N] [--json] [--output FILE]`.

    It is a step of one device, or of the processes that torchrun started.

    Args:
        arguments: what stands after `lm bench step`.

    Raises:
        RequestError: the config or the command line is wrong.
        RunError: a signal came before the end.
    """
    config = config_parser("lm bench step", BenchOptions).read(arguments)
    require_at_least(1, "--", steps=config.steps)
    require_at_least(0, "--", checkpoints=config.checkpoints)
    refuse_url("--output", config.output or "")
    stretch = min(config.steps, config.trainer.log_interval)
    timer = StepTimer(warmup=WARMUP, stretch=stretch, rounds=config.steps // stretch, checkpoints=config.checkpoints)
    # The checkpoints that the timer takes are the only ones.
    trainer = fit_briefly(config, timer.steps, [timer], checkpoint_interval=timer.steps + 1)
    if not trainer.is_global_zero:
        return
    found = report(config, timer, trainer)
    if config.output:
        write_atomically(config.output, json.dumps(found, indent=2) + "\n")
    if config.json:
        print(json.dumps(found))
    else:
        show_times(found)


# ---- the training that is measured -----------------------------------------------------------------------------------


def fit_briefly(
    config: Namespace,
    steps: int,
    callbacks: Sequence[Callback] = (),
    own_data: bool = False,
    watch: Callable[[Trainer, LanguageModule], None] = lambda trainer, module: None,
    **options: Any,
) -> Trainer:
    """Train for a few steps, with everything that `lm fit` does for a step, and leave nothing behind.

    It is on one device, or on those of the processes that torchrun or srun started.

    Guards watch and do nothing; there are no samples and no evaluations. The schedule is constant, since the
    configured one is for a longer run.

    Args:
        config: as `ConfigParser.read` gives it.
        steps: optimizer steps.
        callbacks: beside those of `lm fit` and of the config.
        own_data: train on the config's data, which must be there; else on random tokens.
        watch: called before the fit.
        options: of the Trainer, in place of the config's.

    Returns:
        The Trainer after its fit.

    Raises:
        RequestError: the config is wrong.
        RunError: a signal came before the end.
    """
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning.fabric", "lm.training.callbacks.run_folder"):
        logging.getLogger(name).setLevel(logging.WARNING)
    lightning.seed_everything(config.seed_everything)
    root = Path(config.trainer.default_root_dir)
    # Beside the runs: a checkpoint is timed, and the system's temporary folder may lie in memory.
    with tempfile.TemporaryDirectory(prefix=".lm-bench-", dir=root if root.is_dir() else ".") as folder:
        data_options = vars(config.data)
        if not own_data:
            write_random_data(Path(folder) / "data", find_vocab_size(config), config.data)
            others = ("train", "val", "test", "tokenizer", "sources", "phases", "prepare", "packing")
            data_options |= dict.fromkeys(others)
            data_options["path"] = str(Path(folder) / "data")
            data_options["shuffle_buffer"] = max(config.data.shuffle_buffer, ROW_GROUP_TOKENS)  # one row group fits
        data = DataModule(**data_options)
        data.set_position(seed=config.seed_everything)
        constant = replace(config.model.schedule, name="constant")
        module = training_class()(**vars(config.model) | {"schedule": constant})
        request = vars(config.trainer) | {
            "max_steps": steps, "max_tokens": None, "default_root_dir": str(Path(folder) / "runs"), "logger": None,
            **options,
        }  # fmt: skip
        if not (torchrun_world() or srun_world()):
            if str(config.trainer.devices) not in ("1", "auto") or config.trainer.num_nodes > 1:
                log.warning("one device is measured, whatever trainer.devices and trainer.num_nodes say: start this "
                            "with torchrun to measure several")  # fmt: skip
            request |= dict(devices=1, num_nodes=1, strategy="auto", distributed=DistributedConfig())
        run_folder = RunFolder(None, "bench", "", register=False)
        sections = sections_of_callbacks({"guards": config.guards.harmless()})
        standard = standard_callbacks(TrainerConfig(**request), run_folder, sections)
        trainer = Trainer(**request | {"callbacks": [*(request["callbacks"] or []), *standard, *callbacks]})
        watch(trainer, module)
        try:
            trainer.fit(module, data)
        except Interrupted as error:
            raise RunError("stopped by a signal before the measurement was done") from error
    return trainer


def find_vocab_size(config: Namespace) -> int:
    """The vocabulary that a training of this config would have.

    Raises:
        RequestError: the tokenizer that decides it is still to be made.
    """
    decoder = with_vocabulary(config, None if config.model.decoder.vocab_size else find_tokenizer(config.data))
    if decoder is None:
        raise RequestError(
            f"the vocabulary is not known before {config.data.path} is made: make it with `lm data prepare`, or give "
            "--model.decoder.vocab_size"
        )
    return decoder.vocab_size


def write_random_data(folder: Path, vocab_size: int, data: Namespace) -> None:
    """Make a prepared folder: a tokenizer of this size, and random tokens for two steps, which then repeat."""
    (folder / "train").mkdir(parents=True)
    backend = Backend(models.BPE(vocab={END_OF_TEXT: 0} | {f"t{i}": i for i in range(1, vocab_size)}, merges=[]))
    backend.add_special_tokens([END_OF_TEXT])
    tokenizer = Tokenizer(backend.to_str())
    (folder / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
    window = data.seq_len + 1
    count = 2 * max(data.global_batch_tokens or 0, data.micro_batch_size * window) + window
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    ids = np.random.default_rng(0).integers(vocab_size, size=count, dtype=dtype)
    writer = ShardWriter(folder / "train/00000.parquet", dtype, tokenizer.sha256)
    writer.write(ids, np.array([count]))
    shard = {"file": "train/00000.parquet", "size": writer.close(), "row_groups": writer.row_groups}
    manifest = {
        "layout": LAYOUT, "column": COLUMN, "tokenizer": tokenizer.sha256, "vocab_size": vocab_size,
        "splits": {"train": {"tokens": count, "shards": [shard]}},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))


def describe_training(config: Namespace, trainer: Trainer) -> dict[str, Any]:
    """What was trained, on what, and how it was computed."""
    steps, module, device = trainer.steps, trainer.lightning_module, trainer.strategy.root_device
    facts = run_facts()
    return {
        "config": config.run or config_name(config),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device_name(device),
        "accelerator": device.type,
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        "ranks": trainer.world_size,
        "strategy": trainer.sharding if trainer.world_size > 1 else None,
        "compile": module.options.compile,
        "activation_checkpointing": module.options.activation_checkpointing,
        "kernels": module.built.kernels,
        "cuda_graphs": module.options.cuda_graphs,
        "attention": module.built.attention,
        "python": facts["python"],
        "versions": facts["versions"],
        "parameters": sum(weight.numel() for weight in module.decoder.parameters()),
        "vocab_size": module.config.vocab_size,
        "seq_len": steps.seq_len,
        "micro_batch_size": steps.micro_batch_size,
        "accumulate": steps.accumulate,
        "tokens_per_step": steps.tokens_per_step,
    }


def print_heading(console: Console, found: dict[str, Any]) -> None:
    """Print what `describe_training` found as two lines."""
    console.print(
        f"{found['config']}: {format_count(found['parameters'])} parameters, {found['micro_batch_size']} x "
        f"{found['seq_len']} tokens x {plural(found['accumulate'], 'micro-batch')} x {plural(found['ranks'], 'rank')}, "
        f"{found['precision']}; {found['device']}, {plural(found['threads'], 'thread')}, "
        f"torch {found['versions']['torch']}"
    )
    console.print(
        f"compile: {found['compile']}{', CUDA graphs' * found['cuda_graphs']}; activation checkpointing: "
        f"{found['activation_checkpointing']}; kernels: {found['kernels']}; attention: {found['attention']}"
    )


# ---- clocks ----------------------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """The time that some consecutive optimizer steps took."""

    seconds: float  # on the clock, with the device caught up at both ends
    cpu_seconds: float  # of all threads of this process


class Clock:
    """A stopwatch that waits for the device before it starts and before it is read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        synchronize(device)
        self._began = time.perf_counter(), time.process_time()

    def read(self) -> Stretch:
        """The time since the start."""
        synchronize(self._device)
        seconds, cpu_seconds = self._began
        return Stretch(time.perf_counter() - seconds, time.process_time() - cpu_seconds)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timestamp(device: torch.device) -> Any:
    """A moment: an event in the queue of a CUDA device, which nothing waits for; else seconds, the device caught up."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    synchronize(device)
    return time.perf_counter()


def seconds_between(begun: Any, ended: Any) -> float:
    """The time from one `timestamp` to a later one; waits for the device."""
    if isinstance(begun, float):
        return ended - begun
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that tensors have held on a GPU so far, or this process in main memory; None on other devices."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu":
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- the steps that are timed ----------------------------------------------------------------------------------------


class StepTimer(Callback):
    """Times stretches of optimizer steps, then some checkpoints.

    A stretch is timed from the end of this callback's hook to its next call, so everything that `lm fit` does for a
    step is in it.

    Args:
        warmup: optimizer steps before anything is timed.
        stretch: optimizer steps of a stretch.
        rounds: stretches.
        checkpoints: checkpoints to take afterwards, one a step.

    Attributes:
        stretches: their times.
        optimizer_steps: seconds that the optimizer's `step` took in each timed step.
        savings: of each checkpoint the seconds that training waits, and those until it is whole on the disk.
        first_step: seconds of the first optimizer step, with all that is compiled and loaded in it.
        first_step_age: seconds from the start of the process to the end of that step.
        peak_bytes: most memory in use when the warm-up was over; None where it is not known.
        checkpoint_bytes: of the last checkpoint, if there is one.
    """

    def __init__(self, *, warmup: int, stretch: int, rounds: int, checkpoints: int) -> None:
        self.warmup, self.stretch = warmup, stretch
        self.measured = warmup + rounds * stretch
        self.steps = self.measured + checkpoints
        self.stretches: list[Stretch] = []
        self.optimizer_steps: list[float] = []
        self.savings: list[tuple[float, float]] = []
        self.first_step = self.first_step_age = 0.0
        self.peak_bytes: int | None = None
        self._optimizer_spans: list[tuple[Any, Any]] = []  # timestamps before and after, since the last stretch

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        optimizer, begun = pl_module.optimizers().optimizer, []  # torch's, inside Lightning's
        optimizer.register_step_pre_hook(lambda *_: begun.append(timestamp(pl_module.device)))
        optimizer.register_step_post_hook(
            lambda *_: self._optimizer_spans.append((begun.pop(), timestamp(pl_module.device))))  # fmt: skip
        self._clock = Clock(pl_module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LanguageModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == 1:
            self.first_step, self.first_step_age = self._clock.read().seconds, seconds_since_process_start()
        if step == self.warmup:
            self.peak_bytes = peak_memory(pl_module.device)
        if step < self.warmup or step <= self.measured and (step - self.warmup) % self.stretch:
            return
        if self.warmup < step <= self.measured:
            self.stretches.append(self._clock.read())
            self.optimizer_steps += [seconds_between(*span) for span in self._optimizer_spans]
        with not_training(trainer):  # so that the log lines stay true
            self.between_stretches(trainer, pl_module, step)
        self._optimizer_spans.clear()
        self._clock = Clock(pl_module.device)

    def between_stretches(self, trainer: Trainer, module: LanguageModule, step: int) -> None:
        """Do what is not timed as a step; called before, between and after the stretches."""
        if step > self.measured:
            clock = Clock(module.device)
            trainer.checkpoint_callback.save(trainer)
            stall = clock.read().seconds
            trainer.checkpoint_io.drain()
            self.savings.append((stall, clock.read().seconds))
            if trainer.is_global_zero:  # each rank has a folder of its own, and this one writes
                self.checkpoint_bytes = folder_bytes(trainer.run.checkpoint("last"))

    def on_train_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        trainer.checkpoint_callback.saved_step = trainer.global_step  # no other checkpoint than those that are timed


# ---- report ----------------------------------------------------------------------------------------------------------


def report(config: Namespace, timer: StepTimer, trainer: Trainer) -> dict[str, Any]:
    """The JSON object: times in milliseconds, medians all."""
    steps, module = trainer.steps, trainer.lightning_module
    facts = describe_training(config, trainer)
    peak = trainer.device_peak
    ms_per_step = statistics.median(stretch.seconds for stretch in timer.stretches) / timer.stretch * 1e3
    rate = steps.tokens_per_step / ms_per_step * 1e3
    flops = {full: flops_per_token(module.config, steps.seq_len, full_attention=full) for full in (False, True)}
    optimizer_ms = statistics.median(timer.optimizer_steps) * 1e3
    predicted = training_memory(module.config, step_of(trainer), state_size(module.options.optimizer))["peak"]
    return {
        **facts,
        "turns": len(timer.stretches),
        "steps_per_turn": timer.stretch,
        "ms_per_step": ms_per_step,
        "ms_per_micro_batch": ms_per_step / steps.accumulate,
        "cpu_ms_per_step": statistics.median(one.cpu_seconds for one in timer.stretches) / timer.stretch * 1e3,
        "tokens_per_second": rate,
        "mfu": rate * flops[False] / peak if peak else None,
        "mfu_full_attention": rate * flops[True] / peak if peak else None,
        "optimizer": {"ms_per_step": optimizer_ms, "share": optimizer_ms / ms_per_step},
        "first_step_s": timer.first_step_age,
        "first_step": {"step_s": timer.first_step, "warm_up_s": timer.first_step - ms_per_step / 1e3},
        "peak_memory_bytes": timer.peak_bytes,
        "predicted_memory_bytes": predicted,  # of tensors; on a CPU the process itself comes on top
        "checkpoint": checkpoint_cost(timer, config.trainer.checkpoint_interval, ms_per_step),
        "flops_per_token": flops[False],
        "flops_per_token_full_attention": flops[True],
        "formulas": FORMULAS,
    }


def checkpoint_cost(timer: StepTimer, interval: int, ms_per_step: float) -> dict[str, Any] | None:
    """What a checkpoint every `interval` steps costs; None if none was timed."""
    if not timer.savings:
        return None
    stall, total = (statistics.median(seconds) * 1e3 for seconds in zip(*timer.savings, strict=True))
    return {
        "stall_ms": stall,
        "total_ms": total,
        "bytes": timer.checkpoint_bytes,
        "interval_steps": interval,
        "stall_share": stall / (interval * ms_per_step),
    }


def show_times(found: dict[str, Any]) -> None:
    """Print the report."""
    console = Console(highlight=False, soft_wrap=True)
    print_heading(console, found)
    first, checkpoint, memory = found["first_step"], found["checkpoint"], found["peak_memory_bytes"]
    console.print(
        f"a step: {found['ms_per_step']:.2f} ms, {found['ms_per_micro_batch']:.2f} ms a micro-batch; "
        f"{format_count(found['tokens_per_second'])} tokens/s"
    )
    console.print(f"MFU: {describe_mfu(found['mfu'], found['mfu_full_attention'])}")
    optimizer = found["optimizer"]
    console.print(f"the optimizer: {optimizer['ms_per_step']:.2f} ms, {optimizer['share']:.1%} of a step")
    console.print(
        f"first step: {found['first_step_s']:.1f} s after the start of the process; it took {first['step_s']:.2f} s, "
        f"{first['warm_up_s']:.2f} s more than a later one"
    )
    measured = "unknown" if memory is None else format_bytes(memory)
    of = "the whole process" if found["accelerator"] == "cpu" else "tensors"
    console.print(f"peak memory of {of}: {measured}; `lm plan` expects "
                  f"{format_bytes(found['predicted_memory_bytes'])} of tensors, without its reserve")  # fmt: skip
    if checkpoint is None:
        return
    console.print(
        f"a checkpoint of {format_bytes(checkpoint['bytes'])}: training waits {checkpoint['stall_ms']:.1f} ms "
        f"({checkpoint['stall_share']:.2%} of the time, every {checkpoint['interval_steps']} steps); on the disk after "
        f"{checkpoint['total_ms']:.0f} ms"
    )
