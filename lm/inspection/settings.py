"""What runs were made with, and in what they differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.documents import flatten
from lm.runs import Run


def differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys in which configs differ, with the value of each; None where it is not set."""
    flat = [flatten(config) for config in configs]
    keys = sorted(set().union(*flat) - {"run"})
    values = {key: [one.get(key) for one in flat] for key in keys}
    return {key: those for key, those in values.items() if any(value != those[0] for value in those)}


def labels(runs: Sequence[Run]) -> list[str]:
    """The runs' names; with the folders that they lie in where one name stands for several."""
    names = [run.path.resolve().name for run in runs]
    return [
        name if names.count(name) == 1 else str(Path(*run.path.resolve().parts[-3:]))
        for name, run in zip(names, runs, strict=True)
    ]


def beside(run: Run, most: int = 2) -> list[Run]:
    """Other runs of the same folder that have log lines, the newest last.

    Args:
        most: of them, the newest.
    """
    others = [other for other in Run.all(run.path.resolve().parent) if other.path.resolve() != run.path.resolve()]
    return [other for other in others if (other.path / "metrics.jsonl").exists()][-most:] if most else []
