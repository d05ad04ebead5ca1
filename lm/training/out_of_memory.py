"""The one-line error of a training that runs out of memory: how much there was, and a size that fits.

How much there was is what training had when it failed, so limits of the process or its container are included, and so
is the memory that other processes use on the GPU.
"""

import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lm.errors import RunError
from lm.model.config import DecoderConfig
from lm.model.estimates import OptimizerState, checkpoint_bytes
from lm.model.memory import Step, largest_micro_batch, training_memory
from lm.system.hardware import process_bytes
from lm.system.units import format_bytes
from lm.training.optim import state_size

if TYPE_CHECKING:
    from lm.training.trainer import Trainer

MESSAGES = ("can't allocate memory", "out of memory", "ALLOC_FAILED")  # in a RuntimeError of torch
USABLE = 0.9  # fraction of what there was that tensors may take: the rest is lost between them
CPU_RESERVE = 2**26  # bytes that libraries take in the first steps, in addition to a checkpoint's copy


def is_out_of_memory(error: BaseException) -> bool:
    of_torch = isinstance(error, RuntimeError) and any(sign in str(error) for sign in MESSAGES)
    return of_torch or isinstance(error, MemoryError)


def out_of_memory_error(error: BaseException, trainer: "Trainer", before: int | None) -> RunError:
    """The error for an exception that `is_out_of_memory`; frees what the failed step still held.

    `before` is the bytes of this process when the training began, weights included; None: it had not begun.
    """
    module, device, steps_taken = trainer.lightning_module, trainer.strategy.root_device, trainer.global_step
    step, state = step_of(trainer), state_size(module.options.optimizer)
    had, reserve = None, 0
    if device.type == "cuda":
        had = torch.cuda.max_memory_allocated(device)
    elif before is not None:
        memory = training_memory(module.config, step, state)
        had = process_bytes() - before + memory["weights"] + (memory["optimizer"] if steps_taken else 0)
        reserve = CPU_RESERVE + checkpoint_bytes(module.config, step.master_item, state)
    traceback.clear_frames(error.__traceback__)
    usage = "there was too little" if had is None else f"it had {format_bytes(had)} at most"
    alone = trainer.datamodule.global_batch_tokens is None  # a step would be one micro-batch, of whatever size
    tokens = f" --data.global_batch_tokens {trainer.steps.tokens_per_step}" if alone else ""
    fix = _fix(module.config, step, state, had, reserve, tokens)
    return RunError(
        f"out of memory ({device.type}) in step {steps_taken + 1}: with micro-batches of "
        f"{step.micro_batch_size} x {step.seq_len} tokens {usage}; {fix}; checkpoints are as they were"
    )


def _fix(config: DecoderConfig, step: Step, state: OptimizerState, had: int | None, reserve: int, tokens: str) -> str:
    smaller = "take a smaller model, a shorter data.seq_len, or a device with more memory"
    if step.checkpointing != "block":
        smaller = f"--model.activation_checkpointing block recomputes activations; or {smaller}"
    samples = step.micro_batch_size * step.accumulate
    fitting = None if had is None else largest_micro_batch(config, step, int(USABLE * had) - reserve, samples, state)
    if had is not None and fitting is None:
        return f"not even a micro-batch of 1 fits in that: {smaller}"
    if step.micro_batch_size == 1:
        return smaller
    if fitting is None or fitting >= step.micro_batch_size:  # a guess, where the memory is not taken by what is counted
        halves = [size for size in range(1, step.micro_batch_size // 2 + 1) if samples % size == 0]
        return f"try --data.micro_batch_size {halves[-1]}{tokens}, which changes no step"
    tried = replace(step, micro_batch_size=fitting, accumulate=samples // fitting)
    needed = format_bytes(training_memory(config, tried, state)["peak"])
    return f"--data.micro_batch_size {fitting}{tokens} needs about {needed} and fits, and changes no step"


def step_of(trainer: "Trainer") -> Step:
    """How a micro-batch of a training is computed."""
    steps, module, strategy = trainer.steps, trainer.lightning_module, trainer.strategy
    options = module.options
    return Step(
        steps.micro_batch_size,
        steps.seq_len,
        str(trainer.precision),
        module.built.fused,
        options.compile,
        steps.accumulate,
        steps.world_size,
        hasattr(strategy, "shard") and steps.world_size > 1,
        options.activation_checkpointing,
        trainer.datamodule.documents_per_token("train") if options.document_mask else 0.0,
    )
