"""Parameter groups, AdamW and the learning-rate schedules: the last stop of a batch.

Schedules are pure functions of the optimizer step, so nothing of them is saved and a resume cannot disagree with them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lm.errors import RequestError
from lm.quantities import Count


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101).

    Args:
        lr: Peak learning rate.
        betas: Decay rates of the running means of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled decay, on matrices only; vectors (norms) are never decayed.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise RequestError(f"model.optimizer.lr {self.lr} must be above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise RequestError(f"model.optimizer.betas {self.betas} must lie in [0, 1)")


@dataclass
class ScheduleConfig:
    """How the learning rate moves over the optimizer steps.

    Args:
        name: Shape after the warm-up; `wsd` is warm-up, stable, decay: constant, then linear down over `decay_steps`.
        warmup_steps: Steps of linear rise from 0.
        final_fraction: Share of the peak that is left at the end (unused by `constant`).
        decay_steps: `wsd`: length of the fall at the end. `cosine`, `linear`: step at which the fall ends,
            the whole run if not given.
    """

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: Count = Count(0)
    final_fraction: float = 0.1
    decay_steps: Count | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.final_fraction <= 1:
            raise RequestError(f"model.schedule.final_fraction {self.final_fraction} must lie in [0, 1]")


def schedule(step: int, max_steps: int, config: ScheduleConfig) -> float:
    """The share of the peak learning rate at an optimizer step.

    Args:
        step: 0 for the first optimizer step.
        max_steps: optimizer steps of the whole run.

    Returns:
        A factor in [0, 1]: `(step + 1) / warmup` while warming up, 1 at its end, then by the schedule's name
        (cosine as in Loshchilov and Hutter, 2017, arXiv:1608.03983; wsd as in Hu et al., 2024, arXiv:2404.06395).
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    if config.name == "wsd":
        end, start = max_steps, max_steps - (config.decay_steps or 0)
    else:
        end, start = config.decay_steps or max_steps, config.warmup_steps
    progress = min(1.0, max(0.0, (step - start) / max(1, end - start)))  # 0 at the start of the fall, 1 at its end
    if config.name == "wsd" and not config.decay_steps:
        progress = 0.0
    fall = 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1 - progress
    return config.final_fraction + (1 - config.final_fraction) * fall


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with decay, vectors without; each group knows the names of its parameters, in order."""
    groups = [
        {"names": [], "params": [], "weight_decay": weight_decay},
        {"names": [], "params": [], "weight_decay": 0.0},
    ]
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            group = groups[0 if parameter.ndim >= 2 else 1]
            group["names"].append(name)
            group["params"].append(parameter)
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over a module's parameters, fused where their device has the fused step."""
    groups = [{k: v for k, v in group.items() if k != "names"}
              for group in parameter_groups(module.named_parameters(), config.weight_decay)]
    fused = all(p.device.type in ("cuda", "cpu") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def name_state(state: dict[str, Any], names: list[str]) -> dict[str, Tensor]:
    """An optimizer's `state_dict` as flat tensors `<parameter>/<slot>`, so that a file of them reads by itself.

    Args:
        state: `{"state": {index or name: {slot: tensor}}, "param_groups": ...}`.
        names: parameter names in the order of the groups; index `i` belongs to `names[i]`.
    """
    return {
        f"{names[key] if isinstance(key, int) else key.removeprefix('decoder.')}/{slot}": value
        for key, slots in state["state"].items()
        for slot, value in slots.items()
    }


def index_state(tensors: dict[str, Tensor], groups: list[dict[str, Any]]) -> dict[int, dict[str, Tensor]]:
    """The inverse of `name_state` for the order of `groups` (of `parameter_groups`): `{index: {slot: tensor}}`."""
    names = [name for group in groups for name in group["names"]]
    slots: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, tensor in tensors.items():
        name, _, slot = key.rpartition("/")
        slots[name][slot] = tensor
    return {index: slots[name] for index, name in enumerate(names) if slots[name]}
