"""Trained models for use, as `lm.load_model` returns them and as commands load them."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError, first_line
from lm.inference.completion import Written, gather_texts, generate_text
from lm.inference.sampling import Sampling
from lm.model.build import BuildOptions, build, config_of
from lm.model.config import CUSTOM_MODEL_TYPE, DecoderConfig, DTypeName
from lm.model.decoder import Decoder
from lm.model.huggingface import check_tied, config_from_json, from_huggingface
from lm.runs.checkpoint import read_folder, read_progress
from lm.runs.find import find_run
from lm.runs.resume import checkpoint_folder
from lm.runs.run import Run
from lm.system import process
from lm.system.dataclass_arguments import build_options
from lm.system.files import check_fetched, is_remote
from lm.system.parsing import parse_json, read_object

INDEX = "model.safetensors.index.json"
LONGEST_REASON = 400  # characters of torch's message on weights that do not fit


@dataclass(frozen=True)
class Pretrained:
    """A decoder with its tokenizer, on its device, in evaluation mode, without gradients.

    `step` is None for a folder that no run wrote.
    """

    path: Path  # the folder that it was read from
    decoder: Decoder  # or a custom model, by the contract of `model/custom`
    tokenizer: Tokenizer
    step: int | None
    kernels: str  # how it is computed, in words

    @property
    def config(self) -> DecoderConfig:
        return config_of(self.decoder)

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of the computation."""
        return next(self.decoder.parameters()).dtype

    def generate(
        self, prompts: str | Sequence[str], *, sampling: Sampling = Sampling(temperature=0.8, top_k=50), **options: Any
    ) -> list[Written]:
        """Continue one text, or several together.

        Args:
            prompts: one text or several; an empty one begins a document.
            sampling: how tokens are chosen, and where a text ends.
            options: fields of `Sampling`, such as `max_new_tokens`, `stop` and `seed`, in place of those of `sampling`.

        Returns:
            For each prompt: `text`, the continuation without the prompt; its tokens; and why it ended.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        sampling = build_options(Sampling, "generate", **vars(sampling) | options)
        return gather_texts(prompts, generate_text(self.decoder, self.tokenizer, prompts, sampling))


def load_pretrained(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: DTypeName | torch.dtype | None = None,
    eos_token: str | None = None,
    module: type | None = None,
) -> Pretrained:
    """Load a model for use, as `lm.load_model` does; `path` may also be the URL of a checkpoint's folder.

    `eos_token` is the token that ends a document, if the folder does not name it.
    """
    folder = checkpoint_folder(str(path)) if is_remote(str(path)) or Path(path).is_file() else Path(path)
    if not any((folder / file).exists() for file in ("config.json", "run.json")):
        with suppress(RequestError) if folder.is_dir() else nullcontext():  # the folder may have the name of a run
            folder = find_run(str(path)).path
    if (folder / "run.json").exists():
        folder = Run(folder).checkpoint()
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # no device of that name, or none here
        raise RequestError(f"device {device}: {first_line(error)}; `cpu` is everywhere, `cuda` a GPU") from error
    of_weights: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    file = folder / "config.json"
    if not file.exists():
        gguf = next(folder.glob("*.gguf"), None)
        hint = f"; to use {gguf}: lm import --input {gguf} --output models/{gguf.stem}" if gguf else ""
        raise RequestError(f"{folder} is not a model: it has no config.json{hint}")
    document = read_object(file)
    custom = document.get("model_type") == CUSTOM_MODEL_TYPE
    if custom:
        from lm.model.custom import build_custom

        kind, script = module or process.module_class, Run(folder.resolve().parent).script
        decoder, weights = build_custom(document, kind, str(folder), script), read_weights(folder)
        config = config_of(decoder)
    else:
        try:
            config = config_from_json(document)
        except (TypeError, AttributeError, ValueError) as error:
            raise RequestError(f"{file}: a value is of another kind than it should be ({error})") from error
        weights = from_huggingface(read_weights(folder), config)
        with torch.device("meta"):
            decoder = Decoder(config)
    check_tied(decoder, weights)
    try:
        decoder.load_state_dict(weights, assign=True)
    except RuntimeError as error:  # other names or shapes, or integers
        reason = shorten(str(error).partition("\n")[2], LONGEST_REASON)
        raise RequestError(f"{folder}: the weights and config.json do not belong together: {reason}") from error
    decoder.to(device, of_weights)
    decoder.eval().requires_grad_(False)
    of_weights = next(decoder.parameters()).dtype
    built = build(config, BuildOptions(), device, of_weights, make=lambda config: decoder, builtin=not custom)
    tokenizer = Tokenizer.load(folder, eos_token)
    if tokenizer.vocab_size > config.vocab_size:
        raise RequestError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} ids and the model {config.vocab_size:,}: they do "
            "not belong together"
        )
    progress = read_progress(folder) if (folder / "trainer.json").exists() else None
    return Pretrained(folder, decoder, tokenizer, progress and progress.step, built.kernels)


# ---- the files of a folder -------------------------------------------------------------------------------------------


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all weights of a folder, under Hugging Face's names, to the CPU. Nothing is unpickled.

    The folder is a checkpoint of lm, whose digests are checked, or a Hugging Face model: a `model.safetensors`, or
    several files and their index.
    """
    if (folder / "trainer.json").exists():
        return read_folder(folder, optimizer=False)["state_dict"]
    weights: dict[str, Tensor] = {}
    for name in _files(folder):
        try:
            weights |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            with suppress(OSError), (folder / name).open("rb") as file:
                check_fetched(file.read(64), folder / name)
            raise RequestError(f"{folder / name} cannot be read ({error}); is it damaged or truncated?") from error
    return weights


def _files(folder: Path) -> list[str]:
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    if not (folder / INDEX).exists():
        pickled = next(folder.glob("pytorch_model*.bin"), None)
        if pickled is None:
            raise RequestError(f"{folder} has no model.safetensors")
        raise RequestError(
            f"{folder} has no model.safetensors; {pickled.name} is a pickle, which could run anything: save the model "
            "with safe_serialization=True"
        )
    names = sorted(set(parse_json((folder / INDEX).read_bytes())["weight_map"].values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise RequestError(f"{folder / INDEX} names {name!r}, which is not a safetensors file of this folder")
    return names
