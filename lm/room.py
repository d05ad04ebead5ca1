"""Room on the disk for the checkpoints of a run."""

import shutil
from pathlib import Path
from typing import NamedTuple

from lm.quantities import format_bytes


class Room(NamedTuple):
    """Bytes: of one checkpoint, of all that are there at once, and what is free."""

    checkpoint: int
    at_once: int
    free: int

    @property
    def suffices(self) -> bool:
        return self.at_once <= self.free

    def __str__(self) -> str:
        one, at_once, free = map(format_bytes, self)
        return f"checkpoints of {one} need {at_once} at once, and {free} are free"


def room(folder: Path, checkpoint: int, keep: int, present: int = 0) -> Room:
    """What a run will need of the disk that its folder is or will be on.

    Args:
        folder: of the run, or of the runs; it need not be there yet.
        checkpoint: bytes of one.
        keep: how many of the newest are kept; the best and the one in flight come on top.
        present: how many there are already, whose room the run will have again.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free + checkpoint * present
    return Room(checkpoint, checkpoint * (keep + 2), free)
