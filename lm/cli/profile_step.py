"""`lm profile`: where the time of a training step goes, by part."""

import json
import re
import statistics
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.profiler
from lightning.pytorch.profilers import Profiler
from rich.console import Console
from torch.autograd.profiler import record_function

from lm.cli.brief_fit import WARMUP, describe_training, fit_briefly, now, print_heading
from lm.cli.charts import plain_table
from lm.cli.command_options import ProfileOptions
from lm.cli.request import Request
from lm.system.files import check_local_path
from lm.system.units import format_count
from lm.training.trainer import Trainer

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
    "data": "waiting for data",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "clipping and optimizer",
    "callbacks": "log lines and other callbacks",
    "rest": "the rest of the loop",
}
CALLBACK = "[Callback]"  # begins the names that Lightning gives to callbacks' spans


def profile(config: Request[ProfileOptions]) -> None:
    """Show where the time of a training step goes: `lm profile --config X [--steps N] [--trace FILE] [--json]`.

    It trains on the config's data or, if that does not exist yet, on random tokens.
    """
    options = config.command_options
    check_local_path("--trace", options.trace or "")
    ends = WARMUP + options.steps
    tracer = torch.profiler.profile() if options.trace else None
    last = 1 + ends + (TRACED if tracer else 0)
    parts = Parts(tracer, ends)
    own_data = config.data.path is None or (Path(config.data.path) / "manifest.json").exists()
    validated = config.data.micro_batch_size * config.data.seq_len  # at the end; it is not timed
    config = replace(config, data=replace(config.data, val_tokens=validated))
    intervals = {"val_interval": last, "checkpoint_interval": last + 1}
    trainer = fit_briefly(config, last, own_data=own_data, profiler=parts, **intervals)
    if not trainer.is_global_zero:
        return
    if tracer:
        Path(options.trace).absolute().parent.mkdir(parents=True, exist_ok=True)
        tracer.export_chrome_trace(options.trace)
    result = describe_parts(config, parts.steps[WARMUP:ends], trainer, own_data)
    if options.json:
        print(json.dumps(result))
        return
    show_parts(result)
    if tracer:
        order = f"self_{'cpu' if torch.accelerator.current_accelerator() is None else 'device'}_time_total"
        print(tracer.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=40))
        print(f"trace: {options.trace}, for https://ui.perfetto.dev or chrome://tracing")


class Parts(Profiler):
    """Lightning profiler that sums the seconds of each part of every step; a callback is a part with its span's name.

    It synchronizes the device between parts, so its steps are longer than those of `lm bench step`; otherwise the
    device's work would count for a later part. With a `tracer`, it traces `TRACED` steps after step `begin`.
    """

    trainer: Trainer

    def __init__(self, tracer: torch.profiler.profile | None, begin: int) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []  # of each finished step, seconds by part
        self._tracer, self._begin = tracer, begin
        # Parts of the spans that are open with their marks in the trace, outermost first.
        self._spans: list[tuple[str, AbstractContextManager]] = [("rest", nullcontext())]
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    def start(self, action_name: str) -> None:
        hook = action_name.rpartition(".")[2]
        if hook in ("train_dataloader_next", "on_train_epoch_end"):
            self._end_step()
        part = around = self._spans[-1][0]
        if not around.startswith(CALLBACK):  # spans inside a callback's span belong to that callback
            callback = re.match(re.escape(CALLBACK) + r"\w+", action_name)
            part = callback[0] if callback else SPANS.get(hook, around)
        if part != around:
            self._count(around)
        mark = record_function(f"lm.{part}") if part != around and self._tracer else nullcontext()
        mark.__enter__()
        self._spans.append((part, mark))

    def stop(self, action_name: str) -> None:
        part, mark = self._spans.pop()
        if part != self._spans[-1][0]:
            self._count(part)
        mark.__exit__(None, None, None)

    def _count(self, part: str) -> None:
        """Count the time since the last change of part for `part`."""
        moment = now(self.trainer.strategy.root_device)
        self._seconds[part] += moment - self._since
        self._since = moment

    def _end_step(self) -> None:
        if self.trainer.global_step <= len(self.steps):
            return
        self._count(self._spans[-1][0])
        self.steps.append(dict(self._seconds))
        self._seconds.clear()
        if self._tracer is not None and len(self.steps) == self._begin:
            self._tracer.start()
        elif self._tracer is not None and len(self.steps) == self._begin + TRACED:
            self._tracer.stop()
        self._since = time.perf_counter()


def describe_parts(
    config: Request[ProfileOptions], steps: list[dict[str, float]], trainer: Trainer, own_data: bool
) -> dict[str, Any]:
    """What `lm profile --json` prints; `steps` has the seconds by part of each timed step."""
    mean = {name: statistics.mean(step.get(name, 0.0) for step in steps) * 1e3 for name in set().union(*steps)}
    callbacks = {name.removeprefix(CALLBACK): ms for name, ms in mean.items() if name.startswith(CALLBACK)}
    total = sum(mean.values())
    by_part = {part: sum(callbacks.values()) if part == "callbacks" else mean.get(part, 0.0) for part in TITLES}
    return {
        **describe_training(config, trainer),
        "data": "the config's" if own_data else "random tokens, as the config's is not made yet",
        "steps": config.command_options.steps,
        "log_interval": config.trainer.log_interval,
        "ms_per_step": total,
        "parts": {part: {"ms_per_step": ms, "share": ms / total} for part, ms in by_part.items()},
        "callbacks": dict(sorted(callbacks.items(), key=lambda item: -item[1])),
        "trace": config.command_options.trace,
    }


def show_parts(result: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    print_heading(console, result)
    console.print(f"data: {result['data']}")
    parts = [(TITLES[name], part["ms_per_step"], part["share"]) for name, part in result["parts"].items()]
    parts.append(("all of them", result["ms_per_step"], 1.0))
    rows = [(title, f"{ms:.2f}", f"{fraction:.1%}") for title, ms, fraction in parts]
    console.print(plain_table(("part of a step", "ms", "share"), "tnn", rows))
    slowest = ", ".join(f"{name} {ms:.2f} ms" for name, ms in list(result["callbacks"].items())[:3])
    rate = format_count(result["tokens_per_step"] / result["ms_per_step"] * 1e3)
    console.print(f"mean of {result['steps']} steps, a log line every {result['log_interval']}: {rate} tokens/s")
    console.print(f"the slowest callbacks, a step: {slowest}")
