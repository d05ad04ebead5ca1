"""`lm bench step`: what a training step of a config takes on this machine, and what the loop around it adds.

Here a config becomes a training on random tokens; `step_loops` does the timing, `step_report` says what was found, and
`step_modes` has it done for each way to run a step.
"""

import json
import logging
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
from jsonargparse import Namespace
from tokenizers import Tokenizer as Backend
from tokenizers import models

from lm.arguments import spell_out
from lm.callbacks.evaluations import EvaluationConfig
from lm.callbacks.run_folder import RunFolder
from lm.callbacks.samples import SamplesConfig
from lm.callbacks.standard import standard_callbacks
from lm.commands.step_loops import Turns
from lm.commands.step_modes import measure_modes, parse_modes, show_modes
from lm.commands.step_report import report, show
from lm.config_file import config_parser
from lm.data.datamodule import DataModule
from lm.data.pages import LAYOUT
from lm.data.tokenizer import END_OF_TEXT, Tokenizer
from lm.data.writer import COLUMN, ROW_GROUP_TOKENS, ShardWriter
from lm.errors import Interrupted, RequestError, RunError
from lm.module import LanguageModule
from lm.quantities import Count
from lm.runs import write_atomically
from lm.trainer import Trainer

WARMUP = 5  # optimizer steps: more than the micro-batches after which a CUDA graph is recorded
CHECKPOINTS = 3


def step(arguments: list[str]) -> None:
    """Time a training step: `lm bench step --config X [--steps N] [--modes M ...] [--json] [--output FILE]`.

    Args:
        arguments: what stands after `lm bench step`.

    Raises:
        RequestError: the config or the command line is wrong.
        RunError: a signal came before the end.
    """
    parser = config_parser("lm bench step")
    parser.description = "Time a training step of a config on one device, with random tokens, and its checkpoints."
    parser.add_argument(
        "--steps", type=Count, default=Count(50),
        help="Optimizer steps of each loop that are timed, in turns of trainer.log_interval steps: one log line each.",
    )  # fmt: skip
    parser.add_argument(
        "--modes", type=list[str], default=[],
        help="Ways to run a step, to be compared: none, inductor, triton_free, each also +graphs, each also /on or "
        "/off for our kernels; or all. Not given: as the config has it.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    parser.add_argument("--output", type=Path | None, default=None, help="File to write the JSON object to.")
    arguments = spell_out(arguments, lists=("modes",))
    config = parser.read(arguments)
    if config.steps < 1:
        raise RequestError(f"--steps {config.steps} must be at least 1")
    vocab_size = find_vocab_size(config)
    modes = parse_modes(config.modes)
    if modes:
        others = [argument for argument in arguments if not argument.startswith("--modes=")]
        found = measure_modes(modes, others, config.output)
    else:
        found = measure(config, vocab_size)
        if config.output:
            write_atomically(config.output, json.dumps(found, indent=2) + "\n")
    if config.json:
        print(json.dumps(found))
    else:
        (show_modes if modes else show)(found)


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
    # These few steps are not the run that the schedule is for, and its decay may not fit into them.
    schedule = replace(config.model.schedule, name="constant")
    module = LanguageModule(**vars(config.model) | {"schedule": schedule})
    request = vars(config.trainer) | {
        "max_steps": turns.steps, "max_tokens": None, "devices": 1, "num_nodes": 1,
        "checkpoint_interval": turns.steps + 1,  # those that are timed are all there are
        "default_root_dir": str(folder / "runs"),
    }  # fmt: skip
    callbacks = standard_callbacks(  # no samples and no tasks: there is no text that these tokens are
        request, RunFolder(None, "bench", ""), config.guards.harmless(), SamplesConfig(), EvaluationConfig()
    )
    trainer = Trainer(**request | {"callbacks": [*(request["callbacks"] or []), *callbacks, turns]})
    data.seed = config.seed_everything
    try:
        trainer.fit(module, data)
    except Interrupted as error:
        raise RunError("stopped by a signal before the measurement was done") from error
    return trainer, module
