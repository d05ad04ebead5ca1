"""What `lm profile` found: the parts of a step from the times of many, as one JSON object and as tables."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from lm.commands.profile_parts import PARTS, Label, StepTimes
from lm.commands.step_report import heading
from lm.hardware import device_name
from lm.kernels.operations import choose
from lm.model.accounting import parameters
from lm.module import LanguageModule
from lm.quantities import format_count
from lm.run_facts import run_facts
from lm.trainer import Trainer

FORMULAS = {
    "parts": "mean over the middle half, by time, of the steps that no log line and no checkpoint follows, plus "
    "each_ms / interval_steps",
    "each_ms": "median over the steps where it happens, less that mean",
    "validation": "each_ms / interval_steps; of its batches some were run, and their time scaled to all",
    "ms_per_step": "the same of whole steps, by the clock",
    "share": "of the sum of all parts",
    "mean_ms_per_step": "of all timed steps as they were, with the log lines and checkpoints among them",
    "undisturbed_ms_per_step": "median of whole steps where the device is waited for only at their ends",
}
TITLES = {
    "data": "waiting for data", "forward": "forward pass", "backward": "backward pass",
    "optimizer": "clipping and optimizer", "logging": "log lines and other callbacks",
    "checkpoint": "waiting for checkpoints", "validation": "validation", "rest": "the rest of the loop",
}  # fmt: skip


def describe(trainer: Trainer, module: LanguageModule) -> dict[str, Any]:
    """What was run, and on what."""
    steps, device = trainer.steps, trainer.strategy.root_device
    facts = run_facts()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device_name(device),
        "accelerator": device.type,
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        "compile": module.compile_mode,
        "kernels": choose(module.kernels, device)[1],
        "cuda_graphs": module.cuda_graphs,
        "attention": module.attention,
        "python": facts["python"],
        "versions": facts["versions"],
        "parameters": parameters(module.config)["total"],
        "seq_len": steps.seq_len,
        "micro_batch_size": steps.micro_batch_size,
        "accumulate": steps.accumulate,
        "tokens_per_step": steps.tokens_per_step,
    }


def account(
    timed: list[StepTimes], validated: StepTimes, unseen: float, intervals: dict[str, int], log_interval: int
) -> dict[str, Any]:
    """The parts of a step, in milliseconds, as `FORMULAS` says.

    Args:
        timed: steps that no validation follows.
        validated: one that a validation follows, if there is validation data.
        unseen: how many times as long the batches of a whole validation take.
        intervals: optimizer steps between the log lines (`logging`), checkpoints and validations of the config.
        log_interval: and between the log lines among the timed steps.
    """
    happens: dict[str, Callable[[StepTimes], bool]] = {
        "logging": lambda times: times.step % log_interval == 0,
        "checkpoint": lambda times: times.saved,
    }
    usual = timed
    for event in happens.values():
        usual = [times for times in usual if not event(times)] or usual  # or it follows every step
    # Not medians: those of the parts would not add up to that of the whole.
    quarter = len(usual) // 4
    middle = sorted(usual, key=lambda times: times.whole)[quarter : len(usual) - quarter]
    parts = {part: {"ms_per_step": _mean(times.part(part) for times in middle)} for part in PARTS}
    whole = _mean(times.whole for times in middle)
    for part, event in happens.items():
        times_of_event = [times.part(part) * 1e3 for times in timed if event(times)]
        each = statistics.median(times_of_event) - parts[part]["ms_per_step"] if times_of_event else 0.0
        parts[part] |= {"each_ms": each, "interval_steps": intervals[part]}
        parts[part]["ms_per_step"] += each / intervals[part]
        whole += each / intervals[part]
    each = sum(seconds * (1 if label.callback else unseen) * 1e3
               for label, seconds in validated.seconds.items() if label.part == "validation")
    parts["validation"] = {
        "ms_per_step": each / intervals["validation"], "each_ms": each, "interval_steps": intervals["validation"],
    }  # fmt: skip
    whole += each / intervals["validation"]
    total = sum(part["ms_per_step"] for part in parts.values())
    for part in parts.values():
        part["share"] = part["ms_per_step"] / total
    return {
        "ms_per_step": whole, "sum_ms": total, "mean_ms_per_step": _mean(times.whole for times in timed),
        "parts": parts, "callbacks": _callbacks(timed),
    }  # fmt: skip


def _callbacks(timed: list[StepTimes]) -> dict[str, float]:
    """Mean milliseconds a step of each callback's hooks, the slowest first."""
    names = {label.callback for times in timed for label in times.seconds if label.part == "logging"}
    mean = {name: _mean(times.seconds.get(Label("logging", name), 0.0) for times in timed) for name in names}
    return dict(sorted(mean.items(), key=lambda item: -item[1]))


def _mean(seconds: Iterable[float]) -> float:
    """In milliseconds."""
    return statistics.mean(seconds) * 1e3


def show(found: dict[str, Any]) -> None:
    """The report as tables on standard output."""
    console = Console(highlight=False)
    measured, computed = heading(found)
    console.print(measured)
    console.print(f"{computed}; data: {found['data']}")
    table = Table("part of a step", "ms", "share", "each time", "every")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, part in found["parts"].items():
        title = TITLES[name]
        if found["cuda_graphs"] and name == "forward":
            title = "forward and backward pass, replayed"
        each = f"{part['each_ms']:.1f} ms" if part.get("each_ms") else ""
        every = f"{part['interval_steps']} steps" if part.get("each_ms") else ""
        table.add_row(title, f"{part['ms_per_step']:.2f}", f"{part['share']:.1%}", each, every)
    table.add_section()
    table.add_row("all of them", f"{found['sum_ms']:.2f}", "100.0%")
    console.print(table)
    rate = found["tokens_per_step"] / found["ms_per_step"] * 1e3
    slowest = ", ".join(f"{name} {ms:.2f} ms" for name, ms in list(found["callbacks"].items())[:3])
    console.print(f"a step by the clock: {found['ms_per_step']:.2f} ms, {format_count(rate)} tokens/s")
    console.print(f"the slowest callbacks, a step: {slowest}")
    if found["operators"]:
        _show_operators(console, found)
    if found["accelerator"] == "cpu":
        console.print("on a CPU that others use, too, the shares are what counts, not the milliseconds")
    else:
        console.print(
            "the device was waited for between the parts, so that each has its own work; without that a step takes "
            f"{found['undisturbed_ms_per_step']:.2f} ms"
        )


def _show_operators(console: Console, found: dict[str, Any]) -> None:
    where = "on the CPU" if found["accelerator"] == "cpu" else "on the device"
    table = Table(Column("operator", overflow="fold"), "calls a step", "ms a step", f"share {where}")
    for column in table.columns[1:]:
        column.justify = "right"
    for operator in found["operators"]:
        table.add_row(operator["name"], f"{operator['calls_per_step']:.0f}", f"{operator['ms_per_step']:.2f}",
                      f"{operator['share']:.1%}")  # fmt: skip
    console.print(table)
    console.print(f"trace: {found['trace']}, for https://ui.perfetto.dev or chrome://tracing")
