"""The built-in optimizers by name: the class, and what it keeps of each parameter.

A new one is a class in a file of its own, an entry in `BUILTIN` and in `training/optimizer_rules`, and the options that
only it has in `OptimizerConfig`. Nothing here imports torch.
"""

from typing import Literal, NamedTuple

from lm.model.estimates import OptimizerState

OptimizerName = Literal["adamw", "muon"]


class BuiltinOptimizer(NamedTuple):
    """What is known of an optimizer before it is built."""

    class_path: str  # of a class that takes groups of parameters, lr, weight_decay and the options
    options: tuple[str, ...]  # fields of `OptimizerConfig`
    state: OptimizerState  # what it keeps, in the parameters' precision
    whole_matrices: bool  # the blocks' matrices are groups of one shape, with `kind` and `rows` as Muon takes them


BUILTIN: dict[OptimizerName, BuiltinOptimizer] = {
    "adamw": BuiltinOptimizer(
        class_path="lm.training.optim.AdamW",
        options=("betas", "eps"),
        state=OptimizerState(),
        whole_matrices=False,
    ),
    "muon": BuiltinOptimizer(
        class_path="lm.training.muon.Muon",
        options=("betas", "eps", "momentum"),
        state=OptimizerState(hidden=1, divided=True),
        whole_matrices=True,
    ),
}
