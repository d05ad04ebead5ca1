"""`lm profile`: where the time of a training step of a config goes.

A fit is run as `lm fit` would run it, in a folder that is removed. `profile_parts` takes the times, `profile_trace` a
trace of a few steps, `profile_report` says what was found.
"""

import json
import logging
import statistics
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
from jsonargparse import Namespace

from lm.arguments import call
from lm.callbacks.evaluations import EvaluationConfig
from lm.callbacks.run_folder import RunFolder
from lm.callbacks.standard import standard_callbacks
from lm.commands.bench_step import WARMUP, find_vocab_size, write_random_data
from lm.commands.profile_generation import profile_generation
from lm.commands.profile_parts import Parts
from lm.commands.profile_report import FORMULAS, account, describe, show
from lm.commands.profile_trace import Trace
from lm.config_file import config_name, config_parser
from lm.data.datamodule import DataModule
from lm.data.writer import ROW_GROUP_TOKENS
from lm.errors import Interrupted, RequestError, RunError
from lm.module import LanguageModule
from lm.quantities import Count
from lm.trainer import Trainer

TRACE = "trace.json"
VALIDATED = 8  # optimizer steps' worth of tokens that are validated on at most


def profile(arguments: list[str]) -> None:
    """Say where the time of a training step goes: `lm profile --config X [--steps N] [--trace [FILE]] [--json]`; or how
    fast a checkpoint generates: `lm profile --run R [--ckpt_path P] [--prompt T] [--max_new_tokens N] [--json]`.

    Args:
        arguments: what stands after `lm profile`.

    Raises:
        RequestError: the config or the command line is wrong.
        RunError: a signal came before the end.
    """
    given = {argument.partition("=")[0] for argument in arguments}
    if "--run" in given and not given & {"-c", "--config"}:
        call(profile_generation, arguments, prog="lm profile")
        return
    parser = config_parser("lm profile")
    parser.description = (
        "Where the time of a training step of a config goes, on one device, with its data or, where that is not made "
        "yet, random tokens. The run folder is a temporary one. With --run R in place of --config: how fast the run's "
        "checkpoint generates; `lm profile --run R --help` tells the options."
    )
    parser.add_argument("--steps", type=Count, default=Count(30), help="Optimizer steps that are timed; at least 6.")
    parser.add_argument(
        "--trace", type=str | None, default=None, metavar="FILE",
        help=f"Trace a few more steps to this file, {TRACE} if none is given, for Perfetto or chrome://tracing, and "
        "list the most expensive operators. Where the name ends in .gz, it is compressed.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    config = parser.read(_name_trace(arguments))
    if config.steps < 6:
        raise RequestError(f"--steps {config.steps} must be at least 6")
    found = measure(config)
    if config.json:
        print(json.dumps(found))
    else:
        show(found)


def _name_trace(arguments: list[str]) -> list[str]:
    """`--trace` without a file as `--trace=trace.json`."""
    following = [*arguments[1:], "--"]
    return [
        f"--trace={TRACE}" if argument == "--trace" and after.startswith("--") else argument
        for argument, after in zip(arguments, following, strict=True)
    ]


def measure(config: Namespace) -> dict[str, Any]:
    """Fit as `lm fit` would, on one device and in a temporary folder, and report the times.

    Args:
        config: as `ConfigParser.read` gives it, with `steps` and `trace`.

    Raises:
        RequestError: the config is wrong.
        RunError: a signal came before the end.
    """
    first = WARMUP + config.steps // 3  # steps whose parts are not timed
    trace = Trace(config.trace, first + config.steps) if config.trace else None
    last = trace.last if trace else first + config.steps
    parts = Parts(first, lambda step: trace.at_step(step, parts) if trace else None)
    root = Path(config.trainer.default_root_dir)
    # Beside where the runs go, because checkpoints are timed and the system's temporary folder may lie in memory.
    with tempfile.TemporaryDirectory(prefix=".lm-profile-", dir=root if root.is_dir() else ".") as folder:
        data, made = _data(config, Path(folder))
        evaluation = config.evaluation if made else EvaluationConfig()  # there is no text that random tokens are
        trainer = _trainer(config, parts, last + 1, Path(folder), evaluation)
        # The schedule is for a longer run, and its decay may not fit into this one.
        constant = replace(config.model.schedule, name="constant")
        module = LanguageModule(**vars(config.model) | {"schedule": constant})
        try:
            trainer.fit(module, data)
        except Interrupted as error:
            raise RunError("stopped by a signal before the measurement was done") from error
    timed = parts.steps[first : first + config.steps]
    intervals = {
        "logging": config.trainer.log_interval, "checkpoint": config.trainer.checkpoint_interval,
        "validation": config.trainer.val_interval,
    }  # fmt: skip
    return {
        "config": config_name(config),
        **describe(trainer, module),
        "data": "the config's" if made else "random tokens, as the config's is not made yet",
        "steps": config.steps,
        **account(timed, parts.steps[-1], _unseen(config, data), intervals, trainer.log_interval),
        "undisturbed_ms_per_step": statistics.median(times.whole for times in parts.steps[WARMUP:first]) * 1e3,
        "trace": config.trace,
        "operators": trace.operators if trace else None,
        "formulas": FORMULAS,
    }


def _trainer(config: Namespace, parts: Parts, steps: int, folder: Path, evaluation: EvaluationConfig) -> Trainer:
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning.fabric", "lm.callbacks.run_folder"):
        logging.getLogger(name).setLevel(logging.WARNING)
    lightning.seed_everything(config.seed_everything)
    request = vars(config.trainer) | {
        "max_steps": steps, "max_tokens": None, "devices": 1, "num_nodes": 1, "profiler": parts,
        "val_interval": steps,  # the last step has the one validation and is not among the timed ones
        "log_interval": min(config.trainer.log_interval, config.steps // 3),
        "checkpoint_interval": min(config.trainer.checkpoint_interval, config.steps // 3),
        "default_root_dir": str(folder / "runs"),
    }  # fmt: skip
    run_folder = RunFolder(None, "profile", "")
    callbacks = standard_callbacks(request, run_folder, config.guards.harmless(), config.samples, evaluation)
    parts.trainer = Trainer(**request | {"callbacks": [*(request["callbacks"] or []), *callbacks]})
    return parts.trainer


def _data(config: Namespace, folder: Path) -> tuple[DataModule, bool]:
    """The config's data if it is there, else random tokens; and whether it is the config's."""
    wanted = vars(config.data)
    made = wanted["path"] is None or (Path(wanted["path"]) / "manifest.json").exists()
    if not made:
        write_random_data(folder / "data", find_vocab_size(config), config.data)
        wanted |= dict.fromkeys(("train", "val", "test", "tokenizer", "prepare")) | {
            "path": str(folder / "data"),
            "shuffle_buffer": max(config.data.shuffle_buffer, ROW_GROUP_TOKENS),  # the tokens are one row group
        }
    data = DataModule(**wanted | {"val_tokens": _val_tokens(config)})
    data.seed = config.seed_everything
    return data, made


def _val_tokens(config: Namespace) -> int:
    """Tokens that are validated on."""
    data = config.data
    most = VALIDATED * (data.global_batch_tokens or data.micro_batch_size * data.seq_len)
    return min(data.val_tokens or most, most)


def _unseen(config: Namespace, data: DataModule) -> float:
    """How many times as many tokens the validations of a training have."""
    if not data.has_validation:
        return 0.0
    there = int(data.shards["val"].windows(data.seq_len).sum()) * data.seq_len
    return min(config.data.val_tokens or there, there) / min(_val_tokens(config), there)
