"""What a checkpoint holds of a training run, as a dictionary; `runs/checkpoint` writes it to a folder.

    content = {
        # from Lightning as they are
        "epoch": 0, "global_step": 1000, "pytorch-lightning_version": ..., "loops": ..., "callbacks": ...,
        "lr_schedulers": [],
        # by `to_content`
        "state_dict": {"model.norm.weight": Tensor, ...},           # by the names of Hugging Face; a custom model's own
        "optimizer": {"norm.weight/exp_avg": Tensor, ...},          # by parameter and slot of its state
        "optimizer_values": {"written_by": {"name": "adamw"}},      # which optimizer; other classes add plain values
        "ranks": [{"rng": ...}, ...],                               # random number generators of each rank
        "files": {"config.json": "{...", ...},                      # texts beside the weights of a Hugging Face model
        # by `RunState.save` and the callback `Checkpoints`
        "cursor": {"consumed": 64000}, "pending_validation": False, "step_stats": ..., "kept_for_good": False,
    }

On a resume, `from_content` makes Lightning's checkpoint of it again; `training/checkpoint_checks` compares it with the
model that it is loaded into.
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


def to_content(module: "LanguageModule", checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The content of a checkpoint folder, made from Lightning's checkpoint; call it on every rank."""
    hyper_parameters = (module.CHECKPOINT_HYPER_PARAMS_KEY, module.CHECKPOINT_HYPER_PARAMS_NAME)  # in config.json
    content = {key: value for key, value in checkpoint.items() if key not in ("optimizer_states", *hyper_parameters)}
    content["lr_schedulers"] = []  # a resume needs the key, which Lightning leaves out with `save_weights_only`
    weights = {name.removeprefix("decoder."): value for name, value in checkpoint["state_dict"].items()}
    content["state_dict"] = to_huggingface(weights, module.config) if module.builtin else weights
    content["optimizer"] = {}
    states = checkpoint.get("optimizer_states")
    if states and states[0]:  # neither where it saves weights alone, nor on ranks other than zero
        content |= optimizer_content(module, states[0])
    content["ranks"] = [{"rng": rng_state()}] * module.trainer.world_size
    if module.trainer.world_size > 1:
        torch.distributed.all_gather_object(content["ranks"], content["ranks"][0])
    content["files"] = huggingface_files(module)
    return content


def from_content(module: "LanguageModule", content: dict[str, Any]) -> dict[str, Any]:
    """Lightning's checkpoint, with weights and optimizer state under its keys and the rest of the content as it is.

    RequestError if they are those of another model or optimizer.
    """
    from lm.training.checkpoint_checks import check_same_class, check_same_shapes

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


# ---- the model -------------------------------------------------------------------------------------------------------


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
    """The state of an optimizer as tensors by name, and what identifies the optimizer.

    AdamW and Muon keep tensors alone; `optimizer_by_class` adds the plain values that other classes keep.
    """
    optimizer, config = module.optimizers(use_pl_optimizer=False), module.options.optimizer
    state = name_state(state_dict["state"], parameter_names(module.decoder, optimizer))
    values: dict[str, Any] = {"written_by": describe_optimizer(config, optimizer)}
    if "name" not in values["written_by"]:
        from lm.training.optimizer_by_class import plain_values

        values |= plain_values(config.class_path, optimizer, state_dict, state)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {"optimizer": tensors, "optimizer_values": values}


def optimizer_state_dict(module: "LanguageModule", tensors: dict[str, Tensor], values: dict[str, Any]) -> dict:
    """The inverse of `optimizer_content`, with the settings of the config, so that a changed learning rate counts."""
    from lm.training.checkpoint_checks import check_same_optimizer

    optimizer = module.configure_optimizers()
    state_dict = optimizer.state_dict()
    check_same_optimizer(values.get("written_by"), describe_optimizer(module.options.optimizer, optimizer))
    state = index_state(tensors | values.get("state", {}), parameter_names(module.decoder, optimizer))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, slots in state.items():
        state[index] = {slot: with_strides_of(parameters[index], value) for slot, value in slots.items()}
    state_dict["state"] |= state  # a class may need what it made when it was built
    if "entries" in values:
        from lm.training.optimizer_by_class import add_plain_values

        add_plain_values(state_dict, values)
    return state_dict


def describe_optimizer(config: OptimizerConfig, optimizer: Optimizer) -> dict[str, str]:
    """Identifies the optimizer, to compare on resume: the option or the method that chose it, and its value."""
    if config.class_path is not None:
        return {"class_path": config.class_path}
    class_path = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if class_path != BUILTIN[config.name].class_path:  # a subclass of LanguageModule made it
        return {"configure_optimizers": class_path}
    return {"name": config.name}


def parameter_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in the order in which its state counts them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def name_state(state: dict[Any, Any], names: list[str]) -> dict[str, Any]:
    """State by index, `{index: {slot: value}}`, as values `<parameter>/<slot>`; state of no parameter is left out."""
    by_index = {index: slots for index, slots in state.items() if isinstance(index, int)}
    return {f"{names[index]}/{slot}": value for index, slots in by_index.items() for slot, value in slots.items()}


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
