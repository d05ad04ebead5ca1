"""Activation checkpointing, and `torch.compile` block by block.

Every block is compiled, and the loss. All blocks share one graph, so compiling takes seconds and not minutes.
"""

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from lm.kernels.torch_private import set_compile_options, triton_free
from lm.model.config import ActivationCheckpointing, Compile


def checkpoint_activations(decoder: Any, mode: ActivationCheckpointing) -> None:
    """Recompute activations in the backward pass instead of keeping them (Chen et al., 2016, arXiv:1604.06174).

    Call it after `model/fused.fuse` and before `compile_decoder`. Results are bitwise identical. `block` keeps what
    goes into a block and runs its forward pass again; `selective` does so with the MLP alone, which keeps the most.
    """
    if mode == "none":
        return
    for layer in decoder.layers:
        owner, name = layer, "forward"
        if mode == "selective":
            owner, name = (layer, "mlp_branch") if hasattr(layer, "mlp_branch") else (layer.mlp, "forward")
        recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=layer.dropout.p > 0)
        setattr(owner, name, functools.partial(recomputed, getattr(owner, name)))


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
