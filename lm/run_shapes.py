"""What the files of a run say, and the shape of each fact: what has another shape is not known, whatever damaged it.

`Run.read` and `Run.metrics` give what passed here, so that nobody who looks at a run has to ask again.
"""

from typing import Any

from lm.documents import fits


def is_number(value: Any) -> bool:
    """Also one that is not finite, as a loss may be."""
    return type(value) in (int, float)


def is_empty(value: Any) -> bool:
    """What is said of a machine where it cannot be read."""
    return value == {}


TEXT, NUMBER = (str, None), (float, None)
GPU = {
    **dict.fromkeys(("load_percent", "memory_used_bytes", "memory_total_bytes", "temperature_celsius", "power_watts",
                     "power_limit_watts"), NUMBER), "index": (int, None), "clocks_limited_by": ([str], None),
}  # fmt: skip

# file -> fact -> its shape, as `documents.fits` has it; other facts are nobody's to rely on, and stay as they are
SHAPES: dict[str, dict[str, Any]] = {
    "run.json": {
        "id": str, "name": str, "status": str, "reason": TEXT, "device": TEXT, "world_size": int, "turn": int,
        "started": str, "entered": float, "command": [str], "host": str, "python": str, "versions": {...: str},
        "git": TEXT, "step": int, "began_from": TEXT, "left_behind": [TEXT],
        "stretches": [{"step": int, "sample": int, "global_batch": int}],
        "rollbacks": [{"step": int, "to": int}], "injected": {"steps": [int]},
    },
    "state.json": {
        "run": str, "status": str, "reason": TEXT, "phase": TEXT, "step": int, "max_steps": int, "tokens": int,
        "max_tokens": (int, None), "metrics": {...: (is_number, None)}, "eta_seconds": NUMBER, "pid": int, "host": str,
        "time": float,
    },
    "heartbeat.json": {
        "time": float, "pid": int, "host": str,
        "machine": (is_empty, {
            "cpu": {"load_percent": NUMBER}, "memory": {"used_bytes": NUMBER, "total_bytes": NUMBER},
            "process": {"memory_bytes": NUMBER}, "gpus": ([GPU], None),
        }),
    },
}  # fmt: skip

ALERT = {"step": int, "time": float, "guard": str, "action": str, "message": str}  # a line of alerts.jsonl


def known(file: str, document: Any) -> dict[str, Any]:
    """The facts of a file that have their shape; none where it is no object."""
    if not isinstance(document, dict):
        return {}
    shapes = SHAPES.get(file, {})
    return {name: fact for name, fact in document.items() if name not in shapes or fits(fact, shapes[name])}


def measured(line: dict[str, Any]) -> dict[str, Any] | None:
    """What counts of a line of `metrics.jsonl`: its numbers, also those that are not finite; None where it says neither
    its step nor from which one the run was gone on with."""
    numbers = {name: value for name, value in line.items() if is_number(value)}
    whole = [type(numbers[name]) is int for name in ("step", "resumed_at") if name in numbers]
    return numbers if whole and all(whole) else None
