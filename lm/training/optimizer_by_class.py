"""Builds an optimizer of torch, of a package or of the user from its class path; what checkpoints keep of it.

It has the same groups, learning rates and clipping as AdamW and Muon. Its non-finite steps are skipped too, and its
`state_dict` is saved to checkpoints as tensors and plain values and restored exactly.
"""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor, optim
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
    rate = {"lr": groups[0]["lr"]} if "lr" in signature(kind).parameters else {}
    skippable = type(kind.__name__, (_SkippedSteps, kind), {"__module__": kind.__module__})
    try:
        optimizer = skippable(groups, **rate, **init_args)
    except Exception as error:
        known = ", ".join(name for name in signature(kind).parameters if name not in ("params", *OURS))
        takes = f"; it takes {known}" if isinstance(error, TypeError) else ""
        raise RequestError(
            f"model.optimizer.class_path {class_path} with init_args {init_args}: {first_line(error)}{takes}"
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
        near = next((each for each in dir(optim) if each.lower() == name.lower()), "SGD")
        raise RequestError(
            f"{place}: {first_line(error)}; give a class such as torch.optim.{near}, or my_optimizers.Lion for Lion in "
            "my_optimizers.py in this folder"
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


def plain_values(
    class_path: str | None, optimizer: Optimizer, state_dict: dict[str, Any], named_state: dict[str, Any]
) -> dict[str, Any]:
    """What an optimizer keeps besides the tensors of its parameters, by example:

        state               {"norm.weight/count": 3}: values of parameters that are not tensors
        groups              [{"k": 3}, {"k": 3}]: settings that its steps change
        of_no_parameter     {"seen": 3}: state of which the key is no parameter
        entries             {"mean": 0.5}: keys beside "state" and "param_groups"

    `named_state` is the state of the parameters by name. RequestError for values that a checkpoint cannot hold.
    """
    changed = []  # of each group, if `build_by_class` made the optimizer
    for group, initial in zip(state_dict["param_groups"], getattr(optimizer, "initial", [])):
        settings = _settings(group).items()
        changed.append({name: value for name, value in settings if _comparable(value) != initial.get(name, MISSING)})
    try:
        encode(apply_to_collection({**state_dict, "param_groups": changed}, Tensor, lambda tensor: None))
    except TypeError as error:
        maker = f"model.optimizer.class_path {class_path}" if class_path else f"optimizer {type(optimizer).__name__}"
        raise RequestError(f"{maker}: of its state_dict {error}, only tensors and plain values") from error
    return {
        "state": {name: value for name, value in named_state.items() if not isinstance(value, Tensor)},
        "groups": changed,
        "of_no_parameter": {key: value for key, value in state_dict["state"].items() if not isinstance(key, int)},
        "entries": {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")},
    }


def add_plain_values(state_dict: dict[str, Any], values: dict[str, Any]) -> None:
    """Put what `plain_values` returned back into a `state_dict`, but for the state of parameters."""
    state_dict["state"] |= values["of_no_parameter"]
    for group, changed in zip(state_dict["param_groups"], values["groups"]):
        group |= changed
    state_dict |= values["entries"]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "peak_lr", *OURS)}


def _comparable(value: Any) -> Any:
    """Encode a value so that `!=` works, which it does not for tensors, and later in-place changes do not matter."""
    try:
        return encode(value)
    except TypeError:
        return value
