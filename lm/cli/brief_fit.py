"""A run of a few steps, to measure them: what `lm bench step` and `lm profile` have in common."""

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import Callback
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import models

from lm.cli.classes_by_path import with_classes
from lm.cli.fit import quiet_lightning
from lm.cli.plan_facts import find_tokenizer, with_vocabulary
from lm.cli.request import Request
from lm.data.config import DataConfig
from lm.data.datamodule import DataModule
from lm.data.parquet import COLUMN
from lm.data.shard_writer import ROW_GROUP_TOKENS, ShardWriter
from lm.data.tokenizer import END_OF_TEXT, Tokenizer
from lm.errors import Interrupted, RequestError, RunError
from lm.kernels.linear import adds_in_place
from lm.system.hardware import device_name
from lm.system.process import run_facts
from lm.system.units import format_count, plural
from lm.training.callbacks.run_folder import RunFolder
from lm.training.callbacks.standard import standard_callbacks
from lm.training.config import DistributedConfig, TrainerConfig, sections_of_callbacks
from lm.training.lightning_patches import use_profiler
from lm.training.module import LanguageModule, training_class
from lm.training.trainer import Trainer
from lm.training.world import srun_world, torchrun_world

log = logging.getLogger(__name__)
WARMUP = 5  # optimizer steps


def fit_briefly(
    config: Request,
    steps: int,
    callbacks: Sequence[Callback] = (),
    own_data: bool = False,
    profiler: Any = None,
    **options: Any,
) -> Trainer:
    """Train for a few steps as `lm fit` does, and return the Trainer; all files are removed.

    It runs on one device, or on those of the processes that torchrun or srun started. Guards take no action; there
    are no samples and no evaluations. The schedule is constant, since the configured one is for a longer run.

    `own_data`: train on the config's data, which must exist, instead of random tokens. `profiler`: a profiler
    of Lightning with a field for the Trainer. `options` replace Trainer options of the config.
    """
    quiet_lightning()
    config = with_classes(config)
    logging.getLogger("lm.training.callbacks.run_folder").setLevel(logging.WARNING)
    lightning.seed_everything(config.seed_everything)
    root = Path(config.trainer.default_root_dir)
    # Beside the runs: a checkpoint is timed, and the system's temporary folder may lie in memory.
    with tempfile.TemporaryDirectory(prefix=".lm-bench-", dir=root if root.is_dir() else ".") as folder:
        data_options = dict(vars(config.data))
        if not own_data:
            data_options |= dict.fromkeys(("path", "val", "test", "sources", "phases", "prepare", "packing"))
            data_options |= write_random_data(Path(folder), find_vocab_size(config), config.data)
            data_options["shuffle_buffer"] = max(config.data.shuffle_buffer, ROW_GROUP_TOKENS)  # one row group fits
        data = DataModule(**data_options)
        data.set_position(seed=config.seed_everything)
        constant = replace(config.model.schedule, name="constant")
        module = training_class()(**vars(config.model) | config.custom_arguments | {"schedule": constant})
        replaced = {"max_steps": steps, "max_tokens": None, "default_root_dir": f"{folder}/runs", "logger": None}
        trainer_options = vars(config.trainer) | replaced | options
        if not (torchrun_world() or srun_world()):
            if str(config.trainer.devices) not in ("1", "auto") or config.trainer.num_nodes > 1:
                log.warning(
                    "one device is measured, whatever trainer.devices and trainer.num_nodes say: start this with "
                    "torchrun to measure several"
                )
            trainer_options |= dict(devices=1, num_nodes=1, strategy="auto", distributed=DistributedConfig())
        run_folder = RunFolder(None, "bench", "", register=False)
        sections = sections_of_callbacks({"guards": config.guards.harmless()})
        standard = standard_callbacks(TrainerConfig(**trainer_options), run_folder, sections)
        trainer_options["callbacks"] = [*(config.trainer.callbacks or []), *standard, *callbacks, OnlySteps()]
        trainer = Trainer(**trainer_options)
        if profiler is not None:
            profiler.trainer = trainer  # which it asks for the device and the step
            use_profiler(trainer, profiler)
        try:
            trainer.fit(module, data)
        except Interrupted as error:
            raise RunError("stopped by a signal before the measurement was done") from error
    return trainer


class OnlySteps(Callback):
    """Writes no checkpoint after the last validation or at the end, as it is no step to be measured."""

    def on_validation_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        trainer.checkpoint_callback.skip(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        self.on_validation_end(trainer, pl_module)


def find_vocab_size(config: Request) -> int:
    """The vocabulary size of this config; RequestError if it depends on a tokenizer that does not exist yet."""
    decoder = with_vocabulary(config, None if config.model.decoder.vocab_size else find_tokenizer(config.data))
    if decoder is None:
        raise RequestError(
            f"the vocabulary is not known before {config.data.path} is made: make it with `lm data prepare`, or give "
            "--model.decoder.vocab_size"
        )
    return decoder.vocab_size  # pyright: ignore[reportReturnType]


def write_random_data(folder: Path, vocab_size: int, data: DataConfig) -> dict[str, str]:
    """Write a tokenizer of `vocab_size` tokens, and random tokens for two steps, which repeat.

    Returns the options of `data` that read them.
    """
    backend = Backend(models.BPE(vocab={END_OF_TEXT: 0} | {f"t{i}": i for i in range(1, vocab_size)}, merges=[]))
    backend.add_special_tokens([END_OF_TEXT])
    tokenizer = Tokenizer(backend.to_str())
    (folder / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
    window = data.seq_len + 1
    count = 2 * max(data.global_batch_tokens or 0, data.micro_batch_size * window) + window
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    ids = np.random.default_rng(0).integers(vocab_size, size=count, dtype=dtype)
    writer = ShardWriter(folder / "random.parquet", dtype, tokenizer.sha256)
    writer.write(ids, np.array([count]))
    writer.close()
    return {"train": f"{folder}/random.parquet", "tokenizer": f"{folder}/tokenizer.json", "column": COLUMN}


def now(device: torch.device) -> float:
    """Synchronize the device, and return the time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def describe_training(config: Request, trainer: Trainer) -> dict[str, Any]:
    module, device, facts = trainer.lightning_module, trainer.strategy.root_device, run_facts()
    counts = ("seq_len", "micro_batch_size", "accumulate", "tokens_per_step")
    return {
        "config": config.run_name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device_name(device),
        "accelerator": device.type,
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        "ranks": trainer.world_size,
        "strategy": trainer.options.strategy if trainer.world_size > 1 else None,
        **{name: getattr(module.options, name) for name in ("compile", "activation_checkpointing")},
        **{name: getattr(module.built, name) for name in ("kernels", "attention")},
        "torch_adds_in_place": adds_in_place(torch.bfloat16, device) if device.type == "cuda" else None,
        **{name: facts[name] for name in ("python", "versions")},
        "parameters": sum(weight.numel() for weight in module.decoder.parameters()),
        "vocab_size": module.config.vocab_size,
        **{name: getattr(trainer.steps, name) for name in counts},
    }


def print_heading(console: Console, result: dict[str, Any]) -> None:
    parameters, micro_batches = format_count(result["parameters"]), plural(result["accumulate"], "micro-batch")
    console.print(
        f"{result['config']}: {parameters} parameters, {result['micro_batch_size']} x {result['seq_len']} tokens x "
        f"{micro_batches} x {plural(result['ranks'], 'rank')}, {result['precision']}; {result['device']}, "
        f"{plural(result['threads'], 'thread')}, torch {result['versions']['torch']}"
    )
    console.print(
        f"compile: {result['compile']}; activation checkpointing: {result['activation_checkpointing']}; "
        f"kernels: {result['kernels']}; attention: {result['attention']}"
    )
