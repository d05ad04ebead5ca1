"""`trainer.json`, the file that is written last into a checkpoint and makes it complete.

    {"sha256": ..., "format": 5, "written_by": "0.3.0", "digests": {"model.safetensors": ..., ...}, "global_step": ...}

`sha256` is the digest of the rest of this text, `digests` has those of all other files; after them comes the state of
the run, which `runs/checkpoint` gives.
"""

from pathlib import Path
from typing import Any

from lm.errors import RequestError
from lm.system.files import digest, dump_checksummed, load_checksummed
from lm.system.parsing import DAMAGE_ERRORS
from lm.system.process import lm_version

# A checkpoint of another format is refused, with the version of lm that reads it. The number goes up when the same key
# means something else: with 4, Lightning counts optimizer steps instead of micro-batches; with 5, states of guards have
# names.
FORMAT = 5


def write_document(folder: Path, state: dict[str, Any]) -> None:
    """Write `trainer.json`, with the digests of the files that the folder has and the state of the run as JSON."""
    digests = {path.name: digest(path) for path in sorted(folder.iterdir())}
    document = {"format": FORMAT, "written_by": lm_version(), "digests": digests, **state}
    (folder / "trainer.json").write_bytes(dump_checksummed(document))


def read_document(folder: Path) -> dict[str, Any]:
    """Read `trainer.json` and compare its digest; RequestError with a short reason if it is damaged."""
    try:
        document = load_checksummed((folder / "trainer.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RequestError("no trainer.json, so this is not a complete checkpoint") from error
    except OSError as error:
        raise RequestError(f"trainer.json cannot be read ({error.strerror})") from error
    except DAMAGE_ERRORS as error:
        raise RequestError(f"trainer.json is damaged ({error})") from error
    if document.get("format") != FORMAT:
        writer = str(document.get("written_by", ""))
        raise RequestError(
            f"format {document.get('format')!r}: lm {writer} wrote and reads it (`pip install lm-pretrain=="
            f"{writer.partition('+')[0]}`); this is lm {lm_version()}, which reads format {FORMAT}"
        )
    return document


def best_name(document: dict[str, Any]) -> str | None:
    """The name of the best checkpoint when this one was saved; None if none was validated.

    `Checkpoints.state_dict` of callbacks/checkpoints.py saves it; Lightning's key of that has its arguments too.
    """
    states = document.get("callbacks", {}).values()
    return next((state["best_name"] for state in states if isinstance(state, dict) and "best_name" in state), None)


def find_damage(folder: Path) -> str | None:
    """Compare every file of a checkpoint with its digest: a description of the damage, or None if there is none."""
    try:
        digests = read_document(folder)["digests"]
    except RequestError as error:
        return str(error)
    for name, expected in digests.items():
        path = folder / name
        if path.name != name:
            return f"trainer.json names {name!r}, a path outside the folder"
        try:
            actual = digest(path)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if actual != expected:
            return f"{name} is damaged (its digest is not the one that was written)"
    return None
