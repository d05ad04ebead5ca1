"""Which optimizer takes the step, with which settings for which parameters: the last stop of a batch.

The step itself is torch's AdamW, or Muon for hidden matrices. How the learning rate moves is in `training/schedule`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lm.errors import RequestError
from lm.model.estimates import OptimizerState

# ---- muon ------------------------------------------------------------------------------------------------------------
# Muon for hidden matrices and AdamW for the rest, as one optimizer. `optim` says which parameter goes where.
#
# Muon steps along the momentum of a matrix with its singular values made alike, so that rare directions move as much as
# common ones (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/).

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steepest at 0, and bounded after any number of rounds
ROUNDS = 5
MUON_SLOTS = ("momentum_buffer",)  # what a step leaves for the next one, of each parameter
ADAMW_SLOTS = ("exp_avg", "exp_avg_sq", "step")


def orthogonalize(matrices: Tensor) -> Tensor:
    """Matrices with the same singular vectors and singular values of about 1.

    Newton-Schulz: rounds of `a X + (b G + c G^2) X` with `G = X X^T` apply an odd polynomial to the singular values,
    and nothing but multiplications is needed. Coefficients and rounds are Jordan's; values end between 0.67 and 1.21,
    and lower only where they were under 0.0015 of the Frobenius norm. A matrix of zeros stays one.

    Args:
        matrices: `(n, rows, columns)`, in the precision to compute in.

    Returns:
        `(n, rows, columns)`.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # (n, short, long), because G is square in the first
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value is above 1
    for _ in range(ROUNDS):
        gram = x @ x.mT  # (n, short, short)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


class Muon(Optimizer):
    """One step of Muon for the groups that name `rows`, and of AdamW for the others.

    A group with `rows` holds matrices of one shape, so that one batch of multiplications serves them all. `rows` are
    those of the matrices that stand one above the other in each of them. They are orthogonalised one by one, as if
    they had never been joined: joined, they would share one set of singular values, and the part with the larger
    gradient would take most of the step from the others.

    An update's root mean square is brought to 0.2, which is AdamW's: `0.2 * sqrt(max(rows, columns))` times the
    orthogonal matrix, so both take the same learning rate and the same decoupled decay (Liu et al., 2025,
    arXiv:2502.16982, section 2.2).

    A matrix is needed whole. Where it is sharded, momentum stays so, every rank gathers the updates of a group and
    orthogonalises them, and keeps its share; replicas of a model compute the same from equal gradients.

    Args:
        groups: dictionaries with `params`, and if they differ from the rest `lr`, `weight_decay`, `rows`.
        lr: learning rate.
        weight_decay: decoupled decay.
        betas: AdamW's decay rates of the running means of the gradient and of its square.
        eps: AdamW's, added to the denominator.
        momentum: decay rate of Muon's running mean of the gradient, which is used with Nesterov's look ahead.

    Attributes:
        skip: a bool scalar on the device; the step is not taken where it is true.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
    ) -> None:
        super().__init__(
            groups, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, momentum=momentum, rows=None)
        )
        self.skip: Tensor | None = None
        for group in self.param_groups:
            group["fused"] = group["rows"] is None and all(p.device.type in ("cuda", "cpu") for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: computes the gradients first.

        Returns:
            What the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.skip is not None and self.skip.item():
            return loss
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                (self._adamw if group["rows"] is None else self._muon)(parameters, group)
        return loss

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradients = [_own(p.grad) for p in parameters]
        momenta = [_own(self.state[p]["momentum_buffer"]) for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
        # Half the bytes and twice the speed and more on a GPU; the values need not be exact, only alike.
        dtype = torch.bfloat16 if parameters[0].device.type == "cuda" else torch.float32
        whole = [_whole(update.to(dtype), p) for update, p in zip(updates, parameters, strict=True)]
        stack = torch.stack(whole)  # (n, rows, columns)
        del updates, whole
        for part in stack.split(group["rows"], dim=1):
            part.copy_(orthogonalize(part)).mul_(0.2 * math.sqrt(max(part.shape[1:])))
        weights = [_own(p) for p in parameters]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        updates = [_share(update, p).to(p.dtype) for update, p in zip(stack, parameters, strict=True)]
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p].update(
                    step=torch.zeros((), device=p.device if group["fused"] else "cpu"),
                    exp_avg=torch.zeros_like(p),
                    exp_avg_sq=torch.zeros_like(p),
                )
        averages, squares, steps = ([self.state[p][slot] for p in parameters] for slot in ADAMW_SLOTS)
        beta1, beta2 = group["betas"]
        adamw(
            parameters, [p.grad for p in parameters], averages, squares, [], steps, fused=group["fused"] or None,
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip


def _own(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(own: Tensor, like: Tensor) -> Tensor:
    """All of a tensor that is sharded as `like` is, from what every rank holds of it."""
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def _share(whole: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_whole`; every rank has `whole`, so nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


# ---- optim -----------------------------------------------------------------------------------------------------------
# Which optimizer takes the step, and with which settings for which parameters: the last stop of a batch.
#
# The step itself is torch's AdamW or `muon`. How the learning rate moves over the run is in `schedule`.


@dataclass
class GroupConfig:
    """What one group of parameters takes in place of the optimizer's own settings.

    Args:
        lr: Its peak learning rate.
        weight_decay: Its decay.
    """

    lr: float | None = None
    weight_decay: float | None = None


@dataclass
class GroupsConfig:
    """Settings for groups of parameters; what is not given is the optimizer's own.

    Args:
        matrices: The matrices inside the blocks.
        embedding: The embedding; where it is tied, also the output matrix.
        output: The output matrix, where it is not the embedding.
        norms: All vectors; they are not decayed unless a decay is given here.
    """

    matrices: GroupConfig = field(default_factory=GroupConfig)
    embedding: GroupConfig = field(default_factory=GroupConfig)
    output: GroupConfig = field(default_factory=GroupConfig)
    norms: GroupConfig = field(default_factory=GroupConfig)


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) for all parameters, or Muon for the matrices in the blocks.

    Args:
        name: `adamw`; or `muon`: Muon for the matrices inside the blocks and AdamW for the rest, with updates of one
            size, so that they share learning rate and decay.
        lr: Peak learning rate.
        betas: AdamW: decay rates of the running means of the gradient and of its square.
        eps: AdamW: added to the denominator.
        momentum: Muon: decay rate of the running mean of the gradient.
        weight_decay: Decoupled decay, on matrices only.
        groups: A learning rate and a decay for a group of parameters: matrices, embedding, output, norms.

    Raises:
        RequestError: a number outside its range.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 0.1
    groups: GroupsConfig = field(default_factory=GroupsConfig)

    @property
    def state(self) -> OptimizerState:
        """How many values it keeps for each parameter: Muon has one running mean for hidden matrices."""
        return OptimizerState(hidden=len(MUON_SLOTS)) if self.name == "muon" else OptimizerState()

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise RequestError(f"model.optimizer.betas {self.betas} must lie in [0, 1)")
        if not 0 <= self.momentum < 1:
            raise RequestError(f"model.optimizer.momentum {self.momentum} must lie in [0, 1)")
        places = {"": self, **{f"groups.{name}.": group for name, group in vars(self.groups).items()}}
        for place, settings in places.items():
            if settings.lr is not None and not settings.lr > 0:
                raise RequestError(f"model.optimizer.{place}lr {settings.lr} must be above 0")
            if settings.weight_decay is not None and not settings.weight_decay >= 0:
                raise RequestError(f"model.optimizer.{place}weight_decay {settings.weight_decay} must not be below 0")


def group_of(name: str, parameter: Tensor) -> str:
    """The group of `GroupsConfig` that a parameter belongs to."""
    if parameter.ndim < 2:
        return "norms"
    return {"embed_tokens.weight": "embedding", "lm_head.weight": "output"}.get(name, "matrices")


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    fused_rows: Mapping[str, tuple[int, ...]],
) -> list[dict[str, Any]]:
    """Parameters with the settings that their group has; those with equal settings are together.

    Args:
        named_parameters: of the decoder.
        config: the settings.
        fused_rows: the end of a fused weight's name -> the rows of each matrix in it.

    Returns:
        For each group `params`, `lr`, `weight_decay` and `peak_lr`, which the schedule starts from; for matrices that
        Muon updates also `rows`, and then all of a group have one shape.

    Raises:
        RequestError: settings for a group that this model does not have.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    met = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        kind = group_of(name, parameter)
        met.add(kind)
        own = getattr(config.groups, kind)
        lr = config.lr if own.lr is None else own.lr
        decay = (0.0 if kind == "norms" else config.weight_decay) if own.weight_decay is None else own.weight_decay
        settings: dict[str, Any] = {"lr": lr, "peak_lr": lr, "weight_decay": decay}
        alike: tuple[Any, ...] = (lr, decay)
        if config.name == "muon" and kind == "matrices":
            whole = (parameter.shape[0],)
            settings["rows"] = next((rows for end, rows in fused_rows.items() if name.endswith(end)), whole)
            alike = (lr, decay, settings["rows"], parameter.shape)
        groups.setdefault(alike, {"params": [], **settings})["params"].append(parameter)
    _refuse_settings_for_nothing(config.groups, met)
    return list(groups.values())


def _refuse_settings_for_nothing(groups: GroupsConfig, met: set[str]) -> None:
    for kind in vars(groups).keys() - met:
        if getattr(groups, kind) != GroupConfig():
            tied = "; its output matrix is the embedding: set groups.embedding" if kind == "output" else ""
            raise RequestError(f"model.optimizer.groups.{kind} is for parameters that this model does not have{tied}")


def build_optimizer(
    module: nn.Module, config: OptimizerConfig, fused_rows: Mapping[str, tuple[int, ...]]
) -> torch.optim.Optimizer:
    """The optimizer of a decoder's parameters, AdamW's part fused where their device has that; see `parameter_groups`.

    Raises:
        RequestError: settings for a group that this model does not have.
    """
    groups = parameter_groups(module.named_parameters(), config, fused_rows)
    common = dict(lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
    if config.name == "muon":
        return Muon(groups, momentum=config.momentum, **common)
    fused = all(p.device.type in ("cuda", "cpu") for group in groups for p in group["params"])
    return AdamW(groups, fused=fused, **common)


class AdamW(torch.optim.AdamW):
    """torch's AdamW, and a way to have it leave everything as it is.

    Attributes:
        skip: a bool scalar on the device; the step is not taken where it is true. A fused optimizer of whole tensors
            reads it on the device, any other waits for it.
    """

    skip: Tensor | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: computes the gradients first, and may set `skip`.

        Returns:
            What the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.skip is not None:
            first = self.param_groups[0]["params"][0]
            if self.defaults["fused"] and not isinstance(first, DTensor):
                self.found_inf = self.skip.float()  # what torch's GradScaler sets
            elif self.skip.item():
                return loss
        super().step()
        return loss


# ---- state by name ---------------------------------------------------------------------------------------------------


def parameter_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in the order in which its state counts them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def name_state(state: dict[str, Any], names: list[str]) -> dict[str, Tensor]:
    """An optimizer's `state_dict` as flat tensors `<parameter>/<slot>`, so that a file of them reads by itself.

    Args:
        state: `{"state": {index or name: {slot: tensor}}, "param_groups": ...}`.
        names: of `parameter_names`; index `i` belongs to `names[i]`.
    """
    return {
        f"{names[key] if isinstance(key, int) else key.removeprefix('decoder.')}/{slot}": value
        for key, slots in state["state"].items()
        for slot, value in slots.items()
    }


def index_state(
    tensors: dict[str, Tensor], module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, Tensor]]:
    """The inverse of `name_state` for the parameters of `optimizer`, which are `module`'s: `{index: {slot: tensor}}`.

    Raises:
        RequestError: the tensors are of another optimizer.
    """
    names = parameter_names(module, optimizer)
    groups = optimizer.param_groups
    wanted = [MUON_SLOTS if group.get("rows") else ADAMW_SLOTS for group in groups for _ in group["params"]]
    states: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, tensor in tensors.items():
        name, _, slot = key.rpartition("/")
        states[name][slot] = tensor
    for name, slots in zip(names, wanted, strict=True):
        if states[name] and set(states[name]) != set(slots):
            raise RequestError(
                f"this is a checkpoint of another optimizer: it has {', '.join(sorted(states[name]))} of {name}, and "
                f"{type(optimizer).__name__} needs {', '.join(sorted(slots))}; set model.optimizer.name back"
            )
    return {index: states[name] for index, name in enumerate(names) if states[name]}
