"""Builds the optimizer of a decoder and its parameter groups.

`training/builtin_optimizers` lists the built-in optimizers. Any other optimizer, of torch or custom, is built from its
class path, with the same groups, learning rates and clipping. Its non-finite steps are skipped too, and its
`state_dict` is saved to checkpoints as tensors and plain values and restored exactly. `training/schedule` has the
learning rate of each step.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lm.errors import RequestError, first_line
from lm.model.estimates import OptimizerState
from lm.runs.checkpoint import encode
from lm.training.builtin_optimizers import BUILTIN
from lm.training.config import OURS, GroupConfig, OptimizerConfig

TRIAL = 256  # rows and columns of the matrix that an optimizer is tried on


def build_optimizer(module: nn.Module, config: OptimizerConfig, matrix_rows: Mapping[str, int]) -> Optimizer:
    """Build the optimizer of a decoder's parameters, grouped by `parameter_groups`.

    It has an attribute `skip`, None or a bool scalar on the device: if true, `step` changes nothing.
    """
    embeddings = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    groups = parameter_groups(module.named_parameters(), config, matrix_rows, embeddings)
    if not groups:
        raise RequestError("there is nothing to train: all of the model's weights are frozen (requires_grad is False)")
    if config.class_path is not None:
        return build_by_class(config.class_path, config.init_args, groups)
    builtin = BUILTIN[config.name]
    options = {name: getattr(config, name) for name in builtin.options}
    file, _, name = builtin.class_path.rpartition(".")
    return getattr(import_module(file), name)(groups, lr=config.lr, weight_decay=config.weight_decay, **options)


def state_size(config: OptimizerConfig) -> OptimizerState:
    """How many values the optimizer keeps for each parameter."""
    if config.class_path is None:
        return BUILTIN[config.name].state
    values = try_optimizer(config.class_path, config.init_args, config.weight_decay)
    return OptimizerState(values, values)


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    matrix_rows: Mapping[str, int],
    embeddings: Collection[str],
) -> list[dict[str, Any]]:
    """Divide the parameters into groups with equal settings.

    A group has `params`, `lr`, `weight_decay` and `peak_lr`, which the schedule multiplies. If the optimizer works on
    whole matrices (Muon), groups of the blocks' matrices also have `kind`, the optimizer's name, and `rows`, and their
    parameters have the same shape. `matrix_rows` maps the end of a weight's name to the rows of each matrix that is
    stacked in the weight; `embeddings` are the names of embedding weights.
    """
    whole_matrices = config.class_path is None and BUILTIN[config.name].whole_matrices
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    met = set()
    for name, parameter in named_parameters:
        group = group_of(name, parameter, embeddings)
        met.add(group)
        if not parameter.requires_grad:
            continue
        if not parameter.is_floating_point():
            raise RequestError(
                f"the weight {name} is of {parameter.dtype}, which neither optimizers nor checkpoints "
                "take: keep its real and imaginary part, or its values, as floating-point weights"
            )
        own = getattr(config.groups, group)
        lr = config.lr if own.lr is None else own.lr
        decay = (0.0 if group == "norms" else config.weight_decay) if own.weight_decay is None else own.weight_decay
        settings: dict[str, Any] = {"lr": lr, "peak_lr": lr, "weight_decay": decay}
        shape = None
        if whole_matrices and group == "matrices" and parameter.ndim == 2:
            shape, whole = parameter.shape, parameter.shape[0]
            rows = next((rows for end, rows in matrix_rows.items() if name.endswith(end)), whole)
            settings |= {"kind": config.name, "rows": whole if whole % rows else rows}
        groups.setdefault((*settings.values(), shape), {"params": [], **settings})["params"].append(parameter)
    for group in vars(config.groups).keys() - met:
        if getattr(config.groups, group) != GroupConfig():
            raise RequestError(f"model.optimizer.groups.{group} is for parameters that this model does not have")
    return list(groups.values())


def group_of(name: str, parameter: Tensor, embeddings: Collection[str]) -> str:
    """The field of `GroupsConfig` that a parameter belongs to; `embeddings` are the names of embedding weights."""
    if parameter.ndim < 2:
        return "norms"
    if name in embeddings:
        return "embedding"
    return "output" if name.split(".")[-2:] == ["lm_head", "weight"] else "matrices"


class AdamW(torch.optim.AdamW):
    """torch's AdamW, fused where the device has that, with a step that can be skipped."""

    skip: Tensor | None = None  # the fused kernel reads it on the device; otherwise the host waits for it

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        fused = all(p.device.type in ("cuda", "cpu") for group in groups for p in group["params"])
        super().__init__(groups, fused=fused, **options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.skip is not None and self.defaults["fused"]:
            self.found_inf = self.skip.float()  # what torch's GradScaler sets
            first = self.param_groups[0]["params"][0]
            if isinstance(first, DTensor):
                mesh = first.device_mesh
                self.found_inf = DTensor.from_local(self.found_inf, mesh, [Replicate()] * mesh.ndim, run_check=False)
        elif self.skip is not None and self.skip.item():
            return None
        return super().step(closure)


# ---- other classes ---------------------------------------------------------------------------------------------------


def build_by_class(class_path: str, init_args: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """Build an optimizer from its class path, for groups with `lr` and `weight_decay`; its steps can be skipped.

    Its attribute `initial` has each group's settings at construction, as `encode` writes them. Raises RequestError for
    a class that does not take these arguments, does not work on dense parameters with one gradient a step, or has
    state that a checkpoint cannot hold.
    """
    made = _make(class_path, init_args, groups)
    try_optimizer(class_path, init_args)
    return made


def try_optimizer(class_path: str, init_args: dict[str, Any], weight_decay: float = 0.0) -> float:
    """Run a step on a small matrix and a vector, on the CPU; return the number of state values per matrix value."""
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


def _make(class_path: str, init_args: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    kind = _class_of(class_path)
    taken = signature(kind).parameters
    anything = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values())
    if "weight_decay" not in taken and not anything and any(group["weight_decay"] for group in groups):
        raise RequestError(f"model.optimizer.class_path {class_path} has no weight_decay: give "
                           "--model.optimizer.weight_decay 0")  # fmt: skip
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


# ---- what a class keeps ----------------------------------------------------------------------------------------------


def refuse_unkept(class_path: str, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Raise RequestError if `state`, the optimizer's `state_dict`, has values that a checkpoint cannot hold."""
    kept = {**state, "param_groups": changed_settings(optimizer, state["param_groups"])}
    try:
        encode(apply_to_collection(kept, Tensor, lambda tensor: None))
    except TypeError as error:
        raise RequestError(f"model.optimizer.class_path {class_path}: of its state_dict {error}, only tensors and "
                           "plain values") from error  # fmt: skip


def changed_settings(optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings of each parameter group that the optimizer has changed itself, such as a step count."""
    initial = getattr(optimizer, "initial", [])  # AdamW and Muon change none
    return [
        {name: value for name, value in _settings(group).items()
         if name not in before or _comparable(value) != before[name]}
        for group, before in zip(groups, initial)
    ]  # fmt: skip


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "peak_lr", *OURS)}


def _comparable(value: Any) -> Any:
    """Encode a value so that `!=` works, which it does not for tensors, and later in-place changes do not matter."""
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
