"""From text to shards: the steps of `lm data prepare`.

Files are found (`data/text_files`), a tokenizer is loaded or trained (`data/tokenizer`), units of text are encoded by
processes and copied into shards (`data/encode`, `data/parquet`), which `data/shards` reads.

The result depends only on the options and the files, not on the number of processes or on interruptions. A folder is
finished when it has a `manifest.json`, which is written last; until then `.parts` keeps the finished units.
"""

import json
import logging
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lm.data.blocks import ranges_within
from lm.data.catalog import MANIFEST
from lm.data.config import LEARNED, PrepareOptions
from lm.data.encode import (
    Recipe,
    Slice,
    Unit,
    encode_unit,
    plan_units,
    record_path,
    run_tasks,
    split_of,
    unit_pieces,
    write_shard,
)
from lm.data.encoder import id_type
from lm.data.overlap import describe_shared, shared_spans
from lm.data.parquet import COLUMN, LAYOUT, PackedRows
from lm.data.shards import Shards
from lm.data.splits import Split, divide, shared_documents
from lm.data.text_files import TextFile, find_files, split_by_names
from lm.data.tokenizer import Tokenizer
from lm.data.tokenizer_training import train_bpe, train_char
from lm.errors import Interrupted, RequestError
from lm.system.files import write_atomically
from lm.system.parsing import parse_json
from lm.system.units import listed

log = logging.getLogger(__name__)

VAL_BYTES = 80_000  # of text, 10,000 tokens or more; a loss over fewer is mostly noise
CHANGED = ("Aa", "é", "a.b", "a  b", "a\nb")  # by tokenizers that fold letters or insert blanks between words
PARTS, PLAN, LOCK = ".parts", ".parts/plan.json", ".lock"


def prepare(options: PrepareOptions) -> dict[str, Any]:
    """Make shards, or continue an unfinished preparation; returns the content of `manifest.json`."""
    options.check()
    output, parts = Path(options.output), Path(options.output) / PARTS
    files = split_by_names(find_files(options.input))
    if options.val_fraction is None:
        fraction = VAL_BYTES / max(1, sum(file.text_bytes for file in files))
        options = replace(options, val_fraction=round(min(0.1, max(0.01, fraction)), 3))
    known = None if options.tokenizer in LEARNED else Tokenizer.load(options.tokenizer, options.eos_token).bare()
    if known is None and any(file.kind == "flat" for file in files):
        raise RequestError(
            "a .bin holds token ids: give the tokenizer.json that they were made with (--tokenizer), or the "
            "meta.json of characters"
        )
    plan = _plan(options, files, known)
    if (manifest := _finished(output, plan)) is None:
        if holds_other_files(output):
            raise RequestError(f"{output} holds other files: {fix_other_files(output)}")
        if known is not None and (loss := describe_loss(known)):
            log.warning("%s", loss)
        try:
            with _only_one(output):
                if (manifest := _finished(output, plan)) is None:  # no other process has made it meanwhile
                    log.info("preparing %s from %s", output, ", ".join(options.input))
                    _begin(output, parts, plan)
                    manifest = _make(options, output, parts, files, known) | plan
                    write_atomically(output / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
                (output / LOCK).unlink(missing_ok=True)
        except KeyboardInterrupt as error:
            done = {file.name for file in parts.glob("*")} - {Path(PLAN).name}
            action = "continues from here" if done else "begins again"
            raise Interrupted(f"stopped; the same command {action}") from error
    shutil.rmtree(parts, ignore_errors=True)
    return manifest


def _finished(output: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a finished folder that fits the plan; None if there is none yet."""
    if not (output / MANIFEST).exists():
        return None
    manifest = _read_manifest(output)
    if difference := _difference(manifest, plan):
        raise RequestError(f"{output} was made with other options or files: {difference}; {_how_to_restart(output)}")
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
        except OSError:  # a file system without locks
            pass
        yield


def _make(
    options: PrepareOptions, output: Path, parts: Path, files: list[TextFile], known: Tokenizer | None
) -> dict[str, Any]:
    """Make everything except the manifest, and return the manifest's content."""
    units = plan_units(files)
    tokenizer = _tokenizer(options, parts, units, known)
    identity = tokenizer.sha256 + tokenizer.eos_token
    recipe = Recipe(parts, identity, options.text_key, options.val_fraction, options.shard_tokens)
    remaining = [unit for unit in units if not record_path(unit, recipe).exists()]
    if len(remaining) < len(units):
        log.info("continuing: %d of %d units are done", len(units) - len(remaining), len(units))
    tasks = [(unit, recipe) for unit in remaining]
    run_tasks(encode_unit, tasks, [unit.text_bytes for unit in remaining], "encoding", options.workers)
    encoded = [part for unit in units for part in json.loads(record_path(unit, recipe).read_text())["parts"]]
    splits = divide(encoded, options.val_fraction, tokenizer, parts)
    size, encoded_size = (sum(split.counts[name] for split in splits) for name in ("bytes", "token_bytes"))
    if encoded_size < 0.9 * size:
        percent = 100 * encoded_size / size
        log.warning("the tokens stand for %.0f %% of the bytes of the text; --tokenizer bpe knows all bytes", percent)
    named = any(file.split for file in files)  # otherwise no document is in both splits
    shared = shared_documents(splits, tokenizer, parts) if named else None
    for name in ("train", "val"):
        shutil.rmtree(output / name, ignore_errors=True)  # of a killed attempt
    shards = [shard for split in splits for shard in _shards(output, split, options.shard_tokens)]
    sizes = [sum(stop - start for _, start, stop in slices) for _, slices in shards]
    tasks = [(*shard, parts, options.seq_len) for shard in shards]
    entries = run_tasks(write_shard, tasks, sizes, "writing", options.workers)
    if named and shared is None:  # no document is in both
        train, val = (Shards.open(str(output / name), vocab_size=tokenizer.vocab_size) for name in ("train", "val"))
        shared = describe_shared(*shared_spans(train, val, tokenizer.eos_id), "passages")
    if shared:
        log.warning("%s", shared)
    for name, text in tokenizer.files().items():
        write_atomically(output / name, text)
    return {
        "layout": LAYOUT,
        "column": COLUMN,
        "dtype": id_type(tokenizer.vocab_size).name,
        "tokenizer": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "packed": None if options.seq_len is None else PackedRows(options.seq_len, tokenizer.eos_id),
        "splits": {
            split.name: split.counts
            | {"shards": [entry for entry in entries if entry["file"].startswith(f"{split.name}/")]}
            for split in splits
        },
    }


def _plan(options: PrepareOptions, files: list[TextFile], known: Tokenizer | None) -> dict[str, Any]:
    """The options and files that the result depends on."""
    ignored = {"input", "output", "workers"}
    if known is not None:
        options = replace(options, tokenizer=known.sha256, eos_token=known.eos_token)
        ignored |= {"vocab_size", "sample_bytes"}
    sources = [{"name": file.name, "size": file.size, "modified": file.modified} for file in files]
    for source, file in zip(sources, files, strict=True):
        if file.split:
            source["split"] = file.split
    return {"sources": sources, "options": {key: value for key, value in asdict(options).items() if key not in ignored}}


def _begin(output: Path, parts: Path, plan: dict[str, Any]) -> None:
    """Start a preparation, or continue a stopped one with the same plan."""
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
        raise RequestError(f"{where} holds no manifest.json: {fix_other_files(path)}")
    if command:
        raise RequestError(f"{where} holds no manifest.json: make it with {command}")


def holds_other_files(path: Path) -> bool:
    """Whether a path is neither a folder of shards, finished or unfinished, nor empty or absent."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    return path.is_file() or not names & {MANIFEST, PARTS} and bool(names - {LOCK})


def fix_other_files(path: Path) -> str:
    """What to do if the path for shards has other files, which are mostly the texts themselves."""
    output = f"{path.with_suffix('')}-tokens"
    options = f"--input {shlex.quote(str(path))} --output {shlex.quote(output)}"
    return f"if they are texts, `lm data prepare {options}` makes shards of them; else give another folder"


def _how_to_restart(output: Path) -> str:
    return f"give another --output, or `rm -r {shlex.quote(str(output))}` first"


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
    file = output / MANIFEST
    try:
        manifest = parse_json(file.read_bytes())
        if not all(isinstance(entry["name"], str) for entry in manifest["sources"]):
            raise ValueError("a source has no name")
        return manifest | {"options": {"packing": "stream", **manifest["options"]}}  # folders made before this option
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{file} is damaged ({error}); {_how_to_restart(output)}") from error


def describe_loss(tokenizer: Tokenizer) -> str | None:
    """How encoding changes a text; None if decoding restores texts, except for unknown tokens."""
    for text in CHANGED:
        with suppress(RequestError):
            ids = tokenizer.encode(text)
            if tokenizer.vocabulary.get(tokenizer.unknown) not in ids and (decoded := tokenizer.decode(ids)) != text:
                return f"encoding with this tokenizer is lossy: {text!r} is decoded as {decoded!r}"
    return None


def check_same_options(options: PrepareOptions) -> None:
    """RequestError if a finished folder was made with options other than the config's; its texts may be gone by now."""
    old = _read_manifest(Path(options.output))["options"]
    learned = {"bpe": ["tokenizer", "vocab_size"], "char": ["tokenizer"]}.get(options.tokenizer, [])
    for name in ["val_fraction", "text_key", *learned]:
        new = getattr(options, name)
        if name in old and new is not None and old[name] != new:
            raise RequestError(
                f"{options.output} was made with {name} {old[name]}, and data.prepare.{name} is {new}: "
                "give --data.prepare null to train on it as it is, or another data.path"
            )


def _tokenizer(options: PrepareOptions, parts: Path, units: list[Unit], known: Tokenizer | None) -> Tokenizer:
    """The tokenizer of this preparation; a stopped preparation that has trained one continues with it."""
    if (parts / "tokenizer_config.json").exists():
        return Tokenizer.load(parts)
    tokenizer = known
    if tokenizer is None:
        log.info("learning %s", LEARNED[options.tokenizer])
        texts = _sample(options, units)
        tokenizer = train_bpe(texts, options.vocab_size) if options.tokenizer == "bpe" else train_char(texts)
        if options.tokenizer == "bpe" and tokenizer.vocab_size < options.vocab_size:
            log.info("the text gives %d tokens, fewer than --vocab_size", tokenizer.vocab_size)
    for name, text in tokenizer.files().items():  # tokenizer_config.json is written last
        write_atomically(parts / name, text)
    return tokenizer


def _sample(options: PrepareOptions, units: list[Unit], training: bool = True) -> Iterator[str]:
    """Documents to train a tokenizer on, from the training split if it has any; of much text, beginnings of units."""

    def scattered(unit: Unit) -> bytes:  # an order unrelated to that of the files
        return blake2b(repr([(file.name, part) for file, part, _ in unit.slices]).encode()).digest()

    limit, empty = options.sample_bytes, True
    per_unit = limit if sum(unit.text_bytes for unit in units) <= limit else max(limit // len(units), 2**20)
    for unit in sorted(units, key=scattered):
        unit_limit, selected = min(limit, per_unit), None
        for piece in unit_pieces(unit, options.text_key, None):
            if selected is None:  # a document begins
                selected = not training or split_of(piece, options.val_fraction) == "train"
            if selected and isinstance(piece.content, str):  # ids come with a tokenizer, so none is trained
                empty = False
                unit_limit -= len(piece.content)
                limit -= len(piece.content)
                yield piece.content
            if piece.last:
                selected = None
            if unit_limit <= 0:
                break
        if limit <= 0:
            return
    if empty and training:
        yield from _sample(options, units, training=False)


def _shards(output: Path, split: Split, shard_tokens: int) -> list[tuple[Path, tuple[Slice, ...]]]:
    """The path and slices of each shard of a split, each filled in turn; makes the split's folder."""
    (output / split.name).mkdir()
    runs = ranges_within([piece.stop - piece.start for piece in split.slices], shard_tokens)
    groups = [tuple(split.slices[run.start : run.stop]) for run in runs]
    return [(output / split.name / f"{i:05d}.parquet", group) for i, group in enumerate(groups)]
