"""`lm scale`: its options, and a complete config from a depth and a length, with a reason on each line.

`cli/scaling_rules` has the rules, `cli/scale_hours` the search for the depth that is best for some hours.
"""

import json
import math
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lm.cli import scaling_rules as rules
from lm.cli.scaling_rules import TOKENS_PER_PARAMETER, Recipe
from lm.errors import RequestError, require_at_least
from lm.model.config import MAX_LAYERS, DecoderConfig
from lm.model.estimates import parameters
from lm.system.parsing import parse_json
from lm.system.units import Count, format_count, plural, spelled_count
from lm.training.builtin_optimizers import OptimizerName
from lm.training.optimizer_rules import MATRICES, RULES, peak_rate, rope_theta

EMBEDDING, OUTPUT = 24.0, 4.8  # learning rate x width x sqrt(depth)
SMALL = {"seq_len": Count(256), "aspect_ratio": 32.0, "head_dim": Count(32), "window_pattern": "L"}  # for little text
SMALL_BATCH, SMALL_STEPS = 4_096, 300  # for little text: tokens of a step, steps of a run; half the steps are too few
LITTLE = 10_000_000  # tokens, up to which the size of a model follows from its text; measured with 0.3M to 2.8M
PARAMETERS_PER_TOKEN = 10  # outside the embedding, of little text; 33 gain 0.010 bits per byte for three times the work
EPOCHS = 4  # that a text is repeated; measured, "Little text" in tests/benchmarks/README.md, and by Muennighoff et al.,
# 2023, arXiv:2305.16264
# Fraction of the run whose updates the weights average, with little text that is repeated: matrices; embedding, output.
MATRIX_MEMORY, VOCABULARY_MEMORY = 0.65, 0.2
HORIZONS = ("target_param_data_ratio", "target_flops", "max_steps")  # options that give the length
# Options of a run of some hours.
TIMING = ("hours", "usd", "rate", "device", "devices", "memory", "peak_tflops", "mfu", "ladder")


@dataclass(frozen=True)
class ScaleOptions:
    """The options that `lm scale` and `lm ladder` share: all but depth and length.

    Args:
        vocab_size: Vocabulary size, at least the tokenizer's; if not given, that of the data's tokenizer, or 32,768 if
            the data does not exist yet.
        seq_len: Context length, in tokens.
        data: Folder that `lm data prepare` made, or will make.
        optimizer: Muon for the matrices in the blocks, or AdamW for all parameters.
        aspect_ratio: Width / depth, before the width is rounded up to a multiple of the head width.
        head_dim: Width of an attention head, an even number.
        window_pattern: Sequence of layers with a sliding window (S) or full attention (L), repeated; the last is L.
        batch_tokens: Tokens per optimizer step; the best for the length of the run if not given.
    """

    vocab_size: Count | None = None
    seq_len: Count = Count(2_048)
    data: str = "data/pretrain-32k"
    optimizer: OptimizerName = "muon"
    aspect_ratio: float = 64
    head_dim: Count = Count(128)
    window_pattern: str = "SSSL"
    batch_tokens: Count | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
                raise RequestError(f"--{name} {value:g} must be above 0")
        if not self.window_pattern or set(self.window_pattern) - {"S", "L"}:
            raise RequestError(f"--window_pattern {self.window_pattern!r} must be of S (a window) and L (all): SSSL")
        tokens, seq_len = self.batch_tokens, self.seq_len
        if tokens and tokens % seq_len:
            raise RequestError(f"--batch_tokens {tokens:,} must be whole samples of --seq_len {seq_len:,}")

    @property
    def batch(self) -> int | None:  # samples of an optimizer step, if given
        return self.batch_tokens and self.batch_tokens // self.seq_len

    @property
    def text_tokens(self) -> float:
        """Tokens of the text to train on; infinity where it is still to be prepared."""
        prepared = manifest(self.data)
        return prepared["splits"]["train"]["tokens"] if prepared else math.inf


@dataclass(frozen=True)
class ScaleRequest(ScaleOptions):
    """All options of `lm scale`.

    Args:
        depth: Number of blocks; width, heads, batch size, learning rate and weight decay are derived from it. Or a
            number of parameters, such as 50M, for the depth that comes nearest.
        target_param_data_ratio: Length of the run: tokens per non-embedding parameter; 20 if no length is given.
        target_flops: Length of the run, instead: FLOPs of the whole run.
        max_steps: Length of the run, instead: optimizer steps.
        output: File to write the config to, which must not exist yet; it is printed if not given.
        hours: Time budget in hours, including validations and startup. The depth with the lowest expected loss is
            chosen, unless one is given.
        usd: Instead of hours: a budget in US dollars, at `rate`.
        rate: Price of the machine in US dollars per hour.
        device: Device to train on: h200, a100, 4090, ..., or auto: this machine, whose speed is measured.
        devices: Number of devices; if not given, all of this machine, or one if another device is named.
        memory: Memory of the device, such as 16GiB.
        peak_tflops: Peak throughput of the device in bf16: dense TFLOP/s with fp32 accumulation.
        mfu: Model FLOPs utilization (MFU) to assume, as a fraction of the peak.
        ladder: Folder of a ladder, whose fitted scaling law gives the expected loss.
    """

    depth: Count | None = None
    target_param_data_ratio: float | None = None
    target_flops: float | None = None
    max_steps: Count | None = None
    output: str | None = None
    hours: float | None = None
    usd: float | None = None
    rate: float | None = None
    device: str = "auto"
    devices: int | None = None
    memory: str | None = None
    peak_tflops: float | None = None
    mfu: float | None = None
    ladder: str | None = None

    @property
    def horizon(self) -> dict[str, float]:
        """The given length as `{option: value}`; empty if none is given."""
        return {name: value for name in HORIZONS if (value := getattr(self, name)) is not None}

    @property
    def timing(self) -> dict[str, Any]:
        """The given options for a run of some hours, by name."""
        return {name: value for name in TIMING if (value := getattr(self, name)) not in (None, "auto")}

    @property
    def seconds(self) -> float:
        """Time of the run; 0 if none is given."""
        if self.usd is not None and (self.hours is not None or self.rate is None):
            raise RequestError("--usd takes --rate, US dollars an hour of the machine, and no --hours beside it")
        hours = self.usd / self.rate if self.usd and self.rate else self.hours
        return 3600 * (hours or 0)

    @property
    def blocks(self) -> int | None:
        if (depth := self.depth) is None or depth <= MAX_LAYERS:
            return depth
        sizes = {blocks: parameters(shape(blocks, self))["total"] for blocks in range(2, 200)}
        return min(sizes, key=lambda blocks: abs(math.log(sizes[blocks] / depth)))

    @property
    def file(self) -> str:
        """The file that the config is for."""
        return self.output or (f"depth{self.blocks}.yaml" if self.depth else "mine.yaml")

    def command(self) -> str:
        """The `lm scale` command that makes this config."""
        usual, depth = vars(ScaleOptions()), {} if self.depth is None else {"depth": self.blocks}
        changed = {name: value for name, value in vars(self).items() if value != usual.get(name, value)}
        command, output = "lm scale", {"output": self.file}
        for name, value in {**depth, **self.horizon, **self.timing, **changed, **output}.items():
            command += f" --{name} {shlex.quote(f'{value:.15g}' if isinstance(value, float) else str(value))}"
        return command


def manifest(folder: str) -> dict[str, Any]:
    """What `lm data prepare` wrote of a folder; empty where it has not made one."""
    try:
        return parse_json((Path(folder) / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return {}


def shape(depth: int, options: ScaleOptions = ScaleOptions()) -> DecoderConfig:
    """A decoder of `depth` blocks in the proportions below.

    Every query head has its own key head, as in nanochat: at these sizes the cache that sharing them saves is small.
    The output matrix is not the embedding, so that each learns at its own rate, as in nanochat. QK-norm bounds the
    attention logits, which allows larger learning rates (Wortsman et al., 2023, arXiv:2309.14322). Blocks start as the
    identity (Goyal et al., 2017, arXiv:1706.02677).
    """
    seq_len, head_dim = options.seq_len, options.head_dim
    require_at_least(2, "--", depth=depth, seq_len=seq_len)
    prepared = manifest(options.data)
    for split, counts in prepared.get("splits", {}).items():
        if 0 < counts["tokens"] <= seq_len:
            raise RequestError(
                f"{options.data}/{split} has {counts['tokens']:,} tokens, and a sample takes {seq_len + 1:,}, "
                "--seq_len and one more: give more text"
            )
    known_size = prepared.get("vocab_size", 0)
    vocab_size = options.vocab_size or known_size or 32_768
    if vocab_size < known_size:
        raise RequestError(
            f"--vocab_size {vocab_size:,} is less than the {known_size:,} of {options.data}: leave it out"
        )
    hidden_size, window = rules.width(depth, options.aspect_ratio, head_dim), rules.sliding_window(seq_len)
    windows = rules.window_pattern(depth, options.window_pattern) if window < seq_len else "L"
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=depth,
        num_attention_heads=hidden_size // head_dim,
        intermediate_size=rules.mlp_width(hidden_size),
        max_position_embeddings=seq_len,
        rope_theta=rope_theta(seq_len),
        window_pattern=windows,
        sliding_window=window if "S" in windows else None,
        qk_norm=True,
        tie_word_embeddings=False,
        zero_init_residual=True,
    )


# ---- the config ------------------------------------------------------------------------------------------------------

INTERVAL = 250  # the most optimizer steps between validations, and between checkpoints
VALIDATED = 16  # batches a validation reads after so many steps: a fiftieth of their work

WINDOW = "    sliding_window: {:_}  # window in tokens: a quarter of the context, in tiles of 128 (nanochat)\n"
BIGRAMS = "  bigram_init: true  # embedding and output begin with which token follows which in the data (measured)\n"
RESHUFFLE = "  reshuffle: documents  # shuffled in every epoch, so that no sample is repeated exactly\n"
ONE_DEVICE = "1  # enough for so few samples"
ALL_DEVICES = "auto  # all devices of the node; also under torchrun and SLURM"
FEW_STEPS = "smaller than for a long run, for more steps (measured)"
BEST_BATCH = "the power of two nearest to the optimum for this run (arXiv:2505.13738)"
YAML = """\
# {title}
#   {command}
#   lm data prepare --input texts/ --output {data} --tokenizer {tokenizer}
#   lm plan --config {file} && lm fit --config {file}
# yaml-language-server: $schema=lm.schema.json (for editors; made by `lm schema > lm.schema.json`)

seed_everything: 1337  # the same seed gives the same weights and the same order of samples

trainer:
  max_steps: {steps:_}  # {horizon}
  val_interval: {interval}  # optimizer steps between validations
  checkpoint_interval: {interval}  # optimizer steps between checkpoints
  log_interval: 10  # optimizer steps between log lines
{bigrams}  gradient_clip_val: 1.0  # largest global norm of the gradient
  precision: bf16-mixed  # bf16 compute with fp32 master weights
  devices: {devices}
  strategy: auto  # ddp on several devices; fsdp2 for a model that does not fit on one

model:
  decoder:
    vocab_size: {vocab_size:_}  # vocabulary size, at least the tokenizer's
    hidden_size: {hidden_size:_}  # {aspect:g} x depth, rounded up to whole heads (nanochat: {usual.aspect_ratio})
    num_hidden_layers: {num_hidden_layers}  # the depth
    num_attention_heads: {num_attention_heads}  # each {head_dim} wide (nanochat: {usual.head_dim})
    num_key_value_heads: {num_attention_heads}  # one per query head: a small model's cache is small
    intermediate_size: {intermediate_size:_}  # 8/3 x hidden_size, rounded up to a multiple of 128 (arXiv:2002.05202)
    max_position_embeddings: {max_position_embeddings:_}  # context length
    rope_theta: {rope_theta:_.0f}  # base of the rotary position embedding; smaller in a short context (measured)
    window_pattern: {window_pattern}  # S: sliding window, L: full attention (nanochat: {usual.window_pattern})
{window}    qk_norm: true  # bounds the attention logits, which allows larger learning rates (arXiv:2309.14322)
    tie_word_embeddings: false  # the output matrix is separate from the embedding, and has its own learning rate
    zero_init_residual: true  # each block starts as the identity (arXiv:1706.02677)
  optimizer:
{optimizer}    groups:  # parameter groups with multiples of this rate, and {group_decay}
      embedding: {embedding}
      output: {output}
    weight_decay: {weight_decay}  # weights average the updates of {memory} of the run ({memory_source})
  schedule:
{schedule}
data:
  path: {data}  # a folder that `lm data prepare` made
  micro_batch_size: {micro_batch}  # samples per device and forward pass; `lm plan --fit` finds the most that fit
  global_batch_tokens: {batch}  # {samples}: {batch_reason}
{reshuffle}  val_tokens: {val_tokens}  # tokens per validation; `lm test` uses all of them

samples:
  prompts: [""]  # continued after every validation, to read in TensorBoard; an empty one begins a document
"""


def scaled_config(request: ScaleRequest) -> tuple[Recipe, str]:
    if request.depth is None:
        request = for_text(request)
    horizon = request.horizon
    if len(horizon) > 1:
        names = " and ".join(f"--{name}" for name in horizon)
        raise RequestError(f"{names} each give the length of the run: give one of them")
    decoder = shape(request.blocks, request)
    limit = EPOCHS * request.text_tokens / Recipe(decoder, 1, 1, request.optimizer).multiplied
    recipe = rules.make_recipe(
        decoder,
        tokens_per_parameter=request.target_param_data_ratio if horizon else min(TOKENS_PER_PARAMETER, limit),
        flops=request.target_flops,
        steps=request.max_steps,
        optimizer=request.optimizer,
        batch=request.batch,
    )
    at_once = recipe.batch if request.text_tokens <= LITTLE and recipe.batch_tokens <= SMALL_BATCH else None
    return recipe, write_yaml(recipe, request.command(), _horizon(recipe, horizon, request), request, at_once)


def for_text(request: ScaleRequest) -> ScaleRequest:
    """Set the depth by the size of a text of a few megabytes, with the proportions measured for such texts."""
    if request.text_tokens > LITTLE:
        fix = "give the depth, such as --depth 12, or the time, such as --hours 8"
        if not manifest(request.data):
            from lm.data.prepare import check_folder

            command = f"`lm data prepare --input TEXTS --output {request.data}`, or {fix}"
            check_folder(Path(request.data), f"--data {request.data}", command)
        raise RequestError(fix)
    request, depth = in_small_proportions(request), 2
    most = PARAMETERS_PER_TOKEN * request.text_tokens
    while Recipe(shape(depth, request), 1, 1, request.optimizer).multiplied <= most:
        depth += 1
    return replace(request, depth=Count(depth))


def in_small_proportions(request: ScaleRequest) -> ScaleRequest:
    """For a small text, set options not given to measured values: proportions, and a batch for enough steps."""
    if request.text_tokens > LITTLE:
        return request
    usual = vars(ScaleOptions())
    small = {name: value for name, value in SMALL.items() if getattr(request, name) == usual[name]}
    request = replace(request, **small)
    tokens = min(SMALL_BATCH, EPOCHS * request.text_tokens / SMALL_STEPS)
    samples = rules.power_of_two(tokens / request.seq_len, down=True)
    return replace(request, batch_tokens=request.batch_tokens or Count(samples * request.seq_len))


def interval(steps: int) -> int:
    """Optimizer steps between validations, and between checkpoints: at least four of each per run."""
    return min(INTERVAL, math.ceil(steps / 4))


def validated_samples(recipe: Recipe) -> int:
    return math.ceil(VALIDATED * interval(recipe.steps) / INTERVAL) * recipe.batch


def write_yaml(
    recipe: Recipe, command: str, horizon: str, options: ScaleRequest, samples_at_once: int | None = None
) -> str:
    """The YAML of a recipe; `command` is the command that makes it, `horizon` explains the length of the run."""
    decoder, optimizer = recipe.decoder, RULES[recipe.optimizer]
    depth = decoder.num_hidden_layers
    numbers = {"lr": _float(recipe.learning_rate), "flops": _float(recipe.block_flops)}
    numbers |= optimizer.values(recipe.steps, recipe.batch_tokens)
    window = "" if decoder.sliding_window is None else WINDOW.format(decoder.sliding_window)
    repeated = recipe.tokens > options.text_tokens
    few_steps = recipe.batch_tokens < 0.7 * rules.published_batch_tokens(recipe.tokens)
    little = repeated and options.text_tokens <= LITTLE
    memory = min(recipe.memory, MATRIX_MEMORY) if little else recipe.memory

    def group(factor: float) -> str:
        rate = peak_rate(factor, depth, decoder.hidden_size)
        decay = rules.weight_decay(VOCABULARY_MEMORY, rate, recipe.steps) if little else 0
        ratios = f"lr_ratio: {rate / recipe.learning_rate:.3g}, weight_decay: {decay:.3g}"
        return f"{{{ratios}}}  # {factor:g} / (hidden_size x sqrt(depth))"

    learned = manifest(options.data).get("options", {}).get("vocab_size", decoder.vocab_size)  # as it was asked for
    data = options.data if re.fullmatch(r"[\w.-]*/[\w./-]*", options.data) else json.dumps(options.data)
    return YAML.format(
        **vars(decoder),  # under the names that they have in the YAML
        # the model
        title=f"Depth {depth}: {format_count(recipe.parameters)} parameters on {format_count(recipe.tokens)} tokens, "
        f"{_float(recipe.flops)} FLOPs. Why each number: lm/cli/scaling_rules.py.",
        command=command,
        file=shlex.quote(options.file),
        window=window,
        aspect=options.aspect_ratio,
        usual=ScaleOptions(),
        # the run
        steps=recipe.steps,
        horizon=horizon,
        interval=interval(recipe.steps),
        bigrams=BIGRAMS if recipe.bigram_init else "",
        devices=ONE_DEVICE if samples_at_once == recipe.batch else ALL_DEVICES,
        # the optimizer
        optimizer=optimizer.optimizer_yaml.format(**numbers, matrices=MATRICES),
        schedule=optimizer.schedule_yaml.format(**numbers),
        embedding=group(EMBEDDING),
        output=group(OUTPUT),
        group_decay=f"a weight decay that averages {VOCABULARY_MEMORY:.0%} of the run" if little else "no weight decay",
        weight_decay=f"{rules.weight_decay(memory, recipe.learning_rate, recipe.steps):.3g}",
        memory="all" if memory >= 1 else f"{100 * memory:.2g}%",
        memory_source="measured with little text" if memory < recipe.memory else optimizer.memory_source,
        # the data
        data=data,
        tokenizer=f"bpe --vocab_size {learned}" if decoder.vocab_size > 256 else "char",
        micro_batch=samples_at_once or rules.micro_batch(recipe.batch, recipe.seq_len),
        batch=spelled_count(recipe.batch_tokens),
        samples=plural(recipe.batch, "sample"),
        batch_reason="as --batch_tokens says" if options.batch_tokens else FEW_STEPS if few_steps else BEST_BATCH,
        reshuffle=RESHUFFLE if repeated and not manifest(options.data).get("packed") else "",
        val_tokens=spelled_count(validated_samples(recipe) * recipe.seq_len),
    )


def _horizon(recipe: Recipe, horizon: dict[str, float], options: ScaleOptions) -> str:
    """The length of a run in words, with its source if the length was not given."""
    ratio, source = recipe.tokens / recipe.multiplied, ""
    if not horizon:
        source = " (arXiv:2203.15556)"
        if options.text_tokens < math.inf and ratio < 0.9 * TOKENS_PER_PARAMETER:
            source = f": {EPOCHS} times the text, which teach nearly as much as new ones (arXiv:2305.16264)"
    each = f"{ratio:.3g} for each of {format_count(recipe.multiplied)} outside the embedding"
    return f"{format_count(recipe.tokens)} tokens in steps of {spelled_count(recipe.batch_tokens)}, {each}{source}"


def _float(number: float) -> str:
    """A number with three digits and an exponent: 0.00173 -> 1.73e-3."""
    digits, exponent = f"{number:.2e}".split("e")
    return f"{digits}e{int(exponent)}"
