"""Optimizers by their class path: any of torch's, or one's own, in place of AdamW and Muon (`training/optim`).

They get our parameter groups, learning rates and clipping; a step that is not finite is skipped, and their state goes
into checkpoints as tensors and plain values.
"""

from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.errors import RequestError, first_line
from lm.runs.checkpoint import encode

OURS = ("lr", "weight_decay")  # which `model.optimizer` gives, and its groups
TRIAL = 256  # rows and columns of the matrix that an optimizer is tried on


class Trial(NamedTuple):
    """What an optimizer keeps, as one step on a small matrix and a vector shows."""

    values: float  # for each value of a matrix
    slots: dict[int, tuple[str, ...]]  # their names, by the dimensions of a parameter: 1 for vectors, 2 for matrices


def build_by_class(class_path: str, init_args: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of a class, whose steps can be skipped.

    Args:
        class_path: such as `torch.optim.SGD`, or `my_optimizers.Lion` of a file `my_optimizers.py`.
        init_args: its arguments beside parameters, lr and weight_decay.
        groups: of parameters, each with `lr` and `weight_decay`.

    Returns:
        With the attributes `skip`, a bool scalar on the device or None: `step` does nothing where it is true; `slots`,
        the names of its state as in `Trial`; and `initial`, the settings of each group, as it was made.

    Raises:
        RequestError: there is no such class, it does not take these arguments, or it does not work on dense parameters
            with one gradient a step.
    """
    made = _make(class_path, init_args, groups)
    made.slots = try_optimizer(class_path, init_args).slots
    return made


def try_optimizer(class_path: str, init_args: dict[str, Any], weight_decay: float = 0.0) -> Trial:
    """Take one step on a small matrix and a vector, on the CPU.

    Raises:
        RequestError: as for `build_by_class`; or its state holds what a checkpoint cannot.
    """
    parameters = [nn.Parameter(torch.ones(TRIAL, TRIAL)), nn.Parameter(torch.ones(TRIAL))]
    with torch.random.fork_rng(devices=[]):
        optimizer = _make(class_path, init_args, [{"params": parameters, "lr": 1e-3, "weight_decay": weight_decay}])
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        try:
            optimizer.step()
        except Exception as error:
            message = f"model.optimizer.class_path {class_path}: its step fails: {first_line(error)}"
            raise RequestError(message) from error
    states = {parameter.ndim: dict(optimizer.state[parameter]) for parameter in parameters}
    for slot, value in (item for state in states.values() for item in state.items()):
        try:
            encode(None if isinstance(value, Tensor) else value)
        except TypeError as error:
            raise RequestError(
                f"model.optimizer.class_path {class_path}: it keeps {slot!r} of a parameter, a {type(value).__name__}, "
                "and a checkpoint can hold tensors and plain values"
            ) from error
    kept = sum(value.numel() for value in states[2].values() if isinstance(value, Tensor) and value.ndim)
    return Trial(kept / parameters[0].numel(), {ndim: tuple(state) for ndim, state in states.items()})


def changed_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What an optimizer changed by itself in the settings of its groups, such as a count of steps; by group."""
    initial = getattr(optimizer, "initial", [])
    return [
        {name: value for name, value in _settings(group).items() if name not in before or value != before[name]}
        for group, before in zip(optimizer.param_groups, initial)
    ]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "peak_lr", *OURS)}


def _make(class_path: str, init_args: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    kind, place = _find(class_path), f"model.optimizer.class_path {class_path}"
    taken = signature(kind).parameters
    anything = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values())
    if "weight_decay" not in taken and not anything:
        if any(group["weight_decay"] for group in groups):
            raise RequestError(f"{place} has no weight_decay: give --model.optimizer.weight_decay 0")
        groups = [{name: value for name, value in group.items() if name != "weight_decay"} for group in groups]
    rate = {"lr": groups[0]["lr"]} if "lr" in taken else {}
    skippable = type(kind.__name__, (_SkippedSteps, kind), {"__module__": kind.__module__})
    try:
        made = skippable(groups, **rate, **init_args)
    except Exception as error:
        raise RequestError(f"{place}: {first_line(error)}") from error
    made.initial = [dict(_settings(group)) for group in made.param_groups]
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
        raise RequestError(f"{place} is no torch.optim.Optimizer")
    closure = signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise RequestError(f"{place} computes the loss several times a step, and a step here has one: take another")
    return kind


class _SkippedSteps:
    skip: Tensor | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.skip is not None and self.skip.item():  # waits for the device, which AdamW and Muon need not
            return None
        return super().step()
