"""`lm scale`: a complete config from a depth and a training length by published rules, with a reason on each line.

Each rule is a pure function that names its source; `training/optimizer_rules` has the rules for learning rates. They
were found on other data, or on small models: they are where a search starts.
"""

import json
import math
import re
import shlex
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lm.errors import RequestError, require_at_least
from lm.model.config import MAX_LAYERS, DecoderConfig
from lm.model.estimates import block_flops_per_token, flops_per_token, parameters
from lm.system.files import parse_json
from lm.system.units import Count, format_count, plural, spelled_count
from lm.training.builtin_optimizers import OptimizerName
from lm.training.optimizer_rules import MATRICES, RULES, peak_rate

TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al., 2022, arXiv:2203.15556; nanochat takes 12, with Muon
DEVICES = 8  # of a node; a batch of as many samples or more divides evenly over 8, 4, 2 and 1
EMBEDDING, OUTPUT = 24.0, 4.8  # learning rate x width x sqrt(depth)
SMALL = {"seq_len": Count(256), "aspect_ratio": 32.0, "head_dim": Count(32), "window_pattern": "L"}  # for little text
SMALL_BATCH, SMALL_STEPS = 4_096, 300  # for little text: tokens of a step, steps of a run; half the steps are too few
LITTLE = 10_000_000  # tokens, up to which the size of a model follows from its text; measured with 0.3M to 2.8M
PARAMETERS_PER_TOKEN = 10  # outside the embedding, of little text; 33 gain 0.010 bits per byte for three times the work
EPOCHS = 4  # that a text is repeated; measured, "Little text" in tests/benchmarks/README.md, and by Muennighoff et al.,
# 2023, arXiv:2305.16264
# Share of the run whose updates the weights average, with little text that is repeated: matrices, embedding and output.
REPEATED_MEMORY = 0.65, 0.2
HORIZONS = ("target_param_data_ratio", "target_flops", "max_steps")  # options that give the length
DEVICE_TOKENS = 16_384  # the most tokens of a micro-batch, until `lm plan --fit` finds how many fit


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
            raise RequestError(f"--window_pattern {self.window_pattern!r} must be of S (a window) and L (all), such as "
                               "SSSL")  # fmt: skip
        if self.batch_tokens and self.batch_tokens % self.seq_len:
            raise RequestError(f"--batch_tokens {self.batch_tokens:,} must be whole samples of --seq_len "
                               f"{self.seq_len:,}")  # fmt: skip

    @property
    def batch(self) -> int | None:  # samples of an optimizer step, if given
        return self.batch_tokens and self.batch_tokens // self.seq_len

    @property
    def text_tokens(self) -> float:
        """Tokens of the text to train on; infinity where it is still to be prepared."""
        return made["splits"]["train"]["tokens"] if (made := manifest(self.data)) else math.inf


@dataclass(frozen=True)
class ScaleRequest(ScaleOptions):
    """The options of `lm scale` except those for a time budget, which `TimedRequest` has.

    Args:
        depth: Number of blocks; width, heads, batch size, learning rate and weight decay are derived from it. Or a
            number of parameters, such as 50M, for the depth that comes nearest.
        target_param_data_ratio: Length of the run: tokens per non-embedding parameter; 20 if no length is given.
        target_flops: Length of the run, instead: floating-point operations of the whole run.
        max_steps: Length of the run, instead: optimizer steps.
    """

    depth: Count | None = None
    target_param_data_ratio: float | None = None
    target_flops: float | None = None
    max_steps: Count | None = None

    @property
    def horizon(self) -> dict[str, float]:
        """The given length as `{option: value}`; empty if none is given."""
        return {name: value for name in HORIZONS if (value := getattr(self, name)) is not None}

    @property
    def blocks(self) -> int | None:
        if (depth := self.depth) is None or depth <= MAX_LAYERS:
            return depth
        sizes = {blocks: parameters(shape(blocks, self))["total"] for blocks in range(2, 200)}
        return min(sizes, key=lambda blocks: abs(math.log(sizes[blocks] / depth)))

    def command(self, others: dict[str, Any] = {}) -> str:
        """The `lm scale` command that makes this config; `others` are additional options."""
        usual, depth = vars(ScaleOptions()), {} if self.depth is None else {"depth": self.blocks}
        changed = {name: value for name, value in vars(self).items() if value != usual.get(name, value)}
        command = "lm scale"
        for name, value in {**depth, **self.horizon, **others, **changed}.items():
            command += f" --{name} {shlex.quote(f'{value:.15g}' if isinstance(value, float) else str(value))}"
        return command


@dataclass(frozen=True)
class TimedRequest(ScaleRequest):
    """All options of `lm scale`.

    Args:
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
    def timing(self) -> dict[str, Any]:
        """The options above that were given, by name."""
        own = TimedRequest.__annotations__
        return {name: value for name in own if (value := getattr(self, name)) not in (None, "auto")}

    @property
    def seconds(self) -> float:
        """Time of the run; 0 if none is given."""
        if self.usd is not None and (self.hours is not None or self.rate is None):
            raise RequestError("--usd takes --rate, US dollars an hour of the machine, and no --hours beside it")
        hours = self.usd / self.rate if self.usd and self.rate else self.hours
        return 3600 * (hours or 0)


@cache
def manifest(folder: str) -> dict[str, Any]:
    """What `lm data prepare` wrote of a folder; empty where it has not made one."""
    try:
        return parse_json((Path(folder) / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True)
class Recipe:
    """Model, batch, length and optimizer of a training; all else follows from them by the rules below."""

    decoder: DecoderConfig
    batch: int  # samples of an optimizer step
    steps: int
    optimizer: OptimizerName  # of the matrices in the blocks; AdamW for the rest

    @property
    def parameters(self) -> int:
        return parameters(self.decoder)["total"]

    @property
    def multiplied(self) -> int:
        """Number of parameters that multiply activations: all but the embedding. Tokens per parameter count these.

        Source: nanochat, scripts/base_train.py.
        """
        return self.parameters - self.decoder.vocab_size * self.decoder.hidden_size

    @property
    def batch_tokens(self) -> int:  # of an optimizer step
        return self.batch * self.decoder.max_position_embeddings

    @property
    def tokens(self) -> int:  # of the run
        return self.steps * self.batch_tokens

    @property
    def flops_per_token(self) -> float:  # of training
        return flops_per_token(self.decoder, self.decoder.max_position_embeddings)

    @property
    def flops(self) -> float:  # of the run
        return self.tokens * self.flops_per_token

    @property
    def block_flops(self) -> float:
        """Floating-point operations of the run in the blocks: all but the output matrix."""
        return self.tokens * block_flops_per_token(self.decoder, self.decoder.max_position_embeddings)

    @property
    def learning_rate(self) -> float:
        """Peak learning rate of the matrices in the blocks."""
        return RULES[self.optimizer].learning_rate(self.decoder, self.block_flops, self.batch_tokens)

    @property
    def memory(self) -> float:
        """Share of the run over which the matrices average their updates; see `weight_decay`."""
        return RULES[self.optimizer].memory(self.tokens / self.multiplied)


def recipe(
    decoder: DecoderConfig, *, tokens_per_parameter: float | None = None, flops: float | None = None,
    steps: int | None = None, optimizer: OptimizerName = "muon", batch: int | None = None,
) -> Recipe:  # fmt: skip
    """Make the recipe of a decoder for a training length, given in one of three units, and `batch` samples a step.

    The units: tokens for each parameter outside the embedding, floating-point operations of the run, optimizer steps.
    """
    step, seq_len = Recipe(decoder, 1, 1, optimizer), decoder.max_position_embeddings  # a step of one sample
    if steps is not None:
        wanted = tokens_of_steps(steps)  # at the best batch
    elif flops is not None:
        wanted = flops / step.flops_per_token
    else:
        wanted = (tokens_per_parameter or TOKENS_PER_PARAMETER) * step.multiplied
    batch = batch or power_of_two(batch_tokens(wanted) / seq_len)
    if steps is None:
        steps = round(wanted / (batch * seq_len))
    if steps < 1:
        raise RequestError(
            f"{wanted:,.0f} tokens are less than one optimizer step of {batch} x {seq_len} = {batch * seq_len:,}: "
            "give a longer horizon or a shorter --seq_len"
        )
    return replace(step, batch=batch, steps=steps)


# ---- the model -------------------------------------------------------------------------------------------------------


def shape(depth: int, options: ScaleOptions = ScaleOptions()) -> DecoderConfig:
    """A decoder of `depth` blocks in the proportions below.

    Every query head has its own key head, as in nanochat: at these sizes the cache that sharing them saves is small.
    The output matrix is not the embedding, so that each learns at its own rate, as in nanochat. QK-norm bounds the
    attention logits, which allows larger learning rates (Wortsman et al., 2023, arXiv:2309.14322). Blocks start as the
    identity (Goyal et al., 2017, arXiv:1706.02677).
    """
    seq_len, head_dim = options.seq_len, options.head_dim
    require_at_least(2, "--", depth=depth, seq_len=seq_len)
    made = manifest(options.data)
    for split, found in made.get("splits", {}).items():
        if 0 < found["tokens"] <= seq_len:
            raise RequestError(f"{options.data}/{split} has {found['tokens']:,} tokens, and a sample takes "
                               f"{seq_len + 1:,}, --seq_len and one more: give more text")  # fmt: skip
    vocab_size = options.vocab_size or made.get("vocab_size", 32_768)
    if vocab_size < made.get("vocab_size", 0):
        raise RequestError(f"--vocab_size {vocab_size:,} is less than the {made['vocab_size']:,} of {options.data}: "
                           "leave it out")  # fmt: skip
    hidden_size, window = width(depth, options.aspect_ratio, head_dim), sliding_window(seq_len)
    windows = window_pattern(depth, options.window_pattern) if window < seq_len else "L"
    return DecoderConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=depth,
        num_attention_heads=hidden_size // head_dim, intermediate_size=mlp_width(hidden_size),
        max_position_embeddings=seq_len, window_pattern=windows,
        sliding_window=window if "S" in windows else None, qk_norm=True, tie_word_embeddings=False,
        zero_init_residual=True,
    )  # fmt: skip


def width(depth: int, aspect_ratio: float, head_dim: int) -> int:
    """Width of the residual stream: `64 x depth`, rounded up to whole heads of 128.

    Source: nanochat, https://github.com/karpathy/nanochat, scripts/base_train.py; in its log 64 is better than 128.
    """
    return _round_up(aspect_ratio * depth, head_dim)


def mlp_width(width: int) -> int:
    """Width inside the MLP: `8/3 x width`, rounded up to a multiple of 128.

    Three matrices of this width have as many parameters as two of `4 x width` (Shazeer, 2020, arXiv:2002.05202).
    """
    return _round_up(8 * width / 3, 128)


def window_pattern(depth: int, pattern: str) -> str:
    """Three layers with a window, then one with full attention; the last layer always has full attention.

    Source: nanochat, nanochat/gpt.py. The pattern is written out by layer if its length does not divide the depth.
    """
    return pattern if depth % len(pattern) == 0 and pattern[-1] == "L" else (pattern * depth)[: depth - 1] + "L"


def sliding_window(seq_len: int) -> int:
    """Tokens that a token sees in a layer with a window: a quarter of the context, rounded up to tiles of 128.

    Source: nanochat, nanochat/gpt.py.
    """
    return min(seq_len, _round_up(seq_len / 4, 128))


# ---- the horizon and the batch ---------------------------------------------------------------------------------------


def batch_tokens(tokens: float) -> float:
    """Tokens of an optimizer step that lead to the lowest loss after `tokens` of training.

    `0.0306 x tokens^0.383` sequences of 2,048, whatever the size of the model (Bergsma et al., 2025,
    arXiv:2505.13738). nanochat takes the same exponent, from 512Ki tokens at depth 12, tuned for Muon.
    """
    return 2_048 * 0.0306 * tokens**0.383


def tokens_of_steps(steps: int) -> float:
    """The tokens of a run of `steps` optimizer steps at the best batch: `batch_tokens` solved for tokens."""
    return (2_048 * 0.0306 * steps) ** (1 / (1 - 0.383))


def micro_batch(batch: int, seq_len: int, devices: int = DEVICES, fitting: int = DEVICE_TOKENS) -> int:
    """Samples per micro-batch: a power of two that divides the batch, with one micro-batch or more for each device.

    `fitting` are the samples that a device has memory for.
    """
    each = batch // devices
    return math.gcd(power_of_two(min(DEVICE_TOKENS // seq_len, each, fitting), down=True), batch, each)


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def weight_decay(memory: float, learning_rate: float, steps: int) -> float:
    """Decoupled weight decay for which the weights average the updates over the share `memory` of the run.

    The weights are a running mean of the updates over `1 / (learning_rate x decay)` steps (Wang and Aitchison, 2024,
    arXiv:2405.13698).
    """
    return 1 / (memory * learning_rate * steps)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def power_of_two(number: float, down: bool = False) -> int:
    """The power of two nearest to a number in ratio, or the largest that is not above it; at least 1."""
    exponent = math.log2(max(1, number))
    return 2 ** (math.floor(exponent) if down else round(exponent))


def _round_up(number: float, unit: int) -> int:
    return math.ceil(number / unit) * unit


# ---- the config ------------------------------------------------------------------------------------------------------

INTERVAL = 250  # the most optimizer steps between validations, and between checkpoints
VALIDATED = 16  # batches a validation reads after so many steps: a fiftieth of their work

RESHUFFLE = "  reshuffle: documents  # shuffled in every epoch, so that no sample is repeated exactly\n"
YAML = """\
# {title}
#   {command} > {name}.yaml
#   lm data prepare --input texts/ --output {data} --tokenizer {tokenizer}
#   lm plan --config {name}.yaml && lm fit --config {name}.yaml

seed_everything: 1337  # the same seed gives the same weights and the same order of samples

trainer:
  max_steps: {steps:_}  # {horizon}
  val_interval: {interval}  # optimizer steps between validations
  checkpoint_interval: {interval}  # optimizer steps between checkpoints
  log_interval: 10  # optimizer steps between log lines
  gradient_clip_val: 1.0  # largest global norm of the gradient
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
    window_pattern: {window_pattern}  # S: sliding window, L: full attention (nanochat: {usual.window_pattern})
{window}    qk_norm: true  # bounds the attention logits, which allows larger learning rates (arXiv:2309.14322)
    tie_word_embeddings: false  # the output matrix is separate from the embedding, and has its own learning rate
    zero_init_residual: true  # each block starts as the identity (arXiv:1706.02677)
  optimizer:
{optimizer}    groups:  # parameter groups with their own learning rates and {group_decay}
      embedding: {{{embedding}}}  # {embedding_factor:g} / (hidden_size x sqrt(depth)), as above
      output: {{{output}}}  # {output_factor:g} / (hidden_size x sqrt(depth)), as above
    weight_decay: {weight_decay}  # weights average the updates of {memory} of the run ({memory_source})
  schedule:
{schedule}
data:
  path: {data}  # a folder that `lm data prepare` made
  micro_batch_size: {micro_batch}  # samples per device and forward pass; `lm plan --fit` finds the most that fit
  global_batch_tokens: {batch}  # {samples}: {batch_reason}
{reshuffle}  val_tokens: {val_tokens}  # tokens per validation; `lm test` uses all of them
"""


def scaled_config(request: ScaleRequest) -> tuple[Recipe, str]:
    """Return the recipe of a request, and its complete config as YAML."""
    if request.depth is None:
        request = for_text(request)
    given = request.horizon
    if len(given) > 1:
        names = " and ".join(f"--{name}" for name in given)
        raise RequestError(f"{names} each give the length of the run: give one of them")
    decoder = shape(request.blocks, request)
    most = EPOCHS * request.text_tokens / Recipe(decoder, 1, 1, request.optimizer).multiplied
    usual = min(TOKENS_PER_PARAMETER, most)
    made = recipe(
        decoder,
        tokens_per_parameter=request.target_param_data_ratio if given else usual,
        flops=request.target_flops,
        steps=request.max_steps,
        optimizer=request.optimizer,
        batch=request.batch,
    )
    whole = made.batch if request.text_tokens <= LITTLE and made.batch_tokens <= SMALL_BATCH else None
    return made, write_yaml(made, request.command(), _horizon(made, given, request), request, whole)


def for_text(request: ScaleRequest) -> ScaleRequest:
    """Set the depth by the size of a text of a few megabytes, with the proportions measured for such texts."""
    if request.text_tokens > LITTLE:
        found = "" if manifest(request.data) else f"{request.data} is not prepared yet: "
        raise RequestError(f"{found}give the depth, such as --depth 12, or the time, such as --hours 8")
    request = in_small_proportions(request)
    wanted = PARAMETERS_PER_TOKEN * request.text_tokens
    sizes = (Recipe(shape(depth, request), 1, 1, request.optimizer).multiplied for depth in range(2, MAX_LAYERS))
    return replace(request, depth=Count(2 + next(place for place, size in enumerate(sizes) if size > wanted)))


def in_small_proportions(request: ScaleRequest) -> ScaleRequest:
    """For a small text, set options not given to measured values: proportions, and a batch for enough steps."""
    if request.text_tokens > LITTLE:
        return request
    usual = vars(ScaleOptions())
    small = {name: value for name, value in SMALL.items() if getattr(request, name) == usual[name]}
    request = replace(request, **small)
    samples = power_of_two(min(SMALL_BATCH, EPOCHS * request.text_tokens / SMALL_STEPS) / request.seq_len, down=True)
    return replace(request, batch_tokens=request.batch_tokens or Count(samples * request.seq_len))


def interval(steps: int) -> int:
    """Optimizer steps between validations, and between checkpoints: at least four of each per run."""
    return min(INTERVAL, math.ceil(steps / 4))


def validated_samples(made: Recipe) -> int:
    """Samples of a validation."""
    return math.ceil(VALIDATED * interval(made.steps) / INTERVAL) * made.batch


def write_yaml(
    made: Recipe, command: str, horizon: str, options: ScaleOptions, samples_at_once: int | None = None
) -> str:
    """The YAML of a recipe; `command` is the command that makes it, `horizon` explains the length of the run."""
    decoder, optimizer = made.decoder, RULES[made.optimizer]
    numbers = {
        "lr": _float(made.learning_rate), "flops": _float(made.block_flops), "matrices": MATRICES,
        "warmup_steps": f"{optimizer.warmup_steps(made.steps, made.batch_tokens):_}",
    }  # fmt: skip
    window = "" if decoder.sliding_window is None else (
        f"    sliding_window: {decoder.sliding_window:_}"
        "  # window in tokens: a quarter of the context, in tiles of 128 (nanochat)\n"
    )  # fmt: skip

    repeated = made.tokens > options.text_tokens
    little = repeated and options.text_tokens <= LITTLE
    longest, vocabulary_memory = REPEATED_MEMORY
    memory = min(made.memory, longest) if little else made.memory

    def group(factor: float) -> str:
        rate = peak_rate(factor, decoder.num_hidden_layers, decoder.hidden_size)
        decay = weight_decay(vocabulary_memory, rate, made.steps) if little else 0
        return f"lr: {_float(rate)}, weight_decay: {decay:.3g}"

    data = options.data if re.fullmatch(r"[\w.-]*/[\w./-]*", options.data) else json.dumps(options.data)
    return YAML.format(
        **vars(decoder),  # under the names that they have in the YAML
        title=f"Depth {decoder.num_hidden_layers}: {format_count(made.parameters)} parameters on "
        f"{format_count(made.tokens)} tokens, {_float(made.flops)} operations. Why each number: lm/cli/scale.py.",
        command=command, name=f"depth{decoder.num_hidden_layers}", data=data,
        optimizer=optimizer.optimizer_yaml.format(**numbers), schedule=optimizer.schedule_yaml.format(**numbers),
        steps=made.steps, horizon=horizon, interval=interval(made.steps),
        tokenizer=f"bpe --vocab_size {decoder.vocab_size}" if decoder.vocab_size > 256 else "char",
        window=window, aspect=options.aspect_ratio, usual=ScaleOptions(),
        memory_source="measured with little text" if memory < made.memory else optimizer.memory_source,
        group_decay=f"a weight decay that averages {vocabulary_memory:.0%} of the run" if little else "no weight decay",
        devices="1  # enough for so few samples" if samples_at_once == made.batch else
        "auto  # all devices of the node; also under torchrun and SLURM",
        embedding=group(EMBEDDING), embedding_factor=EMBEDDING, output=group(OUTPUT), output_factor=OUTPUT,
        weight_decay=f"{weight_decay(memory, made.learning_rate, made.steps):.3g}",
        memory="all" if memory >= 1 else f"{100 * memory:.2g}%",
        micro_batch=samples_at_once or micro_batch(made.batch, decoder.max_position_embeddings),
        batch=spelled_count(made.batch_tokens),
        samples=plural(made.batch, "sample"),
        reshuffle=RESHUFFLE if repeated and not manifest(options.data).get("packed") else "",
        batch_reason="as --batch_tokens says" if options.batch_tokens else
        "the power of two nearest to the optimum for this run (arXiv:2505.13738)",
        val_tokens=spelled_count(validated_samples(made) * decoder.max_position_embeddings),
    )  # fmt: skip


def _horizon(made: Recipe, given: dict[str, float], options: ScaleOptions) -> str:
    tokens, batch = format_count(made.tokens), spelled_count(made.batch_tokens)
    if "max_steps" in given:
        return f"as asked: {tokens} tokens, {made.tokens / made.multiplied:.3g} a parameter outside the embedding"
    if "target_flops" in given:
        flops = f"{_float(given['target_flops'])} operations / {_float(made.flops_per_token)} a token"
        return f"{tokens} tokens in steps of {batch}: {flops}"
    if not given and options.text_tokens < math.inf and made.tokens < 0.9 * TOKENS_PER_PARAMETER * made.multiplied:
        return f"{tokens} tokens: {EPOCHS} times the text, which teach nearly as much as new ones (arXiv:2305.16264)"
    ratio = given.get("target_param_data_ratio", TOKENS_PER_PARAMETER)
    source = "" if given else " (arXiv:2203.15556)"
    count = format_count(made.multiplied)
    return f"{tokens} tokens in steps of {batch}: {ratio:g} for each of {count} outside the embedding{source}"


def _float(number: float) -> str:
    """A number with three digits and an exponent: 0.00173 -> 1.73e-3."""
    digits, exponent = f"{number:.2e}".split("e")
    return f"{digits}e{int(exponent)}"
