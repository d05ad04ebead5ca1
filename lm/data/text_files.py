"""Text to be tokenized: which files an input means, and the documents in them.

The first step of `lm data prepare`; `data/encode` encodes what is read here. Plain text, JSON lines, Parquet, and
token ids in a file of nanoGPT. A document of any length streams through: it comes in pieces of at most PIECE
characters, cut at line ends.
"""

import bz2
import codecs
import gzip
import io
import json
import logging
import lzma
import os
import posixpath
import re
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.data.catalog import MANIFEST
from lm.data.encoder import id_type
from lm.data.tokenizer import Tokenizer
from lm.errors import LmError, RequestError, RunError, first_line
from lm.system.files import is_remote
from lm.system.sources import File, file_identity, list_files, open_file, open_filesystem

log = logging.getLogger(__name__)

EMBEDDED = "embedded:"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".xz": "xz"}
KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".bin": "flat",
}  # fmt: skip
TEXT_SUFFIXES = set(
    ".txt .text .md .markdown .rst .tex .org .adoc .xml .css .yaml .yml .toml .ini .cfg "
    ".py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .rs .go .java .kt .scala .cs .js .mjs .jsx .ts .tsx .rb .php "
    ".pl .lua .r .jl .hs .ml .mli .clj .ex .exs .erl .swift .f90 .f .asm .s .sh .bash .zsh .sql .vim .el .lisp .scm "
    ".proto .cmake .tf .zig .nim .dart .v .sv .vhd".split()
)
PANDOC = "`pandoc -t plain -o {0}.txt {0}` makes text of it"
TEXT_KEY = "--text_key (lm fit: --data.prepare.text_key, lm predict: --data.text_key)"
TABLE = f"make Parquet of it (pandas: read_csv, to_parquet), and name the column of its text with {TEXT_KEY}"
NOT_TEXT = {  # suffixes -> what to do
    ".pdf": "`pdftotext {0}` makes text of it",
    **dict.fromkeys((".html", ".htm", ".docx", ".odt", ".rtf", ".epub"), PANDOC),
    **dict.fromkeys((".csv", ".tsv", ".xlsx"), TABLE),
    ".arrow": "datasets.load_from_disk(FOLDER)['train'].to_parquet('train.parquet') makes Parquet of it",
    ".npy": "it holds token ids: np.load({0!r}).astype(np.uint16).tofile('train.bin') makes a file of nanoGPT "
    "(np.uint32 if the vocabulary has more than 65,536 ids)",
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "unpack it and give its files"),
}
DENSITY = 4  # bytes of text in a byte of a compressed file, about
PIECE = 8 * 2**20  # characters of a text, or ids, that are held at once
PARQUET_ROWS = 256  # decoded at once; some million characters for usual documents
# Words of a file's name, or the name of its folder -> the split that it names.
SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
          "test": "test", "testing": "test", "eval": "test", "evaluation": "test"}  # fmt: skip
DATA_SUFFIXES = {*KINDS, ".txt", ".text"}  # of datasets, beside which the following are not documents
CARD = re.compile(r"(.*/)?((readme|licen[cs]e|copying|notice|citation)([._-].*)?\.(md|txt|rst|bib)|"
                  r"(dataset_infos?|dataset_dict|dataset-metadata|state|croissant)\.json)", re.IGNORECASE)  # fmt: skip
SEVERAL = "several"  # splits in one name
NUMBERED = re.compile(r"(.*)\d{5}-of-(\d{5})(.*)")  # one file of several
SURROGATE = re.compile("[\ud800-\udfff]")

# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextFile:
    name: str  # its path or URL
    kind: str  # "text" (one document), "jsonl", "parquet" or "flat" (token ids as nanoGPT keeps them)
    compression: str | None  # "gzip", "zstd", "bz2", "xz"
    size: int  # bytes, as it is stored
    modified: int | str | None  # ns, or what a store calls the content; None where the file system does not know it
    split: str | None = None  # "train" or "val", where the names of the files decide it
    address: str = field(default="", repr=False, compare=False)  # where it is, of a hub at the commit that was listed

    @property
    def text_bytes(self) -> int:
        """About how many bytes of text it holds."""
        return self.size * (DENSITY if self.compression or self.kind == "parquet" else 1)

    @property
    def divisible(self) -> bool:
        """Whether a part of it can be read without the parts before."""
        return self.kind == "parquet" or (self.kind == "jsonl" and not self.compression)

    def open(self) -> pa.NativeFile:
        """The file as it is, seekable."""
        return open_file(*open_filesystem(self.address)[:2], self.name)

    def stream(self) -> io.BufferedIOBase:
        """Its content, decompressed; seekable where it is not compressed."""
        stream = io.BufferedReader(self.open(), 2**23 if is_remote(self.name) else 2**20)
        if self.compression is None:
            return stream
        if self.size == 0:
            raise EOFError("it is empty")
        if self.compression == "gzip":
            return gzip.open(stream)
        if self.compression == "zstd":
            return io.BufferedReader(pa.CompressedInputStream(stream, self.compression), 2**20)
        return io.BufferedReader(_Members(stream, self.compression), 2**20)


class _Members(io.RawIOBase):
    """The content of all members of a .bz2 or .xz file; `bz2.open` and `lzma.open` end at the first damaged one."""

    def __init__(self, stream: io.BufferedIOBase, compression: str) -> None:
        self._stream = stream
        self._new = {"bz2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}[compression]
        self._member = self._new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        content = b""
        while not content:
            if self._member.eof:  # another one follows, or padding, or nothing
                data = self._member.unused_data.lstrip(b"\0")
                while not data and (more := self._stream.read(2**16)):
                    data = more.lstrip(b"\0")
                if not data:
                    return 0
                self._member = self._new()
            elif not self._member.needs_input:
                data = b""
            elif not (data := self._stream.read(2**16)):
                raise EOFError("it ends inside of a member")
            content = self._member.decompress(data, len(buffer))
        buffer[: len(content)] = content
        return len(content)


def find_files(inputs: Sequence[str]) -> list[TextFile]:
    """All files of files, folders, globs (`data/**/*.md`), URLs of any of them, or `embedded:sotu`, by name, each once.

    Of a folder, files with known suffixes are taken; a file that is named is read as text, whatever its suffix.
    """
    found: dict[Hashable, TextFile] = {}
    for file in (file for source in inputs for file in _find(source)):
        found.setdefault(file_identity(file.name), file)
    if not found:
        raise RequestError("there is nothing to read: give files, folders, globs or URLs with --input")
    return sorted(found.values(), key=lambda file: file.name)


def split_by_names(files: list[TextFile]) -> list[TextFile]:
    """Files with the split that their names or folders say, such as `train.txt` and `val/a.txt`, if most say one.

    The others are then for training; those of a test split are left out, and logged. Names of code do not count:
    `train.py` is a program.
    """
    below = len(os.path.commonprefix([PurePosixPath(file.name).parent.parts for file in files]))
    named = [(file, _named_split(file.name, below)) for file in files]
    of: dict[str | None, list[str]] = {}
    for file, split in named:
        of.setdefault(split, []).append(file.name)
    shown = {split: ", ".join(all[:3]) + f" and {len(all) - 3} more" * (len(all) > 3) for split, all in of.items()}
    if len(of) == 1 or of.keys() <= {"train", SEVERAL, None}:
        return files
    unclear = ""
    if SEVERAL in of:
        unclear = f"a name has several: {shown[SEVERAL]}"
    elif 2 * len(of.get(None, [])) > len(files):
        unclear = f"most names have none: {shown[None]}"
    elif of.keys() <= {"val", "test"}:
        unclear = f"none is for training: {shown['val']}, {shown['test']}"
    if unclear:
        log.warning("the splits in the names of files are ignored, because %s; rename them, or leave some out", unclear)
        return files
    if "test" in of:
        log.info("left out, as a test split: %s; prepare it by itself for data.test", shown["test"])
    if "val" not in of:
        return [file for file, split in named if split != "test"]
    log.info("by their names, for training: %s; for validation: %s",
             ", ".join(shown[split] for split in ("train", None) if split in of), shown["val"])  # fmt: skip
    return [replace(file, split=split or "train") for file, split in named if split != "test"]


def _named_split(path: str, below: int) -> str | None:
    """The split in the name of a file, or else in that of the nearest of its folders, without the first `below`."""
    *folders, name = PurePosixPath(path.lower()).parts
    is_code = _split_suffixes(name)[0] in TEXT_SUFFIXES - {".txt", ".text"}
    for name in reversed([*folders[below:], "" if is_code else name]):
        if seen := {SPLITS[word] for word in re.split("[^a-z]+", name) if word in SPLITS}:
            return seen.pop() if len(seen) == 1 else SEVERAL
    return None


def _find(source: str) -> Iterator[TextFile]:
    if source.startswith(EMBEDDED):
        path = Path(__file__).parent / "corpus" / f"{source.removeprefix(EMBEDDED)}.parquet"
        if not path.exists():
            raise RequestError(f"{source}: there is no such text in the package; there is embedded:sotu")
        # When it was installed does not matter.
        yield TextFile(source, "parquet", None, path.stat().st_size, None, address=str(path))
        return
    listing = list_files(source)
    files = listing.files
    if listing.is_folder:
        files, skipped = _texts_of_folder(files)
        kinds = ", ".join(f"{count} {kind}" for kind, count in skipped.most_common(5))
        if not files:
            cure = "".join(f"; {NOT_TEXT[suffix].format(f'FILE{suffix}')}" for suffix in skipped if suffix in NOT_TEXT)
            cure = f"; name the token ids: {source.rstrip('/')}/*.bin" if ".bin" in skipped else cure
            raise RequestError(
                f"{source}: the folder holds no text, JSON lines or Parquet, but {kinds or 'nothing'}{cure}"
            )
        numbered = Counter(match.group(1, 2, 3) for name in files if (match := NUMBERED.fullmatch(name)))
        for (start, total, end), count in numbered.items():
            if count < int(total):
                log.warning("%s: %d of %s*-of-%s%s are missing; was the download stopped?",
                            source, int(total) - count, start, total, end)  # fmt: skip
        read = Counter(map(_suffix, files))
        if skipped or len(read) > 1:
            counts = ", ".join(f"{count} {suffix}" for suffix, count in read.most_common(5))
            log.info("%s: reads %s%s", source, counts, f"; skipped: {kinds}" if skipped else "")
    for file in files.values():
        name = listing.name(file)
        name = name if is_remote(name) else posixpath.normpath(name)
        suffix, packed = _split_suffixes(file.path)
        if cure := NOT_TEXT.get(suffix):
            raise RequestError(f"{name} is not plain text: {cure.format(quote(name))}; or leave it out")
        kind, compression = KINDS.get(suffix, "text"), COMPRESSIONS.get(packed)
        yield TextFile(name, kind, compression, file.size, file.modified, address=listing.address(file))


def _texts_of_folder(files: dict[str, File]) -> tuple[dict[str, File], Counter[str]]:
    """The files of a folder that are read, and the numbers of others by what they are."""
    shard = "train/00000.parquet"
    prepared = [name.removesuffix(shard) for name in files if name.endswith(shard)]
    prepared = [top for top in prepared if top + MANIFEST in files or top + ".parts/plan.json" in files]
    visible = [name for name in files if not re.search(r"(^|/)\.", name)]
    has_data = any(_split_suffixes(name)[0] in DATA_SUFFIXES and not CARD.fullmatch(name) for name in visible)
    kept, skipped = {}, Counter()
    for name in visible:
        packed = _split_suffixes(name)[1]
        if name.startswith(tuple(prepared)):
            skipped["in prepared folders"] += 1
        elif CARD.fullmatch(name) and (has_data or name.endswith(".json")):
            skipped[posixpath.basename(name)] += 1
        elif packed and name[: -len(packed)] in files:
            skipped[f"{packed} of files that are there unpacked"] += 1
        elif not _is_known(name):
            skipped[_suffix(name)] += 1
        else:
            kept[name] = files[name]
    return kept, skipped


def _suffix(path: str) -> str:
    return posixpath.splitext(path)[1] or "no suffix"


def _split_suffixes(path: str) -> tuple[str, str]:
    """`a/b.jsonl.gz` -> (`.jsonl`, `.gz`), in lower case; the second is empty where there is no compression."""
    stem, suffix = posixpath.splitext(path.lower())
    return (posixpath.splitext(stem)[1], suffix) if suffix in COMPRESSIONS else (suffix, "")


def _is_known(path: str) -> bool:
    """Whether a file of a folder is read; flat ids are not, since they often stand beside their text."""
    suffix = _split_suffixes(path)[0]
    return suffix in TEXT_SUFFIXES or KINDS.get(suffix, "flat") != "flat"


# ---- documents -------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    where: str  # file and line, row or token, for messages
    content: str | np.ndarray  # text, or (n,) ids without the end-of-text token
    last: bool  # whether the document ends here
    split: str | None = None  # "train" or "val" where the names of the files decide it


def read_documents(inputs: Sequence[str], text_key: str = "text") -> Iterator[tuple[str, str]]:
    """Whole documents of files, folders, globs or URLs, with the place of each, in order."""
    for file in find_files(inputs):
        held = []
        for piece in read_pieces(file, text_key=text_key):
            held.append(piece.content)
            if piece.last:
                yield piece.where, "".join(held)
                held = []


def read_pieces(
    file: TextFile, part: int = 0, parts: int = 1, text_key: str = "text", tokenizer: Tokenizer | None = None
) -> Iterator[Piece]:
    """Documents of a part, from 0, of a file; empty ones are left out. Flat ids need the tokenizer that made them.

    The documents of all parts one after the other are those of the file; there are several of divisible files only.
    RunError names the line, byte or row of a file that cannot be read.
    """
    try:
        if file.kind == "flat":
            yield from _flat(file, tokenizer)
            return
        if file.kind == "text":
            documents = [(file.name, _decoded(file))]
        else:
            readers = {"jsonl": _json_lines, "parquet": _parquet}
            documents = ((where, (text,)) for where, text in readers[file.kind](file, part, parts, text_key))
        for where, chunks in documents:
            yield from (Piece(where, text, last, file.split) for text, last in _cut(chunks) if text)
    except LmError:
        raise
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        cure = "is it damaged or truncated?"
        if "too much memory" in str(error):
            cure = f"its window is above 128 MiB: `zstd -d --rm --long=31 {quote(file.name)}` unpacks it"
        raise RunError(f"{file.name} cannot be read ({first_line(error)}); {cure}") from error


def _cut(chunks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Join chunks to pieces that end with a line; the last one is marked."""
    held = ""
    for chunk in chunks:
        held += chunk
        while len(held) > PIECE:
            end = held.rfind("\n", 0, PIECE) + 1 or PIECE
            yield held[:end], False
            held = held[end:]
    yield held, True


def _decoded(file: TextFile) -> Iterator[str]:
    decoder, lines = codecs.getincrementaldecoder("utf-8-sig")(), 0
    with file.stream() as stream:
        while True:
            data = stream.read(PIECE)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line = lines + error.object.count(b"\n", 0, error.start) + 1
                raise RequestError(
                    f"{file.name}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8 text; "
                    "convert the file, or leave it out"
                ) from error
            if "\0" in text:
                raise RequestError(f"{file.name} is not plain text: it holds zero bytes; convert it, or leave it out")
            yield text
            if not data:
                return
            lines += text.count("\n")


def _json_lines(file: TextFile, part: int, parts: int, key: str) -> Iterator[tuple[str, str]]:
    """The lines that begin in a part of the file."""
    start, stop = (file.size * edge // parts for edge in (part, part + 1))
    position = max(0, start - 1)
    with file.stream() as stream:
        if start > 0:
            stream.seek(position)
            position += len(stream.readline())
        for number, line in enumerate(iter(stream.readline, b""), start=1):
            if parts > 1 and position >= stop:
                return
            if line.strip():
                where = f"{file.name}, line {number}" if start == 0 else f"{file.name}, byte {position}"
                try:
                    text = _json_text(line, key)
                except ValueError as error:
                    raise RunError(f"{where}: {error}") from error
                yield where, text
            position += len(line)


def _json_text(line: bytes, key: str) -> str:
    """The text of a line; ValueError where there is none."""
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON object on one line ({first_line(error)})") from error
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON {type(entry).__name__} where one object a line is expected")
    if key not in entry:
        raise ValueError(f"there is no key {key!r} among {', '.join(map(repr, entry))}; name it with {TEXT_KEY}")
    text = entry[key]
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is not a text but {json.dumps(text)[:40]}")
    if not text.isascii() and SURROGATE.search(text):
        raise ValueError(f"{key!r} holds half of a surrogate pair, which is not a character")
    return text


def _parquet(file: TextFile, part: int, parts: int, column: str) -> Iterator[tuple[str, str]]:
    """The rows of a part of the row groups."""
    with file.open() as handle:
        parquet = pq.ParquetFile(handle)
        schema = parquet.schema_arrow
        if column not in schema.names:
            raise RunError(
                f"{file.name} has no column {column!r} among {', '.join(map(repr, schema.names))}; name the one with "
                f"text by {TEXT_KEY}; token ids are trained on as they are: --data.train"
            )
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise RunError(f"{file.name}: column {column!r} is not text but {kind}; give another with {TEXT_KEY}")
        groups = parquet.num_row_groups
        chosen = range(groups * part // parts, groups * (part + 1) // parts)
        row = sum(parquet.metadata.row_group(group).num_rows for group in range(chosen.start))
        for batch in parquet.iter_batches(PARQUET_ROWS, row_groups=list(chosen), columns=[column]):
            values = batch.column(0)
            try:
                texts = values.to_pylist()
            except UnicodeDecodeError as error:
                row += values.cast(pa.binary()).to_pylist().index(error.object)
                raise RunError(f"{file.name}, row {row}: column {column!r} is not UTF-8 ({error})") from error
            for row, text in enumerate(texts, start=row):
                if text is None:
                    raise RunError(f"{file.name}, row {row}: column {column!r} is null; leave such rows out")
                yield f"{file.name}, row {row}", text
            row += 1


def _flat(file: TextFile, tokenizer: Tokenizer | None) -> Iterator[Piece]:
    """Documents of a file of ids: uint16 as nanoGPT keeps them, or uint32 if a vocabulary needs it."""
    if tokenizer is None:
        raise RequestError(f"{file.name} holds token ids: give the tokenizer.json they were made with (--tokenizer)")
    position = 0  # tokens before the chunk
    unfinished = False  # whether a piece of the document that the chunk begins with was given already
    dtype = id_type(tokenizer.vocab_size)
    with file.stream() as stream:
        following = stream.read(dtype.itemsize * PIECE)
        while data := following:
            following = stream.read(dtype.itemsize * PIECE)
            if len(data) % dtype.itemsize:
                raise RunError(f"{file.name} ends inside of a token id: it is truncated, or not of {dtype} ids")
            ids = np.frombuffer(data, dtype)  # (n,)
            if position == 0 and len(ids) >= 16 and not ids[1::2].any():  # the upper halves of wider ids
                size, wide = dtype.itemsize, dtype.itemsize * (2 if ids[2::4].any() else 4)
                raise RunError(
                    f"{file.name}: every second id is 0, so an id has {wide} bytes, not {size}: np.fromfile("
                    f"{file.name!r}, '<u{wide}').astype('<u{size}').tofile('train.bin') makes a file of {dtype}"
                )
            outside = ids >= tokenizer.vocab_size
            if outside.any():
                bad = int(np.argmax(outside))
                raise RunError(
                    f"{file.name}, token {position + bad}: id {ids[bad]} is outside the vocabulary of "
                    f"{tokenizer.vocab_size}; was it made with another tokenizer?"
                )
            start = 0
            for end in np.flatnonzero(ids == tokenizer.eos_id).tolist():
                if end > start or unfinished:
                    yield Piece(f"{file.name}, token {position + start}", ids[start:end], True, file.split)
                start, unfinished = end + 1, False
            if start < len(ids):
                unfinished = bool(following)
                yield Piece(f"{file.name}, token {position + start}", ids[start:], not unfinished, file.split)
            position += len(ids)
