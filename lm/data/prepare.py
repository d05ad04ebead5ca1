"""From text to shards: `lm data prepare`, on one machine or several.

Files are found (`data/text_files`), and `data/preparation` does the steps: a tokenizer is loaded or trained, units of
text are encoded by processes and copied into shards, which `data/shards` reads.

The result depends only on the options and the files, not on the number of processes or on interruptions. A folder is
finished when it has a `manifest.json`, which is written last; until then `.parts` keeps what is done.
"""

import json
import logging
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lm.data.catalog import MANIFEST
from lm.data.config import LEARNED, PrepareOptions
from lm.data.preparation import PARTS, Preparation
from lm.data.text_files import TextFile, find_files, split_by_names
from lm.data.tokenizer import Tokenizer
from lm.errors import Interrupted, RequestError
from lm.system.files import write_atomically
from lm.system.parsing import read_object
from lm.system.units import listed, plural

log = logging.getLogger(__name__)

VAL_BYTES = 80_000  # of text, 10,000 tokens or more; a loss over fewer is mostly noise
PLAN, LOCK = f"{PARTS}/plan.json", ".lock"


def prepare(options: PrepareOptions) -> dict[str, Any]:
    """Make shards, or continue an unfinished preparation; returns the content of `manifest.json`."""
    options, files, known, plan = _examine(options)
    output = Path(options.output)
    if (manifest := _finished(output, plan)) is None:
        try:
            with _only_one(output):
                if (manifest := _finished(output, plan)) is None:  # no other process has made it meanwhile
                    log.info("preparing %s from %s", output, ", ".join(options.input))
                    _begin(output, plan)
                    manifest = Preparation(options, files, known).finish() | plan
                    write_atomically(output / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
                (output / LOCK).unlink(missing_ok=True)
        except KeyboardInterrupt as error:
            raise Interrupted("stopped; the same command continues from here") from error
    shutil.rmtree(output / PARTS, ignore_errors=True)
    return manifest


def plan_only(options: PrepareOptions) -> None:
    """Write the plan and the tokenizer of a preparation that several machines share by `prepare_part`."""
    options, files, known, plan = _examine(options)
    _begin(Path(options.output), plan)
    preparation = Preparation(options, files, known)
    units, left = len(preparation.units), len(preparation.unencoded(preparation.units))
    log.info(f"the work: {plural(units, 'unit')} of text, {left} of them to encode; give it to tasks, as --task 0/4")


def prepare_part(options: PrepareOptions, task: int, tasks: int) -> str:
    """Do the work of task `task`, from 0, of `tasks` in a folder that they share; returns what to do next.

    Units are encoded first; once all are, the same tasks write the shards. No task waits for another.
    """
    options, files, known, plan = _examine(options)
    output = Path(options.output)
    if _finished(output, plan) is not None:
        return "nothing is left to do"
    if not (output / PLAN).exists() or (output / PLAN).read_text() != json.dumps(plan):
        raise RequestError(f"{output} has no plan for these options and files: run the same with --plan_only first")
    preparation = Preparation(options, files, known)
    if preparation.unencoded(preparation.units):
        preparation.encode(preparation.unencoded(preparation.units[task::tasks]))
        left = len(preparation.unencoded(preparation.units))
        waiting = f"other tasks have {plural(left, 'unit')} left; then " if left else ""
        return f"{waiting}run every task once more, to write the shards"
    splits, _ = preparation.divide()
    shards = [shard for split in splits for shard in preparation.shards(split)]
    preparation.write(preparation.unwritten(shards[task::tasks]))
    left = len(preparation.unwritten(shards))
    waiting = f"other tasks have {plural(left, 'shard')} left; then " if left else ""
    return f"{waiting}run the same without --task, to check all and write the manifest"


def _examine(options: PrepareOptions) -> tuple[PrepareOptions, list[TextFile], Tokenizer | None, dict[str, Any]]:
    """The options with a fraction for validation, the files, the tokenizer unless it is to be learned, and the plan."""
    known = None if options.tokenizer in LEARNED else Tokenizer.load(options.tokenizer, options.eos_token).bare()
    if options.chat and options.seq_len is None:
        options = replace(options, seq_len=_context(options.tokenizer))
    options.check()
    output = Path(options.output)
    files = split_by_names(find_files(options.input))
    if options.val_fraction is None:
        fraction = VAL_BYTES / max(1, sum(file.text_bytes for file in files))
        options = replace(options, val_fraction=round(min(0.1, max(0.01, fraction)), 3))
    if options.chat and known is not None:
        known = _with_template(known, files)
    if known is None and any(file.kind == "flat" for file in files):
        raise RequestError(
            "a file of token ids needs the tokenizer.json that they were made with (--tokenizer), or the meta.json of "
            "characters"
        )
    if holds_other_files(output):
        raise RequestError(f"{output} holds other files: {fix_other_files(output)}")
    return options, files, known, _plan(options, files, known)


def _with_template(tokenizer: Tokenizer, files: list[TextFile]) -> Tokenizer:
    """The tokenizer with a chat template; RequestError if that or a file is not one for conversations."""
    from lm.data.chat import ChatTemplate, with_template
    from lm.data.documents import CHAT_KINDS

    for file in files:
        if file.kind not in CHAT_KINDS:
            raise RequestError(
                f"{file.name} is no JSON lines or Parquet, which have conversations for --chat: write a line of each, "
                'such as {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}'
            )
    tokenizer = with_template(tokenizer)
    ChatTemplate(tokenizer)
    return tokenizer


def _context(tokenizer: str) -> int | None:
    """The context of the model in a tokenizer's folder; None if there is no model."""
    file = Path(tokenizer) / "config.json"
    return read_object(file).get("max_position_embeddings") if file.is_file() else None


def _finished(output: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a finished folder that fits the plan; None if there is none yet."""
    if not (output / MANIFEST).exists():
        return None
    manifest = _read_manifest(output)
    if difference := _difference(manifest, plan):
        restart = f"give another --output, or `rm -r {shlex.quote(str(output))}` first"
        raise RequestError(f"{output} was made with other options or files: {difference}; {restart}")
    log.info("%s is finished with these options and files; nothing to do", output)
    return manifest


@contextmanager
def _only_one(output: Path) -> Iterator[None]:
    """Lock the folder, if its file system has locks; waits while another process makes it."""
    from filelock import FileLock, Timeout  # takes a while to import

    output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / LOCK)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock.acquire(timeout=0))
        except Timeout:
            log.info("another process is making %s: waiting for it", output)
            stack.enter_context(lock.acquire())
        except OSError:
            log.warning("%s is on a file system without locks: start this command once at a time", output)
        yield


def _plan(options: PrepareOptions, files: list[TextFile], known: Tokenizer | None) -> dict[str, Any]:
    """The options and files that the result depends on."""
    ignored = {"input", "output", "workers", "plan_only", "task"}
    if known is not None:
        options = replace(options, tokenizer=known.sha256, eos_token=known.eos_token)
        ignored |= {"vocab_size", "sample_bytes"}
    of_options = {key: value for key, value in asdict(options).items() if key not in ignored}
    if options.chat and known is not None:
        of_options["chat"] = blake2b(known.config["chat_template"].encode(), digest_size=8).hexdigest()
    sources = [{"name": file.name, "size": file.size, "modified": file.modified} for file in files]
    for source, file in zip(sources, files, strict=True):
        if file.split:
            source["split"] = file.split
    return {"sources": sources, "options": of_options}


def _begin(output: Path, plan: dict[str, Any]) -> None:
    """Start a preparation, or continue a stopped one with the same plan."""
    parts = output / PARTS
    parts.mkdir(parents=True, exist_ok=True)
    file, text = output / PLAN, json.dumps(plan)
    if file.exists() and file.read_bytes() == text.encode():
        return
    if file.exists():  # the names of records tell which parts are still right
        log.info("options or files have changed since it was begun: only what they affect is done again")
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (parts / name).unlink(missing_ok=True)
    write_atomically(file, text)


def check_folder(path: Path, where: str, command: str | None) -> None:
    """RequestError for a path without a manifest that cannot be prepared; `command` would, if no options are given."""
    if holds_other_files(path):
        prepared = next((folder for folder in path.parents[:2] if (folder / MANIFEST).exists()), None)
        fix = f"give the prepared folder that it is in, {prepared}" if prepared else fix_other_files(path)
        raise RequestError(f"{where} {'is a file' if path.is_file() else 'holds no manifest.json'}: {fix}")
    if command:
        names = [file.parent.name for file in path.parent.glob(f"*/{MANIFEST}")]
        near = "".join(f"did you mean {path.parent / name}? Or " for name in get_close_matches(path.name, names, 1))
        raise RequestError(f"{where} holds no manifest.json: {near}make it with {command}")


def holds_other_files(path: Path) -> bool:
    """Whether a path is neither a folder of shards, finished or unfinished, nor empty or absent."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    return path.is_file() or not names & {MANIFEST, PARTS} and bool(names - {LOCK})


def fix_other_files(path: Path) -> str:
    """What to do if the path for shards has other files, which are mostly the texts themselves."""
    output = f"{path.with_suffix('')}-tokens"
    options = f"--input {shlex.quote(str(path))} --output {shlex.quote(output)}"
    return f"if they are texts, `lm data prepare {options}` makes shards of them; else give another folder"


def _difference(manifest: dict[str, Any], plan: dict[str, Any]) -> str:
    """A description of how a manifest's options and files differ from those of a plan; empty if they do not."""
    old, new = manifest["options"], plan["options"]
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    options = [f"--{name} was {old.get(name)}, is {new.get(name)}" for name in names]
    before, after = ({entry["name"]: entry for entry in plan["sources"]} for plan in (manifest, plan))
    files = [f"{name} is new" for name in after.keys() - before.keys()]
    files += [f"{name} is missing" for name in before.keys() - after.keys()]
    files += [f"{name} has changed" for name in before.keys() & after.keys() if before[name] != after[name]]
    return ", ".join(filter(None, [*options, listed(sorted(files), 4)]))


def _read_manifest(output: Path) -> dict[str, Any]:
    manifest = read_object(output / MANIFEST)
    # Of folders made before there were these options.
    old = {"packing": "stream", "keep_duplicates": False, "chat": False}
    return manifest | {"options": {**old, **manifest["options"]}}


def check_same_options(options: PrepareOptions) -> None:
    """RequestError if a finished folder was made with options other than the config's; its texts may be gone by now."""
    manifest = _read_manifest(Path(options.output))
    old, names = manifest["options"], [source["name"] for source in manifest["sources"]]
    parts = {part.partition("@")[0] for name in names for part in name.split("/")}  # without a revision of the hub
    other_way = "take data.prepare out of the config, or give --data.prepare null, to train on it as it is"
    for text in options.input:
        if not re.search(r"[*?[]", text) and Path(text).name.partition("@")[0] not in {*parts, ""}:  # it may have moved
            raise RequestError(
                f"{options.output} was made from {listed(names, 3)}, and data.prepare.input has {text}: {other_way}"
            )
    learned = {"bpe": ["tokenizer", "vocab_size"], "char": ["tokenizer"]}.get(options.tokenizer, [])
    for name in ["val_fraction", "text_key", *learned]:
        new = getattr(options, name)
        if name in old and new is not None and old[name] != new:
            raise RequestError(
                f"{options.output} was made with {name} {old[name]}, and data.prepare.{name} is {new}: {other_way}"
            )
