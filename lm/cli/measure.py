"""`lm bench step` and `lm profile`: measure a training step of a config on this machine, as a whole and by part.

Both train a few steps with `fit_briefly`, as `lm fit` does, in a folder that is removed afterwards.
`StepTimer` times whole steps, then some checkpoints. `Parts` assigns the time of Lightning's profiler spans to the
parts of a step; it synchronizes the device after each part, so its steps are longer. On a GPU the parts are NVTX ranges
too, for NVIDIA's own tools: `nsys profile --trace cuda,nvtx python -m lm profile --config X`.
"""

import json
import logging
import re
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import torch.profiler
from lightning.pytorch import Callback
from lightning.pytorch.profilers import Profiler
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import models
from torch.autograd.profiler import record_function

from lm.cli.charts import plain_table
from lm.cli.classes_by_path import with_classes
from lm.cli.command_options import BenchOptions, ProfileOptions
from lm.cli.fit import quiet_lightning
from lm.cli.hours import options_of_length, steps_of_hours, validation_tokens
from lm.cli.plan_facts import find_tokenizer, with_vocabulary
from lm.cli.request import Request
from lm.data.config import DataConfig
from lm.data.datamodule import DataModule
from lm.data.parquet import COLUMN
from lm.data.shard_writer import ROW_GROUP_TOKENS, ShardWriter
from lm.data.tokenizer import END_OF_TEXT, Tokenizer
from lm.errors import Interrupted, RequestError, RunError, require_at_least
from lm.kernels.linear import adds_in_place
from lm.model.estimates import describe_mfu
from lm.model.memory import training_memory
from lm.system.files import check_local_path, write_atomically
from lm.system.hardware import device_name
from lm.system.output_folder import folder_bytes
from lm.system.process import run_facts, seconds_since_process_start
from lm.system.units import format_bytes, format_count, plural
from lm.training.callback import not_training
from lm.training.callbacks.run_folder import RunFolder
from lm.training.callbacks.standard import standard_callbacks
from lm.training.config import DistributedConfig, TrainerConfig, sections_of_callbacks
from lm.training.module import LanguageModule, training_class
from lm.training.optim import state_size
from lm.training.out_of_memory import step_of
from lm.training.trainer import Trainer
from lm.training.world import srun_world, torchrun_world

log = logging.getLogger(__name__)
WARMUP = 5  # optimizer steps
TRACED = 3  # optimizer steps
# The last part of a span's name -> the part of a step. Spans nest: `training_step` is a whole optimizer step, with the
# micro-batches in it. Other spans belong to the part around them. Time outside all spans is `rest`: the
# loop's own work.
SPANS = {
    "train_dataloader_next": "data",
    "batch_to_device": "data",
    "training_step": "optimizer",
    "forward": "forward",
    "backward": "backward",
}
TITLES = {
    "data": "waiting for data", "forward": "forward pass", "backward": "backward pass",
    "optimizer": "clipping and optimizer", "callbacks": "log lines and other callbacks", "rest": "the rest of the loop",
}  # fmt: skip
CALLBACK = "[Callback]"  # begins the names that Lightning gives to callbacks' spans


def bench_step(config: Request[BenchOptions]) -> None:
    """Time a training step: `lm bench step --config X [--steps N] [--checkpoints N] [--json] [--output FILE]`."""
    options = config.options
    require_at_least(1, "--", steps=options.steps)
    require_at_least(0, "--", checkpoints=options.checkpoints)
    check_local_path("--output", options.output or "")
    validated = 0 if options.hours is None else validation_tokens(config)  # before the measurement, which takes time
    steps = min(options.steps, config.trainer.log_interval)
    timer = StepTimer(steps_per_round=steps, rounds=options.steps // steps, checkpoints=options.checkpoints)
    # The checkpoints that the timer takes are the only ones.
    trainer = fit_briefly(config, timer.steps, [timer], checkpoint_interval=timer.steps + 1)
    if not trainer.is_global_zero:
        return
    found = describe_times(config, timer, trainer)
    if options.output:
        write_atomically(options.output, json.dumps(found, indent=2) + "\n")
    if options.hours is not None:
        length = options_of_length(config, steps_of_hours(config, options.hours, found, validated))
        print(" ".join(f"--{option} {value}" for option, value in length.items()))
    elif options.json:
        print(json.dumps(found))
    else:
        show_times(found)


def profile(config: Request[ProfileOptions]) -> None:
    """Show where the time of a training step goes: `lm profile --config X [--steps N] [--trace FILE] [--json]`.

    It trains on the config's data or, if that does not exist yet, on random tokens.
    """
    options = config.options
    require_at_least(1, "--", steps=options.steps)
    check_local_path("--trace", options.trace or "")
    if options.trace and (not Path(options.trace).absolute().parent.is_dir() or Path(options.trace).is_dir()):
        raise RequestError(f"--trace {options.trace}: give a file in a folder that is there")
    ends = WARMUP + options.steps
    tracer = torch.profiler.profile() if options.trace else None
    last = 1 + ends + (TRACED if tracer else 0)
    parts = Parts(tracer, ends)
    own_data = config.data.path is None or (Path(config.data.path) / "manifest.json").exists()
    validated = config.data.micro_batch_size * config.data.seq_len  # at the end; it is not timed
    config = replace(config, data=replace(config.data, val_tokens=validated))
    trainer = fit_briefly(
        config, last, own_data=own_data, profiler=parts, val_interval=last, checkpoint_interval=last + 1
    )
    if not trainer.is_global_zero:
        return
    if tracer:
        tracer.export_chrome_trace(options.trace)
    found = describe_parts(config, parts.steps[WARMUP:ends], trainer, own_data)
    if options.json:
        print(json.dumps(found))
        return
    show_parts(found)
    if tracer:
        device = "cpu" if torch.accelerator.current_accelerator() is None else "device"
        order = f"self_{device}_time_total"
        print(tracer.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=40))
        print(f"trace: {options.trace}, for https://ui.perfetto.dev or chrome://tracing")


# ---- the training that is measured -----------------------------------------------------------------------------------


def fit_briefly(
    config: Request,
    steps: int,
    callbacks: Sequence[Callback] = (),
    own_data: bool = False,
    **options: Any,
) -> Trainer:
    """Train for a few steps as `lm fit` does, and return the Trainer; all files are removed.

    It runs on one device, or on those of the processes that torchrun or srun started. Guards take no action; there
    are no samples and no evaluations. The schedule is constant, since the configured one is for a longer run.

    `own_data`: train on the config's data, which must exist, instead of random tokens. `options` replace Trainer
    options of the config.
    """
    quiet_lightning()
    config = with_classes(config)
    logging.getLogger("lm.training.callbacks.run_folder").setLevel(logging.WARNING)
    lightning.seed_everything(config.seed_everything)
    root = Path(config.trainer.default_root_dir)
    # Beside the runs: a checkpoint is timed, and the system's temporary folder may lie in memory.
    with tempfile.TemporaryDirectory(prefix=".lm-bench-", dir=root if root.is_dir() else ".") as folder:
        data_options = dict(vars(config.data))
        if not own_data:
            data_options |= dict.fromkeys(("path", "val", "test", "sources", "phases", "prepare", "packing"))
            data_options |= write_random_data(Path(folder), find_vocab_size(config), config.data)
            data_options["shuffle_buffer"] = max(config.data.shuffle_buffer, ROW_GROUP_TOKENS)  # one row group fits
        data = DataModule(**data_options)
        data.set_position(seed=config.seed_everything)
        constant = replace(config.model.schedule, name="constant")
        module = training_class()(**vars(config.model) | config.custom_arguments | {"schedule": constant})
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
        own = [*(request["callbacks"] or []), *standard, *callbacks, OnlySteps()]
        trainer = Trainer(**request | {"callbacks": own})
        if isinstance(trainer.profiler, Parts):
            trainer.profiler.trainer = trainer
        try:
            trainer.fit(module, data)
        except Interrupted as error:
            raise RunError("stopped by a signal before the measurement was done") from error
    return trainer


class OnlySteps(Callback):
    """Keeps what is not a step out of the measured ones: the reservation of memory for checkpoints ends before them,
    and no checkpoint is written after the last validation or at the end."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LanguageModule, *args: Any) -> None:
        if trainer.global_step < WARMUP:
            trainer.checkpoint_io.drain()

    def on_validation_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        trainer.checkpoint_callback.saved_step = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self.on_validation_end(trainer, pl_module)


def find_vocab_size(config: Request) -> int:
    """The vocabulary size of this config; RequestError if it depends on a tokenizer that does not exist yet."""
    decoder = with_vocabulary(config, None if config.model.decoder.vocab_size else find_tokenizer(config.data))
    if decoder is None:
        raise RequestError(
            f"the vocabulary is not known before {config.data.path} is made: make it with `lm data prepare`, or give "
            "--model.decoder.vocab_size"
        )
    return decoder.vocab_size  # pyright: ignore[reportReturnType]


def write_random_data(folder: Path, vocab_size: int, data: DataConfig) -> dict[str, str]:
    """Write a tokenizer of `vocab_size` tokens, and random tokens for two steps, which repeat.

    Returns the options of `data` that read them.
    """
    backend = Backend(models.BPE(vocab={END_OF_TEXT: 0} | {f"t{i}": i for i in range(1, vocab_size)}, merges=[]))
    backend.add_special_tokens([END_OF_TEXT])
    tokenizer = Tokenizer(backend.to_str())
    (folder / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
    window = data.seq_len + 1
    count = 2 * max(data.global_batch_tokens or 0, data.micro_batch_size * window) + window
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    ids = np.random.default_rng(0).integers(vocab_size, size=count, dtype=dtype)
    writer = ShardWriter(folder / "random.parquet", dtype, tokenizer.sha256)
    writer.write(ids, np.array([count]))
    writer.close()
    return {"train": f"{folder}/random.parquet", "tokenizer": f"{folder}/tokenizer.json", "column": COLUMN}


# ---- whole steps -----------------------------------------------------------------------------------------------------


def now(device: torch.device) -> float:
    """Synchronize the device, and return the time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


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


# ---- parts of a step -------------------------------------------------------------------------------------------------


class Parts(Profiler):
    """Lightning profiler that sums the seconds of each part of every step; a callback is a part with its span's name.

    It synchronizes the device between parts; otherwise the device's work would count for a later part. With a
    `tracer`, it traces `TRACED` steps after step `begin`.
    """

    trainer: Trainer

    def __init__(self, tracer: torch.profiler.profile | None, begin: int) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []  # of each finished step, seconds by part
        self._tracer, self._begin = tracer, begin
        self._tracing = False
        self._spans: list[tuple[str, ExitStack]] = []  # those that are open with their marks, outermost first
        self._now = "rest"
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    def start(self, action_name: str) -> None:
        hook = action_name.rpartition(".")[2]
        if hook in ("train_dataloader_next", "on_train_epoch_end"):
            self._end_step()
        part, marks = self._now, ExitStack()
        if not part.startswith(CALLBACK):  # spans inside a callback's span belong to that callback
            callback = re.match(re.escape(CALLBACK) + r"\w+", action_name)
            part = callback[0] if callback else SPANS.get(hook, part)
        if part != self._now and self._tracing:
            marks.enter_context(record_function(f"lm.{part}"))
        if part != self._now and self.trainer.strategy.root_device.type == "cuda":
            marks.enter_context(torch.cuda.nvtx.range(f"lm.{part}"))
        self._spans.append((part, marks))
        self._enter(part)

    def stop(self, action_name: str) -> None:
        _, marks = self._spans.pop()
        self._enter(self._spans[-1][0] if self._spans else "rest")
        marks.close()

    def _enter(self, part: str) -> None:
        """Count the time since the last change of part; what follows counts for `part`."""
        if part != self._now:
            self._count()
            self._now = part

    def _count(self) -> None:
        moment = now(self.trainer.strategy.root_device)
        self._seconds[self._now] += moment - self._since
        self._since = moment

    def _end_step(self) -> None:
        if self.trainer.global_step <= len(self.steps):
            return
        self._count()
        self.steps.append(dict(self._seconds))
        self._seconds.clear()
        if self._tracer is not None and len(self.steps) == self._begin:
            self._tracer.start()
            self._tracing = True
        elif self._tracer is not None and len(self.steps) == self._begin + TRACED:
            self._tracer.stop()
            self._tracing = False
        self._since = time.perf_counter()


# ---- reports ---------------------------------------------------------------------------------------------------------


def describe_training(config: Request, trainer: Trainer) -> dict[str, Any]:
    """The model, device, software and options of the measured training."""
    module, device, facts = trainer.lightning_module, trainer.strategy.root_device, run_facts()
    counts = ("seq_len", "micro_batch_size", "accumulate", "tokens_per_step")
    return {
        "config": config.run_name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device_name(device),
        "accelerator": device.type,
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        "ranks": trainer.world_size,
        "strategy": trainer.options.strategy if trainer.world_size > 1 else None,
        **{name: getattr(module.options, name) for name in ("compile", "activation_checkpointing")},
        **{name: getattr(module.built, name) for name in ("kernels", "attention")},
        "torch_adds_in_place": adds_in_place(torch.bfloat16, device) if device.type == "cuda" else None,
        **{name: facts[name] for name in ("python", "versions")},
        "parameters": sum(weight.numel() for weight in module.decoder.parameters()),
        "vocab_size": module.config.vocab_size,
        **{name: getattr(trainer.steps, name) for name in counts},
    }


def print_heading(console: Console, found: dict[str, Any]) -> None:
    console.print(
        f"{found['config']}: {format_count(found['parameters'])} parameters, {found['micro_batch_size']} x "
        f"{found['seq_len']} tokens x {plural(found['accumulate'], 'micro-batch')} x {plural(found['ranks'], 'rank')}, "
        f"{found['precision']}; {found['device']}, {plural(found['threads'], 'thread')}, "
        f"torch {found['versions']['torch']}"
    )
    console.print(
        f"compile: {found['compile']}; activation checkpointing: {found['activation_checkpointing']}; "
        f"kernels: {found['kernels']}; attention: {found['attention']}"
    )


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


def show_times(found: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    print_heading(console, found)
    checkpoint, memory = found["checkpoint"], found["peak_memory_bytes"]
    console.print(
        f"a step: {found['ms_per_step']:.2f} ms, {found['ms_per_micro_batch']:.2f} ms a micro-batch; "
        f"{format_count(found['tokens_per_second'])} tokens/s"
    )
    console.print(f"MFU: {describe_mfu(found['mfu'], found['mfu_full_attention'])}")
    optimizer = found["optimizer"]
    console.print(f"the optimizer: {optimizer['ms_per_step']:.2f} ms, {optimizer['share']:.1%} of a step")
    console.print(f"first step: done {found['first_step_s']:.1f} s after the start of the process")
    measured = "unknown" if memory is None else format_bytes(memory)
    of = "the whole process" if found["accelerator"] == "cpu" else "tensors"
    console.print(f"peak memory of {of}: {measured}; `lm plan` expects "
                  f"{format_bytes(found['predicted_memory_bytes'])} of tensors, without its reserve")  # fmt: skip
    if checkpoint is None:
        return
    console.print(
        f"a checkpoint of {format_bytes(checkpoint['bytes'])}: training waits {checkpoint['stall_ms']:.1f} ms "
        f"({checkpoint['stall_share']:.2%} of the time, every {checkpoint['interval_steps']} steps), for the first "
        f"{checkpoint['first_stall_ms']:.1f} ms; on the disk after {checkpoint['total_ms']:.0f} ms"
    )


def describe_parts(
    config: Request[ProfileOptions], steps: list[dict[str, float]], trainer: Trainer, own_data: bool
) -> dict[str, Any]:
    """What `lm profile --json` prints; `steps` has the seconds by part of each timed step."""
    mean = {name: statistics.mean(step.get(name, 0.0) for step in steps) * 1e3 for name in set().union(*steps)}
    callbacks = {name.removeprefix(CALLBACK): ms for name, ms in mean.items() if name.startswith(CALLBACK)}
    whole = sum(mean.values())
    by_part = {part: sum(callbacks.values()) if part == "callbacks" else mean.get(part, 0.0) for part in TITLES}
    return {
        **describe_training(config, trainer),
        "data": "the config's" if own_data else "random tokens, as the config's is not made yet",
        "steps": config.options.steps,
        "log_interval": config.trainer.log_interval,
        "ms_per_step": whole,
        "parts": {part: {"ms_per_step": ms, "share": ms / whole} for part, ms in by_part.items()},
        "callbacks": dict(sorted(callbacks.items(), key=lambda item: -item[1])),
        "trace": config.options.trace,
    }


def show_parts(found: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    print_heading(console, found)
    console.print(f"data: {found['data']}")
    rows = []
    for name, part in found["parts"].items():
        rows.append([TITLES[name], f"{part['ms_per_step']:.2f}", f"{part['share']:.1%}"])
    rows.append(["all of them", f"{found['ms_per_step']:.2f}", "100.0%"])
    console.print(plain_table(("part of a step", "ms", "share"), "tnn", rows))
    slowest = ", ".join(f"{name} {ms:.2f} ms" for name, ms in list(found["callbacks"].items())[:3])
    rate = format_count(found["tokens_per_step"] / found["ms_per_step"] * 1e3)
    console.print(f"mean of {found['steps']} steps, a log line every {found['log_interval']}: {rate} tokens/s")
    console.print(f"the slowest callbacks, a step: {slowest}")
    if found["accelerator"] == "cpu":
        console.print("other work on this CPU changes the milliseconds; the shares are more reliable")
    else:
        console.print("the device was waited for after each part, which takes time: `lm bench step` times whole steps")
