"""A checkpoint is a folder, complete or absent.

`model.safetensors` and the small files beside it are a Hugging Face model; `optimizer.safetensors` and `trainer.json`
are the rest of the resume. `trainer.json` carries a digest of every other file and of itself, and is written last.
Everything goes to a temporary folder beside the final one, is synced, verified and renamed; links move afterwards.
Nothing is pickled.

`training/checkpointing` writes them in the background of a training.
"""

import base64
import errno
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.errors import RequestError, RunError
from lm.system.files import digest, dump_checksummed, load_checksummed, remove_stale, restore_interrupted, sync
from lm.system.units import format_bytes

# ---- plain -----------------------------------------------------------------------------------------------------------
# A tree of plain values as JSON and back: what a checkpoint holds beside its big tensors, without pickling.


def encode(value: Any) -> Any:
    """A tree of dicts, lists, tuples, numbers, strings and small tensors as what JSON can hold.

    Raises:
        TypeError: something else is in it.
    """
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
        dtype = str(data.dtype).removeprefix("torch.")
        return {"__tensor__": [dtype, list(data.shape), base64.b64encode(raw).decode()]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {"__items__": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


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


# ---- checkpoint ------------------------------------------------------------------------------------------------------

FORMAT = 4  # 3: trainer.json has a digest of itself; 4: Lightning counts optimizer steps, not micro-batches
NO_SPACE, NO_QUOTA = os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)
TENSORS = {"state_dict": "model.safetensors", "optimizer": "optimizer.safetensors"}
# What parsing a document raises that nobody wrote like this: digests hold, and yet it makes no sense.
MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, OverflowError)


# ---- one folder ------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint, complete or not at all.

    Args:
        folder: the final place, in an existing folder; one that is there is replaced.
        content: `state_dict` and `optimizer` (flat tensors on the CPU), `files` (name -> text), and any tree that
            `encode` takes for the rest.

    Raises:
        RunError: the disk is full, the folder is not writable, or what was read back is not what was written.
    """
    temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    try:
        remove_stale(folder)
        temporary.mkdir()
        try:
            _fill(temporary, content)
            if folder.exists():
                replaced = folder.with_name(f".old-{folder.name}-{os.getpid()}")
                os.rename(folder, replaced)
                os.rename(temporary, folder)
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                os.rename(temporary, folder)
            sync(folder.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            restore_interrupted(folder)
            raise
    except (OSError, SafetensorError) as error:
        raise RunError(f"could not write the checkpoint {folder}: {_reason(error, folder, content)}") from error


def _fill(folder: Path, content: dict[str, Any]) -> None:
    """Write the files of a checkpoint, compare the tensors with what was read back, and wait for the disk."""
    for key, name in TENSORS.items():
        if key in content:
            save_file(content[key], folder / name, metadata={"format": "pt"})
    for name, text in content.get("files", {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    for key, name in TENSORS.items():
        if key in content:
            _verify(folder / name, content[key])
    digests = {path.name: digest(path) for path in sorted(folder.iterdir())}
    rest = {key: encode(value) for key, value in content.items() if key not in (*TENSORS, "files")}
    (folder / "trainer.json").write_bytes(dump_checksummed({"format": FORMAT, "digests": digests, **rest}))
    mode = (folder / "trainer.json").stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)  # safetensors makes files that only their owner may read
    for path in (*folder.iterdir(), folder):
        sync(path)


def _reason(error: Exception, folder: Path, content: dict[str, Any]) -> str:
    """Why a write failed, and what to do: a full disk with the figures."""
    if isinstance(error, FileNotFoundError) and not folder.parent.is_dir():
        return f"the folder {folder.parent} is gone; put it back, and `--ckpt_path auto` goes on"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    size = format_bytes(sum(tensor.nbytes for key in TENSORS for tensor in content.get(key, {}).values()))
    if NO_SPACE in text:  # safetensors says it among other things
        free = format_bytes(shutil.disk_usage(folder.parent).free)
        text = f"{NO_SPACE}, {free} free of the {size} that it takes; make room"
    elif NO_QUOTA in text:  # nobody tells how much of it is left
        text = f"{NO_QUOTA}, and it takes {size}; make room"
    return f"{text}; the ones before it are untouched, and `--ckpt_path auto` goes on from there"


def read_folder(folder: Path, optimizer: bool = True) -> dict[str, Any]:
    """Read a checkpoint back into what `write_folder` was given, after comparing every file with its digest.

    Raises:
        RequestError: it is not a whole checkpoint; the message names the file.
    """
    problem = find_damage(folder)
    if problem:
        raise RequestError(
            f"checkpoint {folder}: {problem}; choose another with --ckpt_path, or `auto` for the newest whole one"
        )
    try:
        document = load_checksummed((folder / "trainer.json").read_bytes())
        digests = document.pop("digests")
        content = {key: decode(value) for key, value in document.items() if key != "format"}
        for key, name in TENSORS.items():
            if name in digests and (key != "optimizer" or optimizer):
                content[key] = load_file(folder / name)
        texts = digests.keys() - set(TENSORS.values())
        content["files"] = {name: (folder / name).read_text(encoding="utf-8") for name in sorted(texts)}
    except (*MALFORMED, OSError, SafetensorError) as error:
        raise RequestError(f"checkpoint {folder} was not written by lm: {error}") from error
    return content


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, in one phrase; None where it is whole."""
    try:
        document = read_document(folder)
    except RequestError as error:
        return str(error)
    digests = document["digests"]
    if TENSORS["state_dict"] not in digests:
        return "trainer.json names no weights"
    for name, expected in digests.items():
        path = folder / name
        if path.name != name:
            return f"trainer.json names {name!r}, a path outside the folder"
        try:
            if path.exists() and not path.is_file():
                return f"{name} is not a file"
            found = digest(path)
        except (OSError, ValueError) as error:
            return f"{name!r} cannot be read ({getattr(error, 'strerror', None) or error})"
        if found != expected:
            return f"{name} is damaged (its digest is not the one that was written)"
    return None


def read_document(folder: Path) -> dict[str, Any]:
    """What stands in `trainer.json`, as JSON has it, after comparing it with its own digest; the others' are in
    `digests`.

    Raises:
        RequestError: there is none, it is damaged, or another version of lm wrote it; in one phrase.
    """
    try:
        text = (folder / "trainer.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RequestError("no trainer.json, so this is not a complete checkpoint") from error
    except OSError as error:
        raise RequestError(f"trainer.json cannot be read ({error.strerror})") from error
    try:
        document = load_checksummed(text)
    except MALFORMED as error:
        if earlier := re.match(rb'{"format": (\d{1,9}), ', text):
            raise RequestError(_other_format(int(earlier[1]))) from error
        raise RequestError(f"trainer.json is damaged ({error})") from error
    if document.get("format") != FORMAT:
        raise RequestError(_other_format(document.get("format")))
    if not isinstance(document.get("digests"), dict):
        raise RequestError("trainer.json names no files")
    return document


def _other_format(version: Any) -> str:
    return f"format {version!r}, and this version of lm reads format {FORMAT}"


def step_of(folder: Path | str | None) -> int:
    """The optimizer step that a checkpoint was taken after; 0 where there is none.

    Raises:
        RequestError: it is damaged.
    """
    return _entry(folder, "global_step") if folder else 0


def samples_of(folder: Path | str | None) -> int:
    """The samples that a checkpoint had been trained on; 0 where there is none.

    Raises:
        RequestError: it is damaged.
    """
    return _entry(folder, "cursor", "consumed") if folder else 0


def best_of(folder: Path) -> str | None:
    """The name of the best checkpoint of a run when this one was taken; None where none was validated.

    Raises:
        RequestError: it is damaged.
    """
    states = decode(read_document(folder).get("callbacks", {})).values()
    return next((state["best_name"] for state in states if "best_name" in state), None)


def pending_validation(folder: Path | str | None) -> bool:
    """Whether a checkpoint was taken before the validation that is due after its step.

    Raises:
        RequestError: it is damaged.
    """
    return bool(folder and read_document(Path(folder)).get("pending_validation"))


def _entry(folder: Path | str, *keys: str) -> int:
    try:
        value = read_document(Path(folder))
        for key in keys:
            value = value[key]
        return int(value)
    except RequestError as error:
        raise RequestError(f"checkpoint {folder}: {error}") from error
    except MALFORMED as error:
        raise RequestError(f"checkpoint {folder}: its trainer.json has no {'.'.join(keys)}") from error


def _verify(path: Path, tensors: dict[str, Tensor]) -> None:
    with safe_open(path, framework="pt") as file:
        for name, tensor in tensors.items():
            if not torch.equal(file.get_tensor(name).view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)):
                raise OSError(f"{path.name}: tensor {name} read back differently than it was written")


def link_to(folder: Path, best: str | None) -> None:
    """Have `last` and `best`, beside a checkpoint, point to it and to the best."""
    if best is not None and folder.with_name(best).exists():
        point(folder.with_name("best"), best)
    point(folder.with_name("last"), folder.name)


def point(link: Path, target: str) -> None:
    """Make `link` a relative symbolic link to `target`, atomically."""
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
