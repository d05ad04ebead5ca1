"""Which text files an input means, of what kind they are, and how to open them.

The first step of `lm data prepare`: `data/sources` reads documents from what is found here.
"""

import io
import logging
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.fs as pafs

from lm.data.glob import glob_expression, split_glob
from lm.data.remote import first_line, is_remote, open_filesystem, with_retries
from lm.errors import RequestError

log = logging.getLogger(__name__)

EMBEDDED = "embedded:"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".bin": "flat"}
TEXT_SUFFIXES = set(
    ".txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .css .csv .tsv .yaml .yml .toml .ini .cfg "
    ".py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .rs .go .java .kt .scala .cs .js .mjs .jsx .ts .tsx .rb .php "
    ".pl .lua .r .jl .hs .ml .mli .clj .ex .exs .erl .swift .f90 .f .asm .s .sh .bash .zsh .sql .vim .el .lisp .scm "
    ".proto .cmake .tf .zig .nim .dart .v .sv .vhd".split()
)
DENSITY = 4  # bytes of text to a byte of a compressed file, about


@dataclass(frozen=True)
class TextFile:
    """One file of an input.

    Args:
        name: what messages and manifests call it: the path or URL.
        kind: "text" (one document), "jsonl", "parquet" or "flat" (token ids as nanoGPT keeps them).
        compression: "gzip", "zstd" or None.
        size: bytes, as it lies there.
        modified: when it last changed, ns; None where the file system does not say.
    """

    name: str
    kind: str
    compression: str | None
    size: int
    modified: int | None

    @property
    def text_bytes(self) -> int:
        """About how many bytes of text it holds."""
        return self.size * (DENSITY if self.compression or self.kind == "parquet" else 1)

    @property
    def divisible(self) -> bool:
        """Whether parts of it can be read without what is before them."""
        return self.kind == "parquet" or (self.kind == "jsonl" and not self.compression)

    def open(self) -> pa.NativeFile:
        """The file as it lies there, seekable."""
        filesystem, path, _ = _locate(self.name)
        return filesystem.open_input_file(path)

    def stream(self) -> BinaryIO:
        """Its content, decompressed; seekable where it is not compressed."""
        filesystem, path, _ = _locate(self.name)
        packed = self.compression is not None
        handle = filesystem.open_input_stream(path, compression=self.compression) if packed else self.open()
        return io.BufferedReader(handle, 2**23 if is_remote(self.name) else 2**20)


def find_files(inputs: Sequence[str]) -> list[TextFile]:
    """Find all files of several inputs.

    Args:
        inputs: files, folders, globs (`data/**/*.md`), URLs of any of them, or `embedded:sotu`. What has a name is
            read as text whatever its suffix; of a folder only the kinds that are known, and no hidden files.

    Returns:
        The files by name, each once.

    Raises:
        RequestError: there is nothing; names the input.
    """
    found = {file.name: file for source in inputs for file in _find(source)}
    if not found:
        raise RequestError("there is nothing to read: give files, folders, globs or URLs with --input")
    return [found[name] for name in sorted(found)]


def _find(source: str) -> Iterator[TextFile]:
    base, pattern = split_glob(source)
    filesystem, path, prefix = _locate(base)
    path = posixpath.normpath(path)

    def look() -> tuple[pafs.FileInfo, list[pafs.FileInfo]]:
        info = filesystem.get_file_info(path)
        below = pafs.FileSelector(path, recursive=True)
        return info, filesystem.get_file_info(below) if info.type == pafs.FileType.Directory else [info]

    try:
        info, files = with_retries(look, source) if is_remote(source) else look()
    except OSError as error:
        raise RequestError(f"{source}: cannot be listed ({first_line(error)})") from error
    if info.type == pafs.FileType.NotFound:
        raise RequestError(f"{source}: no such file or folder")
    if info.type == pafs.FileType.File:
        yield _text_file(source if source.startswith(EMBEDDED) else prefix + path, info)
        return
    files = [file for file in files if file.type == pafs.FileType.File]
    names = {file.path: posixpath.relpath(file.path, path) for file in files}
    if pattern is not None:
        matches = glob_expression(pattern)
        chosen = [file for file in files if matches.fullmatch(names[file.path])]
    else:
        visible = [file for file in files if not re.search(r"(^|/)\.", names[file.path])]
        chosen = [file for file in visible if _is_known(file.path)]
        skipped = Counter(posixpath.splitext(f.path)[1] or "no suffix" for f in visible if not _is_known(f.path))
        if skipped:
            kinds = ", ".join(f"{count} {suffix}" for suffix, count in skipped.most_common(5))
            log.info("%s: skipped %d files that are not known to be text (%s)", source, sum(skipped.values()), kinds)
    if not chosen:
        nothing = "no file matches" if pattern else "the folder holds no text, JSON lines or Parquet"
        raise RequestError(f"{source}: {nothing}")
    yield from (_text_file(prefix + posixpath.normpath(file.path), file) for file in chosen)


def _locate(source: str) -> tuple[pafs.FileSystem, str, str]:
    """File system, path in it, and what makes a name of a path."""
    if source.startswith(EMBEDDED):
        path = Path(__file__).parent / "corpus" / f"{source.removeprefix(EMBEDDED)}.parquet"
        if not path.exists():
            raise RequestError(f"{source}: there is no such text in the package; there is embedded:sotu")
        return pafs.LocalFileSystem(), str(path), ""
    return open_filesystem(source)


def _split_suffixes(path: str) -> tuple[str, str]:
    """`a/b.jsonl.gz` -> (`.jsonl`, `.gz`), in lower case; the second is empty where there is no compression."""
    stem, suffix = posixpath.splitext(path.lower())
    return (posixpath.splitext(stem)[1], suffix) if suffix in COMPRESSIONS else (suffix, "")


def _is_known(path: str) -> bool:
    """Whether a file of a folder is taken; flat ids are not, they often lie beside the text that they were made of."""
    suffix = _split_suffixes(path)[0]
    return suffix in TEXT_SUFFIXES or KINDS.get(suffix, "flat") != "flat"


def _text_file(name: str, info: pafs.FileInfo) -> TextFile:
    suffix, packed = _split_suffixes(info.path)
    embedded = name.startswith(EMBEDDED)  # when it was installed does not matter
    modified = None if embedded else info.mtime_ns
    return TextFile(name, KINDS.get(suffix, "text"), COMPRESSIONS.get(packed), info.size, modified)
