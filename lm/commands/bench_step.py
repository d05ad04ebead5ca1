"""`lm bench step`: what a training step of a config takes on this machine, and what the loop around it adds.

`step_loops` does the timing; here a config becomes a training on random tokens, and its times become a report.
"""

import json
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer as Backend
from tokenizers import models

from lm.callbacks.run_folder import RunFolder
from lm.callbacks.standard import standard_callbacks
from lm.commands.step_loops import Stretch, Turns
from lm.config_file import config_name, config_parser
from lm.data.catalog import LAYOUT
from lm.data.datamodule import DataModule
from lm.data.tokenizer import END_OF_TEXT, Tokenizer
from lm.data.writer import COLUMN, ROW_GROUP_TOKENS, ShardWriter
from lm.errors import Interrupted, RequestError, RunError
from lm.hardware import device_name, peak_flops
from lm.model.accounting import parameters
from lm.module import LanguageModule
from lm.quantities import Count, format_count
from lm.runs import run_facts, write_atomically
from lm.trainer import Trainer

WARMUP = 3  # optimizer steps
CHECKPOINTS = 3
FORMULAS = {
    "overhead.ratio": "median over Lightning's turns: seconds / mean seconds of the plain turns before and after - 1",
    "overhead.cpu_time_ratio": "the same of the CPU time of this process, which busy neighbours disturb less",
    "mfu": "flops_per_token x tokens_per_second / dense peak of the device in this precision",
    "flops_per_token": "6 x parameters without input embedding + 12 x layers x heads x head_dim x (seq_len + 1) / 2",
    "checkpoint.stall_share": "stall_ms / (interval_steps x lightning.ms_per_step)",
}


def step(arguments: list[str]) -> None:
    """Time a training step of a config: `lm bench step --config X [--steps N] [--json] [--output FILE]`.

    Args:
        arguments: what stands after `lm bench step`.

    Raises:
        RequestError: the config or the command line is wrong.
        RunError: a signal came before the end.
    """
    parser = config_parser("lm bench step", trainer=Trainer, model=LanguageModule, data=DataModule)
    parser.description = "Time a training step of a config on one device, with random tokens, and its checkpoints."
    parser.add_argument(
        "--steps", type=Count, default=Count(50),
        help="Optimizer steps of each loop that are timed, in turns of trainer.log_interval steps: one log line each.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    parser.add_argument("--output", type=str | None, default=None, help="File to write the JSON object to.")
    config = parser.read(arguments)
    if config.steps < 1:
        raise RequestError(f"--steps {config.steps} must be at least 1")
    vocab_size = find_vocab_size(config)
    found = measure(config, vocab_size)
    if config.output:
        write_atomically(Path(config.output), json.dumps(found, indent=2) + "\n")
    if config.json:
        print(json.dumps(found))
    else:
        show(found)


def find_vocab_size(config: Namespace) -> int:
    """The vocabulary that a training of this config would have.

    Raises:
        RequestError: the tokenizer that decides it is still to be made.
    """
    if config.model.decoder.vocab_size:
        return config.model.decoder.vocab_size
    data, prepare = config.data, config.data.prepare
    tokenizer = data.tokenizer or data.path
    if tokenizer and (Path(tokenizer).is_file() or (Path(tokenizer) / "tokenizer.json").exists()):
        return Tokenizer.load(tokenizer).vocab_size
    if prepare is not None and prepare.tokenizer == "bpe":
        return prepare.vocab_size
    if prepare is not None and prepare.tokenizer != "char":
        return Tokenizer.load(prepare.tokenizer).vocab_size
    raise RequestError(
        f"the vocabulary is not known before {tokenizer} is made: make it with `lm data prepare`, or give "
        "--model.decoder.vocab_size"
    )


# ---- a training to be timed ------------------------------------------------------------------------------------------


def measure(config: Namespace, vocab_size: int) -> dict[str, Any]:
    """Train on random tokens as `lm fit` would, on one device, and report the times.

    Args:
        config: as `ConfigParser.read` gives it.
        vocab_size: of the tokens.
    """
    stretch = min(config.steps, config.trainer.log_interval)
    turns = Turns(warmup=WARMUP, stretch=stretch, rounds=config.steps // stretch, checkpoints=CHECKPOINTS)
    interval = config.trainer.checkpoint_interval
    root = Path(config.trainer.default_root_dir)
    # Beside where the runs go, because a checkpoint is timed and the system's temporary folder may lie in memory.
    with tempfile.TemporaryDirectory(prefix=".lm-bench-", dir=root if root.is_dir() else ".") as folder:
        write_random_data(Path(folder) / "data", vocab_size, config.data)
        trainer, module = train(config, turns, Path(folder))
        return report(config, turns, trainer, module, interval)


def write_random_data(folder: Path, vocab_size: int, data: Namespace) -> None:
    """A prepared folder: a tokenizer of this size, and random tokens for two steps, which then come again."""
    (folder / "train").mkdir(parents=True)
    backend = Backend(models.BPE(vocab={END_OF_TEXT: 0} | {f"t{i}": i for i in range(1, vocab_size)}, merges=[]))
    backend.add_special_tokens([END_OF_TEXT])
    tokenizer = Tokenizer(backend.to_str())
    (folder / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
    window = data.seq_len + 1
    count = 2 * max(data.global_batch_tokens or 0, data.micro_batch_size * window) + window
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    ids = np.random.default_rng(0).integers(vocab_size, size=count, dtype=dtype)
    writer = ShardWriter(folder / "train/00000.parquet", dtype, tokenizer.sha256)
    writer.write(ids, np.array([count]))
    shard = {"file": "train/00000.parquet", "size": writer.close(), "row_groups": writer.row_groups}
    manifest = {
        "layout": LAYOUT, "column": COLUMN, "tokenizer": tokenizer.sha256, "vocab_size": vocab_size,
        "splits": {"train": {"shards": [shard]}},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))


def train(config: Namespace, turns: Turns, folder: Path) -> tuple[Trainer, LanguageModule]:
    """Fit on the random tokens with everything that `lm fit` has, and `turns` beside it.

    Raises:
        RunError: a signal came before the end.
    """
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning.fabric", "lm.callbacks.run_folder"):
        logging.getLogger(name).setLevel(logging.WARNING)
    lightning.seed_everything(config.seed_everything)
    sources = dict.fromkeys(("train", "val", "test", "tokenizer", "prepare")) | {"path": str(folder / "data")}
    # The random tokens are one row group, and that must fit.
    buffer = {"shuffle_buffer": max(config.data.shuffle_buffer, ROW_GROUP_TOKENS)}
    data = DataModule(**vars(config.data) | sources | buffer)
    module = LanguageModule(**vars(config.model))
    request = vars(config.trainer) | {
        "max_steps": turns.steps, "max_tokens": None, "devices": 1, "num_nodes": 1,
        "checkpoint_interval": turns.steps + 1,  # those that are timed are all there are
        "default_root_dir": str(folder / "runs"),
    }  # fmt: skip
    callbacks = standard_callbacks(request, RunFolder(None, "bench", ""))
    trainer = Trainer(**request | {"callbacks": [*(request["callbacks"] or []), *callbacks, turns]})
    data.seed = config.seed_everything
    try:
        trainer.fit(module, data)
    except Interrupted as error:
        raise RunError("stopped by a signal before the measurement was done") from error
    return trainer, module


# ---- what was found --------------------------------------------------------------------------------------------------


def report(
    config: Namespace, turns: Turns, trainer: Trainer, module: LanguageModule, checkpoint_interval: int
) -> dict[str, Any]:
    """The JSON object: times in milliseconds, medians all."""
    steps = trainer.steps
    device = device_name(trainer.strategy.root_device)
    peak = peak_flops(device, str(trainer.precision))
    micro_batches = turns.stretch * steps.accumulate

    def speed(turns: list[Stretch]) -> dict[str, Any]:
        micro_batch = statistics.median(turn.seconds for turn in turns) / micro_batches
        rate = steps.micro_batch_size * steps.seq_len / micro_batch
        return {
            "ms_per_micro_batch": micro_batch * 1e3,
            "ms_per_step": micro_batch * steps.accumulate * 1e3,
            "cpu_ms_per_micro_batch": statistics.median(turn.cpu_seconds for turn in turns) / micro_batches * 1e3,
            "tokens_per_second": rate,
            "mfu": rate * module.flops_per_token / peak if peak else None,
        }

    loops = {"lightning": speed(turns.lightning), "plain": speed(turns.plain)}
    ratio, cpu_ratio = overhead(turns.lightning, turns.plain)
    median = {part: statistics.median(seconds) * 1e3 for part, seconds in turns.parts.items()}
    stall = statistics.median(saving.stall_seconds for saving in turns.savings) * 1e3
    facts = run_facts()
    return {
        "config": config.run or config_name(config),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device,
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        "python": facts["python"],
        "versions": facts["versions"],
        "parameters": parameters(module.config)["total"],
        "vocab_size": module.config.vocab_size,
        "seq_len": steps.seq_len,
        "micro_batch_size": steps.micro_batch_size,
        "accumulate": steps.accumulate,
        "tokens_per_step": steps.tokens_per_step,
        "turns": len(turns.lightning),
        "steps_per_turn": turns.stretch,
        **loops,
        "overhead": {
            "ratio": ratio, "ms_per_micro_batch": ratio * loops["plain"]["ms_per_micro_batch"],
            "cpu_time_ratio": cpu_ratio,
        },
        "parts": {
            "data_ms_per_micro_batch": median["data"],
            "forward_ms_per_micro_batch": median["forward"],
            "backward_ms_per_micro_batch": median["backward"],
            "optimizer_ms_per_step": median["optimizer"],
        },
        "peak_memory_bytes": turns.peak_bytes,
        "checkpoint": {
            "stall_ms": stall,
            "total_ms": statistics.median(saving.total_seconds for saving in turns.savings) * 1e3,
            "bytes": turns.savings[-1].bytes,
            "interval_steps": checkpoint_interval,
            "stall_share": stall / (checkpoint_interval * loops["lightning"]["ms_per_step"]),
        },
        "flops_per_token": module.flops_per_token,
        "formulas": FORMULAS,
    }  # fmt: skip


def overhead(lightning: list[Stretch], plain: list[Stretch]) -> tuple[float, float]:
    """How much longer Lightning's turns took, by the clock and in CPU time, as `FORMULAS` says.

    Args:
        lightning: its turns, n.
        plain: the turns before and after each, n + 1.
    """
    around = list(zip(plain, plain[1:], strict=False))
    ratios = (
        [turn[i] / ((before[i] + after[i]) / 2) - 1 for turn, (before, after) in zip(lightning, around, strict=True)]
        for i in range(len(Stretch._fields))
    )
    return tuple(statistics.median(ratio) for ratio in ratios)


def show(found: dict[str, Any]) -> None:
    """The report as tables on standard output."""
    console = Console(highlight=False)
    console.print(
        f"{found['config']}: {format_count(found['parameters'])} parameters, {found['micro_batch_size']} x "
        f"{found['seq_len']} tokens x {found['accumulate']} micro-batches, {found['precision']}; {found['device']}, "
        f"{found['threads']} threads, torch {found['versions']['torch']}"
    )
    table = Table("loop", "ms a micro-batch", "ms a step", "tokens/s", "MFU")
    for name, title in (("lightning", "lm fit"), ("plain", "plain loop")):
        loop = found[name]
        mfu = "unknown" if loop["mfu"] is None else f"{loop['mfu']:.1%}"
        table.add_row(title, f"{loop['ms_per_micro_batch']:.2f}", f"{loop['ms_per_step']:.2f}",
                      format_count(loop["tokens_per_second"]), mfu)
    console.print(table)
    overhead, parts, checkpoint = found["overhead"], found["parts"], found["checkpoint"]
    memory = found["peak_memory_bytes"]
    console.print(
        f"overhead of the loop: {overhead['ratio']:+.1%}, {overhead['ms_per_micro_batch']:+.2f} ms a micro-batch "
        f"({overhead['cpu_time_ratio']:+.1%} in CPU time)"
    )
    console.print(
        f"a micro-batch: data {parts['data_ms_per_micro_batch']:.2f} ms, forward "
        f"{parts['forward_ms_per_micro_batch']:.2f}, backward {parts['backward_ms_per_micro_batch']:.2f}; a step: "
        f"clipping and optimizer {parts['optimizer_ms_per_step']:.2f}"
    )
    console.print(f"peak memory: {'unknown' if memory is None else f'{memory / 2**20:,.0f} MiB'}")
    console.print(
        f"a checkpoint of {checkpoint['bytes'] / 2**20:,.1f} MiB: training waits {checkpoint['stall_ms']:.1f} ms "
        f"({checkpoint['stall_share']:.2%} of the time, every {checkpoint['interval_steps']} steps); on the disk after "
        f"{checkpoint['total_ms']:.0f} ms"
    )
