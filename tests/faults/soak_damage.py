"""What the soak does to the folder of a run between two of its sessions, and how it is undone."""

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

JUNK = b'{"half": [1, 2, "\xff\x00'
SMALL = ("metrics.jsonl", "state.json", "heartbeat.json", "log.txt", "alerts.jsonl", "budget.json")  # not needed
VITAL = ("run.json", "config.yaml", "data.json")  # what the run is


@dataclass
class Damage:
    """One thing that was broken.

    Args:
        what: in words.
        checkpoint: the name of the checkpoint that it spoils, if any.
        hides_metrics: what the metrics say of the run need not be whole any more.
        may_refuse: the next fit may refuse with one line, until it is undone.
        when: seconds since the epoch.
    """

    what: str
    checkpoint: str | None = None
    hides_metrics: bool = False
    may_refuse: bool = False
    when: float = 0.0
    _before: dict[Path, bytes] = field(default_factory=dict)

    def keep(self, path: Path) -> bytes:
        """What a file holds, which `undo` will put back."""
        return self._before.setdefault(path, path.read_bytes())

    def undo(self) -> None:
        for path, content in self._before.items():
            if path.parent.is_dir():
                path.write_bytes(content)


def damage(run: Path, registry: Path, random: Random) -> Damage | None:
    """Break something of a run that is not training; None where there is nothing to break yet."""
    kinds = [spoil_checkpoint, spoil_checkpoint, cut_records, spoil_vital, leave_debris, spoil_registry]
    found = random.choice(kinds)(run, registry, random)
    if found is not None:
        found.when = time.time()
    return found


def spoil_checkpoint(run: Path, registry: Path, random: Random) -> Damage | None:
    """Flip a byte of, cut or take away any file of any checkpoint."""
    files = sorted(path for path in run.glob("step-*/*") if path.is_file())
    if not files:
        return None
    path = random.choice(files)
    found = Damage(f"in {path.parent.name}/{path.name}: ", checkpoint=path.parent.name)
    found.what += _spoil(path, found.keep(path), random)
    return found


def cut_records(run: Path, registry: Path, random: Random) -> Damage | None:
    """Cut or fill with junk what is written while it trains and no training needs."""
    files = [run / name for name in SMALL if (run / name).is_file()]
    if not files:
        return None
    path = random.choice(files)
    found = Damage(f"in {path.name}: ", hides_metrics=True)
    found.what += _spoil(path, found.keep(path), random)
    return found


def spoil_vital(run: Path, registry: Path, random: Random) -> Damage | None:
    """Break what says which run it is: resuming as it was and refusing are both right, starting anew is not."""
    files = [run / name for name in VITAL if (run / name).is_file()]
    if not files:
        return None
    path = random.choice(files)
    found = Damage(f"in {path.name}: ", may_refuse=True)
    found.what += _spoil(path, found.keep(path), random, flips=False)
    return found


def leave_debris(run: Path, registry: Path, random: Random) -> Damage | None:
    """What processes that were killed may leave: half a checkpoint, half a file."""
    if not run.is_dir():
        return None
    name = random.choice([".tmp-step-00000035-4194000", ".dead-step-00000005-4194000"])
    (run / name).mkdir(exist_ok=True)
    (run / name / "model.safetensors").write_bytes(JUNK)
    return Damage(f"{name} left behind")


def spoil_registry(run: Path, registry: Path, random: Random) -> Damage | None:
    if not registry.is_file():
        return None
    found = Damage("in the registry: ")
    found.what += _spoil(registry, registry.read_bytes(), random)
    return found


def _spoil(path: Path, content: bytes, random: Random, flips: bool = True) -> str:
    kind = random.choice((["a byte flipped"] if flips and content else []) + ["cut", "emptied", "junk", "taken away"])
    if kind == "a byte flipped":
        place = random.randrange(len(content))
        changed = content[place] ^ random.randrange(1, 256)
        path.write_bytes(content[:place] + bytes([changed]) + content[place + 1 :])
        return f"byte {place} of {len(content)} flipped"
    if kind == "cut":
        path.write_bytes(content[: random.randrange(max(1, len(content)))])
    elif kind == "emptied":
        path.write_bytes(b"")
    elif kind == "junk":
        path.write_bytes(JUNK)
    else:
        path.unlink()
    return kind


class Ballast:
    """Fills a small disk up, and empties it again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ballast"

    def fill(self) -> None:
        free = shutil.disk_usage(self.path.parent).free
        with open(self.path, "wb", buffering=0) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, free - 65536))
                while True:
                    file.seek(0, os.SEEK_END)
                    file.write(b"\0" * 4096)
            except OSError:
                pass  # full

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
