"""What an optimizer step saw, and what that does in the network: the samples are read again and probed.

`callbacks/post_mortem` asks for it when a guard has acted. All losses and norms are by the weights as they are then.
"""

from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch.distributed.fsdp import FSDPModule

from lm import probe
from lm.incident import Evidence, Sample
from lm.tally import Step
from lm.trainer import Trainer

WORST_SAMPLES = 8  # whose tokens are told one by one
Place = tuple[str | None, int | None]  # shard and window; None: the sample was injected


class Taken(NamedTuple):
    """A step of this process, and the first of its samples."""

    step: Step
    sample: int


def gather(trainer: Trainer, module: LightningModule, worst: Taken, ordinary: Taken | None) -> Evidence:
    """Look into a step. Rank zero calls this; every rank does where the model is sharded.

    Args:
        trainer: in a fit.
        module: the LanguageModule.
        worst: the step.
        ordinary: one before it to compare with.
    """
    size, world = trainer.datamodule.micro_batch_size, trainer.world_size
    rows, places = _read(trainer, worst)  # (G, T + 1)
    losses = probe.token_losses(module, rows, size)  # (G, T)
    means = np.nan_to_num(losses.mean(1), nan=np.inf)  # (G,), what is not a number above all
    by_batch = means.reshape(-1, size, world).mean(1)  # (micro-batches, ranks): ranks take samples in turn
    micro, rank = (int(i) for i in np.unravel_index(by_batch.argmax(), by_batch.shape))
    batches = rows.reshape(-1, size, world, rows.shape[1])  # (micro-batches, B, ranks, T + 1)
    without = "the model is sharded over ranks" if is_sharded(module) else None
    norms, without = _norms(module, batches[micro, :, rank], without)
    beside = None
    if ordinary is not None:
        other_rows = _read(trainer, ordinary)[0].reshape(batches.shape)
        other_norms, without = _norms(module, other_rows[0, :, 0], without)
        beside = {"what": _name(ordinary, 0, 0, world), **other_norms._asdict()}
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
        ordinary=beside,
        without_gradients=without,
    )


def is_sharded(module: LightningModule) -> bool:
    """Whether every rank has only a part of the weights, so that all of them are needed to compute anything."""
    return isinstance(module.decoder, FSDPModule)


def injected(trainer: Trainer, step: int) -> np.ndarray | None:
    """`(G, T + 1)` that a callback put in place of a step's samples; None: they were those of the shards."""
    for callback in trainer.callbacks:
        if hasattr(callback, "rows_of_step") and (rows := callback.rows_of_step(trainer, step)) is not None:
            return rows
    return None


def _read(trainer: Trainer, taken: Taken) -> tuple[np.ndarray, list[Place]]:
    """The samples of a step, `(G, T + 1)`, and where they are from."""
    data, size = trainer.datamodule, trainer.steps.global_batch
    put = injected(trainer, taken.step.step)
    if put is not None:
        return put, [(None, None)] * size
    train, length = data.shards["train"], data.seq_len
    blocks, windows = data.order().locate(np.arange(taken.sample, taken.sample + size))
    rows = np.empty((size, length + 1), dtype=np.uint16 if train.column.dtype == np.uint16 else np.int32)
    for block in np.unique(blocks).tolist():
        tokens = train.read(block)
        for index in np.flatnonzero(blocks == block).tolist():
            start = int(windows[index]) * length
            rows[index] = tokens[start : start + length + 1]
    return rows, [(train.blocks[block].file, window) for block, window in zip(blocks.tolist(), windows.tolist())]


def _name(taken: Taken, micro: int, rank: int, world: int) -> str:
    return f"micro-batch {micro + 1} of step {taken.step.step}" + (f" on rank {rank}" if world > 1 else "")


def _norms(module: LightningModule, rows: np.ndarray, without: str | None) -> tuple[probe.Norms, str | None]:
    """The norms, and why there are no gradients among them: it may be known before, or the memory may be short."""
    if without is None:
        try:
            return probe.norms(module, rows), None
        except torch.OutOfMemoryError:
            without = "the device has no memory left for them"
        torch.cuda.empty_cache()
    return probe.norms(module, rows, gradients=False), without
