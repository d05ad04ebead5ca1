"""A look into an optimizer step: the loss of every token and norms inside the network, by the weights as they are now.

`callbacks/postmortem` asks for it when a guard has acted. It leaves no trace in a training: it runs without dropout, so
it draws no random numbers; it takes gradients with `torch.autograd.grad`, so `.grad` stays as it is; and it runs
compiled blocks uncompiled, so that hooks inside a block are called. Every rank of a sharded model has to call it, with
as many samples, since weights are gathered on the way.
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

from lm.data.loader import Batch
from lm.model.decoder import Decoder, Losses, evaluating
from lm.runs.postmortem import Evidence, Sample
from lm.training.callback import call_hook
from lm.training.step_stats import StepRecord
from lm.training.trainer import Trainer


class Norms(NamedTuple):
    """Norms of a micro-batch inside the network."""

    activations: dict[str, dict[str, float]]  # name -> `rms` and `max`, the largest absolute value
    gradients: dict[str, float] | None  # parameter -> L2 norm of the gradient of the mean loss; None: not taken


def token_losses(module: LightningModule, rows: np.ndarray, micro_batch: int) -> np.ndarray:
    """The loss of every token of samples `(N, T + 1)`, `micro_batch` of them at once: `(N, T)` fp32, in nats."""
    with _undisturbed(module), torch.no_grad():
        parts = [_losses(module, rows[first : first + micro_batch]).per_token.float().cpu()
                 for first in range(0, len(rows), micro_batch)]  # fmt: skip
    return torch.cat(parts).numpy()


def norms(module: LightningModule, rows: np.ndarray, gradients: bool = True) -> Norms:
    """Norms inside the network for one micro-batch, `(B, T + 1)`.

    They are those of the embedding's output, of the residual stream that leaves every block, and of what attention and
    MLP add to it; and of the gradient of the mean over the tokens, but with a sharded model, whose gradients are
    exchanged between ranks on the way.
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
    tokens = losses.per_token.numel()
    sizes = torch.stack([torch.zeros((), device=module.device) if g is None else g.float().norm() for g in found])
    return Norms(activations, dict(zip(named, (sizes / tokens).tolist(), strict=True)))


def _losses(module: LightningModule, rows: np.ndarray) -> Losses:
    return module.losses(Batch(torch.from_numpy(np.ascontiguousarray(rows)).to(module.device)))


@contextmanager
def _undisturbed(module: LightningModule) -> Iterator[None]:
    """Evaluate uncompiled in this block; the inference mode of a validation is lifted."""
    try:
        with evaluating(module), torch.inference_mode(False), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if isinstance(module.decoder, FSDPModule):  # it keeps some weights gathered after a forward pass
            module.decoder.reshard()


def _watch(decoder: Any, seen: dict[str, Tensor]) -> list[RemovableHandle]:
    """Hooks that measure the outputs of the embedding and of the parts of every block."""

    def measure(name: str, x: Tensor) -> None:
        wide = x.detach().float()
        seen[name] = torch.stack([wide.square().mean().sqrt(), wide.abs().max()])

    def after(name: str) -> Any:
        return lambda part, inputs, output: measure(name, output)

    def after_block(index: int) -> Any:
        def hook(part: Any, inputs: Any, outputs: Tensor | tuple[Tensor, Tensor]) -> None:
            if isinstance(outputs, tuple):  # a fused block returns the MLP's output and the rest of the stream apart
                branch, stream = outputs  # (B, T, C) each
                measure(f"layers.{index}.mlp", branch)
                outputs = branch.detach() + stream.detach()
            measure(f"layers.{index}.stream", outputs)

        return hook

    if not isinstance(decoder, Decoder):  # a custom model has other parts
        return []
    hooks = [decoder.embed_tokens.register_forward_hook(after("embedding"))]
    for index, layer in enumerate(decoder.layers):
        hooks.append(layer.self_attn.o_proj.register_forward_hook(after(f"layers.{index}.attention")))
        hooks.append(layer.mlp.register_forward_hook(after(f"layers.{index}.mlp")))
        hooks.append(layer.register_forward_hook(after_block(index)))
    return hooks


# ---- evidence --------------------------------------------------------------------------------------------------------

WORST_SAMPLES = 8  # whose tokens are listed
Place = tuple[str | None, int | None]  # shard and window; None: the sample was injected


class StepRef(NamedTuple):
    """A step of this process, and the first of its samples."""

    step: StepRecord
    sample: int


def gather_evidence(trainer: Trainer, module: LightningModule, worst: StepRef, ordinary: StepRef | None) -> Evidence:
    """The samples and norms of the worst step, and the norms of an ordinary one before it to compare with.

    Rank zero calls this; every rank does where the model is sharded.
    """
    size, world = trainer.datamodule.micro_batch_size, trainer.world_size
    rows, places = _read(trainer, worst)  # (G, T + 1)
    losses = token_losses(module, rows, size)  # (G, T)
    means = np.nan_to_num(losses.mean(1), nan=np.inf)  # (G,), what is not a number above all
    by_batch = means.reshape(-1, size, world).mean(1)  # (micro-batches, ranks): ranks take samples in turn
    micro, rank = (int(i) for i in np.unravel_index(by_batch.argmax(), by_batch.shape))
    batches = rows.reshape(-1, size, world, rows.shape[1])  # (micro-batches, B, ranks, T + 1)
    without = "the model is sharded over ranks" if is_sharded(module) else None
    norms, without = _norms(module, batches[micro, :, rank], without)
    other = None
    if ordinary is not None:
        other_rows = _read(trainer, ordinary)[0].reshape(batches.shape)
        other_norms, without = _norms(module, other_rows[0, :, 0], without)
        other = {"what": _name(ordinary, 0, 0, world), **other_norms._asdict()}
    samples = [
        Sample(worst.sample + i, *places[i], rows[i].tolist(), losses[i].tolist())
        for i in np.argsort(-means, kind="stable").tolist()
    ]
    decode = trainer.datamodule.tokenizer.decode
    return Evidence(
        samples=samples,
        texts=[decode(sample.tokens) for sample in samples],
        pieces=[[decode([token]) for token in sample.tokens] for sample in samples[:WORST_SAMPLES]],
        worst={"what": _name(worst, micro, rank, world), **norms._asdict()},
        ordinary=other,
        without_gradients=without,
    )


def is_sharded(module: LightningModule) -> bool:
    """Whether every rank has only a part of the weights, so that no rank can compute without the others."""
    return isinstance(module.decoder, FSDPModule)


def injected_rows(trainer: Trainer, step: int) -> np.ndarray | None:
    """`(G, T + 1)` samples that a callback put in place of a step's own; None: it did not."""
    return next((rows for rows in call_hook(trainer, "rows_of_step", step) if rows is not None), None)


def _read(trainer: Trainer, taken: StepRef) -> tuple[np.ndarray, list[Place]]:
    """The samples of a step, `(G, T + 1)`, and where they are from."""
    put = injected_rows(trainer, taken.step.step)
    if put is not None:
        return put, [(None, None)] * len(put)
    return trainer.datamodule.read_samples(taken.sample, trainer.steps.global_batch)


def _name(taken: StepRef, micro: int, rank: int, world: int) -> str:
    return f"micro-batch {micro + 1} of step {taken.step.step}" + (f" on rank {rank}" if world > 1 else "")


def _norms(module: LightningModule, rows: np.ndarray, without: str | None) -> tuple[Norms, str | None]:
    """The norms, and the reason if there are no gradients among them, such as no memory for them."""
    if without is None:
        try:
            return norms(module, rows), None
        except torch.OutOfMemoryError:
            without = "the device has no memory left for them"
        torch.cuda.empty_cache()
    return norms(module, rows, gradients=False), without
