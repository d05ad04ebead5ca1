"""torch.compile for a decoder, block by block and then the loss: all blocks share one graph, so it takes seconds and
not minutes.

`triton_free` is a backend of a few lines. It traces forward and backward pass together and decides what is kept
between them, then runs torch's own and our kernels in that order: no code is generated, so no Triton and no C++
compiler is needed, and results are those of eager mode to the bit.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

Compile = Literal["none", "inductor", "triton_free"]


def compile_decoder(decoder: nn.Module, mode: Compile) -> None:
    """Compile every block of a decoder and its loss in place.

    What is compiled is a block's `forward` and not the call of the block: names of parameters stay as they are, and
    hooks around a block (sharding has some) stay outside.

    Args:
        decoder: has `layers` and `losses`.
        mode: `none` leaves it as it is.
    """
    if mode == "none":
        return
    # All blocks share one code object, so what dynamo allows for one is divided among them: the first block or another,
    # a window or none, FP8 or not, training or evaluation, documents. Beyond the limit compiling would be an error.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    backend = triton_free if mode == "triton_free" else "inductor"
    for layer in decoder.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    decoder.losses = torch.compile(decoder.losses, backend=backend, fullgraph=True)


def triton_free(graph: GraphModule, inputs: list[Tensor], **options: Any) -> Callable:
    """A backend for `torch.compile` that generates no code."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def as_it_is(graph: GraphModule, inputs: list[Tensor]) -> Callable:
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, inference_compiler=as_it_is,
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    return compiler(graph, inputs)
