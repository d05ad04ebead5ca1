"""What a checkpoint holds of a training, and the thread that writes it while the training continues.

`runs/checkpoint` is the folder on the disk; `callbacks/checkpoints` decides when one is taken.
"""

import json
import logging
import os
import random
import shlex
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lm.data.datamodule import DataModule
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError, RunError
from lm.model.config import CUSTOM_MODEL_TYPE, DecoderConfig
from lm.model.decoder import Decoder
from lm.model.huggingface import (
    config_from_json,
    config_json,
    from_huggingface,
    generation_config_json,
    to_huggingface,
)
from lm.runs.checkpoint import TENSORS, read_folder, write_folder
from lm.runs.run import Run
from lm.system.files import remove_folder
from lm.training.builtin_optimizers import BUILTIN
from lm.training.config import OptimizerConfig

log = logging.getLogger(__name__)

# Fields of the decoder's config that do not change what it computes from its weights when it is not trained.
TRAINING_ONLY = {"vocab_size", "max_position_embeddings", "initializer_range", "zero_init_residual", "dropout"}


def to_checkpoint(module: Any, checkpoint: dict[str, Any]) -> None:
    """Turn Lightning's checkpoint, in place, into a Hugging Face model, named optimizer state and the rest."""
    checkpoint.pop(module.CHECKPOINT_HYPER_PARAMS_KEY, None)  # config.json has them
    checkpoint.pop(module.CHECKPOINT_HYPER_PARAMS_NAME, None)
    checkpoint["state_dict"] = _named_weights(module, checkpoint["state_dict"])
    states = checkpoint.pop("optimizer_states", [])
    checkpoint["optimizer"] = {}
    if states and states[0]:
        optimizer = module.optimizers(use_pl_optimizer=False)
        [whole] = states
        config, changed = module.options.optimizer, []  # AdamW and Muon change no setting of a group
        if config.class_path is not None:
            from lm.training.optimizer_by_class import changed_settings

            changed = changed_settings(config.class_path, optimizer, whole)
        state = name_state(whole["state"], parameter_names(module.decoder, optimizer))
        checkpoint["optimizer"] = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        checkpoint["optimizer_values"] = {
            "written_by": chosen_optimizer(config, optimizer),
            "state": {name: value for name, value in state.items() if not isinstance(value, Tensor)},
            "groups": changed,
            "of_no_parameter": {key: value for key, value in whole["state"].items() if not isinstance(key, int)},
            "entries": {key: value for key, value in whole.items() if key not in ("state", "param_groups")},
        }
    checkpoint["lr_schedulers"] = []
    own = {"rng": rng_state()}
    checkpoint["ranks"] = [own] * module.trainer.world_size
    if module.trainer.world_size > 1:
        torch.distributed.all_gather_object(checkpoint["ranks"], own)  # in the order of the ranks
    dtype = str(next(module.decoder.parameters()).dtype).removeprefix("torch.")
    tokenizer = module.trainer.datamodule.tokenizer
    custom = None
    if not module.builtin:
        from lm.model.custom import custom_config_json

        custom = custom_config_json(module.config, tokenizer.eos_id, dtype, type(module), module.hparams)
    checkpoint["files"] = model_files(module.config, tokenizer, dtype, custom)


def checkpoint_tensors(module: Any) -> dict[tuple[str, str], Tensor]:
    """The tensors of a checkpoint of a training on one device, after its first step, by the part of the checkpoint and
    the name there."""
    optimizer = module.optimizers(use_pl_optimizer=False)
    state = name_state(optimizer.state_dict()["state"], parameter_names(module.decoder, optimizer))
    parts = {"state_dict": _named_weights(module, module.state_dict()), "optimizer": state}
    return {(part, name): value for part, values in parts.items()
            for name, value in values.items() if isinstance(value, Tensor)}  # fmt: skip


def _named_weights(module: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = {name.removeprefix("decoder."): value for name, value in weights.items()}
    return to_huggingface(weights, module.config) if weights and module.builtin else weights


def model_files(
    config: DecoderConfig, tokenizer: Tokenizer, dtype: str, custom: dict[str, Any] | None = None
) -> dict[str, str]:
    """Names and contents of what makes a folder with weights, of a `dtype` such as "float32", a Hugging Face model.

    `custom` is the `config.json` of a custom model, which Hugging Face does not know.
    """
    documents = {
        "config.json": custom or config_json(config, eos_id=tokenizer.eos_id, dtype=dtype),
        "generation_config.json": generation_config_json(eos_id=tokenizer.eos_id),
    }
    return {
        **{name: json.dumps(document, indent=2) + "\n" for name, document in documents.items()},
        **tokenizer.files(),
    }


def restore_weights(module: Any, checkpoint: dict[str, Any]) -> None:
    """Turn weights and optimizer into what Lightning's strategies load, in place: the inverse of `to_checkpoint`."""
    weights = checkpoint["state_dict"]
    _check_same_class(checkpoint["files"], module)
    _check_same_shapes(weights, module)
    if module.builtin:
        weights = from_huggingface(weights, module.config)
    checkpoint["state_dict"] = {f"decoder.{name}": value for name, value in weights.items()}
    if "optimizer" in checkpoint:
        optimizer = module.configure_optimizers()
        state = optimizer.state_dict()
        nothing = {"written_by": None, "state": {}, "groups": [], "of_no_parameter": {}, "entries": {}}
        values = nothing | checkpoint.pop("optimizer_values", {})  # an imported model has none
        check_same_optimizer(values["written_by"], chosen_optimizer(module.options.optimizer, optimizer))
        slots = index_state(checkpoint.pop("optimizer") | values["state"], parameter_names(module.decoder, optimizer))
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, of_parameter in slots.items():
            for slot, value in of_parameter.items():
                of_parameter[slot] = _laid_out_as(parameters[index], value)
        state["state"] |= slots | values["of_no_parameter"]  # a class may need what it made when it was built
        for group, changed in zip(state["param_groups"], values["groups"]):
            group |= changed
        checkpoint["optimizer_states"] = [state | values["entries"]]


def rng_state() -> dict[str, Any]:
    """This rank's random number generators: torch's, Python's and numpy's."""
    name, key, *rest = np.random.get_state()
    state = {"cpu": torch.get_rng_state(), "python": random.getstate(), "numpy": (name, key.tolist(), *rest)}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Put this rank's random number generators where a checkpoint left them."""
    torch.set_rng_state(state["cpu"])
    if "python" in state:  # a checkpoint of an earlier version has torch's alone
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def parameter_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in the order in which its state counts them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def name_state(state: dict[Any, Any], names: list[str]) -> dict[str, Any]:
    """State by index, `{index: {slot: value}}`, as values `<parameter>/<slot>`; state of no parameter is left out."""
    return {
        f"{names[key]}/{slot}": value
        for key, slots in state.items() if isinstance(key, int)
        for slot, value in slots.items()
    }  # fmt: skip


def index_state(values: dict[str, Any], names: list[str]) -> dict[int, dict[str, Any]]:
    """The inverse of `name_state`."""
    states: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in values.items():
        name = key.rpartition("/")[0]
        while name and name not in states:  # the slot has a slash in its name, too
            name = name.rpartition("/")[0]
        states.setdefault(name, {})[key[len(name) + 1 :]] = value
    return {index: states[name] for index, name in enumerate(names) if states[name]}


def _laid_out_as(parameter: Tensor, value: Any) -> Any:
    """State with the strides of its parameter: a fused optimizer goes through both in the order of the memory."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or isinstance(parameter, DTensor):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def chosen_optimizer(config: OptimizerConfig, optimizer: Optimizer) -> dict[str, str]:
    """What chose the optimizer and its value: the option `name` or `class_path`, or a subclass's own method."""
    if config.class_path is not None:
        return {"class_path": config.class_path}
    made = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return {"name": config.name} if made == BUILTIN[config.name].class_path else {"configure_optimizers": made}


def check_same_optimizer(written: dict[str, str] | None, now: dict[str, str]) -> None:
    """Refuse the state of another optimizer than that of now, each as `chosen_optimizer` describes it."""
    if written is None or written == now:
        return
    [[before, then], [option, value]] = [*written.items(), *now.items()]
    place = "" if before == "configure_optimizers" else "model.optimizer."
    raise RequestError(f"this is a checkpoint of another optimizer, of {place}{before} {then}, and this training has "
                       f"{option} {value}: give {before} {then}"
                       + (" and no class_path" if option == "class_path" != before else ""))  # fmt: skip


# ---- the thread that writes ------------------------------------------------------------------------------------------


class FolderCheckpointIO(CheckpointIO):
    """Saves and loads folders for Lightning's Trainer; a thread writes them."""

    def __init__(self) -> None:
        self.load_optimizer = True  # set False where only weights are wanted (validate, test, predict)
        self.verified: Path | None = None  # the checkpoint whose files have just been compared with their digests
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None  # the newest write, or reservation of memory
        self._kept: dict[tuple[str, str | int], Tensor] = {}  # memory for copies, which stays for the next checkpoint

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Callable[[], None] | None = None,
    ) -> None:
        """Copy the tensors now and write them in the background, after the write before, which raises if it failed.

        `storage_options` is Lightning's name for what is ours to use: called after the write, for links and pruning.
        """
        self.drain()
        own = {tensor.untyped_storage().data_ptr() for tensor in self._kept.values()}
        snapshot = {key: deepcopy(value) for key, value in checkpoint.items() if key not in TENSORS}
        for key in TENSORS:
            if key in checkpoint:
                snapshot[key] = {name: self._copy((key, name), tensor, own) for name, tensor in checkpoint[key].items()}
        self.wait_for_copies()

        def write() -> None:
            write_folder(Path(path), snapshot)
            try:
                if storage_options is not None:
                    storage_options()
            except OSError as error:
                raise RunError(
                    f"the checkpoint {path} is whole, but the links and older ones beside it cannot be changed: "
                    f"{error.strerror or error}; `{Run(Path(path).parent).resume_command()}` resumes from it"
                ) from error

        self._pending = self._writer.submit(write)

    def _copy(self, place: tuple[str, str], tensor: Tensor, own: set[int]) -> Tensor:
        """A contiguous copy on the CPU that training will not write to; those at the addresses `own` are copies."""
        if tensor.device.type == "cuda":
            return self.keep(place, tensor)
        return tensor.detach().to("cpu", copy=tensor.untyped_storage().data_ptr() not in own).contiguous()

    def keep(self, place: tuple[str, str | int], tensor: Tensor) -> Tensor:
        """Copy a tensor into host memory that the next checkpoint reuses for `place`; then call `wait_for_copies`.

        From a GPU the copy is asynchronous, into page-locked memory: several times faster than one-by-one copies into
        newly allocated memory.
        """
        self.drain()  # the write before reads this memory
        kept = self._kept.get(place)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._kept[place] = memory_for(tensor)
        return kept.copy_(tensor.detach(), non_blocking=True)

    def reserve(self, tensors: dict[tuple[str, str], Tensor]) -> None:
        """Allocate memory for the copies of these tensors in the background: page-locking it takes a while, for which
        the first checkpoint would keep the training waiting."""
        self.drain()

        def allocate() -> None:
            self._kept |= {place: memory_for(tensor) for place, tensor in tensors.items()}

        self._pending = self._writer.submit(allocate)

    def wait_for_copies(self) -> None:
        """Wait until what `keep` returned can be read."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder to the CPU; the strategy moves what it needs."""
        return read_folder(Path(path), self.load_optimizer, verify=Path(path) != self.verified)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self.drain()
        remove_folder(Path(path))

    def drain(self) -> None:
        """Wait until everything is on the disk; raise the failure of a write."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def raise_failures(self) -> None:
        """Raise the failure of a write that has ended."""
        if self._pending is not None and self._pending.done():
            self.drain()

    def teardown(self) -> None:
        """Wait for the write; log its failure, since the run ends anyway."""
        try:
            self.drain()
        except Exception as error:
            log.error("%s", error)


def memory_for(tensor: Tensor) -> Tensor:
    """Host memory for a copy of a tensor, page-locked if it is on a GPU and the system has enough of such memory."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    except RuntimeError:
        return torch.empty(tensor.shape, dtype=tensor.dtype)


# ---- what does not fit -----------------------------------------------------------------------------------------------


def _check_same_class(files: dict[str, str], module: Any) -> None:
    document = json.loads(files["config.json"])
    there = document["architectures"][0] if document.get("model_type") == CUSTOM_MODEL_TYPE else None
    mine = None if module.builtin else type(module).__name__
    if there == mine:
        return
    by = "this project's decoder" if mine is None else f"that of {mine}"
    if there is None:
        raise RequestError(f"this is a checkpoint of this project's decoder, and the model is {by}: give it to `lm`")
    raise RequestError(f"this is a checkpoint of a model that the class {there} builds, and the model is {by}: give "
                       f"the command to the file that has `lm.run({there})`")  # fmt: skip


def check_same_model(files: dict[str, str], module: Any) -> None:
    """Raise RequestError where a checkpoint's `config.json` describes a model that computes something else with the
    same weights: other rotary wavelengths, windows, heads ..."""
    document, config = json.loads(files["config.json"]), module.config
    if module.builtin:
        there, own, arguments = config_from_json(document), {}, {}
    else:
        from lm.model.custom import plain_arguments

        there, own = DecoderConfig(**document["decoder"]), plain_arguments(type(module), module.hparams)
        arguments = document["init_args"]
    names = {one.name for one in fields(DecoderConfig)} - TRAINING_ONLY
    if there.windows == config.windows:
        names -= {"window_pattern", "sliding_window"}  # the same in other words
    values = {f"decoder.{name}": (getattr(there, name), getattr(config, name)) for name in sorted(names)}
    values |= {name: (value, own.get(name)) for name, value in arguments.items()}
    differing = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
    if differing:
        what = ", ".join(f"model.{name} is {then} there and {now} here" for name, (then, now) in differing.items())
        cure = " ".join(f"--model.{name} {'null' if then is None else shlex.quote(str(then))}"
                        for name, (then, _) in differing.items())  # fmt: skip
        raise RequestError(f"this is a checkpoint of another model: {what}; give {cure}, or --force to compute it so")


def _check_same_shapes(weights: dict[str, Tensor], module: Any) -> None:
    config, expected = module.config, module.decoder.state_dict()
    if module.builtin:
        with torch.device("meta"):
            expected = to_huggingface(Decoder(config).state_dict(), config)
    for name in sorted(expected.keys() | weights.keys()):
        have, want = (tuple(side[name].shape) if name in side else "absent" for side in (weights, expected))
        if have != want:
            raise RequestError(
                f"this is a checkpoint of another architecture: its {name} is {have}, the config makes it {want}; "
                "without --config the config of the checkpoint's run is taken"
            )


def check_same_tokenizer(files: dict[str, str], data: DataModule, checkpoint: Path) -> None:
    """Raise RequestError where a checkpoint's token ids mean other texts than those of the data."""
    tokenizer = data.tokenizer
    if files["tokenizer.json"] == tokenizer.text:
        return
    own = Tokenizer(files["tokenizer.json"], json.loads(files["tokenizer_config.json"]), name="the checkpoint's")
    if own.vocabulary != tokenizer.vocabulary:
        raise RequestError(
            f"the data's tokenizer ({len(tokenizer.vocabulary):,} tokens) is not the checkpoint's "
            f"({len(own.vocabulary):,} tokens), so the same ids mean other texts: prepare the text again with "
            f"--tokenizer {branched_from(checkpoint)} and another --output, and give that as data.path"
        )


def branched_from(checkpoint: Path) -> Path:
    """A checkpoint, or, of one that a new branch begins with, that of the run which it is from."""
    origin = Run(checkpoint.parent).read("run.json").get("branch")
    if origin and checkpoint.name == f"step-{origin['step']:08}":
        return Path(origin["path"], checkpoint.name)
    return checkpoint
