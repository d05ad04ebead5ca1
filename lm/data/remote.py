"""Shards that are not on this machine: file systems by URL, reads that are tried again, a bounded cache of blocks.

Beside the batch's way: `data/shards` opens every source through `open_filesystem` and, for remote ones, reads through
`with_retries` and `BlockCache`.
"""

import hashlib
import logging
import math
import os
import random
import re
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from lm.errors import LmError, RequestError, RunError
from lm.system.process import may_hang

# ---- remote ----------------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)
_told = -math.inf  # when a failed read was last spoken of

ATTEMPTS = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds; doubled after each failure
PATIENCE = 150.0  # seconds
QUIET = 60.0  # seconds
AROUND_BLOCK = 128 + 4  # bytes of a kept block beside its tokens: NumPy's header and a checksum
ARROW_SCHEMES = ("s3", "gs", "gcs")
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_REFUSED = re.compile(  # how pyarrow words what S3 will not answer better the next time
    r"AWS Error (ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH)|HTTP status 301\)"
)


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


def with_retries(read: Callable, name: str, patience: float | None = PATIENCE):
    """Call `read` until it succeeds, with pauses that double.

    Args:
        read: a read that may be repeated.
        name: the URL, for the message.
        patience: seconds for all attempts together. One that gets no answer is given up after half of what is left,
            for the next to begin on a new connection. None: an attempt may take as long as it does, and there are
            `ATTEMPTS`.

    Returns:
        What `read` returns.

    Raises:
        RunError: the last attempt failed too; names the URL.
    """
    end = None if patience is None else time.monotonic() + patience
    last = None
    for attempt in count(1):
        try:
            return read() if end is None else _within((end - time.monotonic()) / 2, read)
        except Exception as error:
            if not _may_pass(error):
                raise
            if last is None or not isinstance(error, _NoAnswer):  # what the store said tells more
                last = error
        # Not all ranks at the same moment.
        pause = min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE) * random.uniform(0.8, 1.2)
        if attempt == ATTEMPTS if end is None else time.monotonic() + pause >= end:
            break
        _tell(name, first_line(last))
        time.sleep(pause)
    within = "" if patience is None else f" in {patience:g} s"
    raise RunError(
        f"{name}: {attempt} attempts to read it failed{within}: {first_line(last)}; "
        "check the network and the credentials, then go on with `--ckpt_path auto`"
    ) from last


def _tell(name: str, reason: str) -> None:
    """Say that a read is tried again, once a minute: when a store is gone all reads fail."""
    global _told
    if time.monotonic() - _told > QUIET:
        _told = time.monotonic()
        log.warning("%s: a read failed and is tried again: %s", name, reason)


class _NoAnswer(OSError):
    """An attempt that was given up."""


def _within(seconds: float, read: Callable):
    """What `read` returns, or an OSError if that takes too long: it is left to itself then, and dropped."""
    result: Future = Future()

    def work() -> None:
        try:
            result.set_result(read())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, name="lm-remote", daemon=True)
    may_hang(thread)
    thread.start()
    try:
        return result.result(seconds)
    except TimeoutError as error:
        if result.done():  # the read's own
            raise
        raise _NoAnswer(f"no answer in {seconds:.1f} s") from error


def _may_pass(error: Exception) -> bool:
    """Whether trying again could help: failed reads, and whatever a client library raises (not all are OSError)."""
    if isinstance(error, OSError):
        return not isinstance(error, _PERMANENT) and not _REFUSED.search(str(error))
    return not isinstance(error, (LmError, pa.ArrowException)) and type(error).__module__ != "builtins"


def first_line(error: BaseException) -> str:
    """An exception as part of a one-line message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _checksum(block: np.ndarray) -> bytes:
    return zlib.crc32(block).to_bytes(4, "little")


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
            with open(path, "rb") as file:
                block = np.load(file, allow_pickle=False)
                if file.read() != _checksum(block):
                    raise ValueError("its checksum is another")
            os.utime(path)
            return block
        except OSError:  # not there, most often
            return None
        except Exception:  # damaged, for instance by a machine that lost power: fetch it again
            path.unlink(missing_ok=True)
            return None

    def put(self, key: str, block: np.ndarray) -> None:
        """Keep a block, if it fits at all; a full disk is a warning, since training goes on without a cache."""
        needed = block.nbytes + AROUND_BLOCK
        if needed > self.max_bytes:
            return
        temporary = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(needed)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", suffix=".tmp", delete=False) as file:
                temporary = file.name
                np.save(file, block, allow_pickle=False)
                file.write(_checksum(block))
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


# ---- glob ------------------------------------------------------------------------------------------------------------
# Globs over any file system: where a pattern begins, and what it matches.
#
# Beside the batch's way: `data/shards` finds shards with it and `data/text_files` texts.


def split_glob(source: str) -> tuple[str, str | None]:
    """Cut before the first wildcard: `a/b*/c.txt` -> (`a`, `b*/c.txt`); without one, or where it names a file, None.

    In a URL `?` begins the query, which stays with the folder.
    """
    url, mark, query = source.partition("?") if is_remote(source) else (source, "", "")
    wildcard = re.search(r"[*?\[]", url)
    if wildcard is None or (not is_remote(source) and Path(source).exists()):
        return source, None
    folder, slash, _ = url[: wildcard.start()].rpartition("/")
    return (folder or slash or ".") + mark + query, url[len(folder + slash) :]


def glob_expression(pattern: str) -> re.Pattern[str]:
    """As a shell reads it: `*` and `?` stay in a folder, `**/` is any folders, `[!ab]` any sign but these."""
    meanings = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.findall(r"\*\*/|\*\*|\[!?[^\]]+\]|.", pattern)
    return re.compile(
        "".join(meanings.get(part) or (part.replace("[!", "[^") if part[1:] else re.escape(part)) for part in parts)
    )
