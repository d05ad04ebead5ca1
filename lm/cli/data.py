"""`lm data prepare`, `inspect`, `show`: from text to shards, the content of shards, the texts of a step of a run."""

import json as jsonlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path, PurePath
from shlex import quote
from typing import Any

from rich.console import Console

from lm.cli.charts import plain_table
from lm.cli.scaling_rules import rare_entries
from lm.data.catalog import INDEX, MANIFEST, find_shards
from lm.data.config import PrepareOptions
from lm.data.document_ends import describe_ends
from lm.data.parquet import Column
from lm.data.prepare import plan_only, prepare, prepare_part
from lm.data.shard_index import write_index
from lm.data.shard_statistics import padding_fraction
from lm.data.shards import Shards
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError, require_at_least
from lm.runs.find import find_run
from lm.runs.run import ROOT
from lm.system.files import check_local_path
from lm.system.parsing import read_object
from lm.system.process import harmless
from lm.system.units import format_count, plural

log = logging.getLogger(__name__)
TOKENIZER_FACTS = ("vocab_size", "eos_token", "eos_id", "sha256")
COUNTS: dict[str, Callable[[Any], str]] = {  # facts of a split, and how they are written in the table
    "documents": "{:,}".format,
    "tokens": format_count,
    "bytes": format_count,
    "bytes_per_token": "{:.3f}".format,
    "shards": str,
    "file_bytes": format_count,
    "samples": "{:,}".format,  # of --seq_len tokens
    "left_over": "{:,}".format,  # tokens that are in no sample
    "filled_up": "{:.2%}".format,  # of packed samples: what only fills them up
    "cut_documents": "{:,}".format,  # longer than a sample
}


@dataclass
class PrepareCommand(PrepareOptions):
    """The options of `lm data prepare`.

    Args:
        plan_only: Write the plan and the tokenizer alone, before several machines share the work with --task.
        task: I/N: do the part of task I, from 0, of N tasks with a shared folder. Run all tasks twice: they encode,
            then write the shards. Then the same command without --task checks all and writes the manifest.
    """

    plan_only: bool = False
    task: str | None = None

    @property
    def part(self) -> tuple[int, int] | None:
        """The task and the number of tasks; None for all of the work."""
        if self.task is None:
            return None
        match = re.fullmatch(r"(\d+)/(\d+)", self.task)
        if not match or not int(match[1]) < int(match[2]):
            raise RequestError(f"--task {self.task} is not a task and the number of tasks, such as 0/4, 1/4, 2/4, 3/4")
        return int(match[1]), int(match[2])


def main_prepare(**options: Any) -> None:
    """Tokenize texts into Parquet shards; the same command resumes where it was stopped."""
    settings = PrepareCommand(**options)
    if settings.plan_only:
        plan_only(settings)
        return
    if settings.part is not None:
        log.info("task %s: %s", settings.task, prepare_part(settings, *settings.part))
        return
    manifest = prepare(settings)
    for name, split in manifest["splits"].items():
        documents, shards = plural(split["documents"], "document"), plural(len(split["shards"]), "shard")
        tokens, per_token = format_count(split["tokens"]), split["bytes"] / split["tokens"]
        log.info("%s: %s, %s tokens, %.2f bytes a token, %s", name, documents, tokens, per_token, shards)
    if ends := describe_ends(Shards.open(f"{settings.output}/train"), Tokenizer.load(settings.output)):
        log.warning("warning: %s; %s", *ends)
    if settings.tokenizer == "bpe" and (
        warning := rare_entries(manifest["vocab_size"], manifest["splits"]["train"]["tokens"])
    ):
        log.warning("warning: %s --output OTHER", warning)
    if settings.chat:
        model, first = quote(settings.tokenizer), ""
        if not (Path(settings.tokenizer) / "model.yaml").exists():  # which `lm import` writes
            model, first = "models/chat", f"lm import --input {model} --output models/chat && "
        fit = f"lm fit --config finetune/chat.yaml --config {model}/model.yaml --ckpt_path {model}"
        log.info("train on it: %s%s --data.path %s", first, fit, quote(settings.output))
        return
    names = (f"{Path(settings.output).name}{suffix}.yaml" for suffix in chain([""], (f"-{n}" for n in count(2))))
    data, config = quote(settings.output), quote(next(name for name in names if not Path(name).exists()))
    log.info("train on it: lm scale --data %s --output %s && lm fit --config %s", data, config, config)


def index(path: str, tokenizer: str | None = None, column: str = "input_ids", pad_id: int | None = None) -> None:
    """Index a folder of shards of another program, so that many files open at once and a changed one is noticed.

    Args:
        path: The folder, on this machine.
        tokenizer: The tokenizer.json that the ids were made with, or its folder; ids outside its vocabulary are errors.
        column: Column of the token ids.
        pad_id: Id of the padding, as in `data.pad_id`.
    """
    check_local_path("lm data index", path)
    made_with = Tokenizer.load(tokenizer) if tokenizer else None
    sha256 = made_with and made_with.sha256
    ids = Column(column, made_with and made_with.vocab_size, pad_id, made_with and made_with.eos_id)
    shards, _ = find_shards(path, ids, sha256, use_index=False)
    write_index(Path(path) / INDEX, shards, ids, sha256)
    tokens = sum(sum(shard.row_groups) for shard in shards)
    log.info("%s/%s: %s, %s tokens", path, INDEX, plural(len(shards), "shard"), format_count(tokens))


def inspect(path: str, column: str = "input_ids", seq_len: int | None = None, json: bool = False) -> None:
    """Show what a data folder holds: splits, shards, tokens, tokenizer, and the beginning of its text.

    Args:
        path: A folder that `lm data prepare` made, or other shards: a folder, glob, file or URL.
        column: Column of the token ids in the shards.
        seq_len: Context length used to count the samples, and the tokens that are in none; if not given, the length
            that documents were packed for, or 1024.
        json: Print one JSON object.
    """
    require_at_least(1, "--", seq_len=seq_len)
    facts = describe_folder(path, column, seq_len)
    if json:
        print(jsonlib.dumps(facts, ensure_ascii=False))
    else:
        _print_folder(facts)


def describe_folder(path: str, column: str = "input_ids", seq_len: int | None = None) -> dict[str, Any]:
    """What `lm data inspect --json` prints."""
    manifest = Path(path) / MANIFEST
    splits = read_object(manifest).get("splits", {}) if manifest.is_file() else {}
    recorded = {name: splits[name] for name in ("train", "val") if name in splits}
    beside = next((at for at in (Path(path), Path(path).parent) if (at / "tokenizer.json").is_file()), None)
    tokenizer = beside and Tokenizer.load(beside)
    known = {} if tokenizer is None else {"vocab_size": tokenizer.vocab_size, "tokenizer_sha256": tokenizer.sha256}
    names = list(recorded)
    if not recorded:
        names = sorted({PurePath(file.name).parts[0] for file in Shards.open(path, column, **known).fingerprint()})
        names = names if {"train", "val"} <= {*names} and Path(path).is_dir() else [""]
    opened = {name: Shards.open(f"{path}/{name}" if name else path, column, **known) for name in names}
    first = opened.get("val") or next(iter(opened.values()))
    if seq_len is None:
        seq_len = first.packed.seq_len if first.packed else 1024
    splits = {name: _counts(shards, seq_len, recorded.get(name)) for name, shards in opened.items()}
    return {
        "path": path,
        "made_by_lm": bool(recorded),
        "column": column,
        "tokenizer": tokenizer and {name: getattr(tokenizer, name) for name in TOKENIZER_FACTS},
        "seq_len": seq_len,
        "splits": splits,
        "sample": None if tokenizer is None or not first.index.blocks else tokenizer.decode(first.read(0)[:100]),
    }


def _counts(shards: Shards, seq_len: int, recorded: dict[str, Any] | None) -> dict[str, Any]:
    """Counts of one split, with the samples of a context; documents and bytes if the manifest records them."""
    shards.check_seq_len(seq_len)
    files, index = shards.fingerprint(), shards.index
    size = sum(file.size for file in files)
    counts: dict[str, Any] = {"tokens": index.tokens, "shards": len(files), "file_bytes": size}
    counts |= {"samples": int(index.windows(seq_len).sum()), "left_over": index.left_over(seq_len)}
    if recorded is not None:
        counts["tokens"] = recorded["tokens"]  # without what fills packed rows up
        per_token = recorded["bytes"] / max(1, counts["tokens"])
        counts |= {"documents": recorded["documents"], "bytes": recorded["bytes"], "bytes_per_token": per_token}
        if shards.packed is not None:
            cut = sum(entry["cut_documents"] for entry in recorded["shards"])
            counts |= {"filled_up": padding_fraction(shards), "cut_documents": cut}
    return counts


def _print_folder(facts: dict[str, Any]) -> None:
    console, splits = Console(highlight=False), facts["splits"]
    rows = []
    for name, form in COUNTS.items():
        if any(name in counts for counts in splits.values()):
            cells = (form(counts[name]) if name in counts else "unknown" for counts in splits.values())
            rows.append([name.replace("_", " "), *cells])
    console.print(f"{facts['path']}, in samples of {facts['seq_len']} tokens", markup=False, soft_wrap=True)
    console.print(plain_table(["", *splits], "t" + "n" * len(splits), rows))
    tokenizer = facts["tokenizer"]
    if tokenizer is None:
        console.print("tokenizer: there is no tokenizer.json in the folder or beside it")
        return
    console.print(
        f"tokenizer: {tokenizer['vocab_size']:,} tokens, a document ends with {tokenizer['eos_token']} "
        f"({tokenizer['eos_id']}), SHA-256 {tokenizer['sha256'][:12]}",
        markup=False,
    )
    console.print(harmless(facts["sample"] or ""), markup=False)


# ---- show ------------------------------------------------------------------------------------------------------------


def show(
    run: str | None = None, step: int | None = None, limit: int = 8, json: bool = False, root: str = str(ROOT)
) -> None:
    """Print the samples of one optimizer step as text, with the boundaries of documents.

    Args:
        run: Name of the run; the newest if not given.
        step: Optimizer step, counted from 1; the newest of the run if not given.
        limit: Number of samples to print; 0 for all of them.
        json: Print one JSON object with token ids and texts instead.
        root: Folder of the runs.
    """
    # Not above, because it needs torch and the other two commands do not.
    from lm.inspection.data import is_injected, open_data, read_step, samples_at, split_documents, steps_taken

    folder = find_run(run, root)
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
        console.print(f"Step {step} was a drill (guards.inject_step): rare tokens replaced its samples.")
    for entry, texts in zip(seen, documents, strict=True):
        where = "injected" if injected else f"{entry.shard}, window {entry.window} of its block"
        where = where if entry.source is None else f"{entry.source}, {where}"
        console.rule(f"sample {entry.sample}, {where}")
        for index, text in enumerate(texts):
            if index:
                console.rule("end-of-text token", characters="·")
            console.print(harmless(text))
    if count > len(seen):
        console.rule(f"{count - len(seen)} more samples in step {step}: --limit 0 shows all")
