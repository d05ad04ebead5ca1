"""A few steps under torch's profiler: a trace for `chrome://tracing` or Perfetto, and the most expensive operators."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lm.commands.profile_parts import RANGE, Parts
from lm.errors import RequestError

WARMUP, TRACED = 1, 3  # optimizer steps: the first one under a profiler is slower
OPERATORS = 10


class Trace:
    """Traces the steps after `begin`.

    Args:
        path: file of the trace; one that ends in `.gz` is compressed.
        begin: the optimizer step after which the profiler runs.

    Attributes:
        operators: the most expensive ones, `name`, `calls_per_step`, `ms_per_step` and `share` of all.
        last: the optimizer step that has to be taken.

    Raises:
        RequestError: the file's folder is not there.
    """

    def __init__(self, path: str, begin: int) -> None:
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir() or self.path.is_dir():
            raise RequestError(f"--trace {path}: give a file in a folder that is there")
        self.operators: list[dict[str, Any]] = []
        self._begin, self.last = begin, begin + WARMUP + TRACED
        self._profiler: profile | None = None

    def at_step(self, step: int, parts: Parts) -> None:
        """Start, count and stop; to be called between two steps."""
        if step == self._begin:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            plan = schedule(wait=0, warmup=WARMUP, active=TRACED, repeat=1)
            self._profiler = profile(activities=activities, schedule=plan, on_trace_ready=self._keep)
            self._profiler.start()
            parts.tracing = True
        elif self._profiler is not None:
            self._profiler.step()
            if step == self.last:
                parts.tracing = False
                self._profiler.stop()
                self._profiler = None

    def _keep(self, profiler: profile) -> None:
        profiler.export_chrome_trace(str(self.path))
        entries = [entry for entry in profiler.key_averages() if not entry.is_user_annotation]
        entries = [entry for entry in entries if not entry.key.startswith((RANGE, "ProfilerStep"))]
        on_device = any(entry.self_device_time_total for entry in entries)
        if on_device:  # the operators alone: the kernels that they started have entries of their own, too
            entries = [entry for entry in entries if entry.device_type.name == "CPU"]
        cost = {id(entry): entry.self_device_time_total if on_device else entry.self_cpu_time_total
                for entry in entries}  # microseconds without those of the operators inside
        whole = sum(cost.values())
        for entry in sorted(entries, key=lambda entry: -cost[id(entry)])[:OPERATORS]:
            self.operators.append({
                "name": entry.key, "calls_per_step": entry.count / TRACED,
                "ms_per_step": cost[id(entry)] / 1e3 / TRACED, "share": cost[id(entry)] / whole,
            })  # fmt: skip
