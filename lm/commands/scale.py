"""`lm scale`: one dial. A depth and a horizon become a config with a reason on every line; `scaling` has the rules."""

import json
import math
import re
import shlex
from typing import Literal

from lm.errors import RequestError
from lm.quantities import Count, format_count
from lm.scaling import TOKENS_PER_PARAMETER, Recipe, recipe

DATA = "data/pretrain-32k"
VOCAB_SIZE, SEQ_LEN, DEVICE_TOKENS = Count(32_768), Count(2_048), Count(16_384)
INTERVAL = 250  # optimizer steps between validations, and between checkpoints
VALIDATED = 16  # batches a validation reads: a fiftieth of the work between two of them

YAML = """\
# {title}
#   {command} > {name}.yaml
#   lm data prepare --input texts/ --output {data} --tokenizer bpe --vocab_size {rows}
#   lm plan --config {name}.yaml && lm fit --config {name}.yaml

seed_everything: 1337  # the same seed gives the same weights and the same order of samples

trainer:
  max_steps: {steps}  # {horizon}
  val_interval: {interval}  # optimizer steps between validations
  checkpoint_interval: {interval}  # optimizer steps between checkpoints
  log_interval: 10  # optimizer steps between log lines
  gradient_clip_val: 1.0  # largest global norm of the gradient
  precision: bf16-mixed  # bf16 arithmetic on fp32 master weights
  devices: auto  # all of the node; `torchrun` and SLURM work too
  strategy: auto  # ddp on several devices; fsdp2 shards what does not fit one

model:
  decoder:
    vocab_size: {vocab_size}  # rows of the embedding; at least the tokenizer's
    hidden_size: {hidden_size}  # 64 x depth, rounded up to whole heads (nanochat)
    num_hidden_layers: {depth}  # the depth
    num_attention_heads: {heads}  # 128 wide each (nanochat)
    num_key_value_heads: {heads}  # one for every query head: the cache of a small model is small
    intermediate_size: {intermediate_size}  # 8/3 x hidden_size: three matrices for the price of two (arXiv:2002.05202)
    max_position_embeddings: {seq_len}  # context
    window_pattern: {window_pattern}  # S sees a window, L all; the last sees all (nanochat)
    sliding_window: {sliding_window}  # tokens of a window: a quarter of the context, in tiles of 128 (nanochat)
    qk_norm: true  # bounds the attention logits, so that large learning rates pass (arXiv:2309.14322)
    tie_word_embeddings: true  # or most of a small model would be its two tables
  optimizer:
    name: {optimizer}  # {optimizer_reason}
    lr: {lr}  # peak: for {flops} operations in the blocks (arXiv:2401.02954), at this batch (arXiv:2205.10287)
    betas: [0.9, 0.95]  # decay of the running means of the gradient and of its square
    weight_decay: {weight_decay}  # a memory of {memory} of the run, at {ratio} tokens a parameter (arXiv:2505.13738)
  schedule:
    name: linear  # straight down to 0, better than a cosine to a tenth (arXiv:2502.15938)
    warmup_steps: {warmup_steps}  # a tenth of the run, at most 375M tokens (arXiv:2509.25087)
    final_fraction: 0.0  # of the peak, at the end

data:
  path: {data}  # a folder that `lm data prepare` made
  micro_batch_size: {micro_batch}  # samples a device runs at once; `lm plan --fit` finds the most that fit
  global_batch_tokens: {batch}  # {samples} samples: best for so many tokens, as a power of two (arXiv:2505.13738)
  val_tokens: {val_tokens}  # tokens of a validation; `lm test` takes all of them
"""


def scale(
    depth: int | None = None,
    target_param_data_ratio: float | None = None,
    target_flops: float | None = None,
    max_steps: Count | None = None,
    vocab_size: Count = VOCAB_SIZE,
    seq_len: Count = SEQ_LEN,
    device_tokens: Count = DEVICE_TOKENS,
    data: str = DATA,
    optimizer: Literal["adamw", "muon"] = "adamw",
) -> None:
    """A whole config from a depth, by published scaling rules, on standard output.

    Args:
        depth: Number of blocks; width, heads, batch, learning rate and decay follow.
        target_param_data_ratio: How long to train: tokens for each parameter; 20 if no horizon is given.
        target_flops: In place of it: floating-point operations of the whole run.
        max_steps: In place of it: optimizer steps.
        vocab_size: Rows of the embedding; at least the tokenizer's.
        seq_len: Context, in tokens.
        device_tokens: The most tokens that a device runs at once.
        data: Folder that `lm data prepare` made, or will make.
        optimizer: AdamW, or Muon for the matrices in the blocks.

    Raises:
        RequestError: no depth, several horizons, or numbers that make no model.
    """
    if depth is None:
        raise RequestError("give the depth, such as --depth 12")
    horizons = {"target_param_data_ratio": target_param_data_ratio, "target_flops": target_flops,
                "max_steps": max_steps}  # fmt: skip
    given = {f"--{name}": value for name, value in horizons.items() if value is not None}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are several lengths of one run: give one of them")
    positive = {**given, "--vocab_size": vocab_size, "--device_tokens": device_tokens}
    for name, value in positive.items():
        if not 0 < value < math.inf:
            raise RequestError(f"{name} {value} must be above 0")
    if not data:
        raise RequestError("--data is empty: give the folder that `lm data prepare` made, or will make")
    if not given:
        target_param_data_ratio = TOKENS_PER_PARAMETER
    made = recipe(
        depth, tokens_per_parameter=target_param_data_ratio, flops=target_flops, steps=max_steps,
        vocab_size=vocab_size, seq_len=seq_len, device_tokens=device_tokens,
    )  # fmt: skip
    settings = {"vocab_size": (vocab_size, VOCAB_SIZE), "seq_len": (seq_len, SEQ_LEN),
                "device_tokens": (device_tokens, DEVICE_TOKENS), "data": (data, DATA),
                "optimizer": (optimizer, "adamw")}  # fmt: skip
    changed = {f"--{name}": shlex.quote(str(value)) for name, (value, usual) in settings.items() if value != usual}
    options = "".join(f" {name} {value}" for name, value in {**given, **changed}.items())
    print(write(made, f"lm scale --depth {depth}{options}", _horizon(made, given), data, optimizer), end="")


def write(made: Recipe, command: str, horizon: str, data: str, optimizer: str) -> str:
    """The YAML of a recipe, with a reason on every line that the dial decided.

    Args:
        made: the recipe.
        command: the command line that makes this file again.
        horizon: why the run is so long.
        data: folder of the shards.
        optimizer: `adamw` or `muon`.
    """
    decoder = made.decoder
    memory = 1 / (made.learning_rate * made.weight_decay * made.steps)
    reasons = {
        "adamw": "the rules for lr and weight_decay are fitted to it",
        "muon": "for matrices; its updates have AdamW's size, so they share lr and decay (arXiv:2502.16982)",
    }
    quoted = data if re.fullmatch(r"[\w./-]+", data) else json.dumps(data)
    return YAML.format(
        title=f"Depth {decoder.num_hidden_layers}: {format_count(made.parameters)} parameters on "
        f"{format_count(made.tokens)} tokens, {_float(made.flops)} operations. Why each number: lm/scaling.py.",
        command=command, name=f"depth{decoder.num_hidden_layers}", data=quoted, optimizer=optimizer,
        optimizer_reason=reasons[optimizer], steps=f"{made.steps:_}", horizon=horizon,
        interval=min(INTERVAL, made.steps), vocab_size=f"{decoder.vocab_size:_}", rows=int(decoder.vocab_size),
        hidden_size=f"{decoder.hidden_size:_}", depth=decoder.num_hidden_layers, heads=decoder.num_attention_heads,
        intermediate_size=f"{decoder.intermediate_size:_}", seq_len=f"{decoder.max_position_embeddings:_}",
        window_pattern=decoder.window_pattern, sliding_window=f"{decoder.sliding_window:_}",
        lr=_float(made.learning_rate), flops=_float(made.block_flops), weight_decay=f"{made.weight_decay:.3g}",
        memory=f"{memory:.0%}", ratio=f"{made.tokens / made.parameters:.3g}", warmup_steps=f"{made.warmup_steps:_}",
        micro_batch=made.micro_batch, batch=_binary(made.batch_tokens), samples=f"{made.batch:,}",
        val_tokens=_binary(VALIDATED * made.batch_tokens),
    )  # fmt: skip


def _horizon(made: Recipe, given: dict[str, float]) -> str:
    tokens, batch = format_count(made.tokens), _binary(made.batch_tokens)
    if "--max_steps" in given:
        return f"as asked: {tokens} tokens, {made.tokens / made.parameters:.3g} a parameter"
    if "--target_flops" in given:
        flops = f"{_float(given['--target_flops'])} operations / {_float(made.flops_per_token)} a token"
        return f"{flops} = {tokens} tokens, in steps of {batch}"
    ratio = given.get("--target_param_data_ratio", TOKENS_PER_PARAMETER)
    source = "" if given else " (arXiv:2203.15556)"
    return f"{ratio:g} tokens a parameter{source} = {tokens} tokens, in steps of {batch}"


def _binary(number: int) -> str:
    """A count as people read it where powers of two are meant: 262_144 -> 256Ki."""
    for size, suffix in ((2**20, "Mi"), (2**10, "Ki")):
        if number % size == 0:
            return f"{number // size}{suffix}"
    return f"{number:_}"


def _float(number: float) -> str:
    """Three digits: 0.00173 -> 1.73e-3."""
    digits, exponent = f"{number:.2e}".split("e")
    return f"{digits}e{int(exponent)}"
