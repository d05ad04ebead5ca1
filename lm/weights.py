"""The weights of a model folder: a checkpoint of ours, or what Hugging Face's libraries write. Nothing is unpickled."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lm.checkpoint import read_folder
from lm.documents import parse_json
from lm.errors import RequestError

INDEX = "model.safetensors.index.json"


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder, under Hugging Face's names, on the CPU.

    A checkpoint of ours is compared with its digests before.

    Args:
        folder: with a `model.safetensors`, or several and their index.

    Raises:
        RequestError: there are none, or they are damaged; the message names the file.
    """
    if (folder / "trainer.json").exists():
        return read_folder(folder, optimizer=False)["state_dict"]
    weights: dict[str, Tensor] = {}
    for name in _files(folder):
        try:
            weights |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{folder / name} cannot be read ({error}); is it damaged or truncated?") from error
    return weights


def _files(folder: Path) -> list[str]:
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    if not (folder / INDEX).exists():
        pickled = next(folder.glob("pytorch_model*.bin"), None)
        hint = (
            f"; {pickled.name} is a pickle, which could run anything: save the model with safe_serialization=True"
            if pickled else ""
        )  # fmt: skip
        raise RequestError(f"{folder} has no model.safetensors{hint}")
    try:
        names = sorted(set(parse_json((folder / INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{folder / INDEX} is damaged: it has no map of weights to files") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise RequestError(f"{folder / INDEX} names {name!r}, which is no safetensors file of this folder")
    return names
