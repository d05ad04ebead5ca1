"""A checkpoint is a folder, complete or absent.

`model.safetensors` and the small files beside it are a Hugging Face model; `optimizer.safetensors` and `trainer.json`
are the rest of the resume. `trainer.json` carries a digest of every other file and is written last. Everything goes to
a temporary folder beside the final one, is synced, verified and renamed; links move afterwards. Nothing is pickled.

Writing happens in a background thread, from a snapshot taken while the training waits, so the training does not wait
for the disk. Removals and links go through the same thread, in order.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.errors import RequestError, RunError
from lm.plain import decode, encode

FORMAT = 2  # 2: what was not logged yet stands under `tally`
TENSORS = {"state_dict": "model.safetensors", "optimizer": "optimizer.safetensors"}


# ---- one folder ------------------------------------------------------------------------------------------------------


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_folder(folder: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint, complete or not at all.

    Args:
        folder: the final place, in an existing folder; one that is there is replaced.
        content: `state_dict` and `optimizer` (flat tensors on the CPU), `files` (name -> text), and any tree that
            `encode` takes for the rest.

    Raises:
        RunError: the disk is full, the folder is not writable, or what was read back is not what was written.
    """
    sweep(folder)
    temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    try:
        temporary.mkdir()
        for key, name in TENSORS.items():
            if key in content:
                save_file(content[key], temporary / name, metadata={"format": "pt"})
        for path in temporary.iterdir():  # safetensors makes files that only their owner may read
            path.chmod(0o666 & ~_umask())
        for name, text in content.get("files", {}).items():
            (temporary / name).write_text(text, encoding="utf-8")
        for key, name in TENSORS.items():
            if key in content:
                _verify(temporary / name, content[key])
        digests = {path.name: digest(path) for path in sorted(temporary.iterdir())}
        rest = {key: encode(value) for key, value in content.items() if key not in (*TENSORS, "files")}
        document = {"format": FORMAT, "digests": digests, **rest}
        (temporary / "trainer.json").write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if folder.exists():
            replaced = folder.with_name(f".old-{folder.name}-{os.getpid()}")
            os.rename(folder, replaced)
            os.rename(temporary, folder)
            shutil.rmtree(replaced)
        else:
            os.rename(temporary, folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunError(
            f"could not write the checkpoint {folder}: {reason}; the ones before it are untouched"
        ) from error


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
    document = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
    try:
        content = {key: decode(value) for key, value in document.items() if key not in ("format", "digests")}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise RequestError(f"checkpoint {folder}: trainer.json is damaged ({error})") from error
    for key, name in TENSORS.items():
        if name in document["digests"] and (key != "optimizer" or optimizer):
            content[key] = load_file(folder / name)
    texts = document["digests"].keys() - set(TENSORS.values())
    content["files"] = {name: (folder / name).read_text(encoding="utf-8") for name in sorted(texts)}
    return content


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, in one phrase; None where it is whole."""
    try:
        document = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
        digests = dict(document["digests"])
        version = document["format"]
    except FileNotFoundError:
        return "no trainer.json, so this is not a complete checkpoint"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "trainer.json is damaged"
    if TENSORS["state_dict"] not in digests:
        return "trainer.json names no weights"
    if version != FORMAT:
        return f"format {version}, and this version of lm reads format {FORMAT}"
    for name, expected in digests.items():
        if Path(name).name != name:
            return f"trainer.json names {name!r}, a path outside the folder"
        try:
            found = digest(folder / name)
        except (OSError, ValueError) as error:
            return f"{name!r} cannot be read ({getattr(error, 'strerror', None) or error})"
        if found != expected:
            return f"{name} is damaged (its digest is not the one that was written)"
    return None


def step_of(folder: Path | str | None) -> int:
    """The optimizer step that a checkpoint was taken after; 0 where there is none."""
    return _document(folder)["global_step"] if folder else 0


def samples_of(folder: Path | str | None) -> int:
    """The samples that a checkpoint had been trained on; 0 where there is none."""
    return _document(folder)["cursor"]["consumed"] if folder else 0


def _document(folder: Path | str) -> dict[str, Any]:
    return json.loads((Path(folder) / "trainer.json").read_text(encoding="utf-8"))


def _verify(path: Path, tensors: dict[str, Tensor]) -> None:
    with safe_open(path, framework="pt") as file:
        for name, tensor in tensors.items():
            if not torch.equal(file.get_tensor(name).view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)):
                raise OSError(f"{path.name}: tensor {name} read back differently than it was written")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Wait until a file or a folder would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(link: Path, target: str) -> None:
    """Make `link` a relative symbolic link to `target`, atomically."""
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


# ---- Lightning's side of it ------------------------------------------------------------------------------------------


class FolderCheckpointIO(CheckpointIO):
    """Saves and loads such folders for Lightning's Trainer, writing in the background.

    Attributes:
        load_optimizer: set False where only weights are wanted (validate, test, predict).
    """

    def __init__(self) -> None:
        self.load_optimizer = True
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: list[Future[None]] = []

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Callable[[], None] | None = None,
    ) -> None:
        """Snapshot now, write behind; `storage_options` is called after the write (links, pruning).

        Raises:
            RunError: an earlier write failed.
        """
        self.raise_failures()
        snapshot = {key: value for key, value in checkpoint.items() if key not in TENSORS}
        for key in TENSORS:
            if key in checkpoint:
                snapshot[key] = {name: _snapshot(tensor) for name, tensor in checkpoint[key].items()}

        def work() -> None:
            write_folder(Path(path), snapshot)
            if storage_options is not None:
                storage_options()

        self._pending.append(self._writer.submit(work))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder to the CPU; the strategy moves what it needs."""
        return read_folder(Path(path), optimizer=self.load_optimizer)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a folder, after the writes before it."""
        self._pending.append(self._writer.submit(remove, Path(path)))

    def drain(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            RunError: a write failed.
        """
        for future in self._pending:
            future.exception()
        self.raise_failures()

    def raise_failures(self) -> None:
        """Raise the first failure of the writes that have ended, and forget them."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        for future in done:
            future.result()

    def teardown(self) -> None:
        """Let the writes end; failures were or will be raised by `drain`."""
        for future in self._pending:
            future.exception()


def sweep(folder: Path) -> None:
    """Remove what writers of a folder that were killed left beside it."""
    if folder.parent.is_dir():
        for path in folder.parent.iterdir():
            if path.name.startswith(f".tmp-{folder.name}-"):
                shutil.rmtree(path, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint folder so that no kill leaves half of one under its name."""
    dead = folder.with_name(f".old-{folder.name}-{os.getpid()}")
    os.rename(folder, dead)
    shutil.rmtree(dead)


def _snapshot(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that training will not write to."""
    tensor = tensor.detach()
    copy = tensor.to("cpu", copy=True) if tensor.device.type == "cpu" else tensor.cpu()
    return copy.contiguous()
