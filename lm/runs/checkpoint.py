"""A checkpoint on the disk: `write_folder` writes it, complete or not at all, and `read_folder` reads it.

    runs/my-run/
        step-00001000/
            model.safetensors         content["state_dict"], the weights
            config.json               content["files"], texts that make a Hugging Face model of the weights
            tokenizer.json ...
            optimizer.safetensors     content["optimizer"], the tensors of the optimizer
            trainer.json              everything else of the content, as JSON, and a digest of each file above
        last -> step-00001000         the newest
        best -> step-00000800         the one with the lowest validation loss

Nothing is pickled. `training/checkpoint_content` shows the content; `training/checkpoint_io` writes it in the
background of a training.
"""

import errno
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lm.errors import RequestError, RunError
from lm.runs.json_tree import decode, encode
from lm.runs.run import Run
from lm.runs.trainer_json import best_name, find_damage, read_document, write_document
from lm.system.files import atomic_folder, point
from lm.system.units import format_bytes

TENSORS = {"state_dict": "model.safetensors", "optimizer": "optimizer.safetensors"}  # key of the content -> file
NO_SPACE = os.strerror(errno.ENOSPC)


def write_folder(folder: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint into a temporary folder, sync it and rename it to `folder`, which is replaced if it exists."""
    try:
        with atomic_folder(folder) as temporary:
            write_files(temporary, content)
    except (OSError, SafetensorError) as error:
        reason = _why_not_written(error, folder, content)
        raise RunError(f"could not write the checkpoint {folder}: {reason}") from error


def write_files(folder: Path, content: dict[str, Any]) -> None:
    """Write the files of a checkpoint into an empty folder; tensors are on the CPU."""
    for key, name in TENSORS.items():
        if key in content:
            save_file(content[key], folder / name, metadata={"format": "pt"})
    for name, text in content.get("files", {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    try:
        state = {key: encode(value, key) for key, value in content.items() if key not in (*TENSORS, "files")}
    except TypeError as error:  # such as callbacks['MyCallback']['cache']
        advice = "let its `state_dict` return numbers, texts, lists, dictionaries or tensors"
        raise RunError(f"{error}: {advice}") from error
    write_document(folder, state)
    mode = (folder / "trainer.json").stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)  # safetensors makes files that only their owner may read


def read_folder(folder: Path, optimizer: bool = True, verify: bool = True) -> dict[str, Any]:
    """Read a checkpoint: the content given to `write_folder`; RequestError if it is not complete and intact.

    `verify`: first compare every file with its digest; not needed if `find_damage` has just done so.
    """
    if verify and (damage := find_damage(folder)):
        raise RequestError(
            f"checkpoint {folder}: {damage}; choose another with --ckpt_path, or `auto` for the newest complete one"
        )
    document = read_document(folder)
    digests = document.pop("digests")
    content = {key: decode(value) for key, value in document.items() if key not in ("format", "written_by")}
    texts = sorted(digests.keys() - set(TENSORS.values()))
    try:
        for key, name in TENSORS.items():
            if name in digests and (key != "optimizer" or optimizer):
                content[key] = load_file(folder / name)
        content["files"] = {name: (folder / name).read_text(encoding="utf-8") for name in texts}
    except (SafetensorError, UnicodeDecodeError) as error:
        raise RequestError(f"checkpoint {folder} was not written by lm: {error}") from error
    return content


def link_to(folder: Path, best: str | None) -> None:
    """Point the links `last` and `best` beside a checkpoint to it and to the checkpoint named `best`."""
    if best is not None and folder.with_name(best).exists():
        point(folder.with_name("best"), best)
    point(folder.with_name("last"), folder.name)


# ---- how far a run was -----------------------------------------------------------------------------------------------


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
    except RequestError as error:
        raise RequestError(f"checkpoint {folder}: {error}") from error
    return Progress(
        step=document["global_step"],
        samples=document["cursor"]["consumed"],
        best_name=best_name(document),
        pending_validation=document.get("pending_validation", False),
    )


# ---- a write that failed ---------------------------------------------------------------------------------------------


def _why_not_written(error: Exception, folder: Path, content: dict[str, Any]) -> str:
    """What went wrong, and what to do."""
    run = Run(folder.parent)
    if not run.path.is_dir():
        return f"the folder {run.path} is gone; put it back, and `{run.resume_command()}` resumes the run"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if NO_SPACE in str(error):  # safetensors has it within a longer message
        size = sum(tensor.nbytes for key in TENSORS for tensor in content.get(key, {}).values())
        free = shutil.disk_usage(run.path).free
        reason = f"{NO_SPACE}, {format_bytes(free)} free of the {format_bytes(size)} that it takes; make room"
    if (run.path / "run.json").exists():  # not in the folder of a user's own ModelCheckpoint
        reason += f"; the ones before it are untouched, and `{run.resume_command()}` resumes from there"
    return reason
