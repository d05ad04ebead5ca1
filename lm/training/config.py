"""The options of a training, each declared once: a dataclass for every section of a config, and the table of them.

Help, the refusal of unknown names and the parsers read `SECTIONS`. Nothing here imports torch or Lightning, which takes
seconds: so help answers at once.
"""

import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args

from lm.data.config import DataConfig
from lm.errors import RequestError, require, require_at_least
from lm.model.config import ActivationCheckpointing, Attention, Compile, DecoderConfig
from lm.runs.history import refuse_wrong_ranges
from lm.system.units import Count
from lm.training.alerts import AlertEvaluator
from lm.training.builtin_optimizers import OptimizerName

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger

# ---- model -----------------------------------------------------------------------------------------------------------

OURS = ("lr", "weight_decay")  # which `model.optimizer` gives, and its groups


@dataclass
class GroupConfig:
    """Settings of one group of parameters, in place of the optimizer's.

    Args:
        lr: Its peak learning rate.
        weight_decay: Its decay.
    """

    lr: float | None = None
    weight_decay: float | None = None


@dataclass
class GroupsConfig:
    """Settings for groups of parameters; what is not given is the optimizer's own.

    Args:
        matrices: The matrices inside the blocks.
        embedding: The embedding; where it is tied, also the output matrix.
        output: The output matrix, where it is not the embedding.
        norms: All vectors; they are not decayed unless a decay is given here.
    """

    matrices: GroupConfig = field(default_factory=GroupConfig)
    embedding: GroupConfig = field(default_factory=GroupConfig)
    output: GroupConfig = field(default_factory=GroupConfig)
    norms: GroupConfig = field(default_factory=GroupConfig)


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) for all parameters, or Muon for the matrices in the blocks.

    Args:
        name: `adamw`; or `muon`: Muon for the matrices inside the blocks and AdamW for the rest, with updates of one
            size, so that they share learning rate and decay.
        class_path: In place of `name`, one of torch's optimizers or a custom one, such as `torch.optim.SGD`.
        init_args: Arguments of that class, all but lr and weight_decay.
        lr: Peak learning rate.
        betas: AdamW: decay rates of the running means of the gradient and of its square.
        eps: AdamW: added to the denominator.
        momentum: Muon: decay rate of the running mean of the gradient.
        weight_decay: Decoupled decay, on matrices only.
        groups: A learning rate and a decay for a group of parameters: matrices, embedding, output, norms.
    """

    name: OptimizerName = "adamw"
    class_path: str | None = None
    init_args: dict[str, Any] = field(default_factory=dict)
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 0.1
    groups: GroupsConfig = field(default_factory=GroupsConfig)

    def __post_init__(self) -> None:
        require(self.class_path is not None or self.name in get_args(OptimizerName),
                f"model.optimizer.name {self.name!r} is not one of {', '.join(get_args(OptimizerName))}: give "
                "model.optimizer.class_path for a class")  # fmt: skip
        require(self.class_path is not None or not self.init_args,
                "model.optimizer.init_args are for a class: give model.optimizer.class_path")  # fmt: skip
        for name in OURS:
            require(name not in self.init_args, f"model.optimizer.init_args.{name}: give model.optimizer.{name}, which "
                    "schedule and groups begin from")  # fmt: skip
        require(all(0 <= beta < 1 for beta in self.betas), f"model.optimizer.betas {self.betas} must lie in [0, 1)")
        require(self.eps > 0, f"model.optimizer.eps {self.eps} must be above 0")
        require(0 <= self.momentum < 1, f"model.optimizer.momentum {self.momentum} must lie in [0, 1)")
        places = {"": self, **{f"groups.{name}.": group for name, group in vars(self.groups).items()}}
        for place, settings in places.items():
            lr, decay = settings.lr, settings.weight_decay
            require(lr is None or lr > 0, f"model.optimizer.{place}lr {lr} must be above 0")
            require(decay is None or decay >= 0, f"model.optimizer.{place}weight_decay {decay} must not be below 0")

    def left_out(self) -> list[str]:
        """Options of AdamW and Muon that are set, and that the class of `class_path` does not get."""
        given = ("class_path", "init_args", "groups", *OURS)
        options = fields(self) if self.class_path else ()
        return [one.name for one in options if one.name not in given and getattr(self, one.name) != one.default]


@dataclass
class ScheduleConfig:
    """The learning rate over the optimizer steps.

    Args:
        name: Shape after the warm-up; `wsd` is warm-up, stable, decay: constant, then linear down at the end.
        warmup_steps: Steps of linear rise from 0.
        warmup_ratio: In place of warmup_steps: the same as a fraction of the run.
        final_fraction: Fraction of the peak that is left at the end (unused by `constant`).
        decay_steps: `wsd`: length of the fall at the end. `cosine`, `linear`: step at which the fall ends,
            the whole run if not given.
        decay_ratio: In place of decay_steps: the same as a fraction of the run.
        begin_step: Of a branch: the step at which this schedule begins. Lengths and fractions of the run count from it.
        begin_fraction: Of a branch: the fraction of the peak at that step, from which the rate rises in a warm-up;
            without one it is what falls, or stays.
    """

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: Count = Count(0)
    warmup_ratio: float | None = None
    final_fraction: float = 0.1
    decay_steps: Count | None = None
    decay_ratio: float | None = None
    begin_step: Count = Count(0)
    begin_fraction: float = 0.0

    def __post_init__(self) -> None:
        for name in ("final_fraction", "warmup_ratio", "decay_ratio", "begin_fraction"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 1, f"model.schedule.{name} {value} must lie in [0, 1]")
        for name in ("warmup", "decay"):
            steps, ratio = getattr(self, f"{name}_steps"), getattr(self, f"{name}_ratio")
            if steps and ratio is not None:
                raise RequestError(
                    f"model.schedule.{name}_steps {steps} and model.schedule.{name}_ratio {ratio} are two lengths for "
                    f"one thing: leave one out, or set {name}_steps to 0 or {name}_ratio to null"
                )
        if self.begin_fraction and not self.begin_step:
            raise RequestError("model.schedule.begin_fraction is for a branch: give begin_step too, or leave it out")
        if self.name == "wsd" and (self.warmup_ratio or 0) + (self.decay_ratio or 0) > 1:
            raise RequestError(f"model.schedule.warmup_ratio {self.warmup_ratio} and decay_ratio {self.decay_ratio} "
                               "together are more than the whole run")  # fmt: skip


@dataclass
class ModelConfig:
    """The options of `LanguageModule`.

    Args:
        decoder: Shape of the decoder, in Hugging Face's names.
        optimizer: Which optimizer, and its settings.
        schedule: Learning-rate schedule over optimizer steps.
        document_mask: Keep attention inside a document and restart positions at its beginning, the end-of-text token
            before its first one.
        z_loss: Weight of the squared log of the partition function in the training loss; keeps logits from drifting.
        kernels: Our CUDA kernels: `on`, `off`, or `auto`, where they can run.
        compile: What runs a block: `none` is eager mode, `inductor` generates code, `triton_free` traces forward and
            backward pass together and generates none.
        activation_checkpointing: Compute activations again in the backward pass instead of keeping them: `selective`
            those of the MLPs, which are the most; `block` all; `none` of them. Less memory for more time.
        attention: The library's kernel for attention on a GPU; `auto` measures which is the fastest.
        cuda_graphs: Record a micro-batch's forward and backward pass once and replay it; for small models.
    """

    decoder: DecoderConfig  # no default: its `__post_init__` would freeze the fields that follow from others
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    document_mask: bool = False
    z_loss: float = 0.0
    kernels: Literal["auto", "on", "off"] | bool = "auto"
    compile: Compile = "none"
    activation_checkpointing: ActivationCheckpointing = "none"
    attention: Attention = "auto"
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.kernels, bool):  # YAML takes a bare `on` for true
            self.kernels = "on" if self.kernels else "off"


# ---- trainer ---------------------------------------------------------------------------------------------------------

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "fp8-tensorwise", "fp8-rowwise"]
Sharding = Literal["auto", "ddp", "fsdp2", "hsdp"]
YEAR = 365 * 24 * 3600  # seconds


@dataclass
class EarlyStoppingConfig:
    """When to stop before the steps are done.

    Args:
        patience: Validations in a row without progress before the run stops; none: never.
        min_delta: How much lower than after the newest progress the validation loss must be to count as progress.
    """

    patience: int | None = None
    min_delta: float = 0.0


@dataclass
class DistributedConfig:
    """What ranks exchange, and when. What is not given is PyTorch's default.

    Args:
        reduce_dtype: Precision in which gradients are added up over the ranks: `bf16` halves what is sent and rounds;
            `fp32` if not given.
        reshard: FSDP2: whether a block's whole weights are freed between its forward and its backward pass; true if
            not given. False sends a third less and takes the memory of a whole model in the gathered precision.
    """

    reduce_dtype: Literal["fp32", "bf16"] | None = None
    reshard: bool | None = None

    def gathered_blocks(self, blocks: int) -> int:
        """FSDP2: how many of the blocks have their whole weights on a device at once: one is gathered ahead."""
        return blocks if self.reshard is False else min(blocks, 2)


@dataclass
class TrainerConfig:
    """The options of `Trainer`.

    Args:
        max_steps: Optimizer steps of the run; or
        max_tokens: tokens of the run, rounded up to whole steps.
        val_interval: Optimizer steps between validations; the last step is always validated.
        checkpoint_interval: Optimizer steps between checkpoints.
        keep_checkpoints: How many of the newest checkpoints are kept beside the best.
        keep_every: Checkpoints of steps that are multiples of this are taken too, and kept for good; none: none.
        stop_within: Seconds that the run may take after a signal, on a single device. A step that is not done in half
            of them is dropped; after all of them the process ends, and the newest checkpoint is the one to resume from.
            0: as long as it takes.
        log_interval: Optimizer steps between log lines.
        histogram_interval: Optimizer steps between histograms of the weights in TensorBoard; none: no histograms.
        early_stopping: When to stop before the steps are done; off unless a patience is given.
        gradient_clip_val: Largest global norm of the gradient; none: no clipping.
        precision: Number format. A half precision that a CPU does not do well becomes one that it does. The FP8 ones
            multiply the blocks' matrices in FP8 and do the rest as bf16-mixed does, with a scale for each matrix
            (tensorwise) or for each of its rows (rowwise); Ada, Hopper and later.
        fp8_keep: Matrices that FP8 leaves in bf16, as patterns of their names, such as `layers.0.*` or `*.down_proj`;
            those of the last block if not given.
        accelerator: Where to train; `gpu` is CUDA or, on a Mac, MPS.
        devices: How many devices of a node, or which. Under `torchrun` its `--nproc_per_node` counts, under `srun` its
            tasks.
        num_nodes: How many nodes. Under `torchrun` or `srun` its `--nnodes` or `--nodes` counts.
        matmul_precision: How fp32 matrices are multiplied on a GPU: `high` as TF32, which keeps 10 bits of the
            mantissa and is several times faster; `medium` in bf16 where that exists. For precision 32-true.
        peak_tflops: Peak of a device in this precision, for MFU: dense TFLOP/s with fp32 accumulation; that of the
            table of devices if not given.
        strategy: Over several devices: `ddp` has a whole model on each, `fsdp2` a shard, and with `hsdp` the devices of
            a node share a model. `auto` is `ddp`.
        distributed: What devices exchange: reduce_dtype, reshard.
        rank_timeout: Seconds that ranks wait for one another before the run ends; longer than anything that one of
            them does alone, such as an evaluation.
        deterministic: Refuse operations whose result may differ from run to run.
        detect_anomaly: Find the operation that made a NaN; slow.
        profiler: One of Lightning's profilers: `simple` or `advanced`. Its report is a file in the run's folder.
        logger: One or several of Lightning's loggers, beside TensorBoard and `metrics.jsonl`.
        callbacks: More Lightning callbacks.
        default_root_dir: Folder of the runs, on a disk.
        mirror: An object store that has a copy of each run: `s3://bucket/folder`, `gs://...`, `file:///...`. It is
            updated after each checkpoint, in the background. A run that is to be resumed comes from there where the
            folder on the disk is gone or older.
    """

    max_steps: Count | None = None
    max_tokens: Count | None = None
    val_interval: Count = Count(250)
    checkpoint_interval: Count = Count(250)
    keep_checkpoints: int = 1
    keep_every: Count | None = None
    stop_within: float = 15.0
    log_interval: Count = Count(10)
    histogram_interval: Count | None = None
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    gradient_clip_val: float | None = 1.0
    precision: Precision = "32-true"
    fp8_keep: list[str] | None = None
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: int | str | list[int] = "auto"
    num_nodes: int = 1
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    peak_tflops: float | None = None
    strategy: Sharding = "auto"
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    rank_timeout: float = 1800.0
    deterministic: bool = False
    detect_anomaly: bool = False
    profiler: Literal["simple", "advanced"] | None = None
    logger: Union["Logger", list["Logger"], None] = None
    callbacks: list["Callback"] | None = None
    default_root_dir: str = "checkpoints"
    mirror: str | None = None

    def __post_init__(self) -> None:
        whole = ("val_interval", "checkpoint_interval", "log_interval", "histogram_interval", "keep_checkpoints",
                 "keep_every", "num_nodes")  # fmt: skip
        require_at_least(1, "trainer.", **{name: getattr(self, name) for name in whole})
        require_at_least(1, "trainer.early_stopping.", patience=self.early_stopping.patience)
        stop, wait, peak = self.stop_within, self.rank_timeout, self.peak_tflops
        require(0 <= stop <= YEAR, f"trainer.stop_within {stop} is a number of seconds: from 0 to {YEAR:,}")
        require(0 < wait <= YEAR, f"trainer.rank_timeout {wait} is a number of seconds: more than 0, to {YEAR:,}")
        require(peak is None or 0 < peak < math.inf, f"trainer.peak_tflops {peak} must be above 0")


# ---- guards ----------------------------------------------------------------------------------------------------------

Action = Literal["warn", "checkpoint", "stop", "rollback"]


@dataclass
class BudgetConfig:
    """What a run may cost.

    Args:
        cap_usd: US dollars that the run may cost over all its sessions.
        rate_usd_per_hr: What the machine costs, in US dollars an hour.
        max_hours: Hours that the run may take over all its sessions.
        file: A `budget.json` that another program keeps. Its figures count, and where it has none this run's own clock.
        warn_at: Part of the cap, or of the hours, at which a warning is due.
        dry_run: Only report what would be done.
    """

    cap_usd: float | None = None
    rate_usd_per_hr: float | None = None
    max_hours: float | None = None
    file: str | None = None
    warn_at: float = 0.8
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("cap_usd", "rate_usd_per_hr", "max_hours"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, f"guards.budget.{name} {value} must be more than 0")
        require(0 < self.warn_at <= 1,
                f"guards.budget.warn_at {self.warn_at} is a part of the cap: more than 0, at most 1")  # fmt: skip
        require(self.cap_usd is None or self.rate_usd_per_hr is not None or self.file is not None,
                "guards.budget.cap_usd needs guards.budget.rate_usd_per_hr, or a guards.budget.file")  # fmt: skip
        require(not self.dry_run or self.cap_usd is not None or self.max_hours is not None,
                "guards.budget.dry_run needs guards.budget.cap_usd or guards.budget.max_hours")  # fmt: skip

    @property
    def wanted(self) -> bool:
        """Whether a cost is to be counted."""
        return any(value is not None for value in (self.cap_usd, self.rate_usd_per_hr, self.max_hours, self.file))


@dataclass
class ThroughputConfig:
    """How fast training must be.

    Args:
        floor: Tokens a second over all devices; none: no floor.
        patience: Log lines in a row below the floor before something is done.
        action: What is done after the cause is logged; `warn` does nothing more.
    """

    floor: Count | None = None
    patience: int = 3
    action: Literal["warn", "checkpoint", "stop"] = "warn"

    def __post_init__(self) -> None:
        require_at_least(1, "guards.throughput.", floor=self.floor, patience=self.patience)


@dataclass
class GuardsConfig:
    """Guards that watch a run while it trains.

    A guard that stops a run ends it with exit code 3; its reason is in `run.json`, `state.json` and `alerts.jsonl`.

    Args:
        alerts: Conditions over the logged metrics, and the action when one becomes true, such as `loss > 10: stop` or
            `loss > 1.5 * median(loss, 100): rollback`. `warn` reports it; `checkpoint` saves; `stop` ends the run;
            `rollback` returns to the weights of the last good checkpoint and continues with the next samples.
            Windows count log lines before the newest.
            In the warm-up and the first ten log lines a condition does nothing before a line at which it is not true.
        not_finite: When a loss or gradient is NaN or Inf, no weight is changed; then `skip` continues with the next
            step, and `stop` ends the run with a checkpoint.
        max_skipped: This many such steps in a row end the run.
        max_rollbacks: How often a run may roll back; the next rollback ends it.
        budget: What the run may cost.
        throughput: Tokens a second that it must reach.
        spike: The condition of a loss spike, for which a post-mortem is written; none: no spike is looked for.
        inject_step: A drill: five steps of rare tokens from this step on, and a post-mortem of them.
    """

    alerts: dict[str, Action] = field(default_factory=dict)
    not_finite: Literal["skip", "stop"] = "skip"
    max_skipped: int = 10
    max_rollbacks: int = 3
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)
    spike: str | None = "max_loss > 1.3 * median(loss, 9)"  # from the tenth log line on
    inject_step: int | None = None

    def __post_init__(self) -> None:
        AlertEvaluator([*self.alerts, *([self.spike] if self.spike else [])])  # refuses a typo
        require_at_least(1, "guards.", max_skipped=self.max_skipped, inject_step=self.inject_step)
        require_at_least(0, "guards.", max_rollbacks=self.max_rollbacks)

    def harmless(self) -> "GuardsConfig":
        """The same guards without their effects on a run, for a few steps that are only timed."""
        return replace(
            self, alerts=dict.fromkeys(self.alerts, "warn"), not_finite="skip", max_skipped=sys.maxsize,
            budget=BudgetConfig(), throughput=ThroughputConfig(), inject_step=None,
        )  # fmt: skip


# ---- between steps ---------------------------------------------------------------------------------------------------


@dataclass
class SamplesConfig:
    """Texts that the model writes while it learns; none unless prompts are given.

    Args:
        prompts: Texts to continue; an empty one begins a document.
        interval: Optimizer steps between samples; after every validation if not given.
        max_new_tokens: The most tokens that follow a prompt.
        temperature: Logits are divided by it; 0 takes the likeliest token always.
        top_k: Choose among this many of the likeliest tokens; none: among all.
        seed: Of the random numbers, the same at every step; those of the training are not touched.
    """

    prompts: list[str] | None = None
    interval: Count | None = None
    max_new_tokens: Count = Count(32)
    temperature: float = 0.8
    top_k: Count | None = Count(50)
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, "samples.", interval=self.interval, max_new_tokens=self.max_new_tokens, top_k=self.top_k)
        require(0 <= self.temperature < math.inf, f"samples.temperature {self.temperature} must not be below 0")


@dataclass
class EvaluationConfig:
    """Benchmark tasks that the model does while it learns; none unless task files are given.

    Args:
        tasks: Task files: a YAML in the layout of DCLM, a `.jsonl` or `.parquet` of items, or `embedded:sotu`.
        interval: Optimizer steps between evaluations, and one after the last step; after every validation if not given.
        max_items: The most items of a task, the same ones every time.
        num_fewshot: Solved items before each question; as the task files say if not given.
        batch_tokens: The most tokens that go through the model at once.
    """

    tasks: list[str] | None = None
    interval: Count | None = None
    max_items: Count = Count(200)
    num_fewshot: int | None = None
    batch_tokens: Count = Count(16_384)

    def __post_init__(self) -> None:
        require_at_least(1, "evaluation.", interval=self.interval, max_items=self.max_items)
        require_at_least(0, "evaluation.", num_fewshot=self.num_fewshot)
        require_at_least(1, "evaluation.", batch_tokens=self.batch_tokens)


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class RunOptions:
    """What is kept of a run, and done at its end.

    Args:
        tags: Words to find the run by, with `lm runs ls --tag WORD`.
        note: What the run is for.
        on_event: A program and its arguments, started when the run has finished, failed, or was interrupted or stopped
            by a guard; it gets the facts as JSON on its standard input. No shell reads it.
        notify: Addresses that get messages about the run. They come when it starts, when a guard finds something, and
            when it ends. An address is in Apprise's notation, such as `ntfy://topic`. With a level,
            `{url: ntfy://topic, level: warning}`, it gets what is as important or more so: `info`, which is everything,
            `warning` or `error`. `$NAME` in it is read from the environment. `lm plan --config X --test_notify` tries
            all of them. It needs the package apprise.
        expect: Metrics, and the range that each must end in, such as `{val/loss: [3.2, 3.5]}`.
    """

    tags: list[str] = field(default_factory=list)
    note: str | None = None
    on_event: list[str] = field(default_factory=list)
    notify: list[Any] = field(default_factory=list)
    expect: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.on_event and shutil.which(self.on_event[0]) is None:
            raise RequestError(
                f"on_event: no program {self.on_event[0]!r} on PATH; a script needs its path and `chmod +x`"
            )
        refuse_wrong_ranges(self.expect)


# ---- the table -------------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A section of a config. One more with a callback is its dataclass and a row here, the callback, and a line for it
    in `callbacks/standard`."""

    name: str  # of the section; empty for options that are in none
    options: type
    frequent: tuple[str, ...] = ()  # what a first training needs: the short help shows these
    of_callbacks: bool = False  # callbacks take it; the others are the Trainer's, the model's, the data's or the run's


SECTIONS = (
    Section("", RunOptions),
    Section("trainer", TrainerConfig, ("max_steps", "max_tokens", "val_interval", "checkpoint_interval", "precision",
                                       "devices", "strategy")),
    Section("model", ModelConfig, (
        "decoder.hidden_size", "decoder.num_hidden_layers", "decoder.num_attention_heads",
        "decoder.max_position_embeddings", "optimizer.lr", "schedule.warmup_steps", "compile",
    )),
    Section("data", DataConfig, ("path", "prepare.input", "micro_batch_size", "global_batch_tokens", "val_tokens")),
    Section("guards", GuardsConfig, ("alerts", "budget.cap_usd"), of_callbacks=True),
    Section("samples", SamplesConfig, ("prompts",), of_callbacks=True),
    Section("evaluation", EvaluationConfig, ("tasks",), of_callbacks=True),
)  # fmt: skip


def sections_of_callbacks(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that callbacks take, by name; what is not given has its defaults."""
    return {section.name: given.get(section.name) or section.options() for section in SECTIONS if section.of_callbacks}
