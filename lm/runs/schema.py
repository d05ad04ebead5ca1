"""What the files of a run hold: the facts of each JSON file with their types, for `runs/run`, which reads them."""

import math
from typing import Any

from lm.system.parsing import nonnegative

NUMBER = (int, float)
# File -> fact -> its type, or that of a list's entries; a fact of another type is treated as missing.
TYPES: dict[str, dict[str, Any]] = {
    "run.json": {
        "id": str, "name": str, "status": str, "reason": str, "device": str, "world_size": int, "turn": int,
        "started": str, "entered": NUMBER, "command": [str], "host": str, "python": str, "versions": dict, "git": str,
        "step": int, "began_from": str, "left_behind": list, "stretches": [dict], "rollbacks": [dict], "injected": dict,
        "tags": [str], "note": str, "acceptance": dict, "machine": dict, "flops_per_token": NUMBER,
        "mixture": dict, "branch": dict,
    },
    "state.json": {
        "run": str, "status": str, "reason": str, "phase": str, "step": int, "max_steps": int, "tokens": int,
        "max_tokens": int, "metrics": dict, "eta_seconds": NUMBER, "pid": int, "host": str, "time": NUMBER,
    },
    "heartbeat.json": {"time": NUMBER, "pid": int, "host": str, "machine": dict},
    "alerts.jsonl": {"step": int, "time": NUMBER, "guard": str, "action": str, "message": str},
}  # fmt: skip


def valid_facts(file: str, document: Any) -> dict[str, Any]:
    """The facts of a run's file that have the right type; empty if the document is not an object."""
    types = TYPES.get(file, {})
    facts = document if isinstance(document, dict) else {}
    return {name: fact for name, fact in facts.items() if name not in types or _has_type(fact, types[name])}


def _has_type(fact: Any, types: Any) -> bool:
    if isinstance(types, list):
        return isinstance(fact, list) and all(isinstance(entry, types[0]) for entry in fact)
    return isinstance(fact, types) and not isinstance(fact, bool) and (type(fact) is not float or math.isfinite(fact))


def is_alert(line: dict[str, Any]) -> bool:
    return TYPES["alerts.jsonl"].keys() <= valid_facts("alerts.jsonl", line).keys()


def add_metrics(lines: list[dict[str, float]], line: dict[str, float]) -> None:
    """Append a line of `metrics.jsonl` to `lines`; if it marks a resume, remove the lines of later steps instead."""
    if "resumed_at" in line:
        lines[:] = [before for before in lines if before["step"] <= line["resumed_at"]]
    else:
        lines.append(line)


def session(facts: dict[str, Any]) -> tuple[float, float]:
    """`Run.entered` for the given facts of `run.json`."""
    return nonnegative(facts.get("turn")) or 0, nonnegative(facts.get("entered")) or 0.0
