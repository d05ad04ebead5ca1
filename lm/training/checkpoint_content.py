"""What a checkpoint holds of a training run: a Hugging Face model, the state of its optimizer by name, and the rest.

`training/checkpoint_io` writes it; `training/checkpoint_checks` compares it with the model that it is loaded into.
"""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lm.data.tokenizer import Tokenizer
from lm.model.config import DecoderConfig
from lm.model.huggingface import config_json, from_huggingface, generation_config_json, to_huggingface
from lm.training.builtin_optimizers import BUILTIN
from lm.training.config import OptimizerConfig
from lm.training.rng_state import rng_state

if TYPE_CHECKING:
    from lm.training.module import LanguageModule


def to_checkpoint(module: "LanguageModule", checkpoint: dict[str, Any]) -> None:
    """Turn Lightning's checkpoint, in place, into the content of a checkpoint folder; call it on every rank."""
    checkpoint.pop(module.CHECKPOINT_HYPER_PARAMS_KEY, None)  # config.json has them
    checkpoint.pop(module.CHECKPOINT_HYPER_PARAMS_NAME, None)
    checkpoint["lr_schedulers"] = []
    checkpoint["state_dict"] = named_weights(module, checkpoint["state_dict"])
    states = checkpoint.pop("optimizer_states", [])
    checkpoint["optimizer"] = {}
    if states and states[0]:  # none where the weights alone are saved
        checkpoint |= optimizer_content(module, states[0])
    rank_state = {"rng": rng_state()}
    checkpoint["ranks"] = [rank_state] * module.trainer.world_size
    if module.trainer.world_size > 1:
        torch.distributed.all_gather_object(checkpoint["ranks"], rank_state)  # in the order of the ranks
    checkpoint["files"] = huggingface_files(module)


def from_checkpoint(module: "LanguageModule", checkpoint: dict[str, Any]) -> None:
    """The inverse of `to_checkpoint` for weights and optimizer: turn them, in place, into what Lightning loads."""
    from lm.training.checkpoint_checks import check_same_class, check_same_shapes

    weights = checkpoint["state_dict"]
    check_same_class(checkpoint["files"], module)
    check_same_shapes(weights, module)
    if module.builtin:
        weights = from_huggingface(weights, module.config)
    checkpoint["state_dict"] = {f"decoder.{name}": value for name, value in weights.items()}
    if "optimizer" in checkpoint:
        tensors, values = checkpoint.pop("optimizer"), checkpoint.pop("optimizer_values", {})
        checkpoint["optimizer_states"] = [optimizer_state_dict(module, tensors, values)]


# ---- the model -------------------------------------------------------------------------------------------------------


def named_weights(module: "LanguageModule", state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a module by the names of Hugging Face, or of a custom decoder by its own names."""
    weights = {name.removeprefix("decoder."): value for name, value in state_dict.items()}
    return to_huggingface(weights, module.config) if weights and module.builtin else weights


def huggingface_files(module: "LanguageModule") -> dict[str, str]:
    dtype = str(next(module.decoder.parameters()).dtype).removeprefix("torch.")
    tokenizer = module.trainer.datamodule.tokenizer
    custom = None
    if not module.builtin:
        from lm.model.custom import custom_config_json

        custom = custom_config_json(module.config, tokenizer.eos_id, dtype, type(module), module.hparams)
    return model_files(module.config, tokenizer, dtype, custom)


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
    texts = {name: json.dumps(document, indent=2) + "\n" for name, document in documents.items()}
    return {**texts, **tokenizer.files()}


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def optimizer_content(module: "LanguageModule", state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's `state_dict` as tensors by name, and the plain values beside them."""
    optimizer, config = module.optimizers(use_pl_optimizer=False), module.options.optimizer
    changed_settings = []  # AdamW and Muon change no setting of a group
    if config.class_path is not None:
        from lm.training import optimizer_by_class

        changed_settings = optimizer_by_class.changed_settings(config.class_path, optimizer, state_dict)
    state = name_state(state_dict["state"], parameter_names(module.decoder, optimizer))
    return {
        "optimizer": {name: value for name, value in state.items() if isinstance(value, Tensor)},
        "optimizer_values": {
            "written_by": describe_optimizer(config, optimizer),
            "state": {name: value for name, value in state.items() if not isinstance(value, Tensor)},
            "groups": changed_settings,
            "of_no_parameter": {key: value for key, value in state_dict["state"].items() if not isinstance(key, int)},
            "entries": {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")},
        },
    }


def optimizer_state_dict(module: "LanguageModule", tensors: dict[str, Tensor], values: dict[str, Any]) -> dict:
    """The inverse of `optimizer_content`, with the settings of the config, so that a changed learning rate counts."""
    from lm.training.checkpoint_checks import check_same_optimizer

    optimizer = module.configure_optimizers()
    state_dict = optimizer.state_dict()
    check_same_optimizer(values.get("written_by"), describe_optimizer(module.options.optimizer, optimizer))
    named_state = tensors | values.get("state", {})  # an imported model has neither
    state = index_state(named_state, parameter_names(module.decoder, optimizer))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, slots in state.items():
        state[index] = {slot: with_strides_of(parameters[index], value) for slot, value in slots.items()}
    state_dict["state"] |= state | values.get("of_no_parameter", {})  # a class may need what it made when it was built
    for group, changed_settings in zip(state_dict["param_groups"], values.get("groups", [])):
        group |= changed_settings
    return state_dict | values.get("entries", {})


def parameter_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in the order in which its state counts them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def name_state(state: dict[Any, Any], names: list[str]) -> dict[str, Any]:
    """State by index, `{index: {slot: value}}`, as values `<parameter>/<slot>`; state of no parameter is left out."""
    by_index = {index: slots for index, slots in state.items() if isinstance(index, int)}
    return {f"{names[index]}/{slot}": value for index, slots in by_index.items() for slot, value in slots.items()}


def index_state(values: dict[str, Any], names: list[str]) -> dict[int, dict[str, Any]]:
    """The inverse of `name_state`."""
    states: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in values.items():
        name = key.rpartition("/")[0]
        while name and name not in states:  # the slot has a slash in its name, too
            name = name.rpartition("/")[0]
        states.setdefault(name, {})[key[len(name) + 1 :]] = value
    return {index: states[name] for index, name in enumerate(names) if states[name]}


def with_strides_of(parameter: Tensor, value: Any) -> Any:
    """State with the strides of its parameter: a fused optimizer goes through both in the order of the memory."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or isinstance(parameter, DTensor):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def describe_optimizer(config: OptimizerConfig, optimizer: Optimizer) -> dict[str, str]:
    """What chose the optimizer and its value: the option `name` or `class_path`, or a subclass's own method."""
    if config.class_path is not None:
        return {"class_path": config.class_path}
    class_path = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if class_path != BUILTIN[config.name].class_path:
        return {"configure_optimizers": class_path}
    return {"name": config.name}


def checkpoint_tensors(module: "LanguageModule") -> dict[tuple[str, str], Tensor]:
    """The tensors of a checkpoint of a run on one device, after its first step, by (part of the checkpoint, name)."""
    optimizer = module.optimizers(use_pl_optimizer=False)
    state = name_state(optimizer.state_dict()["state"], parameter_names(module.decoder, optimizer))
    parts = {"state_dict": named_weights(module, module.state_dict()), "optimizer": state}
    values = {(part, name): value for part, named in parts.items() for name, value in named.items()}
    return {place: value for place, value in values.items() if isinstance(value, Tensor)}
