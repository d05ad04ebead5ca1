"""Builds the optimizer of a decoder and its parameter groups.

`training/builtin_optimizers` lists the built-in optimizers; `training/optimizer_by_class` builds any other one.
`training/schedule` has the learning rate of each step.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lm.errors import RequestError
from lm.model.estimates import OptimizerState
from lm.training.builtin_optimizers import BUILTIN
from lm.training.config import GroupConfig, OptimizerConfig


def build_optimizer(module: nn.Module, config: OptimizerConfig, matrix_rows: Mapping[str, int]) -> Optimizer:
    """Build the optimizer of a decoder's parameters, grouped by `parameter_groups`.

    It has an attribute `skip`, None or a bool scalar on the device: if true, `step` changes nothing.
    """
    embeddings = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    groups = parameter_groups(module.named_parameters(), config, matrix_rows, embeddings)
    if not groups:
        raise RequestError("there is nothing to train: all of the model's weights are frozen (requires_grad is False)")
    if config.class_path is not None:
        from lm.training.optimizer_by_class import build_by_class

        return build_by_class(config.class_path, config.init_args, groups)
    builtin = BUILTIN[config.name]
    options = {name: getattr(config, name) for name in builtin.options}
    file, _, name = builtin.class_path.rpartition(".")
    return getattr(import_module(file), name)(groups, lr=config.lr, weight_decay=config.weight_decay, **options)


def state_size(config: OptimizerConfig) -> OptimizerState:
    """How many values the optimizer keeps for each parameter; of another class it is not known: two, as of AdamW."""
    return BUILTIN["adamw" if config.class_path else config.name].state


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
        options = getattr(config.groups, group)
        lr = options.peak_lr(config.lr)
        decay = options.weight_decay
        if decay is None:
            decay = 0.0 if group == "norms" else config.weight_decay
        settings: dict[str, Any] = {"lr": lr, "peak_lr": lr, "weight_decay": decay}
        shape = None
        if whole_matrices and group == "matrices" and parameter.ndim == 2:
            shape, num_rows = parameter.shape, parameter.shape[0]
            rows = next((rows for end, rows in matrix_rows.items() if name.endswith(end)), num_rows)
            settings |= {"kind": config.name, "rows": num_rows if num_rows % rows else rows}
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
