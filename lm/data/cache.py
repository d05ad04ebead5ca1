"""A bounded cache of decoded blocks of remote shards, for `data/block_reader`."""

import hashlib
import os
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
from filelock import FileLock

from lm.errors import first_line

CHECKSUM = 4  # bytes before the tokens of a block


def _checksum(tokens: np.ndarray | bytes) -> bytes:
    return zlib.crc32(tokens).to_bytes(CHECKSUM, "little")


class BlockCache:
    """Decoded blocks of remote shards in a local folder, bounded, least recently used out first.

    Any number of processes may use the folder: a rename makes an entry appear complete, one that another process
    removed is read again, and of those that need the same block one fetches it while the others wait. Processes that
    write at the same moment may exceed `max_bytes`, which all files have together, by a block each.
    """

    def __init__(self, folder: str | Path, max_bytes: int):
        self.folder, self.max_bytes = Path(folder), int(max_bytes)

    @staticmethod
    def key(*facts) -> str:
        """A file name from everything that decides a block's content (URL, size, row groups, column, dtype)."""
        return hashlib.blake2b(repr(facts).encode(), digest_size=20).hexdigest()

    def get(self, key: str, dtype: np.dtype) -> np.ndarray | None:
        """The block stored under `key`, or None; it becomes the most recently used."""
        path = self.folder / key
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:  # not there, most often
            return None
        if content[:CHECKSUM] != _checksum(content[CHECKSUM:]):  # for instance a machine lost power: fetch it again
            path.unlink(missing_ok=True)
            return None
        return np.frombuffer(content, dtype, offset=CHECKSUM)

    def fits(self, nbytes: int) -> bool:
        """Whether a block of so many bytes is stored at all."""
        return nbytes + CHECKSUM <= self.max_bytes

    @contextmanager
    def reserve(self, key: str, seconds: float) -> Iterator[None]:
        """Be the only one, of all threads and processes, that fetches a block.

        A lock ends with the process that holds it. After `seconds`, or if the folder is not writable, the block is
        fetched without the lock: fetching it twice is better than not at all.
        """
        lock = FileLock(self.folder / f"{key}.lock")
        with ExitStack() as stack:
            with suppress(OSError):  # also filelock's Timeout
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock.acquire(seconds))
                stack.callback(Path(lock.lock_file).unlink, missing_ok=True)  # who waits for it looks into the cache
            yield

    def put(self, key: str, block: np.ndarray) -> None:
        """Store a block that fits; a full disk is a warning, since training works without a cache."""
        temporary = self.folder / f".{uuid4().hex}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(block.nbytes + CHECKSUM)
            temporary.write_bytes(_checksum(block) + block.tobytes())
            os.replace(temporary, self.folder / key)
        except FileNotFoundError:  # another process made room by removing our temporary file
            return
        except OSError as error:
            temporary.unlink(missing_ok=True)
            warnings.warn(f"block cache {self.folder}: a block was not stored ({first_line(error)})", stacklevel=2)

    def _make_room(self, needed: int) -> None:
        files = []
        for entry in os.scandir(self.folder):  # temporary files too: those of killed processes grow old and go
            try:
                files.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
            except FileNotFoundError:
                continue
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used + needed <= self.max_bytes:
                return
            Path(path).unlink(missing_ok=True)
            used -= size
