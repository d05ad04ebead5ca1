"""Activation checkpointing, `torch.compile` block by block, and CUDA graphs of a micro-batch.

Every block is compiled, and the loss. All blocks share one graph, so compiling takes seconds and not minutes.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.kernels.torch_private import set_compile_options, triton_free
from lm.model.config import ActivationCheckpointing, Compile
from lm.model.fused import FusedBlock


def checkpoint_activations(decoder: Any, mode: ActivationCheckpointing) -> None:
    """Recompute activations in the backward pass instead of keeping them (Chen et al., 2016, arXiv:1604.06174).

    Call it after `model/fused.fuse` and before `compile_decoder`. Results are the same to the bit. `block` keeps what
    goes into a block and runs its forward pass again; `selective` does so with the MLP alone, which keeps the most.
    `store_all` is the opposite: our kernels then store what they recompute otherwise; plain PyTorch stores all anyway.
    """
    if mode == "none":
        return
    for layer in decoder.layers:
        if mode == "store_all":
            layer.store = True
            continue
        if mode == "block":
            owner, name = layer, "forward"
        else:
            owner, name = (layer, "mlp_branch") if isinstance(layer, FusedBlock) else (layer.mlp, "forward")
        setattr(owner, name, functools.partial(
            checkpoint, getattr(owner, name), use_reentrant=False, preserve_rng_state=layer.dropout.p > 0
        ))  # fmt: skip


def compile_decoder(decoder: Any, mode: Compile) -> None:
    """Compile every block of a decoder and its loss in place; any other model as one.

    A block's `forward` is compiled and not its `__call__`: names of parameters do not change, and hooks around a block
    (FSDP2 has some) stay outside of the graph.
    """
    if mode == "none":
        return
    # All blocks share one code object and so dynamo's limit of recompilations, beyond which compiling is an error.
    # There is a graph for each mix of: first block or not (fused), window, FP8, training or evaluation, documents.
    set_compile_options(recompile_limit=64)
    backend = triton_free if mode == "triton_free" else "inductor"
    if not hasattr(decoder, "cross_entropy"):  # a custom model, in which dynamo may break the graph
        decoder.forward = torch.compile(decoder.forward, backend=backend)
        return
    for layer in decoder.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    decoder.cross_entropy = torch.compile(decoder.cross_entropy, backend=backend, fullgraph=True)


WARMUP = 3  # micro-batches that run as usual first, so that every kernel is loaded and every buffer has its size


class GraphedMicroBatch:
    """The forward and backward pass of a micro-batch as one CUDA graph: one launch instead of thousands.

    The first calls run without a graph, then one is captured, and later calls replay it. The first call with new
    constants runs without one too: it may compile, which a capture must not. Gradients accumulate in buffers at fixed
    addresses: clear them with `zero_grad(set_to_none=False)`. The optimizer stays outside, and so do
    accumulation, clipping and the schedule. Without `capture` every call runs as usual.

    `forward_backward` takes tokens `(B, T + 1)`, always of one shape, and the constants of the call, and returns a
    detached tensor. It must not wait for the device.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], forward_backward: Callable[..., Tensor], capture: bool
    ) -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.forward_backward = forward_backward
        self.stream = torch.cuda.Stream() if capture else None  # warmed up and recorded on one that is not the default
        self.calls, self.known = 0, set()  # constants that a call had before
        self.recorded: dict[tuple, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # and what it returns, by constants

    def __call__(self, tokens: Tensor, *constants: object) -> Tensor:
        """What `forward_backward` returns for these tokens; the gradients are added to the buffers.

        There is a graph for each value of `constants`, which are on the host.
        """
        self.calls += 1
        if self.stream is None:
            return self.forward_backward(tokens, *constants)
        if self.calls <= WARMUP or constants not in self.known:
            self.known.add(constants)
            return self._run_as_usual(tokens, constants)
        if constants not in self.recorded:
            self._record(tokens, constants)
        graph, result = self.recorded[constants]
        self.tokens.copy_(tokens, non_blocking=True)
        graph.replay()
        return result.clone()

    def _run_as_usual(self, tokens: Tensor, constants: tuple) -> Tensor:
        if self.recorded:  # their memory is needed for what this call keeps for its backward pass
            torch.cuda.synchronize()
            self.recorded.clear()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.forward_backward(tokens, *constants)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _record(self, tokens: Tensor, constants: tuple) -> None:
        if not self.recorded:
            self.tokens = tokens.clone()
        graph, pool = torch.cuda.CUDAGraph(), next((graph.pool() for graph, _ in self.recorded.values()), None)
        # Other threads, which pin memory for the next batches, are not restricted meanwhile.
        with torch.cuda.graph(graph, pool, self.stream, capture_error_mode="thread_local"):
            self.recorded[constants] = graph, self.forward_backward(self.tokens, *constants)
