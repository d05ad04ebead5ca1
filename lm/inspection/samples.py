"""What a run wrote from its prompts while it was trained."""

import json
from typing import Any

from lm.runs import Run


def read_samples(run: Run) -> list[dict[str, Any]]:
    """The lines of `samples.jsonl` by step: `step`, `tokens`, `prompt`, `text`.

    A run that went on from a checkpoint wrote the samples of later steps again; the later line counts.
    """
    try:
        lines = (run.path / "samples.jsonl").read_bytes().split(b"\n")
    except OSError:
        return []
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines:
        try:
            sample = json.loads(line)
        except ValueError:  # a line that a kill cut short
            continue
        found[sample["step"], sample["prompt"]] = sample
    return sorted(found.values(), key=lambda sample: sample["step"])


def spread(steps: list[int], most: int) -> list[int]:
    """At most so many of ascending steps, evenly spread; the last is among them, and the first where there is room."""
    if len(steps) <= most:
        return steps
    if most == 1:
        return steps[-1:]
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]
