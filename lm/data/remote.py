"""Shards that are not on this machine: file systems by URL, reads that are tried again, a bounded cache of blocks.

Beside the batch's way: `data/shards` opens every source through `open_filesystem` and, for remote ones, reads through
`with_retries` and `BlockCache`.
"""

import hashlib
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from lm.errors import LmError, RequestError, RunError

ATTEMPTS = 5
FIRST_PAUSE = 0.5  # seconds; doubled after each failure, so about eight seconds are waited in all
NPY_HEADER = 128  # bytes, of a one-dimensional array
ARROW_SCHEMES = ("s3", "gs", "gcs")
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def is_remote(source: str) -> bool:
    return "://" in source and not source.startswith("file://")


def open_filesystem(source: str) -> tuple[pafs.FileSystem, str, str]:
    """Find the file system of a path or URL.

    `s3://` and `gs://` go through pyarrow (region, endpoint and credentials from the environment, or as a query:
    `s3://bucket/folder?endpoint_override=http://host:9000`); any other scheme through fsspec, as far as its package
    is installed (`hf://` needs huggingface_hub).

    Returns:
        The file system, the path in it, and the prefix that makes a path of it a name that people know.

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
        import fsspec  # only those who need it wait for it

        filesystem, path = fsspec.core.url_to_fs(source)
        prefix = "" if "://" in path else f"{scheme}://"
        return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path, prefix
    except (ImportError, ValueError, OSError) as error:
        raise RequestError(f"{source}: cannot be opened ({first_line(error)}); is the URL right?") from error


def with_retries(read: Callable, name: str):
    """Call `read` until it succeeds, with pauses that double.

    Args:
        read: a read that may be repeated.
        name: the URL, for the message.

    Returns:
        What `read` returns.

    Raises:
        RunError: the last attempt failed too; names the URL.
    """
    for attempt in range(ATTEMPTS):
        try:
            return read()
        except Exception as error:
            if not _may_pass(error):
                raise
            last = error
        if attempt + 1 < ATTEMPTS:
            time.sleep(FIRST_PAUSE * 2**attempt * random.uniform(0.8, 1.2))  # not all ranks at the same moment
    raise RunError(
        f"{name}: {ATTEMPTS} attempts to read it failed, the last with: {first_line(last)}; "
        "check the network and the credentials, then resume"
    ) from last


def _may_pass(error: Exception) -> bool:
    """Whether trying again could help: failed reads, and whatever a client library raises (not all are OSError)."""
    if isinstance(error, OSError):
        return not isinstance(error, _PERMANENT)
    return not isinstance(error, (LmError, pa.ArrowException)) and type(error).__module__ != "builtins"


def first_line(error: BaseException) -> str:
    """An exception as part of a one-line message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


class BlockCache:
    """Decoded blocks of remote shards in a local folder, bounded, least recently used out first.

    Any number of processes may share the folder: an entry appears whole by a rename, and one that another process
    evicted is simply not there.

    Args:
        folder: created when the first block is kept.
        max_bytes: the folder's files together stay at or below this (processes that write at the very same moment may
            pass it by a block each until the next write).
    """

    def __init__(self, folder: str | Path, max_bytes: int):
        self.folder, self.max_bytes = Path(folder), int(max_bytes)

    @staticmethod
    def key(*facts) -> str:
        """A file name from all that decides a block's content (URL, size, row groups, column, dtype ...)."""
        return hashlib.blake2b(repr(facts).encode(), digest_size=20).hexdigest() + ".npy"

    def get(self, key: str) -> np.ndarray | None:
        """The block kept under `key`, or None; it becomes the most recently used."""
        path = self.folder / key
        try:
            block = np.load(path, allow_pickle=False)
            os.utime(path)
            return block
        except OSError:  # not there, most often
            return None
        except (ValueError, EOFError):  # damaged, for instance by a machine that lost power: fetch it again
            path.unlink(missing_ok=True)
            return None

    def put(self, key: str, block: np.ndarray) -> None:
        """Keep a block, if it fits at all; a full disk is a warning, since training goes on without a cache."""
        needed = block.nbytes + NPY_HEADER
        if needed > self.max_bytes:
            return
        temporary = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(needed)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", suffix=".tmp", delete=False) as file:
                temporary = file.name
                np.save(file, block, allow_pickle=False)
            os.replace(temporary, self.folder / key)
        except FileNotFoundError:  # in a crowded cache another process made room with our temporary file
            return
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            warnings.warn(f"block cache {self.folder}: a block was not kept ({first_line(error)})", stacklevel=2)

    def _make_room(self, needed: int) -> None:
        files = []
        for entry in os.scandir(self.folder):  # temporary files too: those of killed processes grow old and go
            try:
                files.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
            except FileNotFoundError:
                continue
        held = sum(size for _, size, _ in files)
        for _, freed, path in sorted(files):
            if held + needed <= self.max_bytes:
                return
            Path(path).unlink(missing_ok=True)
            held -= freed
