"""Files that survive a crash: atomic writes and appends, JSON with its own digest, and folders cleaned up after a kill.

Also safe parsing of YAML and JSON, and the disk space that the checkpoints of a run need. Nothing here imports torch.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from lm.errors import RequestError, RunError
from lm.system.units import format_bytes

# ---- leftovers -------------------------------------------------------------------------------------------------------
# What writers of folders that were killed left behind: half written, half replaced, half removed.
#
# Until its name is the final one a folder is called `.tmp-NAME-PID`; one that is being replaced `.old-NAME-PID`; one
# that is being removed `.dead-NAME-PID`.

LEFT = re.compile(r"\.(?P<kind>tmp|old|dead)-(?P<name>.+)-\d+")


def remove_stale(folder: Path) -> None:
    """Clear away what writers of a folder that were killed left beside it.

    Args:
        folder: a checkpoint's, or a pattern of the names of several, such as `run/step-*`.
    """
    restore_interrupted(folder)
    for path, _, _ in _left_beside(folder):
        shutil.rmtree(path, ignore_errors=True)


def restore_interrupted(folder: Path) -> None:
    """Give a folder its name again that a killed writer had moved aside to replace it, and did not.

    Args:
        folder: as for `remove_stale`.
    """
    for path, kind, name in _left_beside(folder):
        if kind == "old" and not path.with_name(name).exists():
            os.rename(path, path.with_name(name))


def remove(folder: Path) -> None:
    """Remove a folder so that no kill leaves half of one under its name.

    What cannot go now is cleared away with the next `remove_stale`.
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


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make a folder, complete or not at all: the yielded one lies beside it, and takes its name at the end.

    Raises:
        RequestError: there is something under this name that is not an empty folder.
        RunError: it cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"--output {target} is there already and not an empty folder; choose another")
    target = target.resolve()
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    remove_stale(target)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        os.rename(temporary, target)
        sync(target.parent)
    except OSError as error:
        raise RunError(f"could not write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or a folder would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- documents -------------------------------------------------------------------------------------------------------
# YAML and JSON that may hold anything: damaged, nested without end, swelling when its aliases are written out.
#
# Whatever is wrong with a text is a ValueError here, so a reader has one kind of failure to name its file in.

DEEPEST = 32  # values inside values of a YAML
LARGEST = 20_000_000  # characters and values of a YAML, each counted as often as an alias repeats it


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is no JSON, no UTF-8, nested too deep, or has a whole number of more than 64 bits.
    """
    try:
        return _JSON.decode(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("values are nested too deep to be read") from None


def _whole(digits: str) -> int:
    number = int(digits)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"a number of {len(digits)} digits")
    return number


_JSON = json.JSONDecoder(parse_int=_whole)  # `json.loads` would make one for every line of a file


def fits(value: Any, shape: Any) -> bool:
    """Whether a value has the shape that a reader relies on.

    Args:
        value: out of a JSON document.
        shape: a type, where `float` is any finite number; None; a function that says it; a list of the shape of its
            entries; a dict of the shapes that must be under its keys, or under every key where the key is `...`; or a
            tuple of shapes, of which one fits.
    """
    if isinstance(shape, tuple):
        return any(fits(value, each) for each in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(entry, shape[0]) for entry in value)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        every = all(fits(entry, shape[...]) for entry in value.values()) if ... in shape else True
        return every and all(key in value and fits(value[key], shape[key]) for key in shape.keys() - {...})
    if isinstance(shape, FunctionType):
        return shape(value)
    if shape is float:
        return type(value) is int or type(value) is float and math.isfinite(value)
    return value is None if shape is None else type(value) is shape


def parse_yaml(text: str | bytes) -> Any:
    """What a YAML text says, in plain values: no tag makes an object of another kind.

    Raises:
        ValueError: it is no YAML, no UTF-8, nested deeper than `DEEPEST`, or larger than `LARGEST` with its aliases.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, and not in every build of PyYAML
    try:
        _measure(yaml.parse(text, loader))
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split()).replace('in "<byte string>", ', "at ")) from error
    except (AttributeError, LookupError, TypeError, ArithmeticError) as error:  # a tag on what is not of its kind
        raise ValueError(f"a value is not what its tag says ({error})") from error


def _measure(events: Iterable[Any]) -> None:
    """Refuse what would exhaust the stack or the memory of who builds it; to go through its events takes neither."""
    import yaml

    sizes: dict[str, int] = {}  # of what an anchor marks, once it is whole
    open_values: list[tuple[str | None, int]] = []  # the anchor of each, and how much came before it
    size = 0
    for event in events:
        before, size = size, size + 1
        match event:
            case yaml.CollectionStartEvent():
                open_values.append((event.anchor, before))
            case yaml.CollectionEndEvent():
                anchor, before = open_values.pop()
                sizes[anchor] = size - before
            case yaml.ScalarEvent():
                size += len(event.value)
                sizes[event.anchor] = size - before
            case yaml.AliasEvent() if event.anchor not in sizes:
                raise ValueError(f"alias {event.anchor} stands for nothing, or for what it stands in")
            case yaml.AliasEvent():
                size += sizes[event.anchor]
        if len(open_values) > DEEPEST:
            raise ValueError(f"values are nested deeper than {DEEPEST}")
        if size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} characters when its aliases are written out")


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def nonnegative(value: Any) -> float | None:
    """A finite number >= 0 out of a file that may hold anything, else None."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return float(value) if fits else None


# ---- run files -------------------------------------------------------------------------------------------------------
# How the files of a run are written: replaced whole or appended to whole, also where a disk is full or a kill comes.
#
# `Attempts` is for what a training can do without: it says once that it is missing, and the training goes on.

log = logging.getLogger(__name__)


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Replace a file so that a reader sees the old or the new text and never a part.

    Args:
        path: the file; where it cannot be replaced nothing is left beside it.
        text: what it is to hold.
        durable: wait until it would survive a power cut, too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append(descriptor: int, data: bytes) -> None:
    """Add bytes to the end of a file that was opened for appending: all of them, or none.

    Raises:
        OSError: they cannot be written; the file is as long as before.
    """
    end, done = os.fstat(descriptor).st_size, 0
    try:
        while done < len(data):
            done += os.write(descriptor, data[done:])
    except OSError:
        os.ftruncate(descriptor, end)
        raise


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Add a line of JSON to a file, after ending the last one if a kill has cut it short.

    Raises:
        OSError: it cannot be written; the file is as long as before.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        end = os.fstat(descriptor).st_size
        cut = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        append(descriptor, b"\n" * cut + (json.dumps(line, ensure_ascii=False) + "\n").encode())
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, without what a kill has cut short."""
    try:
        text = path.read_bytes()
    except OSError:
        return
    for line in text.split(b"\n"):
        try:
            entry = parse_json(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


class Attempts:
    """Writes that may fail without harm: a full disk costs a training its curve and not its life.

    The first failure is said, and that all is written again; what lies in between is missing for good.
    """

    def __init__(self) -> None:
        self._missing: set[str] = set()  # what could not be written when it was tried last

    def __call__(self, what: Path | str, write: Callable[[], Any]) -> bool:
        """Call `write`; whether it went well.

        Args:
            what: is written; for people.
            write: may raise an OSError.
        """
        try:
            write()
        except OSError as error:
            first = not self._missing
            self._missing.add(str(what))
            if first:
                reason = error.strerror or error
                log.warning("%s cannot be written: %s; until it can, what the run logs is missing", what, reason)
            return False
        if str(what) in self._missing:
            self._missing.remove(str(what))
            if not self._missing:
                log.warning("what the run logs is written again; the part in between is missing")
        return True


# ---- sealed ----------------------------------------------------------------------------------------------------------
# A JSON document that begins with a digest of the rest of itself, so that no byte of it can change unseen.
#
# It is an ordinary JSON object whose first key is `sha256`: the SHA-256 of every byte after that digest.

OPENING = b'{"sha256": "'
BODY = len(OPENING) + 64  # where the rest begins: after as many hexadecimal digits


def dump_checksummed(document: dict[str, Any]) -> bytes:
    """The text of a document, with its digest; not empty, and of what JSON can hold.

    Raises:
        ValueError: a number in it is not finite.
    """
    body = b'", ' + json.dumps(document, allow_nan=False).encode()[1:]
    return OPENING + hashlib.sha256(body).hexdigest().encode() + body


def load_checksummed(text: bytes) -> dict[str, Any]:
    """The inverse of `dump_checksummed`; nothing is parsed before the digest was compared.

    Raises:
        ValueError: it is not what was written.
    """
    if text[:BODY] != OPENING + hashlib.sha256(text[BODY:]).hexdigest().encode():
        raise ValueError("its digest is not the one that was written")
    document = json.loads(text)  # whole, so nothing that `dump_checksummed` took is too deep or too large
    del document["sha256"]
    return document


def stated_digest(path: Path) -> str | None:
    """The digest that a file begins with, which tells one document from another; None where there is none."""
    try:
        with open(path, "rb") as file:
            text = file.read(BODY)
    except OSError:
        return None
    return text[len(OPENING) :].decode("ascii", "replace") if text.startswith(OPENING) else None


# ---- room ------------------------------------------------------------------------------------------------------------
# Room on the disk for the checkpoints of a run.


class DiskSpace(NamedTuple):
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


def disk_space(folder: Path, checkpoint: int, keep: int, present: int = 0) -> DiskSpace:
    """What a run will need of the disk that its folder is or will be on.

    Args:
        folder: of the run, or of the runs; it need not be there yet.
        checkpoint: bytes of one.
        keep: how many of the newest are kept; the best and the one in flight come on top.
        present: how many there are already, whose room the run will have again.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free + checkpoint * present
    return DiskSpace(checkpoint, checkpoint * (keep + 2), free)
