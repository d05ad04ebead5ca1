"""A look into an optimizer step: the loss of every token and norms inside the network, by the weights as they are now.

`callbacks/postmortem` asks for it when a guard has acted. It leaves no trace in a training: it runs without dropout, so
it draws no random numbers; it takes gradients with `torch.autograd.grad`, so `.grad` stays as it is; and it runs
compiled blocks uncompiled, so that hooks inside a block are called. Every rank of a sharded model has to call it, with
as many samples, since weights are gathered on the way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lm.data.loader import Batch
from lm.model.decoder import Decoder, Losses, evaluating
from lm.runs.postmortem import Evidence, Sample
from lm.training.callback import call_hook
from lm.training.step_stats import StepRecord
from lm.training.trainer import Trainer


def token_losses(module: Any, batch: Batch, micro_batch: int) -> np.ndarray:
    """The loss of every target of a batch, `micro_batch` samples at once: `(N, T)` fp32, in nats; 0 where masked."""
    with _undisturbed(module), torch.no_grad():
        parts = [_losses(module, part).per_token.float().cpu() for part in batch.split(micro_batch)]
    return torch.cat(parts).numpy()


def norms(module: Any, batch: Batch, gradients: bool = True) -> dict[str, Any]:
    """Norms inside the network for one micro-batch.

    `activations` has `rms` and `max`, the largest absolute value, of the embedding's output, of the residual stream
    that leaves every block, and of what attention and MLP add to it. `gradients` has the L2 norm of each parameter's
    gradient of the mean loss; None with a sharded model, whose gradients are exchanged between ranks on the way.
    """
    seen: dict[str, Tensor] = {}  # name -> (2,) RMS and largest absolute value
    hooks = _watch(module.decoder, seen)
    try:
        with _undisturbed(module), torch.set_grad_enabled(gradients):
            losses = _losses(module, batch)
            named = dict(module.decoder.named_parameters()) if gradients else {}
            # Of the sum and not of the mean: small gradients of a mean would be lost in fp16.
            found = torch.autograd.grad(losses.total, list(named.values()), allow_unused=True) if gradients else ()
    finally:
        for hook in hooks:
            hook.remove()
    values = torch.stack(list(seen.values())).tolist()
    activations = {name: {"rms": rms, "max": largest} for name, (rms, largest) in zip(seen, values, strict=True)}
    if not gradients:
        return {"activations": activations, "gradients": None}
    targets = max(1, batch.num_targets)
    sizes = torch.stack([torch.zeros((), device=module.device) if g is None else g.float().norm() for g in found])
    return {"activations": activations, "gradients": dict(zip(named, (sizes / targets).tolist(), strict=True))}


def _losses(module: Any, batch: Batch) -> Losses:
    return module.losses(batch.to(module.device))


@contextmanager
def _undisturbed(module: Any) -> Iterator[None]:
    """Evaluate uncompiled in this block; the inference mode of a validation is lifted."""
    try:
        with evaluating(module), torch.inference_mode(False), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if isinstance(module.decoder, FSDPModule):  # it keeps some weights gathered after a forward pass
            module.decoder.reshard()


def _watch(decoder: Any, seen: dict[str, Tensor]) -> list[RemovableHandle]:
    """Hooks that measure the outputs of the embedding and of the parts of every block."""

    def measure(name: str, part: Any, inputs: Any, output: Tensor) -> None:
        wide = output.detach().float()
        seen[name] = torch.stack([wide.square().mean().sqrt(), wide.abs().max()])

    def measure_block(name: str, part: Any, inputs: Any, outputs: Tensor | tuple[Tensor, Tensor]) -> None:
        if isinstance(outputs, tuple):  # a fused block returns the MLP's output and the rest of the stream apart
            branch, stream = outputs  # (B, T, C) each
            measure(f"{name}.mlp", part, inputs, branch)
            outputs = branch.detach() + stream.detach()
        measure(f"{name}.stream", part, inputs, outputs)

    if not isinstance(decoder, Decoder):  # a custom model has other parts
        return []
    hooks = [decoder.embed_tokens.register_forward_hook(partial(measure, "embedding"))]
    for index, layer in enumerate(decoder.layers):
        name = f"layers.{index}"
        hooks.append(layer.self_attn.o_proj.register_forward_hook(partial(measure, f"{name}.attention")))
        hooks.append(layer.mlp.register_forward_hook(partial(measure, f"{name}.mlp")))
        hooks.append(layer.register_forward_hook(partial(measure_block, name)))
    return hooks


# ---- evidence --------------------------------------------------------------------------------------------------------

WORST_SAMPLES = 8  # whose tokens are listed
Place = tuple[str | None, int | None]  # shard and window; None: the sample was injected


def gather_evidence(trainer: Trainer, module: Any, worst: StepRecord, ordinary: StepRecord | None) -> Evidence:
    """The samples and norms of the worst step, and the norms of an ordinary one before it to compare with.

    Rank zero calls this; every rank does where the model is sharded.
    """
    size, world = trainer.datamodule.micro_batch_size, trainer.world_size
    batch, places = _read(trainer, worst.step)  # of G samples
    losses, targets = token_losses(module, batch, size), batch.mask.numpy()  # (G, T)
    sums, counts = np.nan_to_num(losses.sum(1), nan=np.inf), targets.sum(1)  # (G,), what is not a number above all
    means = sums / counts.clip(1)
    total, number = (values.reshape(-1, size, world).sum(1) for values in (sums, counts))
    by_batch = total / number.clip(1)  # (micro-batches, ranks): sample i belongs to rank i % ranks
    micro, rank = (int(i) for i in np.unravel_index(by_batch.argmax(), by_batch.shape))
    without = "the model is sharded over ranks" if is_sharded(module) else None
    worst_norms, without = _norms(module, _part(batch, size, world, micro, rank), without)
    reference = None
    if ordinary is not None:
        other_norms, without = _norms(module, _part(_read(trainer, ordinary.step)[0], size, world), without)
        reference = {"what": _name(ordinary, 0, 0, world), **other_norms}
    samples = [
        Sample(first_sample(trainer, worst.step) + i, *places[i], tokens=batch.tokens[i].tolist(),
               losses=[loss if target else None for loss, target in zip(losses[i].tolist(), targets[i])])
        for i in np.argsort(-means, kind="stable").tolist()
    ]  # fmt: skip
    decode = trainer.datamodule.tokenizer.decode
    return Evidence(
        samples=samples,
        texts=[decode(sample.tokens) for sample in samples],
        pieces=[[decode([token]) for token in sample.tokens] for sample in samples[:WORST_SAMPLES]],
        worst={"what": _name(worst, micro, rank, world), **worst_norms},
        ordinary=reference,
        without_gradients=without,
    )


def is_sharded(module: Any) -> bool:
    """Whether every rank has only a part of the weights, so that no rank can compute without the others."""
    return isinstance(module.decoder, FSDPModule)


def injected_rows(trainer: Trainer, step: int) -> np.ndarray | None:
    """`(G, T + 1)` samples that a callback put in place of a step's own; None: it did not."""
    return next((rows for rows in call_hook(trainer, "rows_of_step", step) if rows is not None), None)


def first_sample(trainer: Trainer, step: int) -> int:
    """Which sample of the stream is the first of a step that this process has taken."""
    steps_since = trainer.global_step - step + 1  # this one included
    return trainer.run_state.cursor.end - steps_since * trainer.steps.global_batch


def _read(trainer: Trainer, step: int) -> tuple[Batch, Sequence[Place]]:
    """The samples of a step, and where they are from."""
    batch, places = trainer.datamodule.read_samples(first_sample(trainer, step), trainer.steps.global_batch)
    put = injected_rows(trainer, step)
    if put is None:
        return batch, places
    return Batch(torch.from_numpy(put), mask=batch.mask), [(None, None)] * len(put)


def _part(batch: Batch, size: int, world: int, micro: int = 0, rank: int = 0) -> Batch:
    """A micro-batch of a step's samples."""
    tokens, mask = (tensor.unflatten(0, (-1, size, world))[micro, :, rank] for tensor in (batch.tokens, batch.mask))
    return Batch(tokens, mask=mask)


def _name(step: StepRecord, micro: int, rank: int, world: int) -> str:
    return f"micro-batch {micro + 1} of step {step.step}" + (f" on rank {rank}" if world > 1 else "")


def _norms(module: Any, batch: Batch, without: str | None) -> tuple[dict[str, Any], str | None]:
    """The norms, and the reason if there are no gradients among them, such as no memory for them."""
    if without is None:
        try:
            return norms(module, batch), None
        except torch.OutOfMemoryError:
            without = "the device has no memory left for them"
        torch.cuda.empty_cache()
    return norms(module, batch, gradients=False), without
