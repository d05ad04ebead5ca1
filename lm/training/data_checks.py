"""Whether the data of a run that is resumed is the data that it has trained on."""

import logging
from typing import Any

from lm.data.catalog import describe_difference
from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.runs.run import Run

log = logging.getLogger(__name__)


def check_same_mixture(run: Run, data: DataModule, samples: int, force: bool) -> set[str]:
    """RequestError if the mixture of the `samples` already seen would change; returns the sources added since then."""
    saved, current = run.read("run.json").get("mixture"), data.describe_mixture()
    if saved is None or current is None:  # one source: `check_config_changes` compares it
        return set()
    from lm.data.mixture import describe_change

    problem, change = describe_change(saved, current, samples)
    if problem and not force:
        raise RequestError(
            f"the mixture of {run.path} changed: {problem}; put it back, start a new run, or give --force"
        )
    if change:
        log.info("resume: %s", change)
    return set(current["sources"]) - set(saved["sources"])


def check_same_shards(run: Run, shards: dict[str, Any], new_sources: set[str], force: bool) -> None:
    """RequestError if the shards differ from those at the run's start, except in new sources."""
    saved = run.read("data.json")
    if force:
        return
    if not saved and (run.path / "data.json").exists():
        raise RequestError(
            f"{run.path / 'data.json'} is damaged, so it is not known which shards the run saw: put it back, start a "
            "new run, or give --force"
        )
    differences = []
    for split in sorted(saved.keys() | shards.keys()):
        old = [entry for entry in shards.get(split, []) if entry[0].split("/")[0] not in new_sources]
        if difference := describe_difference(saved.get(split, []), old):
            differences.append(f"{split}: {difference}")
    if saved and differences:
        raise RequestError(
            f"the shards changed since {run.path} was started, so its order of samples is gone: "
            f"{'; '.join(differences)}; put them back, start a new run, or give --force"
        )
