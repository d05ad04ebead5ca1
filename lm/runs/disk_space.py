"""The disk space that the checkpoints of a run need, and what is free."""

import shutil
from pathlib import Path
from typing import NamedTuple

from lm.system.units import format_bytes


class DiskSpace(NamedTuple):
    """Bytes: of one checkpoint, of all that exist at the same time, and of free space."""

    checkpoint: int
    at_once: int
    free: int

    @property
    def suffices(self) -> bool:
        return self.at_once <= self.free

    def __str__(self) -> str:
        checkpoint, at_once, free = map(format_bytes, self)
        return f"checkpoints of {checkpoint} need {at_once} at once, and {free} are free"


def disk_space(folder: Path, checkpoint: int, keep: int, present: int = 0) -> DiskSpace:
    """The disk space needed for a run's checkpoints of `checkpoint` bytes, and what is free in a (possibly new) folder.

    The newest `keep` are kept, beside the best and the one being written. The space of the `present` checkpoints is
    reused.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free + checkpoint * present
    return DiskSpace(checkpoint, checkpoint * (keep + 2), free)
