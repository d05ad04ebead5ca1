"""The options of a training, each declared once: a dataclass for every section of a config, and the table of them.

Help, the refusal of unknown names and the parsers read `SECTIONS`. Nothing here imports torch or Lightning, which takes
seconds: so help answers at once.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

from lm.data.config import DataConfig
from lm.errors import RequestError, require, require_at_least
from lm.model.config import ActivationCheckpointing, Attention, Compile, DecoderConfig
from lm.system.files import check_local_path
from lm.system.units import Count
from lm.training.builtin_optimizers import OptimizerName

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger

# ---- model -----------------------------------------------------------------------------------------------------------

MAX_LR = 1.0  # of AdamW and Muon, whose updates are about as large as the rate, whatever the gradient
OURS = ("lr", "weight_decay")  # set by `model.optimizer` and its groups, not by `init_args`


@dataclass
class GroupConfig:
    """Settings of one group of parameters, in place of the optimizer's.

    Args:
        lr: Peak learning rate.
        lr_ratio: Where lr is not given: a multiple of the optimizer's, so that it follows when that changes.
        weight_decay: Weight decay.
    """

    lr: float | None = None
    weight_decay: float | None = None
    lr_ratio: float | None = None

    def peak_lr(self, optimizer_lr: float) -> float:
        """The peak learning rate of the group, where the optimizer's is this."""
        return self.lr if self.lr is not None else optimizer_lr * (1.0 if self.lr_ratio is None else self.lr_ratio)


@dataclass
class GroupsConfig:
    """Settings for groups of parameters; the optimizer's own are the default.

    Args:
        matrices: The weight matrices inside the blocks.
        embedding: The embedding matrix; if tied, this is also the output matrix.
        output: The output matrix, if it is not tied to the embedding.
        norms: All vectors, such as norm weights; without weight decay unless it is given here.
    """

    matrices: GroupConfig = field(default_factory=GroupConfig)
    embedding: GroupConfig = field(default_factory=GroupConfig)
    output: GroupConfig = field(default_factory=GroupConfig)
    norms: GroupConfig = field(default_factory=GroupConfig)


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) for all parameters, or Muon for the matrices in the blocks.

    Args:
        name: `adamw`; or `muon`: Muon for the matrices inside the blocks and AdamW for the rest. Muon's updates are
            scaled to the size of AdamW's, so both use the same learning rate and weight decay.
        class_path: Instead of `name`: the class of another optimizer, such as `torch.optim.SGD`.
        init_args: Arguments of that class, except lr and weight_decay.
        lr: Peak learning rate.
        betas: AdamW: decay rates of the running means of the gradient and of its square.
        eps: AdamW: term added to the denominator.
        momentum: Muon: decay rate of the running mean of the gradient.
        weight_decay: Decoupled weight decay, of matrices only.
        groups: Learning rate and weight decay per group of parameters: matrices, embedding, output, norms.
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
        require(
            self.class_path is not None or not self.init_args,
            "model.optimizer.init_args are for a class: give model.optimizer.class_path",
        )
        require(
            self.class_path is None or "." in self.class_path,
            f"model.optimizer.class_path {self.class_path}: give the module too, such as torch.optim.SGD",
        )
        of_class = ("name", "class_path", "init_args", "groups", *OURS)
        others = [option.name for option in fields(self) if getattr(self, option.name) != option.default]
        others = [name for name in others if self.class_path and name not in of_class]
        require(
            not others,
            f"model.optimizer: {' and '.join(others)} of the built-in optimizers: leave them out of the config; "
            f"arguments of {self.class_path} stand in model.optimizer.init_args",
        )
        for name in OURS:
            require(
                name not in self.init_args,
                f"model.optimizer.init_args.{name}: give model.optimizer.{name}, which schedule and groups begin from",
            )
        numbers = ("lr", "eps", "momentum", "weight_decay")
        require_at_least(0, "model.optimizer.", **{name: getattr(self, name) for name in numbers})
        require(
            self.class_path is not None or self.lr <= MAX_LR,
            f"model.optimizer.lr {self.lr:g} is above {MAX_LR}, where {self.name} learns nothing: rates are about 1e-3",
        )


@dataclass
class ScheduleConfig:
    """Learning-rate schedule over optimizer steps.

    Args:
        name: Shape after the warm-up; `wsd` (warm-up, stable, decay) is constant, then decays linearly at the end.
        warmup_steps: Steps over which the learning rate rises linearly from 0.
        warmup_ratio: Instead of warmup_steps: a fraction of the run.
        final_fraction: Final learning rate, as a fraction of the peak (not used by `constant`).
        decay_steps: `wsd`: steps of the decay at the end. `cosine`, `linear`: the step at which the decay ends; the
            last step of the run if not given.
        decay_ratio: Instead of decay_steps: a fraction of the run.
        begin_step: Of a branch: the step at which this schedule begins. Lengths and fractions are counted from it.
        begin_fraction: Of a branch: the learning rate at that step, as a fraction of the peak. A warm-up rises from
            it; without a warm-up, it is the value that stays constant or decays.
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
        counts = ("warmup_steps", "decay_steps", "begin_step")
        require_at_least(0, "model.schedule.", **{name: getattr(self, name) for name in counts})
        for name in ("warmup", "decay"):
            steps, ratio = getattr(self, f"{name}_steps"), getattr(self, f"{name}_ratio")
            if steps and ratio is not None:
                raise RequestError(
                    f"model.schedule.{name}_steps {steps} and model.schedule.{name}_ratio {ratio} are two lengths for "
                    f"one thing: leave one out, or set {name}_steps to 0 or {name}_ratio to null"
                )
        if self.name == "wsd" and (self.warmup_ratio or 0) + (self.decay_ratio or 0) > 1:
            raise RequestError(
                f"model.schedule.warmup_ratio {self.warmup_ratio} and decay_ratio {self.decay_ratio} are together more "
                f"than the whole run: --model.schedule.decay_ratio {1 - (self.warmup_ratio or 0):.3g} is the most"
            )


@dataclass
class ModelConfig:
    """The options of `LanguageModule`.

    Args:
        decoder: Shape of the decoder, in Hugging Face's names.
        optimizer: Optimizer and its settings.
        schedule: Learning-rate schedule over optimizer steps.
        document_mask: Restrict attention to tokens of the same document, and restart positions at each document. A
            document begins with the end-of-text token before it.
        kernels: This project's CUDA kernels: `on`, `off`, or `auto`: on where they can run.
        compile: How blocks run: `none` is eager mode, `inductor` compiles them, `triton_free` traces forward and
            backward pass together without generating code.
        activation_checkpointing: Recompute activations in the backward pass instead of storing them, which takes less
            memory and more time: `selective`, of the MLPs; `block`, of whole blocks; `none`.
        attention: Library kernel for attention on a GPU; `auto` takes the usually fastest one for the device.
    """

    decoder: DecoderConfig  # no default: its `__post_init__` would freeze the fields that follow from others
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    document_mask: bool = False
    kernels: Literal["auto", "on", "off"] | bool = "auto"
    compile: Compile = "none"
    activation_checkpointing: ActivationCheckpointing = "none"
    attention: Attention = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.kernels, bool):  # YAML takes a bare `on` for true
            self.kernels = "on" if self.kernels else "off"


# ---- trainer ---------------------------------------------------------------------------------------------------------

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "fp8-tensorwise", "fp8-rowwise"]
Sharding = Literal["auto", "ddp", "fsdp2"]


@dataclass
class EarlyStoppingConfig:
    """When to stop before the steps are done.

    Args:
        patience: Stop after this many validations in a row without improvement; none: never.
        min_delta: Smallest decrease of the validation loss that counts as improvement.
    """

    patience: int | None = None
    min_delta: float = 0.0


@dataclass
class DistributedConfig:
    """What ranks exchange.

    Args:
        reduce_dtype: Precision in which gradients are reduced over the ranks; `fp32` if not given. `bf16` halves the
            communication, with rounding.
    """

    reduce_dtype: Literal["fp32", "bf16"] | None = None


@dataclass
class TrainerConfig:
    """The options of `Trainer`.

    Args:
        max_steps: Length of the run in optimizer steps.
        max_tokens: Length of the run in tokens, rounded up to whole steps, in place of `max_steps`.
        max_epochs: A limit: a run that would read its data, or a source of it, more often is an error at the start.
        val_interval: Optimizer steps between validations; the last step is always validated.
        checkpoint_interval: Optimizer steps between checkpoints.
        keep_checkpoints: Number of newest checkpoints to keep, in addition to the best one.
        keep_every: Also save a checkpoint at every multiple of this step, and never delete it; none: do not.
        stop_within: Seconds that the run may take to stop after a signal, on a single device; 0: no limit. A step that
            takes longer than half of them is dropped. After all of them the process ends, and the run resumes from its
            newest checkpoint.
        log_interval: Optimizer steps between log lines.
        bigram_init: Begin a new run with an embedding and output matrix made from how often each token of its data
            follows each other one, instead of random ones; it helps short runs. Not for tied embeddings or custom
            models. Takes 12 bytes of memory for each pair of tokens of the vocabulary (8,192 tokens: 0.8 GB).
        early_stopping: When to stop before the last step; off unless a patience is given.
        gradient_clip_val: Largest global norm of the gradient; none: no clipping.
        precision: Number format. A half precision that is slow on this CPU is replaced by one that is not. The FP8
            formats multiply the blocks' matrices in FP8 and the rest as bf16-mixed, with one scale per matrix
            (tensorwise) or per row (rowwise), but those of the last block; they need an Ada, Hopper or newer GPU.
        accelerator: Where to train; `gpu` is CUDA or, on a Mac, MPS.
        devices: Number of devices per node, or a list of them. `torchrun` sets it by `--nproc_per_node`, `srun` by its
            tasks.
        num_nodes: Number of nodes. `torchrun` sets it by `--nnodes`, `srun` by `--nodes`.
        matmul_precision: Precision of fp32 matrix products on a GPU, for precision 32-true: `high` is TF32, with 10
            bits of mantissa and several times faster; `medium` is bf16 where available.
        peak_tflops: Peak of one device in this precision, for MFU: dense TFLOP/s with fp32 accumulation; the known
            value of the device if not given.
        strategy: On several devices: `ddp` replicates the model, `fsdp2` shards it over all devices. `auto` is `ddp`.
        distributed: What devices exchange: reduce_dtype.
        rank_timeout: Seconds that ranks wait for one another before the run ends; must be longer than anything that
            one rank does alone, such as an evaluation.
        deterministic: Use only deterministic operations, and fail where there is none.
        logger: One or several of Lightning's loggers, in addition to TensorBoard and `metrics.jsonl`.
        callbacks: Additional Lightning callbacks.
        default_root_dir: Folder of the runs, on a local disk.
    """

    max_steps: Count | None = None
    max_tokens: Count | None = None
    max_epochs: float | None = None
    val_interval: Count = Count(250)
    checkpoint_interval: Count = Count(250)
    keep_checkpoints: int = 1
    keep_every: Count | None = None
    stop_within: float = 15.0
    log_interval: Count = Count(10)
    bigram_init: bool = False
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    gradient_clip_val: float | None = 1.0
    precision: Precision = "32-true"
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: int | str | list[int] = "auto"
    num_nodes: int = 1
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    peak_tflops: float | None = None
    strategy: Sharding = "auto"
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    rank_timeout: float = 1800.0
    deterministic: bool = False
    logger: Union["Logger", list["Logger"], None] = None
    callbacks: list["Callback"] | None = None
    default_root_dir: str = "checkpoints"

    def __post_init__(self) -> None:
        counts = ("val_interval", "checkpoint_interval", "log_interval", "keep_checkpoints", "keep_every", "num_nodes")
        require_at_least(1, "trainer.", **{name: getattr(self, name) for name in counts})
        require_at_least(1, "trainer.early_stopping.", patience=self.early_stopping.patience)
        positive = ("max_epochs", "gradient_clip_val", "stop_within", "rank_timeout", "peak_tflops")
        require_at_least(0, "trainer.", **{name: getattr(self, name) for name in positive})
        check_local_path(
            "trainer.default_root_dir",
            self.default_root_dir,
            "give a local folder; configs/launch/mirror.sh copies it to a store",
        )


# ---- guards ----------------------------------------------------------------------------------------------------------

Action = Literal["warn", "checkpoint", "stop", "rollback"]


@dataclass
class BudgetConfig:
    """What a run may cost.

    Args:
        cap_usd: Most US dollars that the run may cost, over all its sessions.
        rate_usd_per_hr: Price of the machine, in US dollars per hour.
        max_rate_usd_per_hr: A higher price is an error at the start.
        max_hours: Most hours that the run may take, over all its sessions.
        file: A `budget.json` that another program updates. Its figures are used first; for those that it lacks, this
            run counts by itself.
        warn_at: Fraction of the cap, or of the hours, at which to warn.
        dry_run: Only report what would be done.
    """

    cap_usd: float | None = None
    rate_usd_per_hr: float | None = None
    max_rate_usd_per_hr: float | None = None
    max_hours: float | None = None
    file: str | None = None
    warn_at: float = 0.8
    dry_run: bool = False

    def __post_init__(self) -> None:
        amounts = ("cap_usd", "rate_usd_per_hr", "max_rate_usd_per_hr", "max_hours")
        require_at_least(0, "guards.budget.", **{name: getattr(self, name) for name in amounts})
        require(
            self.cap_usd is None or self.rate_usd_per_hr is not None or self.file is not None,
            "guards.budget.cap_usd needs a price: give --guards.budget.rate_usd_per_hr, in US dollars per hour of the "
            "machine, or a guards.budget.file",
        )
        rate, limit = self.rate_usd_per_hr, self.max_rate_usd_per_hr
        require(
            rate is None or limit is None or rate <= limit,
            f"the machine costs {rate} US dollars per hour, and guards.budget.max_rate_usd_per_hr is {limit}: take a "
            "cheaper one, or raise the limit",
        )

    @property
    def wanted(self) -> bool:
        return any(value is not None for value in (self.cap_usd, self.rate_usd_per_hr, self.max_hours, self.file))


@dataclass
class ThroughputConfig:
    """Smallest acceptable throughput.

    Args:
        floor: Tokens per second over all devices; none: no floor.
        patience: Number of log lines in a row below the floor before the guard acts.
        action: What to do after logging the cause; `warn` does nothing more.
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
        alerts: Conditions on logged metrics, each with the action to take when it becomes true, such as
            `loss > 10: stop` or `loss > 1.5 * median(loss, 100): rollback`. `warn` logs it; `checkpoint` also saves;
            `stop` ends the run; `rollback` returns to the weights of the last good checkpoint and continues with the
            next samples. `median(loss, 100)` is that of the 100 log lines before the newest. A condition that is true
            from the start of the run is ignored until the warm-up and ten log lines are over.
        not_finite: A step whose loss or gradient is NaN or Inf changes no weight. Then `skip` continues with the next
            step, and `stop` ends the run with a checkpoint.
        max_skipped: Number of such steps in a row that ends the run.
        max_rollbacks: Number of rollbacks that a run may make; the next one ends it.
        budget: What the run may cost.
        throughput: Smallest acceptable throughput.
        spike: Condition for a loss spike, for which a post-mortem is written; none: do not look for spikes.
        inject_step: Test the guards: train five steps on rare tokens from this step on, and write a post-mortem.
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
        for condition in filter(None, (*self.alerts, self.spike)):
            from lm.training.alerts import Condition

            Condition(condition)  # refuses a typo
        require_at_least(1, "guards.", max_skipped=self.max_skipped, inject_step=self.inject_step)
        require_at_least(0, "guards.", max_rollbacks=self.max_rollbacks)

    def harmless(self) -> "GuardsConfig":
        """The same guards without their effects on a run, for a few steps that are only timed."""
        return replace(
            self,
            alerts=dict.fromkeys(self.alerts, "warn"),
            not_finite="skip",
            max_skipped=sys.maxsize,
            budget=BudgetConfig(),
            throughput=ThroughputConfig(),
            inject_step=None,
        )


# ---- between steps ---------------------------------------------------------------------------------------------------


@dataclass
class SamplesConfig:
    """Texts generated during training; none unless prompts are given.

    Args:
        prompts: Texts to continue; an empty one begins a document.
        interval: Optimizer steps between samples; after every validation if not given.
        max_new_tokens: Most tokens to generate after a prompt.
        temperature: Divisor of the logits; 0 always takes the most likely token.
        top_k: Sample from this many most likely tokens; none: from all.
        seed: Seed of the sampling, the same at every step; it does not affect the training.
    """

    prompts: list[str] | None = None
    interval: Count | None = None
    max_new_tokens: Count = Count(32)
    temperature: float = 0.8
    top_k: Count | None = Count(50)
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, "samples.", interval=self.interval, max_new_tokens=self.max_new_tokens, top_k=self.top_k)
        require_at_least(0, "samples.", temperature=self.temperature)


@dataclass
class EvaluationConfig:
    """Benchmark tasks evaluated during training; none unless task files are given.

    Args:
        tasks: Task files: a YAML in the layout of DCLM, a `.jsonl` or `.parquet` of items, or `embedded:sotu`.
        interval: Optimizer steps between evaluations, and one at the last step; after every validation if not given.
        max_items: Most items per task, the same ones every time.
        num_fewshot: Number of solved examples before each question; as the task files say if not given.
        batch_tokens: Most tokens per forward pass.
    """

    tasks: list[str] | None = None
    interval: Count | None = None
    max_items: Count = Count(200)
    num_fewshot: int | None = None
    batch_tokens: Count = Count(16_384)

    def __post_init__(self) -> None:
        positive = ("interval", "max_items", "batch_tokens")
        require_at_least(1, "evaluation.", **{name: getattr(self, name) for name in positive})
        require_at_least(0, "evaluation.", num_fewshot=self.num_fewshot)


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class RunOptions:
    """Notes on a run, and what to do at its end.

    Args:
        tags: Words to find the run by, with `lm runs ls --tag WORD`.
        note: What the run is for.
        on_event: A program and its arguments to start when the run begins, when a guard finds something, and when the
            run ends. It gets `LM_EVENT`, `LM_MESSAGE`, `LM_RUN` and `LM_STEP` in its environment, and all facts as JSON
            on its standard input. It is not run in a shell.
        expect: Metrics and the range in which each must end, such as `{val/loss: [3.2, 3.5]}`.
    """

    tags: list[str] = field(default_factory=list)
    note: str | None = None
    on_event: list[str] = field(default_factory=list)
    expect: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.expect:
            from lm.runs.expectations import check_ranges

            check_ranges(self.expect)


# ---- the table -------------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A section of a config. One more with a callback is its dataclass, a row here, a field of `cli/request.Sections`,
    the callback, and a row for it in `callbacks/standard`."""

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


def sections_of_callbacks(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that callbacks take, by name; what is not given has its defaults."""
    return {section.name: config.get(section.name) or section.options() for section in SECTIONS if section.of_callbacks}
