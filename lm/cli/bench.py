"""`lm bench step`: what a training step of a config takes on this machine, and what the loop around it adds.

A config becomes a training on random tokens. `Turns` does the timing, `report` says what was found, and `--modes` has
it done for each way to run a step.
"""

import json
import logging
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer as Backend
from tokenizers import models

from lm.cli.config import config_name, config_parser
from lm.data.datamodule import DataModule
from lm.data.loader import Batch
from lm.data.parquet import COLUMN, LAYOUT, ROW_GROUP_TOKENS, ShardWriter
from lm.data.tokenizer import END_OF_TEXT, Tokenizer
from lm.errors import Interrupted, RequestError, RunError
from lm.kernels.operations import choose_kernels
from lm.model.estimates import Step, parameters, training_memory
from lm.system.arguments import spell_out
from lm.system.files import write_atomically
from lm.system.hardware import device_name, peak_flops
from lm.system.process import run_facts
from lm.system.units import Count, format_bytes, format_count
from lm.training.callbacks.checkpoints import Checkpoints
from lm.training.callbacks.evaluation import EvaluationConfig, SamplesConfig
from lm.training.callbacks.guards import not_training
from lm.training.callbacks.run_folder import RunFolder
from lm.training.callbacks.standard import standard_callbacks
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

# ---- step loops ------------------------------------------------------------------------------------------------------
# Lightning's loop and a plain one around the same model, in turns, so that their times can be compared.
#
# The whole of a batch's way is in both: stream, decoder, loss, backward pass, clipping, optimizer.


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
        self.graphed = module.graphed
        self.device = module.device
        self.optimizer = trainer.optimizers[0]
        self.parameters = list(module.parameters())
        self.batches = iter(trainer.datamodule.train_dataloader())
        self.steps = trainer.steps
        self.largest_norm = trainer.max_grad_norm
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
        """Take optimizer steps, waiting for the device after each part: `data` and `optimizer` of a step, `forward` and
        `backward` of a micro-batch, or `replay` where a CUDA graph does these two, in seconds."""
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
        batch = next(self.batches)
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        batch = batch.to(self.device, non_blocking=True)
        mark("data")
        for micro_batch in batch.split(self.steps.micro_batch_size):
            if self.graphed is None:
                self._forward_backward(micro_batch, mark)
            else:
                self.graphed(micro_batch.tokens)
                mark("replay")
        if self.largest_norm:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.largest_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._zero_grad()
        mark("optimizer")

    def _forward_backward(self, batch: Batch, mark: Callable[[str], None]) -> None:
        total, per_token = self.module.losses(batch)  # (), (b, T)
        loss = total / per_token.numel() / self.steps.accumulate
        mark("forward")
        self.scaler.scale(loss).backward()
        mark("backward")

    def _zero_grad(self) -> None:
        (self.graphed or self.optimizer).zero_grad()


class Turns(Callback):
    """Lets the two loops take turns while Lightning trains, and times each; then times some checkpoints.

    A stretch of Lightning's loop is timed from the end of this callback's hook to its next call, so everything that
    `lm fit` does for a step is in it.

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
        step = trainer.global_step
        if step == 1:
            alone = self._clock.read().seconds  # waits for the device, so that the age is that of the end, too
            self.first_step = FirstStep(process_age(), alone)
        if step < self.warmup:
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


# ---- step modes ------------------------------------------------------------------------------------------------------
# The ways in which a step can run, each measured by an `lm bench step` of its own and put side by side.
#
# A process of its own keeps apart what modes would share: compiled code, memory peaks, the time of the first step.

FORM = re.compile(r"(none|inductor|triton_free)(\+graphs)?(?:/(on|off))?")


class Mode(NamedTuple):
    """One way to run a step."""

    compile: str  # as `model.compile`
    cuda_graphs: bool
    kernels: str | None  # as `model.kernels`; None: as the config has it

    @classmethod
    def parse(cls, text: str) -> "Mode":
        """A mode as people write it: `triton_free`, `none+graphs`, `inductor+graphs/off`.

        Raises:
            RequestError: it is none.
        """
        match = FORM.fullmatch(text)
        if not match:
            raise RequestError(
                f"no mode {text!r}: write none, inductor or triton_free, then +graphs if CUDA graphs are wanted, then "
                f"/on or /off for our kernels; or `all`: {' '.join(map(str, ALL))}"
            )
        return cls(match[1], bool(match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.compile}{'+graphs' * self.cuda_graphs}{f'/{self.kernels}' if self.kernels else ''}"

    @property
    def options(self) -> list[str]:
        """The same as options of a training."""
        kernels = ["--model.kernels", self.kernels] if self.kernels else []
        return ["--model.compile", self.compile, "--model.cuda_graphs", str(self.cuda_graphs).lower(), *kernels]


ALL = [Mode(compile, graphs, None) for graphs in (False, True) for compile in ("none", "triton_free", "inductor")]
ALL += [Mode(compile, False, "off") for compile in ("none", "inductor")]  # what our kernels are worth


def parse_modes(names: list[str]) -> list[Mode]:
    """The modes that a command line names, each once, in its order.

    Raises:
        RequestError: one of the names is no mode.
    """
    modes = [mode for name in names for mode in (ALL if name == "all" else [Mode.parse(name)])]
    return list(dict.fromkeys(modes))


def measure_modes(modes: list[Mode], arguments: list[str], output: Path | None) -> dict[str, Any]:
    """Measure each mode in a process of its own.

    Args:
        modes: to be measured, in this order.
        arguments: of `lm bench step`, without those about modes and output.
        output: file that has what is known so far after each of them, so that a run that is killed leaves it.

    Returns:
        What `lm bench step` says of each, under `modes` by name; where a mode cannot run, why, as `unavailable`.

    Raises:
        RequestError: no mode can run, because the request is wrong.
        RunError: no mode ran to its end.
    """
    found: dict[str, Any] = {}
    for mode in modes:
        with tempfile.TemporaryDirectory(prefix="lm-bench-") as folder:
            own = Path(folder) / "step.json"
            command = [sys.executable, "-m", "lm", "bench", "step", *arguments, *mode.options, "--output", str(own)]
            ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if ended.returncode == 0:
                found[str(mode)] = json.loads(own.read_text())
            else:
                reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
                found[str(mode)] = {"unavailable": reason.removeprefix("lm bench: ")}
        if output:
            write_atomically(output, json.dumps({"modes": found}, indent=2) + "\n")
    if all("unavailable" in result for result in found.values()):
        kind = RequestError if ended.returncode == RequestError.exit_code else RunError
        raise kind("; ".join(f"{name}: {result['unavailable']}" for name, result in found.items()))
    return {"modes": found}


def show_modes(found: dict[str, Any]) -> None:
    """The modes as a table on standard output; ratios are to the first that could run."""
    measured = {name: result for name, result in found["modes"].items() if "unavailable" not in result}
    first = next(iter(measured.values()))
    title = f"{first['config']}, {first['micro_batch_size']} x {first['seq_len']} tokens, {first['device']}"
    ratio = f"to {next(iter(measured))}"
    table = Table("mode", "ms a step", "tokens/s", ratio, "MFU", "peak MiB", "first step s", title=title)
    for name, result in found["modes"].items():
        if "unavailable" in result:
            continue
        loop, memory = result["lightning"], result["peak_memory_bytes"]
        mfu = "unknown" if loop["mfu"] is None else f"{loop['mfu']:.1%}"
        since_start = result["first_step_s"]
        table.add_row(
            name, f"{loop['ms_per_step']:.2f}", format_count(loop["tokens_per_second"]),
            f"{loop['tokens_per_second'] / first['lightning']['tokens_per_second']:.3f}x", mfu,
            "unknown" if memory is None else f"{memory / 2**20:,.0f}",
            "unknown" if since_start is None else f"{since_start:.1f}",
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    for name, result in found["modes"].items():
        if "unavailable" in result:
            console.print(f"{name} is unavailable: {result['unavailable']}")


# ---- step report -----------------------------------------------------------------------------------------------------
# What `lm bench step` found, as one JSON object and as tables.

FORMULAS = {
    "overhead.ratio": "median over Lightning's turns: seconds / mean seconds of the plain turns before and after - 1",
    "overhead.cpu_time_ratio": "the same of the CPU time of this process, which busy neighbours disturb less",
    "mfu": "flops_per_token x tokens_per_second / dense peak of the device in this precision",
    "flops_per_token": "6 x parameters without input embedding + 12 x heads x head_dim x mean attended length, summed "
    "over the layers",
    "checkpoint.stall_share": "stall_ms / (interval_steps x lightning.ms_per_step)",
    "first_step_s": "from the start of the process to the end of the first optimizer step",
    "first_step.warm_up_s": "the first step less a later one: compiling, loading kernels, first allocations",
}


def report(
    config: Namespace, turns: Turns, trainer: Trainer, module: LanguageModule, checkpoint_interval: int
) -> dict[str, Any]:
    """The JSON object: times in milliseconds, medians all."""
    steps = trainer.steps
    root_device = trainer.strategy.root_device
    device = device_name(root_device)
    peak = peak_flops(device, str(trainer.precision))
    micro_batches = turns.stretch * steps.accumulate

    def speed(turns: list[Stretch]) -> dict[str, Any]:
        micro_batch = statistics.median(turn.seconds for turn in turns) / micro_batches
        rate = steps.micro_batch_size * steps.seq_len / micro_batch
        return {
            "ms_per_micro_batch": micro_batch * 1e3,
            "ms_per_step": micro_batch * steps.accumulate * 1e3,
            "cpu_ms_per_micro_batch": statistics.median(turn.cpu_seconds for turn in turns) / micro_batches * 1e3,
            "tokens_per_second": rate,
            "mfu": rate * module.flops_per_token / peak if peak else None,
        }

    loops = {"lightning": speed(turns.lightning), "plain": speed(turns.plain)}
    ratio, cpu_ratio = overhead(turns.lightning, turns.plain)
    median = {part: statistics.median(seconds) * 1e3 for part, seconds in turns.parts.items()}
    stall = statistics.median(saving.stall_seconds for saving in turns.savings) * 1e3
    facts = run_facts()
    return {
        "config": config.run or config_name(config),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device,
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        "compile": module.compile_mode,
        "kernels": choose_kernels(module.kernels, root_device)[1],
        "cuda_graphs": module.cuda_graphs,
        "attention": module.attention_kernels,
        "python": facts["python"],
        "versions": facts["versions"],
        "parameters": parameters(module.config)["total"],
        "vocab_size": module.config.vocab_size,
        "seq_len": steps.seq_len,
        "micro_batch_size": steps.micro_batch_size,
        "accumulate": steps.accumulate,
        "tokens_per_step": steps.tokens_per_step,
        "turns": len(turns.lightning),
        "steps_per_turn": turns.stretch,
        **loops,
        "overhead": {
            "ratio": ratio, "ms_per_micro_batch": ratio * loops["plain"]["ms_per_micro_batch"],
            "cpu_time_ratio": cpu_ratio,
        },
        "parts": {
            f"{part}_ms_per_{'step' if part in ('data', 'optimizer') else 'micro_batch'}": ms
            for part, ms in median.items()
        },
        "first_step_s": turns.first_step.seconds,
        "first_step": {
            "step_s": turns.first_step.step_seconds,
            "warm_up_s": turns.first_step.step_seconds - loops["lightning"]["ms_per_step"] / 1e3,
        },
        "peak_memory_bytes": turns.peak_bytes,
        "predicted_memory_bytes": predicted_memory(trainer, module),
        "checkpoint": {
            "stall_ms": stall,
            "total_ms": statistics.median(saving.total_seconds for saving in turns.savings) * 1e3,
            "bytes": turns.savings[-1].bytes,
            "interval_steps": checkpoint_interval,
            "stall_share": stall / (checkpoint_interval * loops["lightning"]["ms_per_step"]),
        },
        "flops_per_token": module.flops_per_token,
        "formulas": FORMULAS,
    }  # fmt: skip


def predicted_memory(trainer: Trainer, module: LanguageModule) -> int:
    """What `lm plan` expects of the peak; it counts tensors, so on a CPU the process itself comes on top."""
    steps = trainer.steps
    step = Step(
        steps.micro_batch_size, steps.seq_len, str(trainer.precision), module.decoder.fused is not None,
        module.compile_mode, steps.accumulate, module.cuda_graphs,
    )  # fmt: skip
    return training_memory(module.config, step, module.optimizer_config.state)["peak"]


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


def heading(found: dict[str, Any]) -> tuple[str, str]:
    """What was measured, and how it was computed: two lines."""
    return (
        f"{found['config']}: {format_count(found['parameters'])} parameters, {found['micro_batch_size']} x "
        f"{found['seq_len']} tokens x {found['accumulate']} micro-batches, {found['precision']}; {found['device']}, "
        f"{found['threads']} threads, torch {found['versions']['torch']}",
        f"compile: {found['compile']}{', CUDA graphs' * found['cuda_graphs']}; kernels: {found['kernels']}; "
        f"attention: {found['attention']}",
    )


def show(found: dict[str, Any]) -> None:
    """The report as tables on standard output."""
    console = Console(highlight=False)
    for line in heading(found):
        console.print(line)
    table = Table("loop", "ms a micro-batch", "ms a step", "tokens/s", "MFU")
    for name, title in (("lightning", "lm fit"), ("plain", "plain loop")):
        loop = found[name]
        mfu = "unknown" if loop["mfu"] is None else f"{loop['mfu']:.1%}"
        table.add_row(title, f"{loop['ms_per_micro_batch']:.2f}", f"{loop['ms_per_step']:.2f}",
                      format_count(loop["tokens_per_second"]), mfu)
    console.print(table)
    overhead, parts, checkpoint = found["overhead"], found["parts"], found["checkpoint"]
    memory = found["peak_memory_bytes"]
    console.print(
        f"overhead of the loop: {overhead['ratio']:+.1%}, {overhead['ms_per_micro_batch']:+.2f} ms a micro-batch "
        f"({overhead['cpu_time_ratio']:+.1%} in CPU time)"
    )
    of_micro_batch = ", ".join(
        f"{name.removesuffix('_ms_per_micro_batch')} {ms:.2f} ms"
        for name, ms in parts.items() if name.endswith("_ms_per_micro_batch")
    )  # fmt: skip
    console.print(
        f"a micro-batch: {of_micro_batch}; a step: data {parts['data_ms_per_step']:.2f} ms, clipping and optimizer "
        f"{parts['optimizer_ms_per_step']:.2f} ms"
    )
    since_start = found["first_step_s"]
    console.print(
        f"first step: {'unknown' if since_start is None else f'{since_start:.1f} s'} after the start of the process; "
        f"it took {found['first_step']['step_s']:.2f} s, {found['first_step']['warm_up_s']:.2f} s more than a later one"
    )
    predicted = format_bytes(found["predicted_memory_bytes"])
    measured = "unknown" if memory is None else format_bytes(memory)
    console.print(f"peak memory: {measured}; `lm plan` expects {predicted} of tensors")
    console.print(
        f"a checkpoint of {checkpoint['bytes'] / 2**20:,.1f} MiB: training waits {checkpoint['stall_ms']:.1f} ms "
        f"({checkpoint['stall_share']:.2%} of the time, every {checkpoint['interval_steps']} steps); on the disk after "
        f"{checkpoint['total_ms']:.0f} ms"
    )


# ---- bench step ------------------------------------------------------------------------------------------------------

WARMUP = 5  # optimizer steps: more than the micro-batches after which a CUDA graph is recorded
CHECKPOINTS = 3


def step(arguments: list[str]) -> None:
    """Time a training step: `lm bench step --config X [--steps N] [--modes M ...] [--json] [--output FILE]`.

    Args:
        arguments: what stands after `lm bench step`.

    Raises:
        RequestError: the config or the command line is wrong.
        RunError: a signal came before the end.
    """
    parser = config_parser("lm bench step")
    parser.description = "Time a training step of a config on one device, with random tokens, and its checkpoints."
    parser.add_argument(
        "--steps", type=Count, default=Count(50),
        help="Optimizer steps of each loop that are timed, in turns of trainer.log_interval steps: one log line each.",
    )  # fmt: skip
    parser.add_argument(
        "--modes", type=list[str], default=[],
        help="Ways to run a step, to be compared: none, inductor, triton_free, each also +graphs, each also /on or "
        "/off for our kernels; or all. Not given: as the config has it.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    parser.add_argument("--output", type=Path | None, default=None, help="File to write the JSON object to.")
    arguments = spell_out(arguments, lists=("modes",))
    config = parser.read(arguments)
    if config.steps < 1:
        raise RequestError(f"--steps {config.steps} must be at least 1")
    vocab_size = find_vocab_size(config)
    modes = parse_modes(config.modes)
    if modes:
        others = [argument for argument in arguments if not argument.startswith("--modes=")]
        found = measure_modes(modes, others, config.output)
    else:
        found = measure(config, vocab_size)
        if config.output:
            write_atomically(config.output, json.dumps(found, indent=2) + "\n")
    if config.json:
        print(json.dumps(found))
    else:
        (show_modes if modes else show)(found)


def find_vocab_size(config: Namespace) -> int:
    """The vocabulary that a training of this config would have.

    Raises:
        RequestError: the tokenizer that decides it is still to be made.
    """
    if config.model.decoder.vocab_size:
        return config.model.decoder.vocab_size
    data, prepare = config.data, config.data.prepare
    tokenizer = data.tokenizer or data.path
    if tokenizer and (Path(tokenizer).is_file() or (Path(tokenizer) / "tokenizer.json").exists()):
        return Tokenizer.load(tokenizer).vocab_size
    if prepare is not None and prepare.tokenizer == "bpe":
        return prepare.vocab_size
    if prepare is not None and prepare.tokenizer != "char":
        return Tokenizer.load(prepare.tokenizer).vocab_size
    raise RequestError(
        f"the vocabulary is not known before {tokenizer} is made: make it with `lm data prepare`, or give "
        "--model.decoder.vocab_size"
    )


# ---- a training to be timed ------------------------------------------------------------------------------------------


def measure(config: Namespace, vocab_size: int) -> dict[str, Any]:
    """Train on random tokens as `lm fit` would, on one device, and report the times.

    Args:
        config: as `ConfigParser.read` gives it.
        vocab_size: of the tokens.
    """
    stretch = min(config.steps, config.trainer.log_interval)
    turns = Turns(warmup=WARMUP, stretch=stretch, rounds=config.steps // stretch, checkpoints=CHECKPOINTS)
    interval = config.trainer.checkpoint_interval
    root = Path(config.trainer.default_root_dir)
    # Beside where the runs go, because a checkpoint is timed and the system's temporary folder may lie in memory.
    with tempfile.TemporaryDirectory(prefix=".lm-bench-", dir=root if root.is_dir() else ".") as folder:
        write_random_data(Path(folder) / "data", vocab_size, config.data)
        trainer, module = train(config, turns, Path(folder))
        return report(config, turns, trainer, module, interval)


def write_random_data(folder: Path, vocab_size: int, data: Namespace) -> None:
    """A prepared folder: a tokenizer of this size, and random tokens for two steps, which then come again."""
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
        "splits": {"train": {"shards": [shard]}},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))


def train(config: Namespace, turns: Turns, folder: Path) -> tuple[Trainer, LanguageModule]:
    """Fit on the random tokens with everything that `lm fit` has, and `turns` beside it.

    Raises:
        RunError: a signal came before the end.
    """
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning.fabric", "lm.training.callbacks.run_folder"):
        logging.getLogger(name).setLevel(logging.WARNING)
    lightning.seed_everything(config.seed_everything)
    sources = dict.fromkeys(("train", "val", "test", "tokenizer", "prepare")) | {"path": str(folder / "data")}
    # The random tokens are one row group, and that must fit.
    buffer = {"shuffle_buffer": max(config.data.shuffle_buffer, ROW_GROUP_TOKENS)}
    data = DataModule(**vars(config.data) | sources | buffer)
    # These few steps are not the run that the schedule is for, and its decay may not fit into them.
    schedule = replace(config.model.schedule, name="constant")
    module = LanguageModule(**vars(config.model) | {"schedule": schedule})
    request = vars(config.trainer) | {
        "max_steps": turns.steps, "max_tokens": None, "devices": 1, "num_nodes": 1,
        "checkpoint_interval": turns.steps + 1,  # those that are timed are all there are
        "default_root_dir": str(folder / "runs"),
    }  # fmt: skip
    callbacks = standard_callbacks(  # no samples and no tasks: there is no text that these tokens are
        request, RunFolder(None, "bench", ""), config.guards.harmless(), SamplesConfig(), EvaluationConfig()
    )
    trainer = Trainer(**request | {"callbacks": [*(request["callbacks"] or []), *callbacks, turns]})
    data.seed = config.seed_everything
    try:
        trainer.fit(module, data)
    except Interrupted as error:
        raise RunError("stopped by a signal before the measurement was done") from error
    return trainer, module
