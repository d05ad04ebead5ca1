"""Private names of torch (as in torch 2.13), each with the reason why no public name is used.

`training/lightning_patches` has those that only training needs. A test checks that there are none elsewhere.
"""
# pyright: reportPrivateImportUsage=false

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config  # `import torch` alone does not always bring it
from torch import Tensor, nn
from torch.fx import GraphModule

# One operation on a list of tensors is one kernel launch, or a few; torch has no public names for these.
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub_ = torch._foreach_sub_

scaled_mm = torch._scaled_mm  # torch 2.11 cannot compile the public torch.nn.functional.scaled_mm


def has_gradient_hooks(weight: nn.Parameter) -> bool:
    """Whether a weight has hooks on its gradient, so that autograd must compute it; torch has no public test."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


class KeepsPrecision:
    """A base class, to be named first, whose tensors keep their dtype in `to(torch.bfloat16)` but change device.

    A module calls `_apply` in `to`, `half` and the like, also for its submodules.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), *args, **kwargs)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def set_compile_options(recompile_limit: int) -> None:
    """Raise the recompile limit to `recompile_limit` or more, trace backward passes without autocast, and keep a block
    in one graph under DDP.

    `torch.compile` has no argument for these.
    """
    torch._dynamo.config.recompile_limit = max(recompile_limit, torch._dynamo.config.recompile_limit)
    # A traced backward pass would run under autocast, unlike in eager mode. Turned off, both compute the same.
    torch._functorch.config.backward_pass_autocast = "off"
    # dynamo would split a graph where a DDP bucket is full, so that gradients are sent during the backward pass.
    # Blocks are separate graphs, so gradients are sent between blocks anyway.
    torch._dynamo.config.optimize_ddp = False


def triton_free(graph: GraphModule, inputs: list[Tensor], **options: Any) -> Callable:
    """A backend for `torch.compile` that generates no code.

    It traces forward and backward pass together, chooses what is saved between them, and runs the graphs unchanged,
    with torch's kernels and ours. It needs neither Triton nor a C++ compiler, and results are bitwise identical to
    those of eager mode. Public backends either generate code or trace no backward pass.
    """
    from torch._dynamo.backends.common import aot_autograd  # a second to import, and most commands compile nothing
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def run_uncompiled(graph: GraphModule, inputs: list[Tensor]) -> Callable:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=run_uncompiled,
        bw_compiler=run_uncompiled,
        inference_compiler=run_uncompiled,
        partition_fn=min_cut_rematerialization_partition,
    )
    return backend(graph, inputs)


def compiled_graphs() -> tuple[int, str]:
    """Number of graphs that torch.compile has made in this process, and torch's reason for the newest.

    torch only logs these, as text.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")  # only imported if something is compiled
    if dynamo is None:
        return 0, ""
    reasons = [str(reason) for failures in dynamo.guard_failures.values() for reason in failures[-1:]]
    newest = (reasons or [""])[-1].partition("\n")[0]
    return dynamo.counters["stats"]["unique_graphs"], newest.partition(": ")[2] or newest  # without graphs' numbers
