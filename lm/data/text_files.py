"""Files of text: which ones an input means, their kind and compression, and the split that their names say.

The first step of `lm data prepare`; `data/documents` reads them.
"""

import gzip
import io
import logging
import lzma
import os
import posixpath
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from shlex import quote

import pyarrow as pa

from lm.data.catalog import MANIFEST
from lm.errors import RequestError
from lm.system.files import File, is_remote
from lm.system.sources import file_identity, list_files, open_file, open_filesystem
from lm.system.units import listed

log = logging.getLogger(__name__)

EMBEDDED = "embedded:"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".xz": "xz"}
KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".pq": "parquet",
    ".csv": "csv", ".tsv": "tsv", ".arrow": "arrow", ".bin": "flat", ".ds": "flat", ".npy": "flat",
}  # fmt: skip
TEXT_SUFFIXES = set(
    ".txt .text .md .markdown .rst .tex .org .adoc .xml .css .yaml .yml .toml .ini .cfg "
    ".py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .rs .go .java .kt .scala .cs .js .mjs .jsx .ts .tsx .rb .php "
    ".pl .lua .r .jl .hs .ml .mli .clj .ex .exs .erl .swift .f90 .f .asm .s .sh .bash .zsh .sql .vim .el .lisp .scm "
    ".proto .cmake .tf .zig .nim .dart .v .sv .vhd".split()
)
PANDOC = "`pandoc -t plain -o {0}.txt {0}` makes text of it"
TEXT_KEY = "--text_key, in a config data.prepare.text_key (lm predict: data.text_key)"
TABLE = f"make Parquet of it (pandas: read_excel, to_parquet), and name the column of its text with {TEXT_KEY}"
NOT_TEXT = {  # suffixes -> what to do
    ".pdf": "`pdftotext {0}` makes text of it",
    **dict.fromkeys((".html", ".htm", ".docx", ".odt", ".rtf", ".epub"), PANDOC),
    ".xlsx": TABLE,
    **dict.fromkeys((".idx", ".index", ".metadata"), "it belongs to a file of token ids: give that one"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "unpack it and give its files"),
}
DENSITY = 4  # bytes of text in a byte of a compressed file, about
# Words of a file's name, or the name of its folder -> the split that it names.
SPLIT_WORDS = {"train": "train training", "val": "val valid validation dev", "test": "test testing eval evaluation"}
SPLITS = {word: split for split, words in SPLIT_WORDS.items() for word in words.split()}
DATA_SUFFIXES = {*KINDS, ".txt", ".text"}  # of datasets, beside which the following are not documents
CARD_TEXT = r"(readme|licen[cs]e|copying|notice|citation)([._-].*)?\.(md|txt|rst|bib)"
CARD_JSON = r"(dataset_infos?|dataset_dict|dataset-metadata|state|croissant)\.json"
NUMBERED = re.compile(r"(.*)\d{5}-of-(\d{5})(.*)")  # one file of several
CARD = re.compile(rf"(.*/)?({CARD_TEXT}|{CARD_JSON})", re.IGNORECASE)


@dataclass(frozen=True)
class TextFile:
    name: str  # its path or URL
    kind: str  # "text" (one document), "flat" (token ids, see `data/token_files`), or a value of `KINDS`
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
        return open_file(*open_filesystem(self.address)[:2], self.name)

    def read_beside(self, suffix: str, other: str) -> bytes | None:
        """The content of the file that has another suffix in place of this one; None where there is none."""
        path, found = re.subn(rf"{re.escape(suffix)}(?=$|\?)", other, self.address, flags=re.IGNORECASE)
        if not found:
            return None
        try:
            with open_file(*open_filesystem(path)[:2], self.name) as handle:
                return handle.read()
        except FileNotFoundError:
            return None

    def stream(self) -> io.BufferedIOBase:
        """Its content, decompressed; seekable where it is not compressed."""
        stream = io.BufferedReader(self.open(), 2**23 if is_remote(self.name) else 2**20)
        if self.compression is None:
            return stream
        if self.size == 0:
            raise EOFError("it is empty")
        if self.compression == "gzip":
            return gzip.open(stream)
        if self.compression == "xz":  # which Arrow does not know
            return lzma.open(stream)
        return io.BufferedReader(pa.CompressedInputStream(stream, self.compression), 2**20)


def find_files(inputs: Sequence[str]) -> list[TextFile]:
    """All files of files, folders, globs (`data/**/*.md`), URLs of any of them, or `embedded:sotu`, by name, each once.

    Of a folder, files with known suffixes are read; a file that is named is read as text, whatever its suffix.
    """
    files: dict[Hashable, TextFile] = {}
    for file in (file for source in inputs for file in _find(source)):
        files.setdefault(file_identity(file.name), file)
    if not files:
        raise RequestError("there is nothing to read: give files, folders, globs or URLs with --input")
    return sorted(files.values(), key=lambda file: file.name)


def split_by_names(files: list[TextFile]) -> list[TextFile]:
    """Files with the split that their names or folders say, such as `train.txt` and `val/a.txt`, if most say one.

    The others are then for training; those of a test split are left out, and logged. Names of code do not count:
    `train.py` is a program.
    """
    below = len(os.path.commonprefix([PurePosixPath(file.name).parent.parts for file in files]))
    named = [(file, _named_split(file.name, below)) for file in files]
    by_split: dict[str | None, list[str]] = {}
    for file, split in named:
        by_split.setdefault(split, []).append(file.name)
    shown = {split: listed(names, 3) for split, names in by_split.items()}
    if len(by_split) == 1 or by_split.keys() <= {"train", None}:
        return files
    problem = ""
    if 2 * len(by_split.get(None, [])) > len(files):
        problem = f"most names have none: {shown[None]}"
    elif by_split.keys() <= {"val", "test"}:
        problem = f"none is for training: {shown['val']}, {shown['test']}"
    if problem:
        log.warning("the splits in the names of files are ignored, because %s; rename them, or leave some out", problem)
        return files
    if "test" in by_split:
        log.info("left out, as a test split: %s; prepare it by itself for data.test", shown["test"])
    if "val" not in by_split:
        return [file for file, split in named if split != "test"]
    training = ", ".join(shown[split] for split in ("train", None) if split in by_split)
    log.info("by their names, for training: %s; for validation: %s", training, shown["val"])
    return [replace(file, split=split or "train") for file, split in named if split != "test"]


def _named_split(path: str, below: int) -> str | None:
    """The split in the name of a file, or else in that of the nearest of its folders, without the first `below`.

    A name with several has none.
    """
    *folders, name = PurePosixPath(path.lower()).parts
    is_code = _split_suffixes(name)[0] in TEXT_SUFFIXES - {".txt", ".text"}
    for name in reversed([*folders[below:], "" if is_code else name]):
        if splits := {SPLITS[word] for word in re.split("[^a-z]+", name) if word in SPLITS}:
            return splits.pop() if len(splits) == 1 else None
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
            fixes = [NOT_TEXT[suffix].format(f"FILE{suffix}") for suffix in skipped if suffix in NOT_TEXT]
            ids = [f"{source.rstrip('/')}/*{suffix}" for suffix in skipped if KINDS.get(suffix) == "flat"]
            fixes = [f"name the token ids: {' '.join(ids)}"] if ids else fixes
            problem = f"{source}: the folder has no text, JSON lines or Parquet files, only {kinds}"
            problem = problem if kinds else f"{source}: the folder is empty"
            raise RequestError("; ".join([problem, *fixes]))
        numbered = Counter(match.group(1, 2, 3) for name in files if (match := NUMBERED.fullmatch(name)))
        for (start, total, end), count in numbered.items():
            if count < int(total):
                missing = f"{int(total) - count} of {start}*-of-{total}{end}"
                log.warning("%s: %s are missing; was the download stopped?", source, missing)
        suffixes = Counter(map(_suffix, files))
        if skipped or len(suffixes) > 1:
            counts = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(5))
            log.info("%s: reads %s%s", source, counts, f"; skipped: {kinds}" if skipped else "")
    for file in files.values():
        name = listing.name(file)
        name = name if is_remote(name) else posixpath.normpath(name)
        suffix, packed = _split_suffixes(file.path)
        if fix := NOT_TEXT.get(suffix):
            raise RequestError(f"{name} is not plain text: {fix.format(quote(name))}; or leave it out")
        kind, compression = KINDS.get(suffix, "text"), COMPRESSIONS.get(packed)
        yield TextFile(name, kind, compression, file.size, file.modified, address=listing.address(file))


def _texts_of_folder(files: dict[str, File]) -> tuple[dict[str, File], Counter[str]]:
    """The files of a folder that are read, and the numbers of others by what they are."""
    shard = "train/00000.parquet"
    prepared = [name.removesuffix(shard) for name in files if name.endswith(shard)]
    prepared = [top for top in prepared if top + MANIFEST in files or top + ".parts/plan.json" in files]
    visible = [name for name in files if not re.search(r"(^|/)\.", name)]
    has_data = any(_split_suffixes(name)[0] in DATA_SUFFIXES and not CARD.fullmatch(name) for name in visible)
    selected, skipped = {}, Counter()
    for name in visible:
        suffix = _split_suffixes(name)[0]
        if name.startswith(tuple(prepared)):
            skipped["in prepared folders"] += 1
        elif CARD.fullmatch(name) and (has_data or name.endswith(".json")):
            skipped[posixpath.basename(name)] += 1
        elif suffix in TEXT_SUFFIXES or KINDS.get(suffix, "flat") != "flat":
            selected[name] = files[name]
        else:  # flat ids too, which often stand beside their text
            skipped[_suffix(name)] += 1
    return selected, skipped


def _suffix(path: str) -> str:
    return posixpath.splitext(path)[1] or "no suffix"


def _split_suffixes(path: str) -> tuple[str, str]:
    """`a/b.jsonl.gz` -> (`.jsonl`, `.gz`), in lower case; the second is empty where there is no compression."""
    stem, suffix = posixpath.splitext(path.lower())
    return (posixpath.splitext(stem)[1], suffix) if suffix in COMPRESSIONS else (suffix, "")
