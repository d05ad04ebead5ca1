"""Files that are not on this machine: file systems by URL, reads that are retried, copies in a cache folder.

`system/sources` lists and opens the files of a source by what is here.

Reads are retried here, not by pyarrow. On Linux pyarrow ignores its request timeout, so it waits forever for an answer
that never ends; file systems of fsspec retry little or not at all; and neither detects an object that arrives
incomplete. Nor does obstore, which has time limits, but repeats no listing that breaks off and reads no `~/.aws`.
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
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from lm.errors import LmError, RequestError, RunError, first_line
from lm.system.files import PATIENCE, File, atomic_folder
from lm.system.parsing import parse_json
from lm.system.process import reader_pool

log = logging.getLogger(__name__)

FIRST_PAUSE, MAX_PAUSE = 0.5, 15.0  # seconds between attempts; doubled after each failure
MAX_REQUESTED_WAIT = 600.0  # seconds that a store may ask to wait
ASK_LATER = (408, 425, 429)  # statuses below 500 after which the same request may succeed
COPIED_AT_ONCE = 2**24  # bytes per request
FRESH = 60.0  # seconds in which a copy is not renewed if the store gives no times
FACTS = ".source.json"  # in a copy: sizes and times of the files in the store
GCS_LIMIT, GCS_SECONDS = "retry_limit_seconds", 10  # of pyarrow's own retries, in a URL; 15 minutes if not given
ARROW_SCHEMES = ("s3", "gs", "gcs")
# What a retry cannot fix, in pyarrow's errors.
_DENIED = "ACCESS_DENIED|PERMISSION_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH"
_REFUSED = rf"{_DENIED}|NO_SUCH_BUCKET|HTTP status 301\)"
_RATE_LIMIT = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)")  # in the hub's `RateLimit: "api";r=0;t=55`
_last_warnings: dict[str, float] = {}  # kind of a warning -> when it was last logged
_asked_until = -math.inf  # until when a store has asked not to be called


# ---- file systems ----------------------------------------------------------------------------------------------------


def open_filesystem(source: str) -> tuple[pafs.FileSystem, str, str]:
    """The file system of a URL, the path in it, and the prefix that turns such a path into a URL.

    `s3://` and `gs://` go through pyarrow, with region, endpoint and credentials from the environment, or in the URL:
    `s3://bucket/folder?endpoint_override=http://host:9000`, `gs://anonymous@bucket/folder`. `hf://` goes through
    `system/hub`, and any other scheme through fsspec, if its package is installed.
    """
    scheme = source.partition("://")[0]
    try:
        if scheme in ARROW_SCHEMES:
            if scheme in ("gs", "gcs") and GCS_LIMIT not in source:
                source += f"{'&' if '?' in source else '?'}{GCS_LIMIT}={GCS_SECONDS}"
            filesystem, path = pafs.FileSystem.from_uri(source)
            anonymous = "anonymous@" if source.startswith(f"{scheme}://anonymous@") else ""
            return filesystem, path, f"{scheme}://{anonymous}"
        import fsspec

        if scheme == "hf" and not source.startswith("hf://buckets/"):
            from lm.system.hub import hub

            filesystem, path = hub(), source.removeprefix("hf://").strip("/")
        else:
            filesystem, path = fsspec.core.url_to_fs(source)
        return pafs.PyFileSystem(_FSSpecHandler(filesystem)), path, "" if "://" in path else f"{scheme}://"
    except ImportError as error:
        raise RequestError(f"{source}: {scheme}:// needs another package ({first_line(error)})") from error
    except (ValueError, OSError) as error:
        raise RequestError(f"{source}: cannot be opened ({first_line(error)}); is the URL right?") from error


class _FSSpecHandler(pafs.FSSpecHandler):
    """Opens files without asking first whether they exist: if that request failed, they would seem to be missing."""

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self.fs.open(path, mode="rb"), mode="r")


# ---- listing ---------------------------------------------------------------------------------------------------------


def list_folder(
    filesystem: pafs.FileSystem, path: str, recursive: bool, source: str, patience: float
) -> tuple[str, pafs.FileType, list[File]]:
    """The path, on the Hub at its commit; whether it is a file or a folder; and the file, or the folder's files."""
    path = with_retries(lambda: _pinned(filesystem, path), source, patience)
    return path, *with_retries(lambda: _files(filesystem, path, recursive), source, patience)


def _pinned(filesystem: pafs.FileSystem, path: str) -> str:
    """A path of the Hub at its commit; a path of another store unchanged."""
    pin = getattr(_fsspec(filesystem), "pin", None)
    return path if pin is None else pin(path)


def _fsspec(filesystem: pafs.FileSystem) -> Any:
    """The file system of fsspec behind one of pyarrow; None if it is not from fsspec."""
    return filesystem.handler.fs if isinstance(filesystem, pafs.PyFileSystem) else None


def _files(filesystem: pafs.FileSystem, path: str, recursive: bool) -> tuple[pafs.FileType, list[File]]:
    """Whether a path is a file or a folder, and the file, or the files in the folder."""
    if (store := _fsspec(filesystem)) is not None:
        try:
            info = store.info(path)
            if info["type"] == "directory":
                infos = store.find(path, maxdepth=None if recursive else 1, detail=True)
                return pafs.FileType.Directory, [_described(info) for info in infos.values()]
        except FileNotFoundError as error:
            if isinstance(error.__cause__, OSError):  # fsspec says so of a host of HTTP that it cannot reach, too
                hint = "on a machine without a network give a copy of the file in its place"
                raise RequestError(f"{path}: {first_line(error.__cause__)}; {hint}") from error
            return pafs.FileType.NotFound, []
        return pafs.FileType.File, [_described(info)]
    info = filesystem.get_file_info(path)
    infos = [info]
    if info.type == pafs.FileType.Directory:
        infos = filesystem.get_file_info(pafs.FileSelector(path, recursive=recursive))
    return info.type, [File(file.path, file.size, file.mtime_ns) for file in infos if file.type == pafs.FileType.File]


def _described(info: Mapping[str, Any]) -> File:
    modified = info.get("ETag") or info.get("etag")
    if info.get("mtime") is not None:
        modified = pafs.FileInfo(info["name"], mtime=info["mtime"]).mtime_ns
    return File(info["name"], info["size"], modified)


# ---- reading ---------------------------------------------------------------------------------------------------------


class RemoteFile(io.RawIOBase):
    """A remote file whose reads are retried; each returns all requested bytes, or raises RunError."""

    def __init__(self, filesystem: pafs.FileSystem, path: str, name: str, patience: float = PATIENCE) -> None:
        self._filesystem, self._path, self._name, self._patience = filesystem, path, name, patience
        self._handle: pa.NativeFile | None = None
        self._place = 0
        self._size = self._retry(lambda handle: handle.size())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: memoryview) -> int:
        count = max(0, min(len(buffer), self._size - self._place))
        if count:
            buffer[:count] = self._retry(lambda handle: read_exactly(handle, count, self._place))
            self._place += count
        return count

    def _retry(self, read: Callable[[pa.NativeFile], Any]) -> Any:
        def attempt() -> Any:
            handle = self._handle or self._filesystem.open_input_file(self._path)
            self._handle = None  # after a failed or endless attempt, the next one uses a new connection
            try:
                answer = read(handle)
            except ValueError as error:  # pyarrow's error for GCS if the first bytes did not arrive
                raise OSError(f"no bytes came ({first_line(error)})") from error
            self._handle = handle
            return answer

        try:
            return with_retries(attempt, self._name, self._patience)
        except OSError as error:
            raise RunError(f"{self._name}: cannot be read ({first_line(error)})") from error


def read_exactly(handle: pa.NativeFile, count: int, place: int = 0) -> bytearray:
    """Read exactly `count` bytes, or raise OSError.

    If S3 sends fewer bytes than asked for, pyarrow says that all came, and leaves the end of the buffer as it was. So
    the last byte is set before; if it is the same afterwards, the bytes are read again over another one.
    """
    if not count:
        return bytearray()
    for mark in (0xF1, 0xF2):  # text seldom has these bytes, so it is seldom read twice
        data = bytearray(count)
        data[-1:] = [mark]
        handle.seek(place)
        if (came := handle.readinto(data)) != count:
            raise OSError(f"{came} of {count} bytes came")
        if data[-1] != mark:
            return data
    raise OSError(f"fewer than {count} bytes came")


# ---- retries ---------------------------------------------------------------------------------------------------------


def with_retries(read: Callable, name: str, patience: float = PATIENCE):
    """Call `read` until it succeeds, with pauses that double.

    `patience` is the number of seconds for all attempts, after which `Unreachable` is raised. An attempt without an
    answer is given up after half of the remaining time. A wait that the store requests, such as for 'too many
    requests', does not count. `read` is called from other threads.
    """
    global _asked_until
    end = time.monotonic() + patience
    reason, pause = None, FIRST_PAUSE
    attempt = 0
    for attempt in count(1):
        try:
            return call_within((end - time.monotonic()) / 2, read)
        except Exception as error:
            if not _is_transient(error):
                raise
            if reason is None or not isinstance(error, NoAnswer):  # what the store answered says more
                reason = error
            requested_wait = _requested_wait(error)
        # Readers that failed together must not retry at the same time.
        if requested_wait is not None:
            wait = requested_wait + random.uniform(0, 1 + requested_wait / 10)
            end += wait
            _asked_until = max(_asked_until, time.monotonic() + wait)
            _warn("asked", f"{name}: the store asks to wait {requested_wait:.0f} s: {first_line(reason)}")
        else:
            wait, pause = pause * random.uniform(0.8, 1.2), min(2 * pause, MAX_PAUSE)
            if time.monotonic() + wait >= end:
                break
            _warn("failed", f"{name}: a read failed and is retried: {first_line(reason)}")
        time.sleep(wait)
    raise Unreachable(
        f"{name}: {attempt} attempts to read it failed in {patience:g} s: {first_line(reason)}; "
        "check the network and the credentials"
    ) from reason


def is_asked_to_wait() -> bool:
    """Whether a store has asked to wait, and this time is not over."""
    return time.monotonic() < _asked_until


class NoAnswer(OSError):
    """An attempt that was given up, since no answer came."""


class Unreachable(RunError):
    """A remote file system that failed repeatedly; the cause is its last error."""


def call_within(seconds: float, read: Callable):
    """Call `read` in a thread; if it takes longer, raise `NoAnswer` and leave the thread running."""
    pool = reader_pool(1)
    future = pool.submit(read)
    pool.shutdown(wait=False)
    try:
        return future.result(seconds)
    except TimeoutError as error:
        if future.done():  # `read` itself raised it
            raise
        raise NoAnswer(f"no answer in {seconds:.1f} s") from error


def _answer(error: Exception) -> tuple[int | None, Mapping[str, str]]:
    """Status and headers of the HTTP answer that an error belongs to, as client libraries store them."""
    answer = getattr(error, "response", None)  # in httpx and requests, where error responses are falsy
    answer = error if answer is None else answer  # aiohttp's errors have status and headers
    status = getattr(answer, "status_code", getattr(answer, "status", None))
    return (status, getattr(answer, "headers", None) or {}) if isinstance(status, int) else (None, {})


def _requested_wait(error: Exception) -> float | None:
    """Seconds that the store asked to wait, at most MAX_REQUESTED_WAIT; None if it did not, or gave a date."""
    status, headers = _answer(error)
    limit = _RATE_LIMIT.search(headers.get("RateLimit") or "") if status == 429 else None
    value = limit[1] if limit else (headers.get("Retry-After") or "").strip()
    return min(float(value), MAX_REQUESTED_WAIT) if value.isdecimal() else None


def _is_transient(error: Exception) -> bool:
    """Whether another attempt may succeed: failed reads, and what client libraries raise (not all are OSError)."""
    status = _answer(error)[0]
    if status is not None and 400 <= status < 500:
        return status in ASK_LATER
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return False
    if isinstance(error, OSError):
        return not re.search(_REFUSED, str(error))
    return not isinstance(error, (LmError, pa.ArrowException)) and type(error).__module__ != "builtins"


def _warn(kind: str, message: str) -> None:
    """Log a warning, each kind at most once a minute: all reads fail if a store is down."""
    if time.monotonic() - _last_warnings.get(kind, -math.inf) > 60:
        _last_warnings[kind] = time.monotonic()
        log.warning("%s", message)


# ---- copies ----------------------------------------------------------------------------------------------------------


def fetch(source: str, names: Sequence[str] = ()) -> Path:
    """Copy files of a remote folder to this machine, unless existing copies have the same sizes and times.

    The copies are in `$XDG_CACHE_HOME/lm/remote` or `~/.cache/lm/remote`, one folder for each, and may be deleted. Of
    `names`, the first must exist, and others may; without names, all files directly in the folder are copied.
    """
    from filelock import FileLock

    address, mark, query = source.partition("?")
    address = address.rstrip("/")
    filesystem, path, prefix = open_filesystem(address + mark + query)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm" / "remote"
    try:
        path = with_retries(lambda: _pinned(filesystem, path), source)
        places = [f"{path}/{name}" for name in names] or [path]
        listed = with_retries(lambda: [_files(filesystem, place, recursive=False) for place in places], source)
        files = {posixpath.basename(file.path): file for _, entries in listed for file in entries}
        if not files or not {*names[:1]} <= files.keys():
            raise RequestError(f"{source} has no {names[0]}" if names else f"{source}: no such folder")
        facts = {name: [file.size, file.modified] for name, file in files.items()}
        copy = cache / hashlib.blake2b(repr((source, *names)).encode(), digest_size=10).hexdigest()
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(copy.with_suffix(".lock")):
            same = (copy / FACTS).exists() and parse_json((copy / FACTS).read_bytes()) == facts
            known = all(file.modified is not None for file in files.values())
            if same and (known or time.time() - (copy / FACTS).stat().st_mtime < FRESH):
                return copy
            log.info("copying %s to %s", source, copy)
            with atomic_folder(copy) as folder:
                for name, (path, *_) in files.items():
                    with RemoteFile(filesystem, path, prefix + path) as content, open(folder / name, "wb") as to:
                        shutil.copyfileobj(content, to, COPIED_AT_ONCE)
                (folder / FACTS).write_text(json.dumps(facts))
    except (OSError, ValueError) as error:
        raise RequestError(f"{source}: cannot be copied to {cache} ({first_line(error)})") from error
    return copy
