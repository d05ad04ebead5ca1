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
    """One thing that was broken."""

    what: str  # in words
    checkpoint: str | None = None  # the name of the one that it spoils, if any
    hides_metrics: bool = False  # what the metrics say of the run need not be whole any more
    may_refuse: bool = False  # the next fit may refuse with one line, until it is undone
    when: float = 0.0  # seconds since the epoch
    _before: dict[Path, bytes] = field(default_factory=dict)

    def keep(self, path: Path) -> bytes:
        """What a file holds, which `undo` will put back."""
        return self._before.setdefault(path, path.read_bytes())

    def undo(self) -> None:
        for path, content in self._before.items():
            if path.parent.is_dir():
                path.write_bytes(content)


def damage(run: Path, registry: Path, random: Random) -> Damage | None:
    """Break something of a run that is not training; None where there is nothing to break yet.

    Any file of any checkpoint; what is written while it trains and no training needs; what says which run it is, where
    resuming as it was and refusing are both right, and starting anew is not; the registry; or leave behind what a
    process that was killed may leave.
    """
    kind = random.choice(["checkpoint", "checkpoint", "records", "vital", "debris", "registry"])
    if kind == "debris":
        return leave_debris(run, random)
    files = {"checkpoint": sorted(run.glob("step-*/*")), "records": [run / name for name in SMALL],
             "vital": [run / name for name in VITAL], "registry": [registry]}[kind]  # fmt: skip
    files = [path for path in files if path.is_file()]
    if not files:
        return None
    path = random.choice(files)
    found = Damage(f"in {path.parent.name}/{path.name}: ", path.parent.name if kind == "checkpoint" else None,
                   hides_metrics=kind == "records", may_refuse=kind == "vital", when=time.time())  # fmt: skip
    content = path.read_bytes() if kind == "registry" else found.keep(path)
    found.what += _spoil(path, content, random, flips=kind != "vital")
    return found


def leave_debris(run: Path, random: Random) -> Damage | None:
    """Half a checkpoint, half a file."""
    if not run.is_dir():
        return None
    name = random.choice([".tmp-step-00000035-4194000", ".dead-step-00000005-4194000"])
    (run / name).mkdir(exist_ok=True)
    (run / name / "model.safetensors").write_bytes(JUNK)
    return Damage(f"{name} left behind", when=time.time())


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
