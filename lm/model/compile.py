"""`torch.compile` for the decoder, block by block, and CUDA graphs of a micro-batch.

Every block is compiled, and the loss. All blocks share one graph, so compiling takes seconds and not minutes.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch._functorch.config  # `import torch` alone does not always bring it
from torch import Tensor, nn
from torch.fx import GraphModule

Compile = Literal["none", "inductor", "triton_free"]


def compile_decoder(decoder: nn.Module, mode: Compile) -> None:
    """Compile every block of a decoder and its loss in place.

    A block's `forward` is compiled and not its `__call__`: names of parameters do not change, and hooks around a block
    (FSDP2 has some) stay outside of the graph.

    Args:
        decoder: has `layers` and `cross_entropy`.
        mode: `none` leaves it as it is.
    """
    if mode == "none":
        return
    # All blocks share one code object and so dynamo's limit of recompilations, beyond which compiling is an error.
    # There is a graph for each mix of: first block or not (fused), window, FP8, training or evaluation, documents.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    # A traced backward pass would run under autocast, and that of eager mode does not. Off, both compute the same.
    torch._functorch.config.backward_pass_autocast = "off"
    backend = triton_free if mode == "triton_free" else "inductor"
    for layer in decoder.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    decoder.cross_entropy = torch.compile(decoder.cross_entropy, backend=backend, fullgraph=True)


def triton_free(graph: GraphModule, inputs: list[Tensor], **options: Any) -> Callable:
    """A backend for `torch.compile` that generates no code.

    It traces forward and backward pass together, chooses what is saved between them, and runs the graphs as they are,
    with torch's own kernels and ours. It needs neither Triton nor a C++ compiler, and results equal those of eager mode
    to the bit.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def run_uncompiled(graph: GraphModule, inputs: list[Tensor]) -> Callable:
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=run_uncompiled, bw_compiler=run_uncompiled, inference_compiler=run_uncompiled,
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    return compiler(graph, inputs)


WARMUP = 3  # micro-batches that run as usual first, so that every kernel is loaded and every buffer has its size


class GraphedMicroBatch:
    """The forward and backward pass of a micro-batch as one CUDA graph: the host starts one thing and not thousands.

    The first calls run as usual, then one is recorded, and from then on it is replayed. Gradients are accumulated in
    buffers that stay where they are: `zero_grad` clears them, and nothing else may drop them. The optimizer stays
    outside, and so do accumulation, clipping and the schedule.

    Args:
        parameters: what gets gradients.
        forward_backward: takes tokens `(B, T + 1)`, always of one shape, and returns a tensor that is not
            differentiable. It must not wait for the device.
        capture: whether there is a device that can record; otherwise every call runs as usual.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], forward_backward: Callable[[Tensor], Tensor], capture: bool
    ) -> None:
        self.gradients = []
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
            self.gradients.append(parameter.grad)
        self.forward_backward = forward_backward
        self.capture = capture
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """What `forward_backward` returns for these tokens; the gradients are added to the buffers."""
        self.calls += 1
        if not self.capture or self.calls <= WARMUP:
            return self.forward_backward(tokens)
        if self.graph is None:
            self._record(tokens)
        self.tokens.copy_(tokens, non_blocking=True)
        self.graph.replay()
        return self.result.clone()

    def zero_grad(self) -> None:
        """Clear the gradients, and keep their buffers."""
        torch._foreach_zero_(self.gradients)

    def _record(self, tokens: Tensor) -> None:
        self.tokens = tokens.clone()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, which pin memory for the next batches, may do what they like meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = self.forward_backward(self.tokens)
