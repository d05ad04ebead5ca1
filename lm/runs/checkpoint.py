"""A checkpoint is a folder, complete or absent.

`model.safetensors` and the small files beside it are a Hugging Face model; `optimizer.safetensors` and `trainer.json`
hold the rest of what a resume needs. `trainer.json` has a digest of every other file and of itself, and is written
last. All files go to a temporary folder, which is synced and renamed; then the links `last` and `best` move. Nothing is
pickled.

`training/checkpoint_io` writes checkpoints in the background of a training.
"""

import base64
import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.errors import RequestError, RunError
from lm.runs.run import Run
from lm.system.files import atomic_folder, digest, dump_checksummed, load_checksummed, remove_folder
from lm.system.parsing import DAMAGE
from lm.system.process import lm_version
from lm.system.units import format_bytes

FORMAT = 5  # 4: Lightning counts optimizer steps, not micro-batches; 5: names in the states of guards
TENSORS = {"state_dict": "model.safetensors", "optimizer": "optimizer.safetensors"}  # key of the content -> file
NO_SPACE = os.strerror(errno.ENOSPC)

# ---- writing ---------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint, complete or not at all; an existing one is replaced.

    The content is `state_dict` and `optimizer` (flat tensors on the CPU), `files` (name -> text), and under other keys
    any tree that `encode` accepts.
    """
    try:
        with atomic_folder(folder) as temporary:
            write_files(temporary, content)
    except (OSError, SafetensorError) as error:
        raise RunError(f"could not write the checkpoint {folder}: {_reason(error, folder, content)}") from error


def write_files(folder: Path, content: dict[str, Any]) -> None:
    """Write the files of a checkpoint into a folder."""
    for key, name in TENSORS.items():
        if key in content:
            save_file(content[key], folder / name, metadata={"format": "pt"})
    for name, text in content.get("files", {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    digests = {path.name: digest(path) for path in sorted(folder.iterdir())}
    try:
        state = {key: encode(value, key) for key, value in content.items() if key not in (*TENSORS, "files")}
    except TypeError as error:  # such as callbacks['MyCallback']['cache']
        raise RunError(f"{error}: {ENCODABLE}") from error
    document = {"format": FORMAT, "written_by": lm_version(), "digests": digests, **state}
    (folder / "trainer.json").write_bytes(dump_checksummed(document))
    mode = (folder / "trainer.json").stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)  # safetensors makes files that only their owner may read


def _reason(error: Exception, folder: Path, content: dict[str, Any]) -> str:
    """Why a write failed, and the fix; for a full disk with its free space."""
    run = Run(folder.parent)
    if not folder.parent.is_dir():
        return f"the folder {folder.parent} is gone; put it back, and `{run.resume_command()}` resumes the run"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if NO_SPACE in text:  # safetensors has it within a longer message
        size = format_bytes(sum(tensor.nbytes for key in TENSORS for tensor in content.get(key, {}).values()))
        free = format_bytes(shutil.disk_usage(folder.parent).free)
        text = f"{NO_SPACE}, {free} free of the {size} that it takes; make room"
    if not (run.path / "run.json").exists():  # the checkpoint of an imported model
        return text
    return f"{text}; the ones before it are untouched, and `{run.resume_command()}` resumes from there"


def link_to(folder: Path, best: str | None) -> None:
    """Point the links `last` and `best` beside a checkpoint to it and to the checkpoint named `best`."""
    if best is not None and folder.with_name(best).exists():
        point(folder.with_name("best"), best)
    point(folder.with_name("last"), folder.name)


def point(link: Path, target: str) -> None:
    """Make `link` a relative symbolic link to `target`, atomically; not on a file system without such links.

    There `Run.link` finds the checkpoint.
    """
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP):  # as exFAT, FUSE and SMB say it
            return
        raise
    if link.is_dir() and not link.is_symlink():  # the run was copied with folders in place of its links
        remove_folder(link)
    os.replace(temporary, link)


# ---- reading ---------------------------------------------------------------------------------------------------------


class Progress(NamedTuple):
    """How far a run was at a checkpoint; the defaults are its beginning."""

    step: int = 0  # the optimizer step after which the checkpoint was saved
    samples: int = 0  # samples trained on so far
    best_name: str | None = None  # of the best checkpoint so far; None if none was validated
    pending_validation: bool = False  # the validation due after this step had not run yet


def read_progress(folder: Path | str | None) -> Progress:
    """The progress of the run at a checkpoint, or its beginning without one; RequestError if it is damaged."""
    if not folder:
        return Progress()
    try:
        document = read_document(Path(folder))
        states = decode(document.get("callbacks", {})).values()
        best = [state["best_name"] for state in states if isinstance(state, dict) and "best_name" in state]
        step, samples = int(document["global_step"]), int(document["cursor"]["consumed"])
        return Progress(step, samples, best[0] if best else None, bool(document.get("pending_validation")))
    except RequestError as error:
        raise RequestError(f"checkpoint {folder}: {error}") from error
    except (*DAMAGE, RuntimeError) as error:
        raise RequestError(f"checkpoint {folder}: its trainer.json was not written by lm") from error


def read_folder(folder: Path, optimizer: bool = True, verify: bool = True) -> dict[str, Any]:
    """Read a checkpoint: the content given to `write_folder`; RequestError if it is not complete and intact.

    `verify`: first compare every file with its digest; not needed if `find_damage` has just done so.
    """
    if verify and (damage := find_damage(folder)):
        raise RequestError(
            f"checkpoint {folder}: {damage}; choose another with --ckpt_path, or `auto` for the newest complete one"
        )
    try:
        document = read_document(folder)
        digests = document.pop("digests")
        content = {key: decode(value) for key, value in document.items() if key not in ("format", "written_by")}
        for key, name in TENSORS.items():
            if name in digests and (key != "optimizer" or optimizer):
                content[key] = load_file(folder / name)
        texts = digests.keys() - set(TENSORS.values())
        content["files"] = {name: (folder / name).read_text(encoding="utf-8") for name in sorted(texts)}
    except (*DAMAGE, RuntimeError, OSError, SafetensorError) as error:
        raise RequestError(f"checkpoint {folder} was not written by lm: {error}") from error
    return content


def find_damage(folder: Path) -> str | None:
    """Compare every file of a checkpoint with its digest: a description of the damage, or None if there is none."""
    try:
        digests = read_document(folder)["digests"]
    except RequestError as error:
        return str(error)
    if TENSORS["state_dict"] not in digests:
        return "trainer.json names no weights"
    for name, expected in digests.items():
        path = folder / name
        if path.name != name:
            return f"trainer.json names {name!r}, a path outside the folder"
        try:
            if path.exists() and not path.is_file():
                return f"{name} is not a file"
            actual = digest(path)
        except (OSError, ValueError) as error:
            return f"{name!r} cannot be read ({getattr(error, 'strerror', None) or error})"
        if actual != expected:
            return f"{name} is damaged (its digest is not the one that was written)"
    return None


def read_document(folder: Path) -> dict[str, Any]:
    """Read `trainer.json` and compare its digest; RequestError with a short reason if it is damaged."""
    try:
        text = (folder / "trainer.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RequestError("no trainer.json, so this is not a complete checkpoint") from error
    except OSError as error:
        raise RequestError(f"trainer.json cannot be read ({error.strerror})") from error
    try:
        document = load_checksummed(text)
    except DAMAGE as error:
        raise RequestError(f"trainer.json is damaged ({error})") from error
    if document.get("format") != FORMAT:
        writer = str(document.get("written_by", ""))
        raise RequestError(
            f"format {document.get('format')!r}: lm {writer} wrote and reads it (`pip install lm-pretrain=="
            f"{writer.partition('+')[0]}`); this is lm {lm_version()}, which reads format {FORMAT}"
        )
    if not isinstance(document.get("digests"), dict):
        raise RequestError("trainer.json names no files")
    return document


# ---- a tree of plain values as JSON ----------------------------------------------------------------------------------


ENCODABLE = "let its `state_dict` return numbers, texts, lists, dictionaries or tensors"  # advice if `encode` fails


def encode(value: Any, place: str = "") -> Any:
    """Turn a tree of dicts, lists, tuples, numbers, strings and small tensors into JSON values.

    `place` is the path of the value in the tree, for the TypeError about a value of another kind.
    """
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
        dtype = str(data.dtype).removeprefix("torch.")
        return {"__tensor__": [dtype, list(data.shape), base64.b64encode(raw).decode()]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(item, f"{place}[{key!r}]") for key, item in value.items()}
        return {"__items__": [[encode(key, place), encode(item, f"{place}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item, place) for item in value]}
    if isinstance(value, list):
        return [encode(item, place) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold {place or 'a value'} of the type {type(value).__name__}")


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        dtype, shape, raw = value["__tensor__"]
        flat = torch.frombuffer(bytearray(base64.b64decode(raw)), dtype=torch.uint8) if raw else torch.empty(0)
        return flat.view(getattr(torch, dtype)).reshape(shape) if raw else flat.to(getattr(torch, dtype)).reshape(shape)
    if "__items__" in value:
        return {decode(key): decode(item) for key, item in value["__items__"]}
    if "__tuple__" in value:
        return tuple(decode(item) for item in value["__tuple__"])
    if "__float__" in value:
        return float(value["__float__"])
    return {key: decode(item) for key, item in value.items()}
