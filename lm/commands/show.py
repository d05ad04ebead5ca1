"""`lm data show`: the texts that a run saw at a step, and so the other end of a batch's way."""

import json as jsonlib

from rich.console import Console

from lm.errors import RequestError
from lm.inspection.seen import is_injected, open_data, read_step, samples_at, split_documents, steps_taken
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
    _, count = samples_at(folder, step)
    data, injected = open_data(folder), is_injected(folder, step)
    seen = read_step(folder, data, step, limit or None)
    documents = [split_documents(entry.token_ids, data) for entry in seen]
    if json:
        samples = [entry._asdict() | {"documents": texts} for entry, texts in zip(seen, documents, strict=True)]
        facts = {"run": folder.name, "step": step, "injected": injected, "samples_of_step": count, "samples": samples}
        print(jsonlib.dumps(facts))
        return
    console = Console(highlight=False, markup=False)
    if injected:
        console.print(f"Step {step} was a drill (guards.inject_step): rare tokens took the place of its samples.")
    for entry, texts in zip(seen, documents, strict=True):
        where = "injected" if injected else f"{entry.shard}, window {entry.window}"
        console.rule(f"sample {entry.sample}, {where}")
        for index, text in enumerate(texts):
            if index:
                console.rule("a document ends, another begins", characters="·")
            console.print(text)
    if count > len(seen):
        console.rule(f"{count - len(seen)} more samples in step {step}: --limit 0 shows all")
