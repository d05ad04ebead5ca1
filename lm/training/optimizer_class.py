"""Optimizers by their class path: any of torch's, or a custom one, in place of the built-in ones (`training/optim`).

They get our parameter groups, learning rates and clipping; a step that is not finite is skipped. What is in their
`state_dict` goes into checkpoints as tensors and plain values, and comes back exactly.
"""

from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.errors import RequestError, first_line
from lm.runs.checkpoint import encode
from lm.training.config import OURS

TRIAL = 256  # rows and columns of the matrix that an optimizer is tried on


def build_by_class(class_path: str, init_args: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of a class, whose steps can be skipped, for groups with `lr` and `weight_decay`.

    Its attribute `initial` has the settings of each group as it was made, as `encode` writes them. A class that does
    not take these arguments, does not work on dense parameters with one gradient a step, or keeps what a checkpoint
    cannot hold is refused.
    """
    made = _make(class_path, init_args, groups)
    try_optimizer(class_path, init_args)
    return made


def try_optimizer(class_path: str, init_args: dict[str, Any], weight_decay: float = 0.0) -> float:
    """Take a step on a small matrix and a vector, on the CPU; how many values are kept for each value of the matrix."""
    parameters = [nn.Parameter(torch.ones(TRIAL, TRIAL)), nn.Parameter(torch.ones(TRIAL))]
    with torch.random.fork_rng(devices=[]):
        optimizer = _make(class_path, init_args, [{"params": parameters, "lr": 1e-3, "weight_decay": weight_decay}])
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        try:
            optimizer.step()
        except Exception as error:
            raise RequestError(f"model.optimizer.class_path {class_path} with init_args {init_args}: its step fails: "
                               f"{first_line(error)}") from error  # fmt: skip
    refuse_unkept(class_path, optimizer, optimizer.state_dict())
    state = optimizer.state[parameters[0]].values()
    return sum(value.numel() for value in state if isinstance(value, Tensor) and value.ndim) / parameters[0].numel()


# ---- state -----------------------------------------------------------------------------------------------------------


def refuse_unkept(class_path: str, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Refuse an optimizer that keeps in its `state_dict`, here `state`, what a checkpoint cannot hold."""
    kept = {**state, "param_groups": changed_settings(optimizer, state["param_groups"])}
    try:
        encode(apply_to_collection(kept, Tensor, lambda tensor: None))
    except TypeError as error:
        raise RequestError(f"model.optimizer.class_path {class_path}: of its state_dict {error}, only tensors and "
                           "plain values") from error  # fmt: skip
    # A checkpoint names state by parameter and slot, and a state_dict counts parameters.
    slots = {slot for key, slots in state["state"].items() if isinstance(key, int) for slot in slots}
    if not all(isinstance(slot, str) for slot in slots):
        raise RequestError(f"model.optimizer.class_path {class_path}: it keeps state of a parameter under names that "
                           "are not texts")  # fmt: skip
    if any(isinstance(key, int) for key in optimizer.state):
        raise RequestError(f"model.optimizer.class_path {class_path}: it keeps state under a number, which in a "
                           "state_dict is a parameter's: use a text")  # fmt: skip


def changed_settings(optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an optimizer changed by itself in its settings, such as a count of steps, for each of its `param_groups`."""
    initial = getattr(optimizer, "initial", [])  # AdamW and Muon change none
    return [
        {name: value for name, value in _settings(group).items()
         if name not in before or _comparable(value) != before[name]}
        for group, before in zip(groups, initial)
    ]  # fmt: skip


def other_entries(state: dict[str, Any]) -> dict[str, Any]:
    """What a class puts into its `state_dict` beside the state and the groups."""
    return {key: value for key, value in state.items() if key not in ("state", "param_groups")}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "peak_lr", *OURS)}


def _comparable(value: Any) -> Any:
    """A value that `!=` compares, as tensors of many values are not, and that later changes in place do not reach."""
    try:
        return encode(value)
    except TypeError:
        return value


def _load_exactly(optimizer: Optimizer) -> None:
    """Keep torch's `load_state_dict` from casting floating and integer state to its parameter's dtype."""
    given: dict[str, Any] = {}

    def before(optimizer: Optimizer, state: dict[str, Any]) -> None:
        given.update(state)

    def after(optimizer: Optimizer) -> None:
        indices = [index for group in given["param_groups"] for index in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for slot, value in given["state"].get(index, {}).items():
                if slot != "step":  # which torch leaves as it is
                    moved = apply_to_collection(value, Tensor, Tensor.to, parameter.device)
                    optimizer.state[parameter][slot] = moved
        given.clear()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


# ---- the class -------------------------------------------------------------------------------------------------------


def _make(class_path: str, init_args: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    kind = _find(class_path)
    taken = signature(kind).parameters
    anything = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values())
    if "weight_decay" not in taken and not anything:
        if any(group["weight_decay"] for group in groups):
            raise RequestError(f"model.optimizer.class_path {class_path} has no weight_decay: give "
                               "--model.optimizer.weight_decay 0")  # fmt: skip
        groups = [{name: value for name, value in group.items() if name != "weight_decay"} for group in groups]
    rate = {"lr": groups[0]["lr"]} if "lr" in taken else {}
    skippable = type(kind.__name__, (_SkippedSteps, kind), {"__module__": kind.__module__})
    try:
        made = skippable(groups, **rate, **init_args)
    except Exception as error:
        raise RequestError(f"model.optimizer.class_path {class_path} with init_args {init_args}: "
                           f"{first_line(error)}") from error  # fmt: skip
    made.initial = [
        {name: _comparable(value) for name, value in _settings(group).items()} for group in made.param_groups
    ]
    _load_exactly(made)
    return made


def _find(class_path: str) -> type[Optimizer]:
    place = f"model.optimizer.class_path {class_path}"
    module, _, name = class_path.rpartition(".")
    try:
        kind = getattr(import_module(module), name)
    except Exception as error:  # also what running a user's file raises
        raise RequestError(
            f"{place}: {first_line(error)}; give a class such as torch.optim.SGD, or my_optimizers.Lion for the class "
            "Lion in my_optimizers.py in this folder"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise RequestError(f"{place} is not a torch.optim.Optimizer")
    closure = signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise RequestError(f"{place} computes the loss several times a step, and a step here has one: take another")
    return kind


class _SkippedSteps:
    skip: Tensor | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:  # Lightning's, which calls `on_before_optimizer_step` of callbacks
            closure()
        if self.skip is not None and self.skip.item():  # waits for the device, which AdamW and Muon need not
            return None
        return super().step()
