"""Files that are not on this machine: file systems by URL, reads that are retried, copies in a cache folder.

`data/shards` and `data/text_files` find the files of a source with `list_files` and open them with `open_file`.
`runs/mirror` writes.

Reads are retried here and not by pyarrow. On Linux pyarrow ignores its timeout of a request, so that an answer which
never ends is waited for without end; file systems of fsspec (`hf://`) retry little or nothing; and neither notices an
object that comes shorter than it is.
"""

import hashlib
import io
import json
import logging
import math
import os
import posixpath
import random
import re
import shutil
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs
from fsspec.utils import glob_translate

from lm.errors import LmError, RequestError, RunError, first_line
from lm.system.files import atomic_folder, parse_json
from lm.system.process import reader_pool

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between attempts; doubled after each failure
PATIENCE = 150.0  # seconds for all attempts of one read
WARN_EVERY = 60.0  # seconds
COPIED_AT_ONCE = 2**24  # bytes
FRESH = 60.0  # seconds in which a copy is not made again where the store says no times
FACTS = ".source.json"  # in a copy: sizes and times of the files in the store
ARROW_SCHEMES = ("s3", "gs", "gcs")
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_DENIED = re.compile(r"ACCESS_DENIED|PERMISSION_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH")
_REFUSED = re.compile(  # how pyarrow words what S3 will not answer better the next time
    r"AWS Error (ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH)|HTTP status 301\)"
)
_last_warning = -math.inf  # when a failed read was last logged


# ---- file systems ----------------------------------------------------------------------------------------------------


def is_remote(source: str) -> bool:
    return "://" in source and not source.startswith("file://")


def open_filesystem(source: str) -> tuple[pafs.FileSystem, str, str]:
    """Find the file system of a path or URL.

    `s3://` and `gs://` go through pyarrow (region, endpoint and credentials from the environment, or as a query:
    `s3://bucket/folder?endpoint_override=http://host:9000`); any other scheme through fsspec, if its package is
    installed (`hf://` needs huggingface_hub).

    Returns:
        The file system, the path in it, and the prefix that makes a path of it a URL.

    Raises:
        RequestError: the scheme is unknown or its package is missing.
    """
    if not is_remote(source):
        return pafs.LocalFileSystem(), source.removeprefix("file://"), ""
    scheme = source.partition("://")[0]
    try:
        if scheme in ARROW_SCHEMES:
            filesystem, path = pafs.FileSystem.from_uri(source)
            return filesystem, path, f"{scheme}://"
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(source)
        prefix = "" if "://" in path else f"{scheme}://"
        return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path, prefix
    except (ImportError, ValueError, OSError) as error:
        raise RequestError(f"{source}: cannot be opened ({first_line(error)}); is the URL right?") from error


# ---- listing ---------------------------------------------------------------------------------------------------------


class Listing(NamedTuple):
    """The files that a path, folder, glob or URL means."""

    filesystem: pafs.FileSystem
    path: str  # there, of the file or folder, or of the folder before a glob's first wildcard
    prefix: str  # what makes a URL of a path
    files: dict[str, pafs.FileInfo]  # by their names below `path`, in order; for a file its own name
    kind: Literal["file", "folder", "glob"]  # of the source


def list_files(source: str, patience: float = PATIENCE) -> Listing:
    """List a path, folder, glob or URL.

    Raises:
        RequestError: it is not there, or cannot be listed, or a glob matches no file.
        RunError: a remote file system failed again and again.
    """
    base, pattern = _split_glob(source)
    filesystem, path, prefix = open_filesystem(base)
    path = path if "://" in path else posixpath.normpath(path)
    recursive = pattern is None or "/" in pattern or "**" in pattern

    def read() -> tuple[pafs.FileType, list[pafs.FileInfo]]:
        info = filesystem.get_file_info(path)
        if info.type != pafs.FileType.Directory:
            return info.type, [info]
        if isinstance(filesystem, pafs.LocalFileSystem):
            return info.type, filesystem.get_file_info(_walk(path, recursive))
        return info.type, filesystem.get_file_info(pafs.FileSelector(path, recursive=recursive))

    try:
        kind, found = with_retries(read, source, patience)
    except OSError as error:
        raise RequestError(f"{source}: cannot be listed ({first_line(error)})") from error
    except UnicodeEncodeError as error:  # Arrow takes no other names
        raise RequestError(f"{source}: the name {error.object!r} is not UTF-8; rename it") from error
    if kind == pafs.FileType.NotFound:
        raise RequestError(f"{source}: no such file or folder")
    if kind == pafs.FileType.File and pattern is None:
        return Listing(filesystem, path, prefix, {posixpath.basename(path): found[0]}, "file")
    named = {posixpath.relpath(file.path, path): file for file in found if file.type == pafs.FileType.File}
    if pattern is None:
        return Listing(filesystem, path, prefix, dict(sorted(named.items())), "folder")
    try:
        matches = re.compile(glob_translate(pattern)).fullmatch
    except (ValueError, re.error) as error:
        raise RequestError(f"{source} is no pattern of files: {first_line(error)}") from error
    chosen = {name: named[name] for name in sorted(named) if matches(name)}
    if not chosen:
        raise RequestError(f"{source}: no file matches")
    return Listing(filesystem, path, prefix, chosen, "glob")


def _walk(folder: str, recursive: bool) -> list[str]:
    """The paths of all files below a local folder; a link that leads to a folder above itself is not followed.

    Raises:
        OSError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    here = Path(folder).resolve()
    above = {folder: {here, *here.parents}}  # folder -> those that a link in it may not lead to
    paths = []
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        around = above.pop(place)
        paths += [os.path.join(place, name) for name in files]
        led_to = {os.path.join(place, name): Path(place, name).resolve() for name in folders if recursive}
        above |= {path: {*around, there} for path, there in led_to.items() if there not in around}
        folders[:] = [name for name in folders if os.path.join(place, name) in above]
    return paths


def file_identity(name: str) -> Hashable:
    """The same for all paths of a local file, also links; a remote one has its URL alone."""
    if is_remote(name):
        return name
    try:
        info = os.stat(name.removeprefix("file://"))
    except OSError:  # gone since it was listed, which reading it will say
        return name
    return info.st_dev, info.st_ino


def _split_glob(source: str) -> tuple[str, str | None]:
    """Cut before the first wildcard: `a/b*/c.txt` -> (`a`, `b*/c.txt`); without one, or where it names a file, None.

    In a URL `?` begins the query, which stays with the folder.
    """
    url, mark, query = source.partition("?") if is_remote(source) else (source, "", "")
    wildcard = re.search(r"[*?\[]", url)
    if wildcard is None or (not is_remote(source) and Path(source).exists()):
        return source, None
    folder, slash, _ = url[: wildcard.start()].rpartition("/")
    return (folder or slash or ".") + mark + query, url[len(folder + slash) :]


# ---- reading ---------------------------------------------------------------------------------------------------------


def open_file(filesystem: pafs.FileSystem, path: str, name: str, patience: float = PATIENCE) -> pa.NativeFile:
    """Open a file for reading; a remote one, by its `name`, reads with retries."""
    if not is_remote(name):
        return filesystem.open_input_file(path)
    return pa.PythonFile(RemoteFile(filesystem, path, name, patience), mode="r")


class RemoteFile(io.RawIOBase):
    """A remote file of which every read is retried, and gives as many bytes as it should.

    Raises:
        RunError: at any read; names the file.
    """

    def __init__(self, filesystem: pafs.FileSystem, path: str, name: str, patience: float) -> None:
        self._filesystem, self._path, self._name, self._patience = filesystem, path, name, patience
        self._handle: pa.NativeFile | None = None
        self._place = 0
        self._size = self._retry(lambda: self._open().size())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: memoryview) -> int:
        count = max(0, min(len(buffer), self._size - self._place))
        data = self._retry(lambda: self._read(count)) if count else b""
        buffer[:count] = data
        self._place += count
        return count

    def _retry(self, read: Callable) -> Any:
        try:
            return with_retries(read, self._name, self._patience)
        except OSError as error:
            raise unreadable(self._name, error) from error

    def _open(self) -> pa.NativeFile:
        self._handle = self._handle or self._filesystem.open_input_file(self._path)
        return self._handle

    def _read(self, count: int) -> bytes:
        handle = self._open()
        self._handle = None  # an attempt that fails or never returns leaves the next one a new connection
        data = handle.read_at(count, self._place)
        if len(data) != count:
            raise OSError(f"{len(data)} of {count} bytes came")
        self._handle = handle
        return data


# ---- retries ---------------------------------------------------------------------------------------------------------


def with_retries(read: Callable, name: str, patience: float = PATIENCE):
    """Call `read`; where it reads a remote file, until it succeeds, with pauses that double.

    An attempt that gets no answer is given up after half of the time that is left.

    Args:
        read: may be called several times, and from other threads.
        name: path or URL of what is read.
        patience: seconds for all attempts together.

    Raises:
        Unreachable: the last attempt failed too.
    """
    if not is_remote(name):
        return read()
    end = time.monotonic() + patience
    reason = None
    for attempt in count(1):
        try:
            return call_within((end - time.monotonic()) / 2, read)
        except Exception as error:
            if not _is_transient(error):
                raise
            if reason is None or not isinstance(error, NoAnswer):  # what the store answered says more
                reason = error
        # Ranks that failed together must not try again together.
        pause = min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE) * random.uniform(0.8, 1.2)
        if time.monotonic() + pause >= end:
            break
        _warn(name, first_line(reason))
        time.sleep(pause)
    raise Unreachable(
        f"{name}: {attempt} attempts to read it failed in {patience:g} s: {first_line(reason)}; "
        "check the network and the credentials"
    ) from reason


class NoAnswer(OSError):
    """An attempt that was given up."""


class Unreachable(RunError):
    """A remote file system that failed again and again; the cause is its last answer."""


def call_within(seconds: float, read: Callable):
    """Call `read` in a thread; one that takes longer is left to itself, and is a `NoAnswer`."""
    pool = reader_pool(1)
    future = pool.submit(read)
    pool.shutdown(wait=False)
    try:
        return future.result(seconds)
    except TimeoutError as error:
        if future.done():  # `read` itself raised it
            raise
        raise NoAnswer(f"no answer in {seconds:.1f} s") from error


def _is_transient(error: Exception) -> bool:
    """Whether another attempt may succeed: failed reads, and what client libraries raise (not all are OSError)."""
    if isinstance(error, OSError):
        return not isinstance(error, _PERMANENT) and not _REFUSED.search(str(error))
    return not isinstance(error, (LmError, pa.ArrowException)) and type(error).__module__ != "builtins"


def is_denied(error: BaseException | None) -> bool:
    """Whether a file system or store answered that this user may not read."""
    return isinstance(error, PermissionError) or isinstance(error, OSError) and bool(_DENIED.search(str(error)))


def _warn(name: str, reason: str) -> None:
    """Log a failed read, at most once a minute: all reads fail when a store is gone."""
    global _last_warning
    if time.monotonic() - _last_warning > WARN_EVERY:
        _last_warning = time.monotonic()
        log.warning("%s: a read failed and is retried: %s", name, reason)


def unreadable(name: str, error: Exception) -> RunError:
    """The error of a file that is not there, or that may not be read."""
    if is_denied(error):
        return RunError(
            f"{name}: access denied ({first_line(error)}); check its permissions, or the credentials of its store"
        )
    return RunError(f"{name}: cannot be read ({first_line(error)}); if it was moved or deleted, put it back")


# ---- copies ----------------------------------------------------------------------------------------------------------


def fetch(source: str, names: Sequence[str] = ()) -> Path:
    """Copy files of a remote folder to this machine, unless its copy there is the same by sizes and times.

    The copies are in `$XDG_CACHE_HOME/lm/remote` or `~/.cache/lm/remote`, one of each folder, and may be deleted.

    Args:
        source: URL of the folder.
        names: the first must be there, and the others may be; all that are directly in it if not given.

    Returns:
        The folder of the copy.

    Raises:
        RequestError: it is not there, or cannot be read.
        RunError: the store failed again and again, or the copy cannot be written.
    """
    from filelock import FileLock

    address, mark, query = source.partition("?")
    address = address.rstrip("/")
    filesystem, path, _ = open_filesystem(address + mark + query)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm" / "remote"
    wanted = [f"{path}/{name}" for name in names] or pafs.FileSelector(path, allow_not_found=True)
    try:
        listed = with_retries(lambda: filesystem.get_file_info(wanted), source)
        files = {info.base_name: info for info in listed if info.type == pafs.FileType.File}
        if not files or not {*names[:1]} <= files.keys():
            raise RequestError(f"{source} has no {names[0]}" if names else f"{source}: no such folder")
        facts = {name: [info.size, info.mtime_ns] for name, info in files.items()}
        copy = cache / hashlib.blake2b(repr((source, *names)).encode(), digest_size=10).hexdigest()
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(copy.with_suffix(".lock")):
            same = (copy / FACTS).exists() and parse_json((copy / FACTS).read_bytes()) == facts
            known = all(modified is not None for _, modified in facts.values())
            if same and (known or time.time() - (copy / FACTS).stat().st_mtime < FRESH):
                return copy
            log.info("copying %s to %s", source, copy)
            with atomic_folder(copy) as folder:
                for name, info in files.items():
                    with open_file(filesystem, info.path, f"{address}/{name}") as file, open(folder / name, "wb") as to:
                        shutil.copyfileobj(file, to, COPIED_AT_ONCE)
                (folder / FACTS).write_text(json.dumps(facts))
    except (OSError, ValueError) as error:
        raise RequestError(f"{source}: cannot be copied to {cache} ({first_line(error)})") from error
    return copy
