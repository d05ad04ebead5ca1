"""What the soak looks at from outside: what sessions trained on, their processes, what a finished run came to."""

import json
import os
import signal
from pathlib import Path


def read_trace(place: Path) -> list[dict]:
    """What a session's ranks trained on; it is taken away, for the next session to begin a new one."""
    entries = []
    for path in sorted(place.glob("trace*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                entries.append(json.loads(line))
            except ValueError:  # the last line, cut short by a kill
                continue
        path.unlink()
    return sorted(entries, key=lambda entry: (entry["step"], entry["micro"]))


def count_lines(place: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in place.glob("trace*.jsonl"))


def fold(sessions: list[list[dict]]) -> dict[int, tuple[list[str], list]]:
    """Losses and tokens of each step as they counted in the end: a later session's step replaces an earlier one's."""
    steps: dict[int, list[dict]] = {}
    for entries in sessions:
        here: dict[int, list[dict]] = {}
        for entry in entries:
            here.setdefault(entry["step"], []).append(entry)
        steps |= here
    return {
        step: ([entry["loss"] for entry in entries], [row for entry in entries for row in rows(entry)])
        for step, entries in sorted(steps.items())
    }


def rows(entry: dict, length: int = 33) -> list[list[int]]:
    return [entry["tokens"][first : first + length] for first in range(0, len(entry["tokens"]), length)]


def group(leader: int) -> list[int]:
    """The processes of a group that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of_group) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


def kill_quietly(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def kill_group(leader: int) -> None:
    for pid in group(leader):
        kill_quietly(pid)
