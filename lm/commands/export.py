"""`lm export`: a model for others, a Hugging Face folder with a model card, which another process has reloaded.

The folder is complete or absent: it is made beside its place and renamed at the end.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lm.checkpoint import sync
from lm.errors import RequestError, RunError
from lm.leftovers import sweep
from lm.model.huggingface import to_huggingface
from lm.model_card import Card, write_card
from lm.pretrained import Pretrained, load_pretrained
from lm.reload_check import reload
from lm.resume import chosen_model
from lm.runs import ROOT
from lm.snapshot import model_files
from lm.weights import INDEX, read_weights

log = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9  # the most in one file of weights
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def export(
    run: str | None = None,
    ckpt_path: str | None = None,
    output: str = "",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    name: str | None = None,
    license: str = "unknown",
    language: list[str] | None = None,
    root: str = str(ROOT),
) -> None:
    """Write a model to a folder for others: weights, tokenizer and a model card, as Hugging Face's libraries read them.

    Args:
        run: Name of the run; the newest if not given.
        ckpt_path: `best`, `last` or a folder with a model; the best if not given.
        output: The folder to make, which must be empty or not there.
        dtype: Number format of the weights; as they are stored if not given.
        name: What the model card calls the model; the folder's name if not given.
        license: Its licence, by its SPDX identifier, such as Apache-2.0.
        language: Languages of its texts, by their ISO 639 codes, such as en.
        root: Folder of the runs.
    """
    if not output:
        raise RequestError("give the folder to make with --output")
    target = Path(output).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"--output {output} is there already and not an empty folder; choose another")
    for code in language or []:
        if not re.fullmatch(r"[a-z]{2,3}", code):
            raise RequestError(f"--language {code}: give ISO 639 codes, such as en")
    source = chosen_model(run, ckpt_path, root)
    model = load_pretrained(source, device="cpu", dtype=dtype and getattr(torch, dtype))
    model.decoder.to(model.dtype)
    card = Card(name or target.name, license, tuple(language or []))
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    sweep(target)
    try:
        temporary.mkdir(parents=True)
        write(model, card, temporary)
        found = reload(temporary, model, str(model.dtype).removeprefix("torch."))
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        os.rename(temporary, target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise RunError(f"could not write {target}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log.info(
        "a new process loaded it with %s: logits in fp32 differ by %.1e of the largest, %d greedy tokens are the same",
        found.loader, found.difference, found.tokens,
    )  # fmt: skip
    if license == "unknown":
        log.info("the model card says that the licence is unknown: choose one with --license before you publish it")
    print(output)


def write(model: Pretrained, card: Card, folder: Path) -> None:
    """Fill a folder with everything, and compare the weights with those they were made of, bit by bit.

    Args:
        model: in the number format to write.
        card: what a person says of it.
        folder: empty.

    Raises:
        RequestError: a weight has no finite value in this number format.
        RunError: what was read back is not what the source holds.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    weights = to_huggingface(model.decoder.state_dict(), model.config)
    for weight_name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise RequestError(f"{weight_name} has values that are no finite {dtype}; choose another --dtype or model")
    files = model_files(model.config, model.tokenizer, dtype)
    about = json.loads(model.tokenizer.files(model.config.max_position_embeddings)["tokenizer_config.json"])
    special = {name: token for name, token in about.items() if name in SPECIAL}
    for file, document in {"tokenizer_config.json": about, "special_tokens_map.json": special}.items():
        files[file] = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    files["README.md"] = write_card(model, card)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    write_weights(weights, folder)
    for path in folder.iterdir():  # safetensors makes files that only their owner may read
        path.chmod((folder / "README.md").stat().st_mode)
    verify(folder, model.path, model.dtype)


def write_weights(weights: dict[str, Tensor], folder: Path, most: int = SHARD_BYTES) -> None:
    """Weights as `model.safetensors`; as several files and their index where they are larger than `most` bytes."""
    shards: list[dict[str, Tensor]] = [{}]
    room = most
    for name, weight in weights.items():
        if shards[-1] and weight.nbytes > room:
            shards.append({})
            room = most
        shards[-1][name] = weight.contiguous()
        room -= weight.nbytes
    count = len(shards)
    names = ["model.safetensors"] if count == 1 else [
        f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)
    ]  # fmt: skip
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    if count > 1:
        index = {
            "metadata": {"total_size": sum(weight.nbytes for weight in weights.values())},
            "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def verify(folder: Path, source: Path, dtype: torch.dtype) -> None:
    """Compare every weight of a folder, bit by bit, with that of the source in this number format.

    Raises:
        RunError: one is not the same.
    """
    written, origin = read_weights(folder), read_weights(source)
    known_without = {name for name in origin if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")}
    if missing := origin.keys() - written.keys() - known_without:
        raise RunError(f"{min(missing)} of {source} was not written")
    for name, weight in written.items():
        if name not in origin or not torch.equal(_bits(weight), _bits(origin[name].to(dtype))):
            raise RunError(f"{name} read back differently than it is in {source}; is the disk failing?")


def _bits(weight: Tensor) -> Tensor:
    return weight.reshape(-1).view(torch.uint8)
