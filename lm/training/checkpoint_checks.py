"""Whether a checkpoint fits a model, its optimizer and its data; a RequestError says what differs."""

import json
import logging
import shlex
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lm.data.catalog import describe_difference
from lm.data.datamodule import DataModule
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError
from lm.model.config import CUSTOM_MODEL_TYPE, DecoderConfig
from lm.model.decoder import Decoder
from lm.model.huggingface import config_from_json, to_huggingface
from lm.runs.run import Run

if TYPE_CHECKING:
    from lm.training.module import LanguageModule

log = logging.getLogger(__name__)

# Fields of the decoder's config that do not change what it computes from its weights when it is not trained.
TRAINING_ONLY = {"vocab_size", "max_position_embeddings", "initializer_range", "zero_init_residual", "dropout"}


def check_same_class(files: dict[str, str], module: "LanguageModule") -> None:
    """RequestError if the checkpoint's model was built by another class than this module's."""
    document = json.loads(files["config.json"])
    saved_class = document["architectures"][0] if document.get("model_type") == CUSTOM_MODEL_TYPE else None
    model_class = None if module.builtin else type(module).__name__
    if saved_class == model_class:
        return
    saved, model = (
        f"a model that the class {name} builds" if name else "this project's decoder"
        for name in (saved_class, model_class)
    )
    program = f"the file that has `lm.run({saved_class})`" if saved_class else "`lm`"
    raise RequestError(f"this is a checkpoint of {saved}, and the model is {model}: give the command to {program}")


def check_same_model(files: dict[str, str], module: "LanguageModule") -> None:
    """RequestError if a checkpoint's `config.json` describes a model that computes something else with the same
    weights: other rotary wavelengths, windows, heads ..."""
    document, config = json.loads(files["config.json"]), module.config
    if module.builtin:
        saved, saved_arguments, arguments = config_from_json(document), {}, {}
    else:
        from lm.model.custom import plain_arguments

        saved, saved_arguments = DecoderConfig(**document["decoder"]), document["init_args"]
        arguments = plain_arguments(type(module), module.hparams)
    names = {field.name for field in fields(DecoderConfig)} - TRAINING_ONLY
    if saved.windows == config.windows:
        names -= {"window_pattern", "sliding_window"}  # the same in other words
    pairs = {f"decoder.{name}": (getattr(saved, name), getattr(config, name)) for name in sorted(names)}
    pairs |= {name: (value, arguments.get(name)) for name, value in saved_arguments.items()}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if differing:
        changes = ", ".join(f"model.{name} is {old} there and {new} here" for name, (old, new) in differing.items())
        values = {name: "null" if old is None else shlex.quote(str(old)) for name, (old, _) in differing.items()}
        fix = " ".join(f"--model.{name} {value}" for name, value in values.items())
        raise RequestError(f"this is a checkpoint of another model: {changes}; give {fix}, or --force to compute it so")


def check_same_shapes(weights: dict[str, Tensor], module: "LanguageModule") -> None:
    """RequestError if the weights of a checkpoint have other names or shapes than the model's."""
    expected = module.decoder.state_dict()
    if module.builtin:
        with torch.device("meta"):
            expected = to_huggingface(Decoder(module.config).state_dict(), module.config)
    saved_shapes, shapes = ({name: tuple(w.shape) for name, w in side.items()} for side in (weights, expected))
    for name in sorted(shapes.keys() | saved_shapes.keys()):
        saved_shape, shape = saved_shapes.get(name, "absent"), shapes.get(name, "absent")
        if saved_shape != shape:
            raise RequestError(
                f"this is a checkpoint of another architecture: its {name} is {saved_shape}, the config makes it "
                f"{shape}; give the config of its run, or of an imported model its model.yaml as a second --config"
            )


def check_loadable(module: "LanguageModule") -> None:
    """RequestError if a custom model that is built as for loading could not take the weights of this one."""
    from lm.model.custom import build_custom, custom_config_json

    document = custom_config_json(module.config, None, "float32", type(module), module.hparams)
    weights = module.decoder.state_dict()
    try:
        with isolate_rng():
            new_model = build_custom(document, type(module), "")
        if extra := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
            raise RuntimeError(f"{extra[0]} is no tensor: register it as a buffer")
        zeros = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in weights.items()}
        new_model.load_state_dict(zeros)
    except Exception as error:
        raise RequestError(
            f"{type(module.decoder).__name__}: its checkpoint could not be loaded: {' '.join(str(error).split())}"
        ) from error


def check_same_optimizer(saved: dict[str, str] | None, current: dict[str, str]) -> None:
    """RequestError if the state is of another optimizer, both as `checkpoint_content.describe_optimizer` gives them."""
    if saved is None or saved == current:
        return
    [[saved_option, saved_value], [option, value]] = [*saved.items(), *current.items()]
    place = "" if saved_option == "configure_optimizers" else "model.optimizer."
    drop_class_path = " and no class_path" if option == "class_path" != saved_option else ""
    raise RequestError(
        f"this is a checkpoint of another optimizer, of {place}{saved_option} {saved_value}, and this run has {option} "
        f"{value}: give {f'--{place}' if place else ''}{saved_option} {saved_value}{drop_class_path}"
    )


def check_same_tokenizer(files: dict[str, str], data: DataModule) -> None:
    """RequestError if a checkpoint's token ids mean other texts than those of the data."""
    tokenizer = data.tokenizer
    if files["tokenizer.json"] == tokenizer.text:
        return
    saved = Tokenizer(files["tokenizer.json"], json.loads(files["tokenizer_config.json"]), name="the checkpoint's")
    if saved.vocabulary != tokenizer.vocabulary:
        raise RequestError(
            f"the data's tokenizer ({len(tokenizer.vocabulary):,} tokens) is not the checkpoint's "
            f"({len(saved.vocabulary):,} tokens), so the same ids mean other texts: prepare the text again with the "
            "checkpoint, or its run's data, as --tokenizer and another --output, and give that as data.path"
        )


# ---- the data of a run that is resumed -------------------------------------------------------------------------------


def check_same_mixture(run: Run, data: DataModule, samples: int, force: bool) -> set[str]:
    """RequestError if the mixture of the `samples` already seen would change; returns the sources added since then."""
    saved, current = run.read("run.json").get("mixture"), data.describe_mixture()
    if saved is None or current is None:  # one source: `check_config_changes` compares it
        return set()
    from lm.data.mixture import describe_change

    problem, change = describe_change(saved, current, samples)
    if problem and not force:
        raise RequestError(
            f"the mixture of {run.path} changed: {problem}; put it back, start a new run, or give --force"
        )
    if change:
        log.info("resume: %s", change)
    return set(current["sources"]) - set(saved["sources"])


def check_same_shards(run: Run, shards: dict[str, Any], new_sources: set[str], force: bool) -> None:
    """RequestError if the shards differ from those at the run's start, except in new sources."""
    saved = run.read("data.json")
    if force:
        return
    if not saved and (run.path / "data.json").exists():
        raise RequestError(
            f"{run.path / 'data.json'} is damaged, so it is not known which shards the run saw: put it back, start a "
            "new run, or give --force"
        )
    differences = []
    for split in sorted(saved.keys() | shards.keys()):
        old = [entry for entry in shards.get(split, []) if entry[0].split("/")[0] not in new_sources]
        if difference := describe_difference(saved.get(split, []), old):
            differences.append(f"{split}: {difference}")
    if saved and differences:
        raise RequestError(
            f"the shards changed since {run.path} was started, so its order of samples is gone: "
            f"{'; '.join(differences)}; put them back, start a new run, or give --force"
        )
