"""What a run saw at an optimizer step, read again from its data: the other end of a batch's way."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.arguments import Parser
from lm.data.datamodule import DataModule
from lm.data.rare import rare_rows, rare_tokens
from lm.data.remote import is_remote
from lm.documents import fits
from lm.errors import RequestError
from lm.runs import Run

PLACES = ("path", "train", "val", "test", "tokenizer", "cache_dir")  # keys of `data:` that are files or folders


class Sample(NamedTuple):
    """One sample of the training stream.

    Args:
        sample: its number, from 0 over the whole run.
        shard: the file that it is from; None where a drill put rare tokens in its place.
        window: which window of its block it is; None likewise.
        token_ids: T + 1 of them.
    """

    sample: int
    shard: str | None
    window: int | None
    token_ids: list[int]


def open_data(run: Run) -> DataModule:
    """The data of a run, opened as its fit opened it, from whatever folder this is called in.

    Raises:
        RequestError: the run has no config, or its data is not there any more.
    """
    config = run.settings()
    if not fits(config, {"data": dict, "seed_everything": int}):
        raise RequestError(f"{run.config} has no `data:` or no seed, so it is not known what the run saw")
    there = run.started_in()
    described = {key: _place(there, value) if key in PLACES else value for key, value in config["data"].items()}
    parser = Parser(exit_on_error=False)
    parser.add_class_arguments(DataModule, "data")
    data = parser.instantiate_classes(parser.parse_object({"data": described})).data
    data.seed = config["seed_everything"]
    data.setup("fit")
    return data


def read_step(run: Run, data: DataModule, step: int | None = None, limit: int | None = None) -> list[Sample]:
    """The samples of an optimizer step, in order.

    Args:
        run: that took the step.
        data: `open_data(run)`.
        step: from 1; the last one taken if not given.
        limit: how many of them; all if not given.

    Raises:
        RequestError: the run has not taken this step.
    """
    step = steps_taken(run) if step is None else step
    first, count = samples_at(run, step)
    shown = count if limit is None else min(limit, count)
    if is_injected(run, step):
        rare = rare_tokens(data.shards["train"], data.tokenizer.vocab_size)
        rows = rare_rows(rare, data.seed, step, count, data.seq_len + 1)[:shown].tolist()
        return [Sample(first + index, None, None, row) for index, row in enumerate(rows)]
    return _read(data, np.arange(first, first + shown))


def _read(data: DataModule, samples: np.ndarray) -> list[Sample]:
    train, length = data.shards["train"], data.seq_len
    blocks, windows = data.order().locate(samples)
    found: dict[int, Sample] = {}
    for block in np.unique(blocks).tolist():
        tokens = train.read(block)
        for index in np.flatnonzero(blocks == block).tolist():
            window = int(windows[index])
            ids = tokens[window * length : (window + 1) * length + 1].tolist()
            found[index] = Sample(int(samples[index]), train.blocks[block].file, window, ids)
    return [found[index] for index in sorted(found)]


def is_injected(run: Run, step: int) -> bool:
    """Whether a drill (`guards.inject_step`) put rare tokens in the place of a step's samples."""
    return step in run.read("run.json").get("injected", {}).get("steps", [])


def steps_taken(run: Run) -> int:
    """The optimizer steps that a run is known to have taken."""
    return max(run.read(name).get("step", 0) for name in ("state.json", "run.json"))


def samples_at(run: Run, step: int) -> tuple[int, int]:
    """The first sample of an optimizer step, and how many it has.

    Raises:
        RequestError: the run has not taken this step.
    """
    stretches = [stretch for stretch in run.read("run.json").get("stretches", []) if stretch["step"] < step]
    taken = steps_taken(run)
    if not stretches or step > taken:
        raise RequestError(f"run {run.path} has taken steps 1 to {taken}; there is no step {step}")
    stretch = stretches[-1]
    batch = stretch["global_batch"]
    return stretch["sample"] + (step - 1 - stretch["step"]) * batch, batch


def split_documents(token_ids: list[int], data: DataModule) -> list[str]:
    """A sample's tokens as one text a document; the end-of-text token stays with the document that it ends."""
    ends = [index + 1 for index, token in enumerate(token_ids) if token == data.tokenizer.eos_id]
    edges = sorted({0, *ends, len(token_ids)})
    return [data.tokenizer.decode(token_ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def _place(folder: Path, value: str | list[str] | None) -> str | list[str] | None:
    """A path of a config, or several, as seen from anywhere."""
    if isinstance(value, list):
        return [_place(folder, one) for one in value]
    if value is None or is_remote(value) or value.startswith("file://"):
        return value
    return str(folder / value) if folder != Path.cwd() else value
