"""Log lines about a fit: at its start what it will do, at its end what it did and which commands follow."""

import logging
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lm.data.shard_statistics import document_tokens
from lm.runs.checkpoint import read_progress
from lm.runs.metrics import METRICS
from lm.system.hardware import device_name
from lm.system.process import program
from lm.system.units import format_count, format_duration, format_time_and_cost, plural
from lm.training.callback import Callback
from lm.training.callbacks.logging import seconds_left
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)

SAMPLE_WIDTH = 300  # characters of a sample to show


class Summary(Callback):
    def __init__(self) -> None:
        self._began = (0.0, 0)  # time and optimizer step
        self._measured = False  # whether the time left was logged

    def on_train_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self._began = time.monotonic(), trainer.global_step
        if trainer.is_global_zero:
            for line in describe_fit(trainer, pl_module):
                log.info("%s", line)

    def on_metrics(self, trainer: Trainer, pl_module: LanguageModule, metrics: dict[str, float]) -> None:
        """Log the time left once it is measured."""
        seconds, ended = seconds_left(trainer), trainer.global_step >= trainer.max_steps
        if seconds and not ended and not self._measured and trainer.is_global_zero:
            self._measured = True
            rate = trainer.run_state.usd_per_hour
            cost = format_time_and_cost(seconds, seconds / 3600 * rate if rate else None)
            log.info("time left, from the steps so far: %s", cost)

    def on_fit_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if not trainer.is_global_zero:
            return
        since, first = self._began
        step, duration = trainer.global_step, format_duration(time.monotonic() - since)
        log.info(f"{plural(step - first, 'step')} in {duration}, {format_count(trainer.tokens_seen)} tokens in all")
        if step < trainer.max_steps:
            reasons = [getattr(callback, "stopping_reason_message", None) for callback in trainer.callbacks]
            reason = " ".join(filter(None, reasons)) or "a callback asked for it"
            log.info(f"stopped early, at step {step} of {trainer.max_steps}: {reason}")
        best = trainer.run.link("best")
        if best is not None:
            loss, label = trainer.checkpoint_callback.best_loss, METRICS["val/loss"].label
            log.info(f"best {label} {loss:.4f}, at step {read_progress(best).step}")
        link = trainer.run.path / ("last" if best is None else "best")
        model = link if link.exists() else trainer.run.link(link.name)  # without symbolic links
        if pl_module.builtin:
            log.info("model: %s, which Hugging Face transformers loads as it is", model)
        else:
            log.info("model: %s, which lm.load_model(path, module=%s) loads", model, type(pl_module).__name__)
        if (trainer.run.path / "samples.jsonl").exists():
            from lm.runs.history import read_samples

            for line in read_samples(trainer.run)[-1:]:
                text = textwrap.shorten(line["prompt"] + line["text"], SAMPLE_WIDTH, placeholder=" ...")
                log.info("sample: %s", text)
        chat = "chat_template" in trainer.datamodule.tokenizer.config
        for command, purpose in next_commands(trainer.run.path, pl_module.builtin, chat):
            log.info("%-60s  # %s", command, purpose)


def describe_fit(trainer: Trainer, module: LanguageModule) -> list[str]:
    """The model, its data, the steps to take, and the origin of its weights, one line each."""
    total = sum(parameter.numel() for parameter in module.decoder.parameters())
    tables: dict[int, Any] = {
        id(part.weight): part.weight
        for name, part in module.decoder.named_modules()
        if isinstance(part, nn.Embedding) or name.split(".")[-1] == "lm_head"
    }
    embeddings = sum(table.numel() for table in tables.values())
    data, steps, optimizer = trainer.datamodule, trainer.steps, module.options.optimizer
    tokens = {split: document_tokens(shards) for split, shards in data.shards.items()}
    epochs = f"{steps.tokens(steps.max_steps) / tokens['train']:.2f} epochs"
    if data.source_names:
        order: Any = data.order()  # a mixture
        each = order.epochs(steps.samples(steps.max_steps))
        epochs = "epochs: " + ", ".join(f"{name} {count:.2f}" for name, count in zip(data.source_names, each))
    return [
        f"device: {_devices(trainer)}",
        f"model: {format_count(total)} parameters, {format_count(total - embeddings)} of them outside the embeddings; "
        f"vocabulary {module.config.vocab_size:,}, context {module.config.max_position_embeddings:,}",
        f"data: {f'{data.options.path}, ' if data.options.path else ''}{format_count(tokens['train'])} tokens for "
        f"training, {format_count(tokens.get('val', 0))} for validation",
        f"training: {plural(steps.max_steps, 'step')} of {steps.tokens_per_step:,} tokens = "
        f"{format_count(steps.tokens(steps.max_steps))} tokens, {epochs}; a step is {steps}",
        f"optimizer: {optimizer.class_path or optimizer.name}, peak learning rate {optimizer.lr:g}, "
        f"schedule {module.options.schedule.name}",
        f"weights: {_origin(trainer)}",
    ]


def _devices(trainer: Trainer) -> str:
    name = device_name(trainer.strategy.root_device)
    if trainer.strategy.root_device.type == "cpu":
        name += f" with {plural(torch.get_num_threads(), 'thread')}"
    strategy = trainer.options.strategy
    strategy = f", {'ddp' if strategy == 'auto' else strategy}" if trainer.world_size > 1 else ""
    peak = f"peak {trainer.device_peak / 1e12:,.4g} TFLOP/s" if trainer.device_peak else "peak not known, so no MFU"
    return f"{trainer.world_size} x {name}{strategy}, {trainer.precision}, {peak}"


def _origin(trainer: Trainer) -> str:
    if not trainer.ckpt_path and not trainer.lightning_module.decoder_is_new:
        return "those that the module had"
    if not trainer.ckpt_path:
        return f"new, drawn from seed {torch.initial_seed()}"
    if trainer.global_step:
        return f"resumed from {trainer.ckpt_path}, after step {trainer.global_step:,} of {trainer.max_steps:,}"
    return f"from {trainer.ckpt_path}, and training starts at step 1"


def next_commands(run: Path, builtin: bool, chat: bool = False) -> list[tuple[str, str]]:
    """Commands for a finished run and their purposes; `export` only supports a built-in model."""
    where = f"--run {run.name}" if run.parent == Path("checkpoints") else f"--ckpt_path {run / 'best'}"
    return [
        (f"{program()} generate {'--chat ' * chat}{where}", "write with it: type prompts"),
        (f"{program()} runs show {run}", "the whole run on a page"),
        (f"{program()} export {where} --output {run.name}-export", "a folder to publish, with a model card"),
    ][: 3 if builtin else 2]
