"""Files that survive a crash: atomic writes and links, appended lines, JSON with a digest, folders complete or absent.

Also the `--output` of a command, and what is wrong with a path, a URL or a file. Nothing here imports torch.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from lm.errors import RequestError
from lm.system.parsing import parse_line

log = logging.getLogger(__name__)

# ---- paths -----------------------------------------------------------------------------------------------------------

PATIENCE = 150.0  # seconds for all attempts of one read of a remote file
URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>.*)")  # `Path` leaves one of the slashes


class File(NamedTuple):
    """A file as a file system lists it."""

    path: str  # in its file system
    size: int  # bytes
    modified: int | str | None  # ns; of a store without times its ETag, if any


def is_remote(source: str) -> bool:
    return "://" in source and not source.startswith("file://")


def check_local_path(option: str, path: str | Path, fix: str = "write to this machine, and copy it there") -> None:
    """Raise RequestError for a URL if a local path is needed; it would become a folder `s3:`."""
    if url := URL.fullmatch(str(path)):
        if url["scheme"] == "file":
            fix = f"give the path alone: /{url['rest']}"
        raise RequestError(f"{option} {url['scheme']}://{url['rest']} is a URL, and only a path works here: {fix}")


def check_fetched(start: bytes, name: str | Path) -> None:
    """RequestError if a file begins as the pointers that Git LFS leaves for files that were not fetched."""
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        raise RequestError(f"{name} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder")


# ---- atomic writes, links and appended lines -------------------------------------------------------------------------


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Replace a file so that a reader sees the old or the new text but never a part.

    On failure, nothing is left beside it. `durable` waits until the text would survive a power cut.
    """
    with atomic_file(path, durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(path: Path, durable: bool = True) -> Iterator[Path]:
    """The path of a file to write, which replaces the one at `path` at the end; as in `write_atomically`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # instead of the temporary file
        raise


def append_bytes(descriptor: int, data: bytes) -> None:
    """Append bytes to a file opened for appending: all of them, or none and an OSError."""
    end, done = os.fstat(descriptor).st_size, 0
    try:
        while done < len(data):
            done += os.write(descriptor, data[done:])
    except OSError:
        os.ftruncate(descriptor, end)
        raise


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line of JSON to a file, all or nothing; first end the last line, if a kill cut it short."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        end = os.fstat(descriptor).st_size
        text = json.dumps(line, ensure_ascii=False) + "\n"
        if end > 0 and os.pread(descriptor, 1, end - 1) != b"\n":
            text = "\n" + text
        append_bytes(descriptor, text.encode())
    finally:
        os.close(descriptor)


def read_lines(path: Path, containing: tuple[str, ...] = ("",)) -> Iterator[dict[str, Any]]:
    """The objects of the lines that contain one of these texts; a line cut short by a kill is left out."""
    parts = [text.encode() for text in containing]
    try:
        text = path.read_bytes()
    except OSError:
        return
    for line in text.split(b"\n"):
        if any(part in line for part in parts) and (entry := parse_line(line)):
            yield entry


def point(link: Path, target: str) -> None:
    """Make `link` a relative symbolic link to the folder `target`, atomically; not on a file system without such links.

    There `Run.link` finds the checkpoint.
    """
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP):  # as exFAT, FUSE and SMB say it
            return
        raise
    if link.is_dir() and not link.is_symlink():  # the run was copied with folders in place of its links
        remove_folder(link)
    os.replace(temporary, link)


class Attempts:
    """Writes that may fail without ending a run, such as its log on a full disk.

    The first failure and the end of the failures are logged; what could not be written in between is lost.
    """

    def __init__(self) -> None:
        self._missing: set[str] = set()  # what could not be written at the last attempt

    def __call__(self, what: Path | str, write: Callable[[], Any]) -> None:
        """Call `write`, which may raise OSError. `what` names its file in the log."""
        try:
            write()
        except OSError as error:
            if not self._missing:
                reason = error.strerror or error
                log.warning("%s cannot be written: %s; until it can, what the run logs is missing", what, reason)
            self._missing.add(str(what))
            return
        if self._missing == {str(what)}:
            log.warning("what the run logs is written again; the part in between is missing")
        self._missing.discard(str(what))


# ---- digests ---------------------------------------------------------------------------------------------------------
# A checksummed document is a JSON object whose first key is `sha256`: the SHA-256 of every byte after that digest.

OPENING = b'{"sha256": "'
BODY = len(OPENING) + 64  # offset of the bytes under the digest: it has 64 hexadecimal digits


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dump_checksummed(document: dict[str, Any]) -> bytes:
    """Encode a non-empty JSON document with its digest."""
    body = b'", ' + json.dumps(document, allow_nan=False).encode()[1:]
    return OPENING + hashlib.sha256(body).hexdigest().encode() + body


def load_checksummed(text: bytes) -> dict[str, Any]:
    """The inverse of `dump_checksummed`; ValueError, before anything is parsed, if the digest does not match."""
    if text[:BODY] != OPENING + hashlib.sha256(text[BODY:]).hexdigest().encode():
        raise ValueError("its digest is not the one that was written")
    document = json.loads(text)
    del document["sha256"]
    return document


def stated_digest(path: Path) -> str | None:
    """The digest at the beginning of a checksummed document, which identifies it; None if there is none."""
    try:
        with open(path, "rb") as file:
            text = file.read(BODY)
    except OSError:
        return None
    return text[len(OPENING) :].decode("ascii", "replace") if text.startswith(OPENING) else None


# ---- folders that are complete or absent -----------------------------------------------------------------------------

# While it is written, a folder is called `.tmp-NAME-PID`; while it is replaced, the old one is `.old-NAME-PID`; while
# it is removed, `.dead-NAME-PID`.
STALE = re.compile(r"\.(?P<kind>tmp|old|dead)-(?P<name>.+)-\d+")


def sync(path: Path) -> None:
    """Wait until a file or folder would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Write a folder so that it is complete or absent, also after a kill or a power cut.

    Yields a temporary folder beside it, which takes its place when the block ends without an error. An existing folder
    is replaced by it; the parent folder must exist.
    """
    temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    remove_stale(folder)
    temporary.mkdir()
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if folder.exists():
            replaced = folder.with_name(f".old-{folder.name}-{os.getpid()}")
            os.rename(folder, replaced)
            os.rename(temporary, folder)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(temporary, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        restore_interrupted(folder)
        raise


def remove_stale(folder: Path) -> None:
    """Remove what killed writers of a folder left beside it; `folder` may be a pattern such as `run/step-*`."""
    restore_interrupted(folder)
    for path, _, _ in _stale_beside(folder):
        shutil.rmtree(path, ignore_errors=True)


def restore_interrupted(folder: Path) -> None:
    """Rename folders back that a killed writer had moved aside to replace them; `folder` as in `remove_stale`."""
    for path, kind, name in _stale_beside(folder):
        if kind == "old" and not path.with_name(name).exists():
            os.rename(path, path.with_name(name))


def remove_folder(folder: Path) -> None:
    """Remove a folder so that a kill never leaves part of it under its name; `remove_stale` removes the rest."""
    dead = folder.with_name(f".dead-{folder.name}-{os.getpid()}")
    with suppress(FileNotFoundError):  # another process was faster
        os.rename(folder, dead)
    shutil.rmtree(dead, ignore_errors=True)


def _stale_beside(folder: Path) -> list[tuple[Path, str, str]]:
    """The folders that killed writers left: path, kind, and the final name."""
    paths = list(folder.parent.iterdir()) if folder.parent.is_dir() else []
    matches = [(path, stale) for path in paths if (stale := STALE.fullmatch(path.name))]
    return [(path, stale["kind"], stale["name"]) for path, stale in matches if fnmatch(stale["name"], folder.name)]


# ---- what a command writes -------------------------------------------------------------------------------------------


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An `atomic_folder` for the `--output` of a command, whose name must be free or an empty folder."""
    check_local_path("--output", target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"--output {target} is there already and not an empty folder; choose another")
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(target) as folder:
        yield folder


def write_new_file(target: Path, text: str) -> None:
    """Write the `--output` of a command, whose name must be free."""
    check_local_path("--output", target)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RequestError(f"--output {target} is there already; give another name, or remove it") from None


def folder_bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*"))
