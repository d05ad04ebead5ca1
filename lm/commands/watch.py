"""What a run's files say of it, again and again: each look reads only what was added since the one before.

`monitor` asks, `dashboard` draws. Nothing here writes into the run.
"""

import math
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from lm.documents import fits, number, parse_json
from lm.run_shapes import ALERT, measured
from lm.runs import STEP, Run

BLOCK = 2**25  # bytes of a file that one look reads at most
PARSED = 4000  # lines of a block that are parsed, if there are more; those of validations and of resumes all are
RECENT = 256  # lines at the end of a block that are parsed in any case
POINTS = 1024  # of a curve
CURVES = ("train/loss", "val/loss", "optim/lr", "optim/grad_norm", "perf/tokens_per_second")
ALERTS = 20  # the newest, that are kept


class Watch:
    """One run that is being watched.

    Attributes:
        curves: by the name of the metric.
        state: what the last look found.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.state: dict[str, Any] = {}
        self._metrics = Lines(run.path / "metrics.jsonl")
        self._alert_lines = Lines(run.path / "alerts.jsonl")
        self._forget()

    def _forget(self) -> None:
        self.curves = {name: Curve() for name in CURVES}
        self._validations: list[tuple[int, float]] = []
        self._alerts: deque[dict[str, Any]] = deque(maxlen=ALERTS)
        self._pace = Pace()

    @property
    def behind(self) -> bool:
        """Whether there is more to read than the last look took."""
        return self._metrics.behind or self._alert_lines.behind

    def look(self) -> dict[str, Any]:
        """How the run stands.

        Returns:
            For programs, see `lm monitor --json`: `status` is `Run.status()`, or `gone` where the folder has vanished;
            the rest is then what was seen last. Times are in seconds, what is not known is None.
        """
        run, now = self.run, time.time()
        if not run.path.is_dir():
            self.state = {"run": run.name, "path": str(run.path), **self.state, "status": "gone"}
            return self.state
        self._read()
        facts, live, beat = run.read("run.json"), run.read("state.json"), run.read("heartbeat.json")
        step, last = live.get("step"), live.get("max_steps")
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
            "step": step,
            "max_steps": last,
            "tokens": live.get("tokens"),
            "max_tokens": live.get("max_tokens"),
            "eta_seconds": self._pace.eta(step, last, now) if status == "running" and last else None,
            "metrics": live.get("metrics") or {},
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
        lines = worth_parsing(self._metrics.read())
        for entry in filter(None, (measured(parse(line)) for line in lines)):
            if "resumed_at" in entry:
                self._go_back(entry["resumed_at"])
            else:
                self._add(entry)
        self._alerts.extend(alert for line in self._alert_lines.read() if fits(alert := parse(line), ALERT))

    def _add(self, entry: dict[str, Any]) -> None:
        step = entry["step"]
        for name, curve in self.curves.items():
            if name in entry:
                curve.add(step, entry[name])
        if "val/loss" in entry:
            self._validations.append((step, entry["val/loss"]))
        self._pace.add(step, entry.get("time", 0.0), "train/loss" not in entry)

    def _go_back(self, step: int) -> None:
        """As `Run.metrics` does: what lies beyond the checkpoint that was resumed from does not count."""
        for curve in self.curves.values():
            curve.cut(step)
        self._validations = [(at, loss) for at, loss in self._validations if at <= step]
        self._pace.restart()


def _age(now: float, then: Any) -> float | None:
    """Seconds; 0 of what is to come, by a clock that was set back."""
    return None if number(then) is None else max(0.0, now - then)


def _checkpoint(run: Run, link: str, now: float) -> dict[str, Any] | None:
    path = run.link(link)
    step = STEP.fullmatch(path.name) if path else None
    try:
        age = _age(now, path.stat().st_mtime) if step else None
        return {"name": path.name, "step": int(step[1]), "age_seconds": age} if step else None
    except OSError:  # removed in between
        return None


# ---- files that grow -------------------------------------------------------------------------------------------------


class Lines:
    """The lines of a file that grows, each once and only when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.behind = False
        self.rewind()

    def rewind(self) -> None:
        """Begin at the beginning again."""
        self._offset, self._inode, self._half = 0, None, b""

    def replaced(self) -> bool:
        """Whether this is another file than the one that was read, or a shorter one; it then is read anew."""
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
        """The lines that were added, from at most `BLOCK` bytes; none where there is no file."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                block = file.read(BLOCK)
        except OSError:
            block = b""
        self.behind = len(block) == BLOCK
        self._offset += len(block)
        *lines, self._half = (self._half + block).split(b"\n")
        return lines


def worth_parsing(lines: list[bytes]) -> list[bytes]:
    """All lines; of very many, some: evenly spread ones, the last ones, and those that tell what no neighbour does."""
    stride = len(lines) // PARSED + 1
    if stride == 1:
        return lines
    end = len(lines) - RECENT
    return [
        line for index, line in enumerate(lines)
        if index % stride == 0 or index >= end or b'"val/loss"' in line or b'"resumed_at"' in line
    ]  # fmt: skip


def parse(line: bytes) -> dict[str, Any]:
    """A line's object; empty where a kill cut it short."""
    try:
        entry = parse_json(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


# ---- what they add up to ---------------------------------------------------------------------------------------------


class Curve:
    """Means of a metric over stretches of equally many steps, few enough to draw however long the run is."""

    def __init__(self, points: int = POINTS) -> None:
        self._most = points
        self._span = 1  # steps of a stretch
        self._stretches: list[list[float]] = []  # number of the stretch; sums of steps and values, how many they are

    def add(self, step: int, value: float) -> None:
        """One more value; steps ascend."""
        self._put([step // self._span, step, value, 1] if math.isfinite(value) else [step // self._span, 0.0, 0.0, 0])
        self._merge()

    def _merge(self) -> None:
        while len(self._stretches) > self._most:
            self._span *= 2
            stretches, self._stretches = self._stretches, []
            for stretch, *sums in stretches:
                self._put([stretch // 2, *sums])

    def _put(self, stretch: list[float]) -> None:
        if self._stretches and self._stretches[-1][0] == stretch[0]:
            self._stretches[-1][1:] = [a + b for a, b in zip(self._stretches[-1][1:], stretch[1:], strict=True)]
        else:
            self._stretches.append(stretch)

    def cut(self, step: int) -> None:
        """Forget what came after a step, to the precision of a stretch."""
        while self._stretches and self._stretches[-1][0] * self._span > step:
            self._stretches.pop()

    def points(self, most: int | None = None) -> tuple[list[float], list[float]]:
        """Steps and values, at most so many; a value that is not a number where there was none in a stretch."""
        if most and len(self._stretches) > most:
            fewer = Curve(most)
            fewer._span, fewer._stretches = self._span, [list(stretch) for stretch in self._stretches]
            fewer._merge()
            return fewer.points()
        steps = [steps / count if count else number * self._span for number, steps, _, count in self._stretches]
        return steps, [values / count if count else math.nan for _, _, values, count in self._stretches]


class Pace:
    """How long steps and validations take, by the newest ones; a median, so that a hiccup does not move it.

    The first log line begins the first interval: what it took to start and to compile is in none.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=50)  # seconds a step
        self._validations: deque[float] = deque(maxlen=10)  # seconds
        self._validated: deque[int] = deque(maxlen=2)  # steps
        self._before: tuple[int, float] | None = None  # step and time of the line before
        self._between = 0  # steps between two log lines

    def restart(self) -> None:
        """The run is gone on with, perhaps elsewhere: what was measured before does not count."""
        self._steps.clear()
        self._validations.clear()
        self._before = None

    def add(self, step: int, at: float, validation: bool) -> None:
        """A log line, written at a time, after its step or, if it is a validation's, after that."""
        if validation:
            self._validated.append(step)
        if self._before is not None:
            steps, seconds = step - self._before[0], at - self._before[1]
            if validation and (self._steps or steps == 0):
                training = steps * statistics.median(self._steps) if steps else 0.0
                self._validations.append(max(0.0, seconds - training))
            elif not validation and steps > 0:
                self._steps.append(seconds / steps)
                self._between = steps
        self._before = (step, at)

    def eta(self, step: int, last: int, now: float) -> float | None:
        """Seconds until the last step is done and validated; None before two log lines were written."""
        if not self._steps or self._before is None:
            return None
        pace = statistics.median(self._steps)
        left = (last - step) * pace
        if self._validations:
            every = self._validated[-1] - (self._validated[0] if len(self._validated) > 1 else 0)
            coming = math.ceil(last / every) - step // every if every > 0 else 0
            left += coming * statistics.median(self._validations)
        since = min(max(0.0, now - self._before[1]), self._between * pace, left)  # it counts down until the next line
        return left - since if step < last else 0.0
