"""Test equipment: run folders as a training leaves them, written by hand."""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainings import write_config

from lm.runs.run import Run

GIB = 2**30
GPU = {
    "index": 0, "name": "NVIDIA H200", "load_percent": 97, "memory_used_bytes": 71 * GIB,
    "memory_total_bytes": 140 * GIB, "temperature_celsius": 61, "power_watts": 640.5, "power_limit_watts": 700.0,
}  # fmt: skip


def write_run(
    root: Path | str, name: str = "a", lines: Sequence[dict[str, Any]] = (), status: str = "finished",
    entered: float | None = None, state: Mapping[str, Any] = {}, changes: Mapping[str, Any] = {}, **facts: Any,
) -> Run:  # fmt: skip
    """A run folder without checkpoints.

    Args:
        lines: of metrics.jsonl; where they do not say it, a step has 256 tokens and takes 9 seconds.
        entered: when it was started; a minute ago if not given.
        state: of state.json, beside the newest step and metrics.
        changes: of `CONFIG`, by dotted keys.
        facts: of run.json.
    """
    run, entered = Run.create(name, root), time.time() - 60 if entered is None else entered
    run.describe(**{
        "id": run.name, "name": name, "status": status, "entered": entered, "started": "2025-01-02T03:04:05Z",
        "host": socket.gethostname(), "command": ["lm", "fit", "--config", "a.yaml"], "versions": {"lm": "0.1.0"},
        **facts,
    })  # fmt: skip
    lines = [{"tokens": line["step"] * 256, "time": entered + 9 * line["step"], **line} for line in lines]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    newest = {name: value for line in lines for name, value in line.items()}
    metrics = {name: value for name, value in newest.items() if "/" in name}
    step, tokens = newest.get("step", 0), newest.get("tokens", 0)
    run.write_state({"step": step, "max_steps": 50, "tokens": tokens, "metrics": metrics, "pid": os.getpid(), **state})
    write_config(run.path, "config", run=run.name, **changes)
    return run


def write_live_run(
    root: Path, name: str, lines: int = 200, status: str = "running", gpus: int = 0, alerts: int = 0, age: float = 0,
    sources: Sequence[str] = (),
) -> Run:  # fmt: skip
    """A run that was logged `age` seconds ago, with a checkpoint and the machine's figures.

    It has a log line every 10 steps, of 100 tokens each, and a validation every 100, and is to have 4000 steps. Of
    several sources the first has half of the samples up to step 1000, and none after it; the rest are equal.
    """
    now, log = time.time() - age, []
    for index in range(1, lines + 1):
        at = {"step": 10 * index, "tokens": 1000 * index, "time": now - (lines - index) * 5}
        log.append({**at, "train/loss": 2 + 8 / index, "optim/lr": 1e-3, "optim/grad_norm": 1 + 1 / index,
                    "perf/tokens_per_second": 1e5, "perf/mfu": 0.4, "perf/mfu_full_attention": 0.42})  # fmt: skip
        if index % 10 == 0:
            log.append({**at, "time": at["time"] + 1, "val/loss": 2.1 + 8 / index, "val/bpb": 1.0})
    metrics = {name: value for line in log[-2:] for name, value in line.items() if "/" in name}
    for index, source in enumerate(sources):
        metrics |= {f"train/loss/{source}": 2.5 + index, f"data/epochs/{source}": index / 4}
        metrics |= {} if index == 1 else {f"val/loss/{source}": 2.25 + index}  # which has no validation
    others = len(sources) - 1
    mixture = {"sources": sources, "phases": [[0, [others] + [1] * others], [8000, [0] + [1] * others]]}
    state = {"run": name, "status": status, "phase": "training", "max_steps": 4000, "max_tokens": 400_000,
             "metrics": metrics, "time": now, "eta_seconds": 1020.0}  # fmt: skip
    run = write_run(root, name, log, status, now - 5 * lines, state, device="NVIDIA H200", world_size=8,
                    mixture=mixture if sources else None,
                    stretches=[{"step": 0, "sample": 0, "global_batch": 8}])  # fmt: skip
    machine = {
        "cpu": {"load_percent": 12.5, "load_average": 3.0, "cores": 64},
        "memory": {"used_bytes": 100 * GIB, "total_bytes": 512 * GIB},
        "process": {"memory_bytes": 3 * GIB, "cpu_percent": 120.0},
        "gpus": [{**GPU, "index": index} for index in range(gpus)] or None,
    }
    beat = {"time": now, "pid": os.getpid(), "host": socket.gethostname(), "machine": machine}
    (run.path / "heartbeat.json").write_text(json.dumps(beat))
    for index in range(alerts):
        message = f"number {index}: loss 9.1 > 1.5 * median(loss, 100) = 3.2\x1b[2J\nwhat next"
        alert = {"step": index, "time": now, "guard": "spike", "action": "warn", "message": message}
        run.append("alerts.jsonl", alert)
    (run.path / "step-00000100").mkdir()
    (run.path / "step-00000100" / "trainer.json").write_text("{}")
    for link in ("last", "best"):
        (run.path / link).symlink_to("step-00000100")
    return run
