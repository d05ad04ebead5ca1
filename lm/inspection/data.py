"""The data of a run: its tokens, the samples of a step, and the distance between texts."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lm.data.datamodule import DataModule
from lm.data.rare import rare_rows, rare_tokens
from lm.errors import RequestError
from lm.inspection.drawing import Html, table, wrapped
from lm.runs.run import Run
from lm.system.arguments import Parser
from lm.system.parsing import DAMAGE_ERRORS

PATHS = ("path", "train", "val", "test", "tokenizer", "cache_dir")  # options of `data:` that are paths


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The Jensen-Shannon divergence of distributions (Lin, "Divergence measures based on the Shannon entropy", IEEE
    Transactions on Information Theory 37, 1991), in bits: `(...)` of two `(..., V)`, each divided by its sum.

    It is 0 for the same distribution and 1 for nothing in common; NaN if a sum is zero.
    """
    with np.errstate(invalid="ignore"):
        a, b = (torch.from_numpy(counts / counts.sum(-1, keepdims=True)) for counts in map(np.float64, (p, q)))
    parts = torch.special.entr((a + b) / 2) - (torch.special.entr(a) + torch.special.entr(b)) / 2
    return parts.clamp(min=0).sum(-1).numpy() / math.log(2)


# ---- the samples of a step -------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """One sample of the training stream."""

    sample: int  # its index in the stream of the run, from 0
    shard: str | None  # the file in which it begins; None if a drill replaced it by rare tokens
    window: int | None  # index in its block; None likewise
    token_ids: list[int]  # T + 1
    source: str | None = None  # source of a mixture


def open_data(run: Run) -> DataModule:
    """Open the data of a run as its fit did, from any working directory."""
    config = run.settings()
    if not isinstance(config.get("data"), dict) or type(config.get("seed_everything")) is not int:
        raise RequestError(f"{run.config} has no `data:` or no seed, so the samples of the run are not known")
    described = _with_paths_from(run.started_in(), config["data"])
    parser = Parser(exit_on_error=False)
    parser.add_class_arguments(DataModule, "data")
    data = parser.instantiate_classes(parser.parse_object({"data": described})).data
    data.set_position(seed=config["seed_everything"])
    data.setup("fit")
    return data


def _with_paths_from(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `data`, or of a mixture's source, with paths that are valid in any working directory."""

    def absolute(value: Any) -> Any:  # a path, a list of them, or None
        if isinstance(value, list):
            return [absolute(path) for path in value]
        return value if value is None or "://" in value or folder == Path.cwd() else str(folder / value)

    paths = {name: absolute(options[name]) for name in PATHS if name in options}
    sources = [_with_paths_from(folder, source) for source in options.get("sources") or ()]
    return options | paths | ({"sources": sources} if sources else {})


def read_step(run: Run, data: DataModule, step: int | None = None, limit: int | None = None) -> list[Sample]:
    """The first `limit` samples of an optimizer step of the run, in order; default: of its last step."""
    step = steps_taken(run) if step is None else step
    first, count = samples_at(run, step)
    shown = count if limit is None else min(limit, count)
    if is_injected(run, step):
        rare = rare_tokens(data.shards["train"], data.tokenizer.vocab_size)
        rows = rare_rows(rare, data.seed, step, count, data.seq_len + 1)[:shown].tolist()
        return [Sample(first + index, None, None, row) for index, row in enumerate(rows)]
    batch, places = data.read_samples(first, shown)
    parts = zip(places, batch.tokens.tolist(), data.sources_of(first, shown), strict=True)
    return [Sample(first + i, *place, ids, source) for i, (place, ids, source) in enumerate(parts)]


def is_injected(run: Run, step: int) -> bool:
    """Whether a drill (`guards.inject_step`) replaced a step's samples by rare tokens."""
    steps = run.read("run.json").get("injected", {}).get("steps")
    return isinstance(steps, list) and step in steps


def steps_taken(run: Run) -> int:
    """The optimizer steps that a run is known to have taken."""
    return max(run.read(name).get("step", 0) for name in ("state.json", "run.json"))


def samples_at(run: Run, step: int) -> tuple[int, int]:
    """Index of the first sample of an optimizer step that the run has taken, and the number of its samples."""
    last = steps_taken(run)
    try:
        segments = run.read("run.json").get("stretches", [])
        before = [entry for entry in segments if entry["step"] < step]
        if not before or step > last:
            first = segments[0]["step"] + 1 if segments else 1  # of a branch, the step after its trunk
            raise RequestError(f"run {run.path} has taken steps {first} to {last}; there is no step {step}")
        begin, sample, batch = (int(before[-1][name]) for name in ("step", "sample", "global_batch"))
    except DAMAGE_ERRORS as error:
        raise RequestError(f"{run.path / 'run.json'} is damaged: its `stretches` cannot be read ({error})") from error
    return sample + (step - 1 - begin) * batch, batch


def split_documents(token_ids: list[int], data: DataModule) -> list[str]:
    """Decode a sample to one text per document; the end-of-text token stays with the document that it ends."""
    eos_id = data.tokenizer.eos_id
    if data.shards["train"].packed is not None:  # without padding, and without an end of text at the beginning
        begin = [token for token in token_ids[:1] if token != eos_id]
        token_ids = [*begin, *(b for a, b in pairwise(token_ids) if a != eos_id or b != eos_id)]
    ends = [index + 1 for index, token in enumerate(token_ids) if token == eos_id]
    edges = sorted({0, *ends, len(token_ids)})
    return [data.tokenizer.decode(token_ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def seen_table(samples: Sequence[Sample], documents: Sequence[Sequence[str]], most: int = 600) -> Html:
    """Samples of a step as text, at most `most` characters of each document (see `split_documents`)."""
    rows = []
    for sample, texts in zip(samples, documents, strict=True):
        where = "rare tokens of a drill"
        if sample.shard is not None:
            where = f"{'/'.join(sample.shard.split('/')[-2:])}, window {sample.window}"
            where = where if sample.source is None else f"{sample.source}: {where}"
        shown = "\n-- end-of-text token --\n".join(wrapped(text[:most], 90) for text in texts)
        rows.append((sample.sample, where, shown))
    return table(rows, ("sample", "from", "text"))
