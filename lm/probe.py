"""What the weights as they are now make of some samples: the loss of every token, and norms inside the network.

A probe leaves no trace in a training: it runs without dropout, so it draws no random numbers; it takes gradients with
`torch.autograd.grad`, so nothing is added to `.grad` and no hook that waits for it runs; and it runs compiled blocks
uncompiled, so that hooks inside a block are seen and nothing is compiled for it. Every rank of a sharded model has to
call it, with as many samples, since weights are gathered on the way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lm.data.batch import Batch


class Norms(NamedTuple):
    """What a micro-batch does inside the network."""

    activations: dict[str, dict[str, float]]  # name -> `rms` and `max`, the largest absolute value
    gradients: dict[str, float] | None  # parameter -> L2 norm of the gradient of the mean loss; None: not taken


def token_losses(module: LightningModule, rows: np.ndarray, micro_batch: int) -> np.ndarray:
    """The loss of every token of some samples.

    Args:
        module: the LanguageModule.
        rows: (N, T + 1) uint16 or int32.
        micro_batch: samples that run at once.

    Returns:
        (N, T) fp32, in nats.
    """
    with _undisturbed(module), torch.no_grad():
        parts = [_losses(module, rows[first : first + micro_batch]).each.float().cpu()
                 for first in range(0, len(rows), micro_batch)]  # fmt: skip
    return torch.cat(parts).numpy()


def norms(module: LightningModule, rows: np.ndarray, gradients: bool = True) -> Norms:
    """What one micro-batch does inside the network.

    Args:
        module: the LanguageModule.
        rows: (B, T + 1) uint16 or int32, as many as a micro-batch of the training has.
        gradients: take them, too. Not with a sharded model: its gradients are exchanged between ranks on the way.

    Returns:
        Of every block the residual stream that leaves it and what attention and MLP add to it, and of the embedding
        what it gives. The gradient is that of the mean over the tokens.
    """
    seen: dict[str, Tensor] = {}  # name -> (2,) RMS and largest absolute value
    hooks = _watch(module.decoder, seen)
    try:
        with _undisturbed(module), torch.set_grad_enabled(gradients):
            losses = _losses(module, rows)
            named = dict(module.decoder.named_parameters()) if gradients else {}
            # Of the sum and not of the mean: small gradients of a mean would be lost in fp16.
            found = torch.autograd.grad(losses.total, list(named.values()), allow_unused=True) if gradients else ()
    finally:
        for hook in hooks:
            hook.remove()
    values = torch.stack(list(seen.values())).tolist()
    activations = {name: {"rms": rms, "max": largest} for name, (rms, largest) in zip(seen, values, strict=True)}
    if not gradients:
        return Norms(activations, None)
    tokens = losses.each.numel()
    sizes = torch.stack([torch.zeros((), device=module.device) if g is None else g.float().norm() for g in found])
    return Norms(activations, dict(zip(named, (sizes / tokens).tolist(), strict=True)))


def _losses(module: LightningModule, rows: np.ndarray) -> Any:
    with module.trainer.precision_plugin.forward_context():  # autocast, where the training has it
        return module.losses(Batch(torch.from_numpy(np.ascontiguousarray(rows)).to(module.device)))


@contextmanager
def _undisturbed(module: LightningModule) -> Iterator[None]:
    """While it lasts, the module evaluates and runs uncompiled; a validation's inference mode is lifted."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with torch.inference_mode(False), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for part in training:
            part.training = True
        if isinstance(module.decoder, FSDPModule):  # it keeps some weights gathered after a forward pass
            module.decoder.reshard()


def _watch(decoder: Any, seen: dict[str, Tensor]) -> list[RemovableHandle]:
    """Hooks that measure what passes by."""

    def measure(name: str, x: Tensor) -> None:
        wide = x.detach().float()
        seen[name] = torch.stack([wide.square().mean().sqrt(), wide.abs().max()])

    def after_attention(index: int) -> Any:
        return lambda part, inputs, branch: measure(f"layers.{index}.attention", branch)

    def after_block(index: int) -> Any:
        def hook(part: Any, inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
            branch, stream = outputs  # (B, T, C) each
            measure(f"layers.{index}.mlp", branch)
            measure(f"layers.{index}.stream", branch.detach() + stream.detach())

        return hook

    hooks = [decoder.embed_tokens.register_forward_hook(lambda part, inputs, out: measure("embedding", out))]
    for index, layer in enumerate(decoder.layers):
        hooks.append(layer.self_attn.register_forward_hook(after_attention(index)))
        hooks.append(layer.register_forward_hook(after_block(index)))
    return hooks
