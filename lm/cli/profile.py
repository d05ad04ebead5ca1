"""`lm profile`: where the time of a training step goes.

`Parts` follows Lightning's spans through a fit of `cli/bench` and gives each moment to one part of the step. `Trace`
traces a few more steps with torch's profiler. On a GPU the parts are NVTX ranges too, for NVIDIA's own tools:
`nsys profile --trace cuda,nvtx python -m lm profile --config X`.
"""

import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.profiler
from jsonargparse import Namespace
from lightning.pytorch.profilers import Profiler
from rich.console import Console
from rich.table import Table
from torch.autograd.profiler import record_function

from lm.cli.bench import WARMUP, describe_training, fit_briefly, print_heading, synchronize
from lm.cli.config import config_parser
from lm.cli.options import ProfileOptions
from lm.errors import RequestError, require_at_least
from lm.system.files import refuse_url
from lm.system.process import rank
from lm.system.units import format_count
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

TRACED = 3  # optimizer steps
OPERATORS = 10
# The last part of a span's name -> the part of a step. Spans nest: `training_step` is a whole optimizer step, with the
# micro-batches in it. A span that is not here belongs to the part around it. Outside of all spans is the rest: the
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
RANGE = "lm."  # begins the names of the parts in a trace


def profile(arguments: list[str]) -> None:
    """Say where the time of a training step goes: `lm profile --config X [--steps N] [--trace FILE] [--json]`.

    It trains on the config's data or, where that is not made yet, on random tokens.

    Args:
        arguments: what stands after `lm profile`.

    Raises:
        RequestError: the config or the command line is wrong.
        RunError: a signal came before the end.
    """
    config = config_parser("lm profile", ProfileOptions).read(arguments)
    require_at_least(1, "--", steps=config.steps)
    refuse_url("--trace", config.trace or "")
    found, operators = measure_parts(config)
    if rank():  # rank zero reports, under torchrun
        return
    if config.json:
        print(json.dumps(found))
        return
    show_parts(found)
    if operators:
        print(operators)
        print(f"trace: {config.trace}, for https://ui.perfetto.dev or chrome://tracing")


def measure_parts(config: Namespace) -> tuple[dict[str, Any], str | None]:
    """Train for some steps.

    Args:
        config: as `ConfigParser.read` gives it, with `steps` and `trace`.

    Returns:
        What `lm profile --json` prints, and torch's table of the most expensive operators if a trace was asked for.

    Raises:
        RequestError: the config is wrong.
        RunError: a signal came before the end.
    """
    ends = WARMUP + config.steps
    trace = Trace(config.trace, ends) if config.trace else None
    last = 1 + (trace.last if trace else ends)
    parts = Parts(lambda step: trace.at_step(step, parts) if trace else None)
    own_data = config.data.path is None or (Path(config.data.path) / "manifest.json").exists()
    config.data.val_tokens = config.data.micro_batch_size * config.data.seq_len  # at the end; it is not timed
    trainer = fit_briefly(
        config, last, own_data=own_data, watch=parts.watch, profiler=parts, val_interval=last, checkpoint_interval=last
    )
    timed = parts.steps[WARMUP:ends]
    mean = {name: statistics.mean(step.get(name, 0.0) for step in timed) * 1e3 for name in set().union(*timed)}
    callbacks = {name.removeprefix(CALLBACK): ms for name, ms in mean.items() if name.startswith(CALLBACK)}
    whole = sum(mean.values())
    by_part = {part: sum(callbacks.values()) if part == "callbacks" else mean.get(part, 0.0) for part in TITLES}
    found = {
        **describe_training(config, trainer),
        "data": "the config's" if own_data else "random tokens, as the config's is not made yet",
        "steps": config.steps,
        "log_interval": config.trainer.log_interval,
        "ms_per_step": whole,
        "parts": {part: {"ms_per_step": ms, "share": ms / whole} for part, ms in by_part.items()},
        "callbacks": dict(sorted(callbacks.items(), key=lambda item: -item[1])),
        "trace": config.trace,
    }
    return found, trace and trace.operators


# ---- parts of a step -------------------------------------------------------------------------------------------------


class Parts(Profiler):
    """Follows Lightning's spans and adds up seconds by part, step by step.

    The device is waited for wherever one part ends and another begins. Otherwise its work would count in the part that
    happens to wait for it.

    Args:
        at_step: called with each optimizer step when it has ended, between two steps.

    Attributes:
        steps: seconds by part of each finished step, each moment once; a callback is a part with the span's name.
        tracing: whether the parts are marked for a running torch profiler.
    """

    def __init__(self, at_step: Callable[[int], None]) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []
        self.tracing = False
        self._at_step = at_step
        self._spans: list[tuple[str, AbstractContextManager | None]] = []  # those that are open, outermost first
        self._now = "rest"
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    def watch(self, trainer: Trainer, module: LanguageModule) -> None:
        """Follow this fit."""
        self._trainer = trainer

    def start(self, action_name: str) -> None:
        """A span begins."""
        hook = action_name.rpartition(".")[2]
        if hook in ("train_dataloader_next", "on_train_epoch_end"):
            self._end_step()
        part = self._part(action_name, hook)
        mark = None
        if part != self._now:
            mark = named_range(RANGE + part, self.tracing, self._trainer.strategy.root_device)
            mark.__enter__()
        self._spans.append((part, mark))
        self._enter(part)

    def stop(self, action_name: str) -> None:
        """The innermost span ends."""
        _, mark = self._spans.pop()
        self._enter(self._spans[-1][0] if self._spans else "rest")
        if mark is not None:
            mark.__exit__(None, None, None)

    def _part(self, action: str, hook: str) -> str:
        """The part that a span inside the innermost open one belongs to."""
        if self._now.startswith(CALLBACK):
            return self._now
        callback = re.match(re.escape(CALLBACK) + r"\w+", action)
        return callback[0] if callback else SPANS.get(hook, self._now)

    def _enter(self, part: str) -> None:
        """Count the time since the last border, and spend what comes on `part`."""
        if part != self._now:
            self._count()
            self._now = part

    def _count(self) -> None:
        synchronize(self._trainer.strategy.root_device)
        now = time.perf_counter()
        self._seconds[self._now] += now - self._since
        self._since = now

    def _end_step(self) -> None:
        if self._trainer.global_step <= len(self.steps):
            return
        self._count()
        self.steps.append(dict(self._seconds))
        self._seconds.clear()
        self._at_step(len(self.steps))
        self._since = time.perf_counter()


@contextmanager
def named_range(name: str, tracing: bool, device: torch.device) -> Iterator[None]:
    """A range of this name in the trace of torch's profiler, if it runs, and in NVIDIA's tools on a CUDA device."""
    with ExitStack() as marks:
        if tracing:
            marks.enter_context(record_function(name))
        if device.type == "cuda":
            torch.cuda.nvtx.range_push(name)
            marks.callback(torch.cuda.nvtx.range_pop)
        yield


class Trace:
    """Traces a few steps with torch's profiler.

    Args:
        path: file of the trace; one that ends in `.gz` is compressed.
        begin: the optimizer step after which the profiler runs.

    Attributes:
        operators: torch's table of the most expensive ones, over the traced steps.
        last: the optimizer step that has to be taken.

    Raises:
        RequestError: the file's folder is not there.
    """

    def __init__(self, path: str, begin: int) -> None:
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir() or self.path.is_dir():
            raise RequestError(f"--trace {path}: give a file in a folder that is there")
        self.operators = ""
        self._begin, self.last = begin, begin + TRACED
        self._profiler = torch.profiler.profile()

    def at_step(self, step: int, parts: Parts) -> None:
        """Start and stop; called between two steps."""
        parts.tracing = self._begin <= step < self.last
        if step == self._begin:
            self._profiler.start()
        elif step == self.last:
            self._profiler.stop()
            if rank() == 0:
                self._profiler.export_chrome_trace(str(self.path))
            device = "cpu" if torch.accelerator.current_accelerator() is None else "device"
            self.operators = self._profiler.key_averages().table(
                sort_by=f"self_{device}_time_total", row_limit=OPERATORS, max_name_column_width=40
            )


# ---- report ----------------------------------------------------------------------------------------------------------


def show_parts(found: dict[str, Any]) -> None:
    """Print the report as tables."""
    console = Console(highlight=False, soft_wrap=True)
    print_heading(console, found)
    console.print(f"data: {found['data']}")
    table = Table("part of a step", "ms", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, part in found["parts"].items():
        replayed = found["cuda_graphs"] and name == "forward"
        title = "forward and backward pass, replayed" if replayed else TITLES[name]
        table.add_row(title, f"{part['ms_per_step']:.2f}", f"{part['share']:.1%}")
    table.add_section()
    table.add_row("all of them", f"{found['ms_per_step']:.2f}", "100.0%")
    console.print(table)
    slowest = ", ".join(f"{name} {ms:.2f} ms" for name, ms in list(found["callbacks"].items())[:3])
    rate = format_count(found["tokens_per_step"] / found["ms_per_step"] * 1e3)
    console.print(f"mean of {found['steps']} steps, a log line every {found['log_interval']}: {rate} tokens/s")
    console.print(f"the slowest callbacks, a step: {slowest}")
    if found["accelerator"] == "cpu":
        console.print("other work on this CPU changes the milliseconds; the shares are more reliable")
    else:
        console.print("the device was waited for after each part, which takes time: `lm bench step` times whole steps")
