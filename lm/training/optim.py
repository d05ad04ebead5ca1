"""The optimizer and its settings for each parameter: the last stop of a batch.

It is torch's AdamW, Muon for hidden matrices, or any other class (`training/optimizer_class`). The learning rate over
the steps is in `training/schedule`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lm.errors import RequestError
from lm.model.estimates import OptimizerState
from lm.training.config import GroupConfig, OptimizerConfig
from lm.training.muon import ADAMW_SLOTS, MUON_SLOTS, Muon
from lm.training.optimizer_class import build_by_class, same_class, try_optimizer


def state_size(config: OptimizerConfig) -> OptimizerState:
    """How many values the optimizer keeps for each parameter."""
    if config.class_path is not None:
        values = try_optimizer(config.class_path, config.init_args, config.weight_decay).values
        return OptimizerState(values, values)
    return OptimizerState(hidden=len(MUON_SLOTS), divided=True) if config.name == "muon" else OptimizerState()


def group_of(name: str, parameter: Tensor, embeddings: Collection[str] = ("embed_tokens.weight",)) -> str:
    """The group of `GroupsConfig` of a parameter; `embeddings` are the names of those that are looked up."""
    if parameter.ndim < 2:
        return "norms"
    if name in embeddings:
        return "embedding"
    return "output" if name.split(".")[-2:] == ["lm_head", "weight"] else "matrices"


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    matrix_rows: Mapping[str, int],
    embeddings: Collection[str] = ("embed_tokens.weight",),
) -> list[dict[str, Any]]:
    """Parameters with the settings that their group has; those with equal settings are together.

    Args:
        named_parameters: of the decoder.
        config: the settings.
        matrix_rows: the end of a weight's name -> the rows of each of the matrices that are stacked in it.
        embeddings: names of the weights that are looked up.

    Returns:
        For each group `params`, `lr`, `weight_decay` and `peak_lr`, which the schedule starts from; for matrices that
        Muon updates also `rows`, and then all of a group have one shape.

    Raises:
        RequestError: settings for a group that this model does not have.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    met = set()
    for name, parameter in named_parameters:
        kind = group_of(name, parameter, embeddings)
        met.add(kind)
        if not parameter.requires_grad:
            continue
        own = getattr(config.groups, kind)
        lr = config.lr if own.lr is None else own.lr
        decay = (0.0 if kind == "norms" else config.weight_decay) if own.weight_decay is None else own.weight_decay
        settings: dict[str, Any] = {"lr": lr, "peak_lr": lr, "weight_decay": decay}
        alike: tuple[Any, ...] = (lr, decay)
        if config.name == "muon" and config.class_path is None and kind == "matrices" and parameter.ndim == 2:
            whole = parameter.shape[0]
            rows = next((rows for end, rows in matrix_rows.items() if name.endswith(end)), whole)
            settings["rows"] = whole if whole % rows else rows
            alike = (lr, decay, settings["rows"], parameter.shape)
        groups.setdefault(alike, {"params": [], **settings})["params"].append(parameter)
    for kind in vars(config.groups).keys() - met:
        if getattr(config.groups, kind) != GroupConfig():
            raise RequestError(f"model.optimizer.groups.{kind} is for parameters that this model does not have")
    return list(groups.values())


def build_optimizer(
    module: nn.Module, config: OptimizerConfig, matrix_rows: Mapping[str, int]
) -> torch.optim.Optimizer:
    """The optimizer of a decoder's parameters by `parameter_groups`, AdamW's part fused where the device has that.

    Raises:
        RequestError: there is nothing to train; and as for `parameter_groups` and `build_by_class`.
    """
    embeddings = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    groups = parameter_groups(module.named_parameters(), config, matrix_rows, embeddings)
    if not groups:
        raise RequestError("there is nothing to train: all of the model's weights are frozen (requires_grad is False)")
    if config.class_path is not None:
        return build_by_class(config.class_path, config.init_args, groups)
    common = dict(lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
    if config.name == "muon":
        return Muon(groups, momentum=config.momentum, **common)
    fused = all(p.device.type in ("cuda", "cpu") for group in groups for p in group["params"])
    return AdamW(groups, fused=fused, **common)


class AdamW(torch.optim.AdamW):
    """torch's AdamW with a step that can be skipped.

    Attributes:
        skip: a bool scalar on the device; the step is not taken where it is true. A fused optimizer reads it on the
            device, any other waits for it.
    """

    skip: Tensor | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.skip is not None:
            if not self.defaults["fused"]:
                if self.skip.item():
                    return loss
            else:
                self.found_inf = self.skip.float()  # what torch's GradScaler sets
                first = self.param_groups[0]["params"][0]
                if isinstance(first, DTensor):
                    mesh = first.device_mesh
                    everywhere = [Replicate()] * mesh.ndim
                    self.found_inf = DTensor.from_local(self.found_inf, mesh, everywhere, run_check=False)
        super().step()
        return loss


def parameter_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in the order in which its state counts them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def name_state(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """State of parameters as flat values `<parameter>/<slot>`, so that a file of them reads by itself.

    Args:
        state: an optimizer's `state_dict`, `{"state": {index: {slot: value}}, "param_groups": ...}`.
        names: of `parameter_names`; index `i` belongs to `names[i]`.
    """
    return {
        f"{names[key]}/{slot}": value
        for key, slots in state["state"].items() if isinstance(key, int)
        for slot, value in slots.items()
    }  # fmt: skip


def index_state(
    values: dict[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, Any]]:
    """The inverse of `name_state` for the parameters of `optimizer`, which are `module`'s: `{index: {slot: value}}`.

    Raises:
        RequestError: AdamW or Muon, and the values are of another optimizer.
    """
    names = parameter_names(module, optimizer)
    states: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in values.items():
        name, _, slot = key.partition("/")
        states[name][slot] = value
    if isinstance(optimizer, AdamW | Muon):
        rows = [group.get("rows") for group in optimizer.param_groups for _ in group["params"]]
        for name, slots in zip(names, [MUON_SLOTS if count else ADAMW_SLOTS for count in rows], strict=True):
            if states[name] and set(states[name]) != set(slots):
                raise RequestError(
                    f"this is a checkpoint of another optimizer: it has {', '.join(sorted(states[name]))} of {name}, "
                    f"and {type(optimizer).__name__} needs {', '.join(sorted(slots))}; set model.optimizer.name back"
                )
    return {index: states[name] for index, name in enumerate(names) if states[name]}


def chosen_optimizer(config: OptimizerConfig) -> dict[str, str]:
    """The option that chooses the optimizer, `name` or `class_path`, and its value."""
    return {"name": config.name} if config.class_path is None else {"class_path": config.class_path}


def refuse_other_optimizer(written: dict[str, str] | None, values: Collection[str], config: OptimizerConfig) -> None:
    """Refuse the state of another optimizer than the config's.

    Args:
        written: `chosen_optimizer` of the checkpoint; None where an earlier version of lm wrote it.
        values: names of its state, of `name_state`.
        config: the settings now.

    Raises:
        RequestError: it is another class.
    """
    now = chosen_optimizer(config)
    if written is None:  # the names of its state must do, and `index_state` compares those of AdamW and Muon
        found = {key.partition("/")[2] for key in values}
        if config.class_path is None or not found:
            return
        own = try_optimizer(config.class_path, config.init_args).slots
        if not found & own:
            raise RequestError(f"this is a checkpoint of another optimizer: it has {', '.join(sorted(found))}, and "
                               f"{config.class_path} needs {', '.join(sorted(own)) or 'nothing'}: "
                               "give the optimizer that wrote it")  # fmt: skip
    elif written != now and not ("class_path" in written and "class_path" in now
                                 and same_class(written["class_path"], now["class_path"])):  # fmt: skip
        [[before, then], [option, value]] = [*written.items(), *now.items()]
        raise RequestError(f"this is a checkpoint of another optimizer, of model.optimizer.{before} {then}, and the "
                           f"config has {option} {value}: give {before} {then}"
                           + (" and no class_path" if option == "class_path" != before else ""))  # fmt: skip
