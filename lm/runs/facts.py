"""The current state of a run: the facts of its files, its row in the registry, and a view of it while it trains.

`lm runs`, `lm monitor`, `on_event`, exports and the notebooks show parts of it. Nothing here imports torch or writes
into the run.
"""

import math
import time
from typing import Any

from lm.runs.evaluations import merge_evaluations
from lm.runs.history import Series, curve, thin
from lm.runs.metrics import METRICS, valid_metrics
from lm.runs.run import STEP, Run
from lm.runs.schema import TYPES, add_metrics
from lm.system.files import digest
from lm.system.parsing import nonnegative, parse_line


def read_facts(run: Run) -> dict[str, Any]:
    """The facts of `run.json` and `state.json`, by the names of `TYPES`; None for what is not known (yet).

    `status` is `Run.status()`, `step` the newest logged step. `path`, `name` and `budget` are added.
    """
    described, live = run.read("run.json"), run.read("state.json")
    status = run.status()
    return {
        **dict.fromkeys([*TYPES["run.json"], *TYPES["state.json"]]),
        "metrics": {},
        "tags": [],
        "command": [],
        "versions": {},
        "machine": {},
        **live,
        **described,
        "status": status,
        "step": live.get("step", described.get("step")),
        "path": str(run.path.resolve()),
        "name": run.name,
        "budget": run.read("budget.json") or None,
        **({"phase": None, "eta_seconds": None} if status != "running" else {}),
    }


def run_row(run: Run) -> dict[str, Any]:
    """A run as `lm runs ls --json` lists it, and as the registry keeps it; None for what is not known (yet).

    `best_loss` is the lowest validation loss, `core` the mean centred accuracy of the newest evaluation.
    """
    facts, saved = read_facts(run), _checkpoint(run, "last", time.time())
    steps = [step for step in (facts["step"], saved and saved["step"]) if step is not None]
    losses = [line["val/loss"] for line in run.metrics("val/loss") if not math.isnan(line["val/loss"])]
    return {
        **{name: facts[name] for name in ("path", "name", "status", "reason")},
        "step": max(steps, default=None),  # a process killed after its last checkpoint did not log that step
        **{name: facts[name] for name in ("max_steps", "tokens")},
        "best_loss": min(losses, default=None),
        "val_loss": facts["metrics"].get("val/loss"),
        "loss": facts["metrics"].get("train/loss"),
        "tokens_per_second": facts["metrics"].get("perf/tokens_per_second"),
        **{name: facts[name] for name in ("started", "entered", "host", "tags")},
        "config_sha256": digest(run.config) if run.config.exists() else None,
        "core": (merge_evaluations(run.evaluations()) or {}).get("core"),
    }


# ---- a run while it trains -------------------------------------------------------------------------------------------

MAX_POINTS = 256  # of a curve; each is the mean of its lines, which smooths the losses of a long run
CURVES = ("train/loss", "val/loss")
MAX_ALERTS = 20  # of the newest
SHOWN = "status reason phase host device world_size step max_steps tokens max_tokens metrics".split()


class LiveRun:
    """A run that is being watched: every `refresh` reads only the lines that are new."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.state: dict[str, Any] = {}  # the result of the last `refresh`
        self._forget(None)

    def _forget(self, started: str | None) -> None:
        self._started = started  # when the run was started, to tell it from others with its name
        self._lines: list[dict[str, float]] = []  # of metrics.jsonl as in `Run.metrics`, only the metrics in `CURVES`
        self._read = 0  # bytes of metrics.jsonl

    def curve(self, metric: str) -> Series:
        """The curve of a metric of `CURVES`, with at most `MAX_POINTS` points."""
        return thin(curve(METRICS[metric].label, self._lines, metric), MAX_POINTS)

    def refresh(self) -> dict[str, Any]:
        """Read what is new in the run's files, and return the object that `lm monitor --json` prints; None: not known.

        `status` is `Run.status()`, or `gone` if the folder has vanished; the rest is then from the previous refresh.
        """
        run, now = self.run, time.time()
        if not run.path.is_dir():
            self._forget(None)
            self.state = {"run": run.name, "path": str(run.path), **self.state, "status": "gone"}
            return self.state
        facts, beat = read_facts(run), run.read("heartbeat.json")
        if facts["started"] != self._started:  # another run has this name now
            self._forget(facts["started"])
        for line in filter(None, map(valid_metrics, self._new_lines())):
            add_metrics(self._lines, {name: line[name] for name in ("step", "resumed_at", *CURVES) if name in line})
        validations = [line for line in self._lines if "val/loss" in line and math.isfinite(line["val/loss"])]
        best, best_step = min(((line["val/loss"], line["step"]) for line in validations), default=(None, None))
        eta = facts["eta_seconds"]  # from the last log line; counted down below
        self.state = {
            "run": run.name,
            "path": str(run.path),
            **{name: facts[name] for name in SHOWN},
            "eta_seconds": None if eta is None else max(0.0, eta - (_age(now, facts["time"]) or 0.0)),
            "best_val_loss": best,
            "best_val_step": best_step,
            "checkpoint": _checkpoint(run, "last", now),
            "best_checkpoint": _checkpoint(run, "best", now),
            "machine": beat.get("machine") or None,
            "heartbeat_age_seconds": _age(now, beat.get("time")),
            "logged_age_seconds": _age(now, facts["time"]),
            "started_age_seconds": _age(now, facts["entered"]),
            "alerts": run.alerts()[-MAX_ALERTS:],
        }
        return self.state

    def _new_lines(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl that were not read before."""
        try:
            with open(self.run.path / "metrics.jsonl", "rb") as file:
                file.seek(self._read)
                added = file.read()
        except OSError:
            return []
        complete = added[: added.rfind(b"\n") + 1]
        self._read += len(complete)
        return [parse_line(line) for line in complete.splitlines()]


def _age(now: float, then: Any) -> float | None:
    """Seconds from `then` to `now`; 0 if `then` is in the future, since a clock was set back."""
    return None if nonnegative(then) is None else max(0.0, now - then)


def _checkpoint(run: Run, link: str, now: float) -> dict[str, Any] | None:
    path = run.link(link)
    step = STEP.fullmatch(path.name) if path else None
    if path is None or step is None:
        return None
    try:
        return {"name": path.name, "step": int(step[1]), "age_seconds": _age(now, path.stat().st_mtime)}
    except OSError:  # it has been removed
        return None
