"""What `lm bench step` found, as one JSON object and as tables.

`bench_step` runs the training, `step_loops` takes the times.
"""

import statistics
import time
from typing import Any

import torch
from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table

from lm.commands.step_loops import Stretch, Turns
from lm.config_file import config_name
from lm.hardware import device_name, peak_flops
from lm.kernels.operations import FUSED, choose
from lm.model.accounting import parameters
from lm.model.memory import Step, training_memory
from lm.module import LanguageModule
from lm.quantities import format_bytes, format_count
from lm.run_facts import run_facts
from lm.trainer import Trainer

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
        "kernels": choose(module.kernels, root_device)[1],
        "cuda_graphs": module.cuda_graphs,
        "attention": module.attention,
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
            f"{part}_ms_per_{'step' if part == 'optimizer' else 'micro_batch'}": ms for part, ms in median.items()
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
        steps.micro_batch_size, steps.seq_len, str(trainer.precision), module.decoder.operations is FUSED,
        module.compile_mode, steps.accumulate, module.cuda_graphs,
    )  # fmt: skip
    return training_memory(module.config, step, module.optimizer_config.name == "muon")["peak"]


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
        f"a micro-batch: {of_micro_batch}; a step: clipping and optimizer {parts['optimizer_ms_per_step']:.2f} ms"
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
