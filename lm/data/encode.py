"""The parallel work of `lm data prepare`: encode a unit of text, and write a shard of tokens.

Between `data/documents` and `data/parquet`. The text is cut into *units* of similar size, with borders that depend on
the files alone. A unit becomes *parts*: files of plain ids, and a JSON record that is written last, so that a unit with
a record is done. The name of a record is a hash of the content and options of its unit. Shards are then copied from
parts: each document ends with the end-of-text token, which no text becomes. The result does not depend on which process
does what, or when.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lm.data.documents import Piece, read_pieces
from lm.data.encoder import Encoder, id_type
from lm.data.packing import pack_documents
from lm.data.parquet import IGNORED, PackedRows
from lm.data.shard_writer import ROW_GROUP_TOKENS, ShardWriter
from lm.data.text_files import TextFile
from lm.data.tokenizer import Tokenizer
from lm.errors import RunError
from lm.system.files import atomic_file, write_atomically
from lm.system.hardware import allowed_cores

if TYPE_CHECKING:
    from lm.data.chat import ChatTemplate

UNIT_BYTES = 64 * 2**20  # of text, approximately; smaller for a small corpus, so that all processes have work
MIN_UNIT_BYTES = 4 * 2**20
MAX_UNITS = 32
BATCH = 2**20  # characters encoded at once
SMALL_WORK = 64 * 2**20  # bytes of text; starting processes takes longer than this much work
# Counts of a document or split: tokens include the one that ends each document; bytes of the documents in UTF-8, and
# their estimate by `Tokenizer.token_bytes`.
COUNTS = ("tokens", "bytes", "token_bytes")
# The facts of a document, in a file beside the ids of a part: a digest without case and blanks, and its counts.
DOCUMENT = np.dtype([("digest", "<u8"), *((name, "<i8") for name in COUNTS)])
DOCUMENTS = ".documents"  # suffix of that file
LEARNED = ".learned"  # suffix of another, of conversations: which tokens are learned, a bool for each
BLANKS = b" \t\n\r\f\v"

# ---- units and their parts -------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """Tokens of a part, from `start` up to `stop`."""

    part: str
    start: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """Text that one process encodes at once."""

    slices: tuple[tuple[TextFile, int, int], ...]  # file, part and parts, as `read_pieces` takes them
    text_bytes: int  # approximate


@dataclass(frozen=True)
class Recipe:
    """How every unit is encoded."""

    folder: Path  # of the parts and the tokenizer
    tokenizer: str  # its digest and the token that ends a document; of conversations, also the next and the template
    chat_tokens: int | None  # the documents are conversations, of at most so many tokens; None: texts
    text_key: str  # field or column with the text
    val_fraction: float  # of the documents
    shard_tokens: int  # a part is closed after the document with which it reaches this length


def plan_units(files: list[TextFile]) -> list[Unit]:
    """Divide files into units: large files are split if possible, small ones are combined."""
    target = min(UNIT_BYTES, max(MIN_UNIT_BYTES, sum(file.text_bytes for file in files) // MAX_UNITS))
    groups: list[list[tuple[TextFile, int, int]]] = [[]]
    size = 0.0
    for file in files:
        parts = max(1, -(-file.text_bytes // target)) if file.divisible else 1
        for part in range(parts):
            groups[-1].append((file, part, parts))
            size += file.text_bytes / parts
            if size >= target * 0.9:  # parts of a large file are a little smaller than the target
                groups.append([])
                size = 0.0
    sizes = [int(sum(file.text_bytes / parts for file, _, parts in group)) for group in groups]
    return [Unit(tuple(group), size) for group, size in zip(groups, sizes) if group]


def unit_pieces(
    unit: Unit, text_key: str, tokenizer: Tokenizer | None, chat: "ChatTemplate | None" = None
) -> Iterator[Piece]:
    for file, part, parts in unit.slices:
        yield from read_pieces(file, part, parts, text_key, tokenizer, chat)


def unit_conversations(unit: Unit, recipe: Recipe, tokenizer: Tokenizer, counts: dict[str, int]) -> Iterator[Piece]:
    """Conversations with an answer, none longer than a row; `counts` has those that are cut or left out."""
    from lm.data.chat import ChatTemplate

    for piece in unit_pieces(unit, recipe.text_key, tokenizer, ChatTemplate(tokenizer)):
        assert piece.learned is not None and recipe.chat_tokens is not None
        last = recipe.chat_tokens - 1  # index of the end-of-text token of one that is cut
        is_long = len(piece.content) > last
        learned = np.append(piece.learned[:last], False) if is_long else piece.learned
        if learned.any():
            counts["cut"] += is_long
            yield piece._replace(content=piece.content[:last], learned=learned)
        else:
            counts["left_out"] += 1


def split_hash(content: str | np.ndarray) -> float:
    """Hash a document's first piece to a number in [0, 1); below the validation fraction, it is for validation."""
    data = content.encode() if isinstance(content, str) else content.astype("<u2").tobytes()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") / 2**64


def split_of(piece: Piece, val_fraction: float) -> str:
    """The split ("train" or "val") of the document that begins with a piece."""
    return piece.split or ("val" if split_hash(piece.content) < val_fraction else "train")


def record_path(unit: Unit, recipe: Recipe) -> Path:
    """The path of a unit's record, which exists once the unit is done."""
    options = recipe.text_key, recipe.val_fraction, recipe.shard_tokens
    return _record(recipe.folder, unit.slices, recipe.tokenizer, *options, DOCUMENT.names)


def _record(folder: Path, *content: Any) -> Path:
    """The path of a record, whose name is a hash of all that decides the content of what it stands for."""
    return folder / f"{blake2b(repr(content).encode(), digest_size=16).hexdigest()}.json"


def encode_unit(unit: Unit, recipe: Recipe) -> None:
    """Write the parts of a unit, and its record last."""
    path = record_path(unit, recipe)
    encoder, sizes = _tools(recipe)
    parts: list[Part] = []
    conversations = {"cut": 0, "left_out": 0}
    if recipe.chat_tokens is None:
        pieces = unit_pieces(unit, recipe.text_key, encoder.tokenizer)
    else:
        pieces = unit_conversations(unit, recipe, encoder.tokenizer, conversations)
    with ExitStack() as stack:
        open_parts: dict[str, Part] = {}  # by split
        split = None  # of the document that has begun
        for piece, ids in _encoded(pieces, encoder):
            split = split or split_of(piece, recipe.val_fraction)
            if split not in open_parts:
                name = f"{path.stem}-{len(parts):03d}-{split}"
                file = stack.enter_context(open(stack.enter_context(atomic_file(recipe.folder / name)), "wb"))
                open_parts[split] = Part(file, name, split, encoder.tokenizer, sizes)
                parts.append(open_parts[split])
            part = open_parts[split]
            part.write(piece, ids)
            if piece.last:
                if part.tokens >= recipe.shard_tokens:
                    open_parts.pop(split)
                split = None
    for part in parts:
        with atomic_file(recipe.folder / f"{part.name}{DOCUMENTS}") as file:
            np.array(part.documents, DOCUMENT).tofile(file)
        if part.learned:
            with atomic_file(recipe.folder / f"{part.name}{LEARNED}") as file:
                np.concatenate(part.learned).tofile(file)
    files = [{"file": part.name, "split": part.split} for part in parts]
    write_atomically(path, json.dumps({"parts": files, "conversations": conversations}))


class Part:
    """Ids of one split, which are written to a file, and the facts of each document in it."""

    def __init__(self, file: BinaryIO, name: str, split: str, tokenizer: Tokenizer, sizes: np.ndarray) -> None:
        self.file, self.name, self.split = file, name, split
        self.documents: list[tuple[int, ...]] = []  # with the fields of DOCUMENT
        self.learned: list[np.ndarray] = []  # of each conversation
        self.tokens = 0
        self._tokenizer, self._sizes = tokenizer, sizes  # sizes: bytes of each token
        self._eos = np.array([tokenizer.eos_id], id_type(tokenizer.vocab_size)).tobytes()
        self._digest, self._counts = blake2b(digest_size=8), np.zeros(3, np.int64)  # of the document that has begun

    def write(self, piece: Piece, ids: np.ndarray) -> None:
        self.file.write(ids.tobytes() + (self._eos if piece.last else b""))
        if piece.learned is not None:
            self.learned.append(piece.learned)
        tokens, token_bytes = len(ids) + piece.last, int(self._sizes[ids].sum())
        if isinstance(piece.content, str):
            text = piece.content.encode()
            size = len(text)
            self._digest.update(text.lower().translate(None, BLANKS))
        else:
            size = token_bytes if self._tokenizer.byte_level else self._tokenizer.text_bytes(ids)
            self._digest.update(ids.tobytes())
        self._counts += (tokens, size, token_bytes)
        self.tokens += tokens
        if piece.last:
            self.documents.append((int.from_bytes(self._digest.digest(), "little"), *self._counts.tolist()))
            self._digest, self._counts = blake2b(digest_size=8), np.zeros(3, np.int64)


def _encoded(pieces: Iterator[Piece], encoder: Encoder) -> Iterator[tuple[Piece, np.ndarray]]:
    while batch := list(_take(pieces, BATCH)):
        ids = iter(encoder.encode([piece.content for piece in batch if isinstance(piece.content, str)]))
        for piece in batch:
            yield piece, next(ids) if isinstance(piece.content, str) else piece.content.astype(encoder.dtype)


def _take(pieces: Iterator[Piece], length: int) -> Iterator[Piece]:
    """Yield the next pieces, until their total length reaches `length`."""
    while length > 0 and (piece := next(pieces, None)) is not None:
        length -= len(piece.content)
        yield piece


@lru_cache(maxsize=1)
def _tokenizer(recipe: Recipe) -> Tokenizer:
    return Tokenizer.load(recipe.folder)


@lru_cache(maxsize=1)
def _tools(recipe: Recipe) -> tuple[Encoder, np.ndarray]:
    """The encoder of a recipe, and the bytes of each token; made once in a process."""
    return Encoder(_tokenizer(recipe)), _tokenizer(recipe).token_bytes()


def part_ids(folder: Path, file: str, dtype: np.dtype) -> np.ndarray:
    return np.memmap(folder / file, dtype, mode="r")


class ShardTask(NamedTuple):
    """A shard to write: slices of parts, one row a document, or documents packed into rows of `seq_len` tokens."""

    path: Path
    slices: tuple[Slice, ...]
    seq_len: int | None


def shard_entry(task: ShardTask, recipe: Recipe) -> dict[str, Any] | None:
    """The entry of the manifest of a shard that is written; None where it is not yet."""
    try:
        entry = json.loads(shard_record(task, recipe).read_text())
        return entry if task.path.stat().st_size == entry["size"] else None
    except FileNotFoundError:
        return None


def shard_record(task: ShardTask, recipe: Recipe) -> Path:
    """The path of a shard's record, which exists once the shard is written."""
    return _record(recipe.folder, task.path.parts[-2:], task.slices, recipe.tokenizer, task.seq_len)


def write_shard(task: ShardTask, recipe: Recipe) -> None:
    """Write a shard from the parts in the folder of `recipe`, and last its record: its entry of the manifest."""
    tokenizer, folder = _tokenizer(recipe), recipe.folder
    packed = None if task.seq_len is None else PackedRows(task.seq_len, tokenizer.eos_id)
    facts: dict[str, Any] = {}
    with atomic_file(task.path) as file:
        labels = recipe.chat_tokens is not None
        writer = ShardWriter(file, id_type(tokenizer.vocab_size), tokenizer.sha256, packed, labels)
        if packed is None:
            _copy_documents(writer, task.slices, folder, tokenizer.eos_id)
        else:
            facts = _copy_packed(writer, task.slices, folder, packed)
        size = writer.close()
    entry = {"file": "/".join(task.path.parts[-2:]), "size": size, "row_groups": writer.row_groups}
    write_atomically(shard_record(task, recipe), json.dumps({**entry, "digest": writer.digest, **facts}))


def _copy_documents(writer: ShardWriter, slices: Sequence[Slice], folder: Path, eos_id: int) -> None:
    for file, start, stop in slices:
        for first in range(start, stop, ROW_GROUP_TOKENS):
            count = min(ROW_GROUP_TOKENS, stop - first)
            ids = np.fromfile(folder / file, writer.dtype, count, offset=first * writer.dtype.itemsize)
            ends = np.flatnonzero(ids == eos_id) + 1
            writer.write(ids, np.union1d(ends, [count]) if first + count == stop else ends)


def _copy_packed(writer: ShardWriter, slices: Sequence[Slice], folder: Path, packed: PackedRows) -> dict[str, Any]:
    """Write rows of several documents, as `data/packing` describes; returns the counts of padding and cut documents."""
    seq_len, eos_id = packed
    parts = [part_ids(folder, file, writer.dtype)[start:stop] for file, start, stop in slices]
    # A document that was cut for the validation has no end-of-text token.
    parts = [ids if ids[-1] == eos_id else np.append(ids, writer.dtype.type(eos_id)) for ids in parts]
    begins = np.cumsum([0, *map(len, parts)])  # offset of each part in all parts end to end
    inner_ends = [_document_ends(folder, piece) for piece in slices]
    ends = np.concatenate([np.append(inner, len(ids)) + begin for inner, ids, begin in zip(inner_ends, parts, begins)])
    marks = []  # of each part, which of its ids are learned
    if writer.with_labels:
        marks = [part_ids(folder, file + LEARNED, np.dtype(bool))[start:stop] for file, start, stop in slices]
    lengths = np.diff(ends, prepend=0)
    with_text = lengths > 1  # the rest of a cut document may be only its end
    packing = pack_documents((ends - lengths)[with_text], ends[with_text], seq_len)
    group_rows = max(1, ROW_GROUP_TOKENS // (seq_len + 1))
    edges = np.arange(0, packing.rows[-1] + 1 + group_rows, group_rows)
    for first, last in pairwise(np.searchsorted(packing.rows, edges).tolist()):
        starts, stops, rows = (values[first:last] for values in packing)
        rows = rows - rows[0]
        before = np.cumsum(stops - starts) - (stops - starts)
        columns = 1 + before - before[np.searchsorted(rows, rows)]
        source = np.searchsorted(begins, starts, side="right") - 1
        ids = np.full((int(rows[-1]) + 1, seq_len + 1), eos_id, writer.dtype)
        learned = np.zeros(ids.shape, bool)
        spans = (starts - begins[source], stops - begins[source], source, rows, columns)
        for start, stop, part, row, column in zip(*(values.tolist() for values in spans)):
            ids[row, column : column + stop - start] = parts[part][start:stop]
            if column == 1 and start > 0:
                ids[row, 0] = parts[part][start - 1]
            if marks:
                learned[row, column : column + stop - start] = marks[part][start:stop]
        labels = np.where(learned, ids.astype(np.int32), IGNORED).ravel() if marks else None
        writer.write(ids.ravel(), np.arange(1, len(ids) + 1) * (seq_len + 1), labels)
    return {
        "padding": int(packing.rows[-1] + 1) * seq_len - int((packing.stops - packing.starts).sum()),
        "cut_documents": int((lengths > seq_len).sum()),
    }


def _document_ends(folder: Path, piece: Slice) -> np.ndarray:
    """Where documents end inside of a slice; not after each end-of-text token, which may end an answer, too."""
    ends = np.cumsum(np.fromfile(folder / f"{piece.part}{DOCUMENTS}", DOCUMENT)["tokens"])
    return ends[(ends > piece.start) & (ends < piece.stop)] - piece.start


# ---- processes -------------------------------------------------------------------------------------------------------


def run_tasks(
    function: Callable[..., Any], tasks: Sequence[tuple], sizes: Sequence[int], doing: str, workers: int | None
) -> list[Any]:
    """Call a function (importable by name) with the arguments of every task; in processes if there is much work.

    `sizes` is the size of each task, in bytes. `workers` None: one per core.
    """
    columns = (TextColumn(doing), BarColumn(), TaskProgressColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task(doing, total=sum(sizes))
        workers = workers or allowed_cores()

        def watched(results: Iterator[Any]) -> Iterator[Any]:
            for result, size in zip(results, sizes, strict=True):
                progress.advance(bar, size)
                yield result

        if workers == 1 or sum(sizes) <= SMALL_WORK:
            return list(watched(starmap(function, tasks)))
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
        try:
            results = list(watched(pool.map(function, *zip(*tasks, strict=True))))
            pool.shutdown()
            return results
        except BaseException as error:
            processes = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            if not isinstance(error, BrokenProcessPool):
                raise
            raise RunError(
                "a worker process died, perhaps because memory ran out; the same command continues from here, and "
                "fewer --workers need less memory"
            ) from error


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent has died, perhaps killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
