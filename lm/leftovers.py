"""What writers of folders that were killed left behind: half written, half replaced, half removed.

Until its name is the final one a folder is called `.tmp-NAME-PID`; one that is being replaced `.old-NAME-PID`; one that
is being removed `.dead-NAME-PID`.
"""

import os
import re
import shutil
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

LEFT = re.compile(r"\.(?P<kind>tmp|old|dead)-(?P<name>.+)-\d+")


def sweep(folder: Path) -> None:
    """Clear away what writers of a folder that were killed left beside it.

    Args:
        folder: a checkpoint's, or a pattern of the names of several, such as `run/step-*`.
    """
    put_back(folder)
    for path, _, _ in _left_beside(folder):
        shutil.rmtree(path, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Give a folder its name again that a killed writer had moved aside to replace it, and did not.

    Args:
        folder: as for `sweep`.
    """
    for path, kind, name in _left_beside(folder):
        if kind == "old" and not path.with_name(name).exists():
            os.rename(path, path.with_name(name))


def remove(folder: Path) -> None:
    """Remove a folder so that no kill leaves half of one under its name.

    What cannot go now is cleared away with the next `sweep`.
    """
    dead = folder.with_name(f".dead-{folder.name}-{os.getpid()}")
    with suppress(FileNotFoundError):  # somebody was faster
        os.rename(folder, dead)
    shutil.rmtree(dead, ignore_errors=True)


def _left_beside(folder: Path) -> list[tuple[Path, str, str]]:
    """What killed writers left: where, of which kind, and the name that it had or was to have."""
    paths = list(folder.parent.iterdir()) if folder.parent.is_dir() else []
    found = [(path, left) for path in paths if (left := LEFT.fullmatch(path.name))]
    return [(path, left["kind"], left["name"]) for path, left in found if fnmatch(left["name"], folder.name)]
