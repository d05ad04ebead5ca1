"""Private names of torch, as torch 2.13 has them: each with the reason why no public one is used.

`training/lightning_patches` has those that only a training needs. A test lets them stand nowhere else.
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

scaled_mm = torch._scaled_mm  # its public name, torch.nn.functional.scaled_mm, is one that torch 2.11 cannot compile


def has_gradient_hooks(weight: nn.Parameter) -> bool:
    """Whether a hook waits for the gradient of a weight, so that autograd must compute it; torch has no public test."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


class KeepsPrecision:
    """A base of modules, named first, that `to(torch.bfloat16)` leaves in their precision; they still change device.

    `_apply` is what `to`, `half` and the like of a module and of those around it call.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), *args, **kwargs)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def set_compile_options(recompile_limit: int) -> None:
    """Let one function be compiled at least so often, trace backward passes as eager mode runs them, and keep a block
    in one graph under DDP.

    `torch.compile` has no argument for these.
    """
    torch._dynamo.config.recompile_limit = max(recompile_limit, torch._dynamo.config.recompile_limit)
    # A traced backward pass would run under autocast, and that of eager mode does not. Off, both compute the same.
    torch._functorch.config.backward_pass_autocast = "off"
    # dynamo would cut a graph where a bucket of DDP is full, so that gradients are sent during the backward pass.
    # Between blocks, which are graphs of their own, they are anyway.
    torch._dynamo.config.optimize_ddp = False


def triton_free(graph: GraphModule, inputs: list[Tensor], **options: Any) -> Callable:
    """A backend for `torch.compile` that generates no code.

    It traces forward and backward pass together, chooses what is saved between them, and runs the graphs as they are,
    with torch's own kernels and ours. It needs neither Triton nor a C++ compiler, and results equal those of eager mode
    to the bit. Public backends either generate code or trace no backward pass.
    """
    from torch._dynamo.backends.common import aot_autograd  # a second to import, and most commands compile nothing
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def run_uncompiled(graph: GraphModule, inputs: list[Tensor]) -> Callable:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=run_uncompiled, bw_compiler=run_uncompiled, inference_compiler=run_uncompiled,
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    return backend(graph, inputs)


def compiled_graphs() -> tuple[int, str]:
    """How many graphs torch.compile has made in this process, and torch's reason for making the newest.

    torch only logs both, and for people.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")  # there only where something is compiled
    if dynamo is None:
        return 0, ""
    reasons = [str(reason) for failures in dynamo.guard_failures.values() for reason in failures[-1:]]
    newest = (reasons or [""])[-1].partition("\n")[0]
    return dynamo.counters["stats"]["unique_graphs"], newest.partition(": ")[2] or newest  # without graphs' numbers
