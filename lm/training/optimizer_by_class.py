"""Builds an optimizer of torch, of a package or of the user from its class path; what checkpoints keep of it.

It has the same groups, learning rates and clipping as AdamW and Muon. Its non-finite steps are skipped too, and its
`state_dict` is saved to checkpoints as tensors and plain values and restored exactly.
"""

from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor
from torch.optim import Optimizer

from lm.errors import RequestError, first_line
from lm.runs.json_tree import encode
from lm.training.config import OURS

MISSING = object()  # differs from every setting


def build_by_class(class_path: str, init_args: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """Build an optimizer from its class path, for groups with `lr` and `weight_decay`; its steps can be skipped.

    Raises RequestError for a class that does not take these arguments.
    """
    kind = _class_of(class_path)
    parameters = signature(kind).parameters
    anything = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "weight_decay" not in parameters and not anything and any(group["weight_decay"] for group in groups):
        raise RequestError(
            f"model.optimizer.class_path {class_path} has no weight_decay: give --model.optimizer.weight_decay 0"
        )
    rate = {"lr": groups[0]["lr"]} if "lr" in parameters else {}
    skippable = type(kind.__name__, (_SkippedSteps, kind), {"__module__": kind.__module__})
    try:
        optimizer = skippable(groups, **rate, **init_args)
    except Exception as error:
        raise RequestError(
            f"model.optimizer.class_path {class_path} with init_args {init_args}: {first_line(error)}"
        ) from error
    optimizer.initial = [
        {name: _comparable(value) for name, value in _settings(group).items()} for group in optimizer.param_groups
    ]
    return optimizer


def _class_of(class_path: str) -> type[Optimizer]:
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
    return kind


class _SkippedSteps:
    """Skips a step inside `step`, since Lightning counts the calls of it, and loads state as it was saved."""

    skip: Tensor | None = None
    initial: list[dict[str, Any]]  # each group's settings at construction, as `encode` writes them

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:  # Lightning's, which calls `on_before_optimizer_step` of callbacks
            closure()
        if self.skip is not None and self.skip.item():  # waits for the device, which AdamW and Muon need not
            return None
        return super().step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state in its own dtype; torch casts floating and integer state to its parameter's."""
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for slot, value in state_dict["state"].get(index, {}).items():
                if slot != "step":  # which torch leaves as it is
                    self.state[parameter][slot] = apply_to_collection(value, Tensor, Tensor.to, parameter.device)


# ---- what a class keeps ----------------------------------------------------------------------------------------------


def changed_settings(class_path: str, optimizer: Optimizer, state: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of each parameter group that the optimizer has changed itself, such as a step count.

    RequestError if `state`, the optimizer's `state_dict`, has values that a checkpoint cannot hold.
    """
    initial = getattr(optimizer, "initial", [])  # none if a subclass of LanguageModule built it
    changed = []
    for group, before in zip(state["param_groups"], initial):
        settings = _settings(group).items()
        changed.append({name: value for name, value in settings if _comparable(value) != before.get(name, MISSING)})
    try:
        encode(apply_to_collection({**state, "param_groups": changed}, Tensor, lambda tensor: None))
    except TypeError as error:
        raise RequestError(
            f"model.optimizer.class_path {class_path}: of its state_dict {error}, only tensors and plain values"
        ) from error
    return changed


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "peak_lr", *OURS)}


def _comparable(value: Any) -> Any:
    """Encode a value so that `!=` works, which it does not for tensors, and later in-place changes do not matter."""
    try:
        return encode(value)
    except TypeError:
        return value
