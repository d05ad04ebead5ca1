"""The content of a checkpoint as Lightning loads it: the way back of `training/checkpoint_content`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lm.model.huggingface import from_huggingface
from lm.training.checkpoint_checks import check_same_class, check_same_optimizer, check_same_shapes
from lm.training.checkpoint_content import describe_optimizer, parameter_names

if TYPE_CHECKING:
    from lm.training.module import LanguageModule


def from_content(module: "LanguageModule", content: dict[str, Any]) -> dict[str, Any]:
    """Lightning's checkpoint, with weights and optimizer state under its keys and the rest of the content as it is.

    RequestError if they are those of another model or optimizer.
    """
    weights = content["state_dict"]
    check_same_class(content["files"], module)
    check_same_shapes(weights, module)
    if module.builtin:
        weights = from_huggingface(weights, module.config)
    checkpoint = {key: value for key, value in content.items() if key not in ("optimizer", "optimizer_values")}
    checkpoint["state_dict"] = {f"decoder.{name}": value for name, value in weights.items()}
    if "optimizer" in content:
        state_dict = optimizer_state_dict(module, content["optimizer"], content.get("optimizer_values", {}))
        checkpoint["optimizer_states"] = [state_dict]
    return checkpoint


def optimizer_state_dict(module: "LanguageModule", tensors: dict[str, Tensor], values: dict[str, Any]) -> dict:
    """The inverse of `optimizer_content`, with the settings of the config, so that a changed learning rate counts."""
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


def index_state(values: dict[str, Any], names: list[str]) -> dict[int, dict[str, Any]]:
    """The inverse of `name_state`, without state of what the optimizer no longer trains, such as a frozen parameter.

    Slots may have slashes in their names, too: `norm.weight/moment/first` is `moment/first` of `norm.weight`.
    """
    states: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in values.items():
        name, _, slot = key.rpartition("/")
        while name and name not in states:
            name, _, part = name.rpartition("/")
            slot = f"{part}/{slot}"
        if name:
            states[name][slot] = value
    return {index: states[name] for index, name in enumerate(names) if states[name]}


def with_strides_of(parameter: Tensor, value: Any) -> Any:
    """State with the strides of its parameter: a fused optimizer goes through both in the order of the memory."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or isinstance(parameter, DTensor):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
