"""`lm profile`: where the time of a training step goes, or how fast a checkpoint generates.

A fit is run as `lm fit` would run it, in a folder that is removed. `Parts` takes the times, `Trace` a trace of a few
steps.
"""

import json
import json as jsonlib
import logging
import re
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
import torch.profiler
from jsonargparse import Namespace
from lightning.pytorch.profilers import Profiler
from rich.console import Console
from rich.table import Column, Table
from torch.autograd.profiler import record_function

from lm.cli.bench import WARMUP, find_vocab_size, heading, synchronize, write_random_data
from lm.cli.config import config_name, config_parser
from lm.data.datamodule import DataModule
from lm.data.parquet import ROW_GROUP_TOKENS
from lm.errors import Interrupted, RequestError, RunError
from lm.inference.generation import Sampling, stream
from lm.inference.pretrained import load_pretrained
from lm.kernels.operations import choose_kernels
from lm.model.decoder import Decoder
from lm.model.estimates import parameters
from lm.runs.resume import find_checkpoint
from lm.runs.run import ROOT
from lm.system.arguments import call
from lm.system.hardware import device_name
from lm.system.process import run_facts
from lm.system.units import Count, format_count
from lm.training.callbacks.checkpoints import Checkpoints
from lm.training.callbacks.evaluation import EvaluationConfig
from lm.training.callbacks.run_folder import RunFolder
from lm.training.callbacks.standard import standard_callbacks
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

# ---- profile generation ----------------------------------------------------------------------------------------------
# `lm profile --run R`: how soon a checkpoint writes its first token, and how fast the others follow.

GENERATION_ROUNDS = 5  # after one that is not counted
GENERATION_FORMULAS = {
    "first_token_ms": "from the prompt's ids to the first token: reading the prompt, which fills the cache",
    "tokens_per_second": "of the tokens after the first one, each of which is read alone; one prompt at a time",
}


def profile_generation(
    run: str = "",
    ckpt_path: str | None = None,
    prompt: str = "",
    max_new_tokens: Count = Count(128),
    json: bool = False,
) -> None:
    """Time the generation of a checkpoint's tokens, the likeliest ones, with weights as they are stored.

    Args:
        run: Name of the run.
        ckpt_path: `best`, `last` or a checkpoint folder; the best if not given.
        prompt: What to go on from; the beginning of a document if not given.
        max_new_tokens: How many tokens; fewer where the context is full.
        json: Print one JSON object instead of text.
    """
    path, _ = find_checkpoint(ckpt_path, run, str(ROOT), named=True, command="profile")
    found = measure_generation(path, prompt, max_new_tokens)
    print(jsonlib.dumps(found)) if json else show_generation(found)


def measure_generation(path: Path, prompt: str, max_new_tokens: int) -> dict[str, Any]:
    """Times of the generation, medians.

    Args:
        path: a checkpoint folder.
        prompt: a text.
        max_new_tokens: the most tokens that follow it.

    Raises:
        RequestError: the prompt leaves no room in the context, or there is nothing to generate.
    """
    model = load_pretrained(path)
    ids = model.tokenizer.encode(prompt) or [model.tokenizer.eos_id]
    rounds = [_generate(model.decoder, ids, max_new_tokens) for _ in range(1 + GENERATION_ROUNDS)][1:]
    first = statistics.median(times[0] for times in rounds)
    tokens = len(rounds[0])
    rest = statistics.median(times[-1] - times[0] for times in rounds) if tokens > 1 else None
    return {
        "checkpoint": str(path),
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": model.kernels,
        "prompt_tokens": len(ids),
        "new_tokens": tokens,
        "rounds": GENERATION_ROUNDS,
        "first_token_ms": first * 1e3,
        "tokens_per_second": (tokens - 1) / rest if rest else None,
        "formulas": GENERATION_FORMULAS,
    }


def _generate(decoder: Decoder, prompt: list[int], max_new_tokens: int) -> list[float]:
    """Seconds from the start to each new token; every token is waited for, as the next one follows from it."""
    began = time.perf_counter()
    tokens = stream(decoder, [prompt], max_new_tokens=max_new_tokens, sampling=Sampling(temperature=0))
    return [time.perf_counter() - began for _ in tokens]


def show_generation(found: dict[str, Any]) -> None:
    """The report on standard output."""
    rate = found["tokens_per_second"]
    console = Console(highlight=False)
    console.print(f"{found['checkpoint']}, {found['dtype']}; {found['device']}, {found['threads']} threads")
    console.print(f"the first token: {found['first_token_ms']:.1f} ms after {found['prompt_tokens']} tokens of prompt")
    if rate is not None:
        console.print(
            f"then {format_count(rate)} tokens/s, {1e3 / rate:.2f} ms each, over {found['new_tokens'] - 1} tokens"
        )


# ---- profile parts ---------------------------------------------------------------------------------------------------
# Where the time of a training step goes: Lightning's spans, each moment of a fit given to one part of the step.
#
# `profile` runs the fit and says what was found.

# The name of a span, after its last dot -> the part of a step. Spans nest: a training step is a whole optimizer step,
# with the micro-batches in it. What is in no span, or in one that is not here, is the part around it; in none at all it
# is the rest: the loop's own work.
SPANS = {
    "train_dataloader_next": "data",
    "batch_to_device": "data",
    "training_step": "optimizer",
    "forward_backward": "forward",
    "manual_backward": "backward",
}
PARTS = ("data", "forward", "backward", "optimizer", "logging", "checkpoint", "validation", "rest")
RANGE = "lm."  # begins the names of the parts in a trace


class Label(NamedTuple):
    """What a moment of a training was spent on."""

    part: str
    callback: str | None = None  # whose hook it was


REST = Label("rest")
SAVING = Label("checkpoint")


class StepTimes(NamedTuple):
    """Where the time of one optimizer step went, with all that followed before the next one."""

    step: int
    seconds: dict[Label, float]  # each moment once
    whole: float  # seconds on the clock, from one end of a step to the next

    def part(self, part: str) -> float:
        """Seconds of one part, the hooks of all callbacks together."""
        return sum(seconds for label, seconds in self.seconds.items() if label.part == part)

    @property
    def saved(self) -> bool:
        """Whether it was followed by a checkpoint."""
        return SAVING in self.seconds


class Parts(Profiler):
    """Follows Lightning's spans and adds up seconds by part, step by step.

    The device is waited for wherever one part ends and another begins, or its work would count where it is waited for
    by chance.

    Args:
        borders_from: the optimizer step after which that is so; up to there it is waited for at the ends of steps.
        at_step: called with each optimizer step when it has ended, between two steps.

    Attributes:
        trainer: whose spans these are; to be set before the fit.
        steps: the finished steps, in order.
        tracing: whether the parts are marked for a running torch profiler.
    """

    trainer: "Trainer"

    def __init__(self, borders_from: int, at_step: Callable[[int], None]) -> None:
        super().__init__()
        self.steps: list[StepTimes] = []
        self.tracing = False
        self._borders_from = borders_from
        self._at_step = at_step
        self._spans: list[tuple[Label, record_function | None]] = []  # those that are open, outermost first
        self._now: Label | None = None  # None: in no span
        self._since = self._step_since = time.perf_counter()
        self._seconds: dict[Label, float] = defaultdict(float)

    def start(self, action_name: str) -> None:
        """A span begins."""
        hook = action_name.rpartition(".")[2]
        if hook in ("train_dataloader_next", "on_train_epoch_end"):
            self._end_step()
        label = self._label(action_name, hook)
        mark = None
        if self.tracing and label not in (None, self._now):
            mark = record_function(RANGE + label.part)
            mark.__enter__()
        self._spans.append((label, mark))
        self._cross(label)

    def stop(self, action_name: str) -> None:
        """The innermost span ends."""
        _, mark = self._spans.pop()
        self._cross(self._spans[-1][0] if self._spans else None)
        if mark is not None:
            mark.__exit__(None, None, None)

    def watch(self, module: LanguageModule) -> None:
        """Have the forward and the backward pass be spans, too; Lightning knows the whole step only."""
        for name in ("forward_backward", "manual_backward"):
            setattr(module, name, self._spanned(name, getattr(module, name)))

    def _spanned(self, name: str, method: Callable) -> Callable:
        def call(*args: Any) -> Any:
            with self.profile(name):
                return method(*args)

        return call

    def _label(self, action: str, hook: str) -> Label | None:
        """What a span inside the innermost open one is spent on."""
        around = self._now
        if hook == "save_checkpoint":
            return SAVING
        if around is not None and (around == SAVING or around.callback):
            return around
        name = re.match(r"\[Callback\](\w+)", action)
        if name and name[1] == Checkpoints.__name__:
            return Label("checkpoint", name[1])
        if self.trainer.validating:
            return Label("validation", name[1] if name else None)
        if name:
            return Label("logging", name[1])
        return Label(SPANS[hook]) if hook in SPANS else around

    def _cross(self, label: Label | None) -> None:
        """From here on time is spent on `label`."""
        if label == self._now:
            return
        if self._step > self._borders_from:
            synchronize(self.trainer.strategy.root_device)
        now = time.perf_counter()
        spent = self._now or (Label("validation") if self.trainer.validating else REST)
        self._seconds[spent] += now - self._since
        self._since, self._now = now, label

    @property
    def _step(self) -> int:
        """The optimizer step that is under way."""
        return (self.steps[-1].step if self.steps else 0) + 1

    def _end_step(self) -> None:
        if self.trainer.global_step < self._step:
            return  # in the middle of an accumulation
        synchronize(self.trainer.strategy.root_device)
        now = time.perf_counter()
        self._seconds[self._now or REST] += now - self._since
        self.steps.append(StepTimes(self._step, dict(self._seconds), now - self._step_since))
        self._seconds.clear()
        self._at_step(self.steps[-1].step)
        self._since = self._step_since = time.perf_counter()


# ---- profile report --------------------------------------------------------------------------------------------------
# What `lm profile` found: the parts of a step from the times of many, as one JSON object and as tables.

FORMULAS = {
    "parts": "mean over the middle half, by time, of the steps that no log line and no checkpoint follows, plus "
    "each_ms / interval_steps",
    "each_ms": "median over the steps where it happens, less that mean",
    "validation": "each_ms / interval_steps; of its batches some were run, and their time scaled to all",
    "ms_per_step": "the same of whole steps, by the clock",
    "share": "of the sum of all parts",
    "mean_ms_per_step": "of all timed steps as they were, with the log lines and checkpoints among them",
    "undisturbed_ms_per_step": "median of whole steps where the device is waited for only at their ends",
}
TITLES = {
    "data": "waiting for data", "forward": "forward pass", "backward": "backward pass",
    "optimizer": "clipping and optimizer", "logging": "log lines and other callbacks",
    "checkpoint": "waiting for checkpoints", "validation": "validation", "rest": "the rest of the loop",
}  # fmt: skip


def describe(trainer: Trainer, module: LanguageModule) -> dict[str, Any]:
    """What was run, and on what."""
    steps, device = trainer.steps, trainer.strategy.root_device
    facts = run_facts()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device_name(device),
        "accelerator": device.type,
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        "compile": module.compile_mode,
        "kernels": choose_kernels(module.kernels, device)[1],
        "cuda_graphs": module.cuda_graphs,
        "attention": module.attention_kernels,
        "python": facts["python"],
        "versions": facts["versions"],
        "parameters": parameters(module.config)["total"],
        "seq_len": steps.seq_len,
        "micro_batch_size": steps.micro_batch_size,
        "accumulate": steps.accumulate,
        "tokens_per_step": steps.tokens_per_step,
    }


def account(
    timed: list[StepTimes], validated: StepTimes, unseen: float, intervals: dict[str, int], log_interval: int
) -> dict[str, Any]:
    """The parts of a step, in milliseconds, as `FORMULAS` says.

    Args:
        timed: steps that no validation follows.
        validated: one that a validation follows, if there is validation data.
        unseen: how many times as long the batches of a whole validation take.
        intervals: optimizer steps between the log lines (`logging`), checkpoints and validations of the config.
        log_interval: and between the log lines among the timed steps.
    """
    happens: dict[str, Callable[[StepTimes], bool]] = {
        "logging": lambda times: times.step % log_interval == 0,
        "checkpoint": lambda times: times.saved,
    }
    usual = timed
    for event in happens.values():
        usual = [times for times in usual if not event(times)] or usual  # or it follows every step
    # Not medians: those of the parts would not add up to that of the whole.
    quarter = len(usual) // 4
    middle = sorted(usual, key=lambda times: times.whole)[quarter : len(usual) - quarter]
    parts = {part: {"ms_per_step": _mean(times.part(part) for times in middle)} for part in PARTS}
    whole = _mean(times.whole for times in middle)
    for part, event in happens.items():
        times_of_event = [times.part(part) * 1e3 for times in timed if event(times)]
        each = statistics.median(times_of_event) - parts[part]["ms_per_step"] if times_of_event else 0.0
        parts[part] |= {"each_ms": each, "interval_steps": intervals[part]}
        parts[part]["ms_per_step"] += each / intervals[part]
        whole += each / intervals[part]
    each = sum(seconds * (1 if label.callback else unseen) * 1e3
               for label, seconds in validated.seconds.items() if label.part == "validation")
    parts["validation"] = {
        "ms_per_step": each / intervals["validation"], "each_ms": each, "interval_steps": intervals["validation"],
    }  # fmt: skip
    whole += each / intervals["validation"]
    total = sum(part["ms_per_step"] for part in parts.values())
    for part in parts.values():
        part["share"] = part["ms_per_step"] / total
    return {
        "ms_per_step": whole, "sum_ms": total, "mean_ms_per_step": _mean(times.whole for times in timed),
        "parts": parts, "callbacks": _callbacks(timed),
    }  # fmt: skip


def _callbacks(timed: list[StepTimes]) -> dict[str, float]:
    """Mean milliseconds a step of each callback's hooks, the slowest first."""
    names = {label.callback for times in timed for label in times.seconds if label.part == "logging"}
    mean = {name: _mean(times.seconds.get(Label("logging", name), 0.0) for times in timed) for name in names}
    return dict(sorted(mean.items(), key=lambda item: -item[1]))


def _mean(seconds: Iterable[float]) -> float:
    """In milliseconds."""
    return statistics.mean(seconds) * 1e3


def show(found: dict[str, Any]) -> None:
    """The report as tables on standard output."""
    console = Console(highlight=False)
    measured, computed = heading(found)
    console.print(measured)
    console.print(f"{computed}; data: {found['data']}")
    table = Table("part of a step", "ms", "share", "each time", "every")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, part in found["parts"].items():
        title = TITLES[name]
        if found["cuda_graphs"] and name == "forward":
            title = "forward and backward pass, replayed"
        each = f"{part['each_ms']:.1f} ms" if part.get("each_ms") else ""
        every = f"{part['interval_steps']} steps" if part.get("each_ms") else ""
        table.add_row(title, f"{part['ms_per_step']:.2f}", f"{part['share']:.1%}", each, every)
    table.add_section()
    table.add_row("all of them", f"{found['sum_ms']:.2f}", "100.0%")
    console.print(table)
    rate = found["tokens_per_step"] / found["ms_per_step"] * 1e3
    slowest = ", ".join(f"{name} {ms:.2f} ms" for name, ms in list(found["callbacks"].items())[:3])
    console.print(f"a step by the clock: {found['ms_per_step']:.2f} ms, {format_count(rate)} tokens/s")
    console.print(f"the slowest callbacks, a step: {slowest}")
    if found["operators"]:
        _show_operators(console, found)
    if found["accelerator"] == "cpu":
        console.print("on a CPU that others use, too, the shares are what counts, not the milliseconds")
    else:
        console.print(
            "the device was waited for between the parts, so that each has its own work; without that a step takes "
            f"{found['undisturbed_ms_per_step']:.2f} ms"
        )


def _show_operators(console: Console, found: dict[str, Any]) -> None:
    where = "on the CPU" if found["accelerator"] == "cpu" else "on the device"
    table = Table(Column("operator", overflow="fold"), "calls a step", "ms a step", f"share {where}")
    for column in table.columns[1:]:
        column.justify = "right"
    for operator in found["operators"]:
        table.add_row(operator["name"], f"{operator['calls_per_step']:.0f}", f"{operator['ms_per_step']:.2f}",
                      f"{operator['share']:.1%}")  # fmt: skip
    console.print(table)
    console.print(f"trace: {found['trace']}, for https://ui.perfetto.dev or chrome://tracing")


# ---- profile trace ---------------------------------------------------------------------------------------------------
# A few steps under torch's profiler: a trace for `chrome://tracing` or Perfetto, and the most expensive operators.

TRACE_WARMUP, TRACED = 1, 3  # optimizer steps: the first one under a profiler is slower
OPERATORS = 10


class Trace:
    """Traces the steps after `begin`.

    Args:
        path: file of the trace; one that ends in `.gz` is compressed.
        begin: the optimizer step after which the profiler runs.

    Attributes:
        operators: the most expensive ones, `name`, `calls_per_step`, `ms_per_step` and `share` of all.
        last: the optimizer step that has to be taken.

    Raises:
        RequestError: the file's folder is not there.
    """

    def __init__(self, path: str, begin: int) -> None:
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir() or self.path.is_dir():
            raise RequestError(f"--trace {path}: give a file in a folder that is there")
        self.operators: list[dict[str, Any]] = []
        self._begin, self.last = begin, begin + TRACE_WARMUP + TRACED
        self._profiler: torch.profiler.profile | None = None

    def at_step(self, step: int, parts: Parts) -> None:
        """Start, count and stop; to be called between two steps."""
        if step == self._begin:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            plan = torch.profiler.schedule(wait=0, warmup=TRACE_WARMUP, active=TRACED, repeat=1)
            self._profiler = torch.profiler.profile(activities=activities, schedule=plan, on_trace_ready=self._keep)
            self._profiler.start()
            parts.tracing = True
        elif self._profiler is not None:
            self._profiler.step()
            if step == self.last:
                parts.tracing = False
                self._profiler.stop()
                self._profiler = None

    def _keep(self, profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(self.path))
        entries = [entry for entry in profiler.key_averages() if not entry.is_user_annotation]
        entries = [entry for entry in entries if not entry.key.startswith((RANGE, "ProfilerStep"))]
        on_device = any(entry.self_device_time_total for entry in entries)
        if on_device:  # the operators alone: the kernels that they started have entries of their own, too
            entries = [entry for entry in entries if entry.device_type.name == "CPU"]
        cost = {id(entry): entry.self_device_time_total if on_device else entry.self_cpu_time_total
                for entry in entries}  # microseconds without those of the operators inside
        whole = sum(cost.values())
        for entry in sorted(entries, key=lambda entry: -cost[id(entry)])[:OPERATORS]:
            self.operators.append({
                "name": entry.key, "calls_per_step": entry.count / TRACED,
                "ms_per_step": cost[id(entry)] / 1e3 / TRACED, "share": cost[id(entry)] / whole,
            })  # fmt: skip


# ---- profile ---------------------------------------------------------------------------------------------------------
# `lm profile`: where the time of a training step of a config goes.

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
        parts.watch(module)
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
    for name in ("lightning.pytorch", "lightning.fabric", "lm.training.callbacks.run_folder"):
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
