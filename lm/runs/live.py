"""A run while it trains: its curves, figures and alerts, read from its files as they grow.

`lm monitor` refreshes it again and again; each time only the new lines are read. Nothing here writes into the run.
"""

import math
import os
import time
from bisect import bisect_right
from collections import deque
from pathlib import Path
from typing import Any

from lm.runs.metrics import valid_metrics
from lm.runs.run import STEP, Run, is_alert
from lm.system.files import nonnegative, parse_line

POINTS = 1024  # of a curve
CURVES = ("train/loss", "val/loss", "optim/lr", "optim/grad_norm", "perf/tokens_per_second")
ALERTS = 20  # the newest, that are kept


class LiveRun:
    """A run that is being watched.

    Attributes:
        curves: by the name of the metric.
        state: the result of the last `refresh`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.state: dict[str, Any] = {}
        self._metrics = GrowingFile(run.path / "metrics.jsonl")
        self._alert_lines = GrowingFile(run.path / "alerts.jsonl")
        self._forget()

    def _forget(self) -> None:
        self.curves = {name: Curve() for name in CURVES}
        self._validations: list[tuple[int, float]] = []
        self._alerts: deque[dict[str, Any]] = deque(maxlen=ALERTS)

    def refresh(self) -> dict[str, Any]:
        """Read what is new in the run's files.

        Returns:
            The object that `lm monitor --json` prints. `status` is `Run.status()`, or `gone` where the folder has
            vanished; the rest is then that of the refresh before. Times are in seconds; None is not known.
        """
        run, now = self.run, time.time()
        if not run.path.is_dir():
            self.state = {"run": run.name, "path": str(run.path), **self.state, "status": "gone"}
            return self.state
        self._read()
        facts, live, beat = run.read("run.json"), run.read("state.json"), run.read("heartbeat.json")
        status = run.status()
        finite = [(loss, step) for step, loss in self._validations if math.isfinite(loss)]
        best, best_step = min(finite, default=(None, None))
        self.state = {
            "run": run.name,
            "path": str(run.path),
            "status": status,
            "reason": facts.get("reason"),
            "phase": live.get("phase") if status == "running" else None,
            "host": facts.get("host"),
            "device": facts.get("device"),
            "world_size": facts.get("world_size"),
            "step": live.get("step"),
            "max_steps": live.get("max_steps"),
            "tokens": live.get("tokens"),
            "max_tokens": live.get("max_tokens"),
            "eta_seconds": _eta(live, now) if status == "running" else None,
            "metrics": live.get("metrics", {}),
            "best_val_loss": best,
            "best_val_step": best_step,
            "checkpoint": _checkpoint(run, "last", now),
            "best_checkpoint": _checkpoint(run, "best", now),
            "machine": beat.get("machine") or None,
            "heartbeat_age_seconds": _age(now, beat.get("time")),
            "logged_age_seconds": _age(now, live.get("time")),
            "started_age_seconds": _age(now, facts.get("entered")),
            "alerts": list(self._alerts),
        }
        return self.state

    def _read(self) -> None:
        if self._metrics.replaced():
            self._forget()
            self._alert_lines.rewind()
        for entry in filter(None, (valid_metrics(parse_line(line)) for line in self._metrics.read())):
            if "resumed_at" in entry:
                self._go_back(entry["resumed_at"])
            else:
                self._add(entry)
        self._alerts.extend(alert for line in self._alert_lines.read() if is_alert(alert := parse_line(line)))

    def _add(self, entry: dict[str, Any]) -> None:
        step = entry["step"]
        for name, curve in self.curves.items():
            if name in entry:
                curve.add(step, entry[name])
        if "val/loss" in entry:
            self._validations.append((step, entry["val/loss"]))

    def _go_back(self, step: int) -> None:
        """Forget the lines of steps after the checkpoint that the run resumes from, as `Run.metrics` does."""
        for curve in self.curves.values():
            curve.cut(step)
        self._validations = [(at, loss) for at, loss in self._validations if at <= step]


def _age(now: float, then: Any) -> float | None:
    """Seconds from `then` to `now`; 0 where a clock that was set back says that `then` is still to come."""
    return None if nonnegative(then) is None else max(0.0, now - then)


def _eta(live: dict[str, Any], now: float) -> float | None:
    """Seconds until the run ends: what the training wrote in its last log line, counted down since."""
    seconds = live.get("eta_seconds")
    return None if seconds is None else max(0.0, seconds - (_age(now, live.get("time")) or 0.0))


def _checkpoint(run: Run, link: str, now: float) -> dict[str, Any] | None:
    path = run.link(link)
    step = STEP.fullmatch(path.name) if path else None
    try:
        age = _age(now, path.stat().st_mtime) if step else None
        return {"name": path.name, "step": int(step[1]), "age_seconds": age} if step else None
    except OSError:  # it has been removed
        return None


class GrowingFile:
    """Reads the lines of a file that grows, each once and only when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rewind()

    def rewind(self) -> None:
        """Begin at the first line again."""
        self._offset, self._inode, self._half = 0, None, b""

    def replaced(self) -> bool:
        """Whether another file has the name now, or the file has become shorter; it is then read from its beginning."""
        try:
            facts = os.stat(self.path)
        except OSError:
            return False
        other = self._inode not in (None, facts.st_ino) or facts.st_size < self._offset
        if other:
            self.rewind()
        self._inode = facts.st_ino
        return other

    def read(self) -> list[bytes]:
        """The new lines; none where there is no file."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                added = file.read()
        except OSError:
            added = b""
        self._offset += len(added)
        *lines, self._half = (self._half + added).split(b"\n")
        return lines


class Curve:
    """The values of a metric over steps; `points` has means of neighbours, few enough to draw a run of any length."""

    def __init__(self) -> None:
        self._steps: list[int] = []  # ascending
        self._values: list[float] = []

    def add(self, step: int, value: float) -> None:
        """Add a value; steps ascend."""
        self._steps.append(step)
        self._values.append(value)

    def cut(self, step: int) -> None:
        """Forget the values after a step."""
        end = bisect_right(self._steps, step)
        del self._steps[end:], self._values[end:]

    def points(self, most: int = POINTS) -> tuple[list[float], list[float]]:
        """Steps and values of at most `most` points; NaN for a point without a finite value."""
        size = max(1, math.ceil(len(self._steps) / most))
        steps, values = [], []
        for begin in range(0, len(self._steps), size):
            pairs = list(zip(self._steps[begin : begin + size], self._values[begin : begin + size], strict=True))
            finite = [pair for pair in pairs if math.isfinite(pair[1])] or [(pairs[0][0], math.nan)]
            steps.append(sum(step for step, _ in finite) / len(finite))
            values.append(sum(value for _, value in finite) / len(finite))
        return steps, values
