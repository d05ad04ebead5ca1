"""`lm data show`: the texts that a run saw at a step, and so the other end of a batch's way."""

import json as jsonlib
from typing import Any

import numpy as np
import yaml
from jsonargparse import ArgumentParser
from rich.console import Console

from lm.callbacks.spike import rare_rows, rare_tokens
from lm.data.datamodule import DataModule
from lm.errors import RequestError
from lm.runs import ROOT, Run


def show(
    run: str | None = None, step: int | None = None, limit: int = 8, json: bool = False, root: str = str(ROOT)
) -> None:
    """Print the samples of one optimizer step as text, with the boundaries of documents.

    Args:
        run: Name of the run; the newest if not given.
        step: Optimizer step, from 1; the last one taken if not given.
        limit: Samples to print; 0 for all of them.
        json: Print one JSON object with token ids and texts instead.
        root: Folder of the runs.
    """
    folder = Run.named(run, root) if run else Run.newest(root)
    if folder is None:
        raise RequestError(f"no run under {root} yet: start one with `lm fit`")
    step = steps_taken(folder) if step is None else step
    first, count = samples_at(folder, step)
    data = open_data(folder)
    shown = count if limit == 0 else min(limit, count)
    injected = step in folder.read("run.json").get("injected", {}).get("steps", [])
    seen = _injected(data, step, first, count)[:shown] if injected else _read(data, np.arange(first, first + shown))
    for entry in seen:
        entry["documents"] = split_documents(entry["token_ids"], data)
    if json:
        facts = {"run": folder.name, "step": step, "injected": injected, "samples_of_step": count, "samples": seen}
        print(jsonlib.dumps(facts))
        return
    console = Console(highlight=False, markup=False)
    if injected:
        console.print(f"Step {step} was a drill (guards.inject_step): rare tokens took the place of its samples.")
    for entry in seen:
        where = "injected" if injected else f"{entry['shard']}, window {entry['window']}"
        console.rule(f"sample {entry['sample']}, {where}")
        for index, text in enumerate(entry["documents"]):
            if index:
                console.rule("a document ends, another begins", characters="·")
            console.print(text)
    if count > len(seen):
        console.rule(f"{count - len(seen)} more samples in step {step}: --limit 0 shows all")


def _read(data: DataModule, samples: np.ndarray) -> list[dict[str, Any]]:
    """Samples of the stream, and where they are from."""
    blocks, windows = data.order().locate(samples)
    seen = []
    for sample, block, window in zip(samples.tolist(), blocks.tolist(), windows.tolist(), strict=True):
        tokens = data.shards["train"].read(block)[window * data.seq_len : (window + 1) * data.seq_len + 1]
        where = data.shards["train"].blocks[block]
        seen.append({"sample": sample, "shard": where.file, "window": window, "token_ids": tokens.tolist()})
    return seen


def _injected(data: DataModule, step: int, first: int, count: int) -> list[dict[str, Any]]:
    """What a drill put in the place of a step's samples."""
    rare = rare_tokens(data.shards["train"], data.tokenizer.vocab_size)
    rows = rare_rows(rare, data.seed, step, count, data.seq_len + 1).tolist()
    return [{"sample": first + i, "shard": None, "window": None, "token_ids": row} for i, row in enumerate(rows)]


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


def open_data(run: Run) -> DataModule:
    """The data of a run, opened as its fit opened it."""
    config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(DataModule, "data")
    data = parser.instantiate_classes(parser.parse_object({"data": config["data"]})).data
    data.seed = config["seed_everything"]
    data.setup("fit")
    return data


def split_documents(token_ids: list[int], data: DataModule) -> list[str]:
    """A sample's tokens as one text a document; the end-of-text token stays with the document that it ends."""
    ends = [index + 1 for index, token in enumerate(token_ids) if token == data.tokenizer.eos_id]
    edges = sorted({0, *ends, len(token_ids)})
    return [data.tokenizer.decode(token_ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
