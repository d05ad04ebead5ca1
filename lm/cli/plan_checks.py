"""The findings of `lm plan` on its numbers: errors, warnings and advice, each with the arithmetic and the cure.

`cli/plan_facts` computes the numbers; what options do not go together is in `training/checks`.
"""

import math
from collections.abc import Iterator
from typing import Any

from jsonargparse import Namespace

from lm.cli.scale import batch_tokens
from lm.data.config import SourceConfig
from lm.data.prepare import describe_small_validation
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.model.estimates import block_flops_per_token
from lm.system.files import DiskSpace
from lm.system.hardware import Device
from lm.system.units import format_bytes, format_count, format_figure, format_time_and_cost, plural
from lm.training.builtin_optimizers import BUILTIN
from lm.training.callbacks.evaluation import read_evaluation_tasks
from lm.training.checks import Finding
from lm.training.config import EvaluationConfig, OptimizerConfig
from lm.training.schedule import lr_fraction

LONG_WARMUP = 0.2  # share of the run
MANY_EPOCHS = 4  # up to here repeated tokens are nearly as good as new (Muennighoff et al., 2023, arXiv:2305.16264)
FEW_TOKENS = 5  # a parameter; 20 are the best for a budget of operations (Hoffmann et al., 2022, arXiv:2203.15556)
FIRST_TRY = 5e6  # parameters, below which a model is one to try things with
NEARLY_FULL = 0.92  # of the device's memory
HALF_EMPTY = 0.45
LONG_VALIDATION = 0.1  # share of the time
BF16_FROM = (8, 0)  # compute capability; TF32 too
FAR_BATCH, FAR_RATE = 4, 3  # times the rules of `lm scale`, above or below
RULES_FROM = 1e17  # operations in the blocks, the least that the rule of the rate was fitted to (arXiv:2401.02954)
UNCLIPPED_RATE = 6e-4  # the highest of GPT-3's models, which were all clipped at 1.0 (Brown et al., 2020,
# arXiv:2005.14165, table 2.1 and appendix B)
EARLY_DECAY = 0.05  # share of the run after the end of its decay
MUCH_LOST = 3600  # seconds of work
LONG_SAVING = 0.05  # share of the time
ROWS = 64  # a vocabulary that is a multiple of it fills the tiles of a GPU's matrix units


def of_steps(steps: dict[str, Any], config: Namespace) -> Iterator[Finding]:
    total = steps["max_steps"]
    if (drill := config.guards.inject_step) is not None and drill > total:
        yield Finding("error", f"guards.inject_step {drill:,}: the run ends with step {total:,}", "inject it before")
    for name, count in (("val_interval", "validated"), ("checkpoint_interval", "saved")):
        interval = config.trainer[name]
        if interval > total:
            yield Finding("advice", f"trainer.{name} {interval:,} is more than the run's {total:,} steps: the run is "
                          f"{count} at its end alone", f"lower trainer.{name}")  # fmt: skip


def of_warmup(steps: dict[str, Any], config: Namespace, data: dict[str, Any]) -> Iterator[Finding]:
    warmup, total, per_epoch = steps["warmup_steps"], steps["max_steps"], steps.get("steps_per_epoch")
    ratio = config.model.schedule.warmup_ratio is not None
    shorter = f"--model.schedule.warmup_{'ratio' if ratio else 'steps'} {{}}"
    if warmup >= total:
        yield Finding("error", f"the warm-up of {plural(warmup, 'step')} is not over when the run of {total:,} ends",
                      f"{shorter.format(0.1 if ratio else total // 10)}, or `lm fit` with --force")
    elif per_epoch is not None and per_epoch < warmup:
        most = f"{int(per_epoch) / total:.6f}" if ratio else int(per_epoch)
        yield Finding("error", f"the data ends before the warm-up does: {_steps_an_epoch(data, steps)}, and the "
                      f"warm-up takes {warmup:,} of {total:,}",
                      f"{shorter.format(most)}, more data, or `lm fit` with --force")
    elif steps["warmup_share"] > LONG_WARMUP:
        yield Finding("warning", f"warm-up takes {warmup:,} of {total:,} steps, {steps['warmup_share']:.0%} of the run",
                      f"lower model.schedule.warmup_{'ratio' if ratio else 'steps'}, or train longer")


def _steps_an_epoch(data: dict[str, Any], steps: dict[str, Any]) -> str:
    samples = steps["tokens_per_step"] // steps["seq_len"]
    per_epoch = f"{steps['steps_per_epoch']:,.1f} steps an epoch"
    return f"{data['train']['windows']:,} samples / {samples:,} a step = {per_epoch}"


def of_model(model: dict[str, Any], steps: dict[str, Any]) -> Iterator[Finding]:
    parameters = model["parameters"]["total"]
    ratio = steps["tokens"] / parameters
    if ratio < FEW_TOKENS:
        yield Finding("advice" if parameters < FIRST_TRY else "warning",
                      f"{format_count(steps['tokens'])} tokens are {ratio:.2g} for each of {format_count(parameters)} "
                      "parameters; about 20 give the lowest loss for the compute",
                      "train longer, or take a smaller model")  # fmt: skip
    if model["vocab_size"] % ROWS:
        padded = -(-model["vocab_size"] // ROWS) * ROWS
        yield Finding("advice", f"a vocabulary of {model['vocab_size']:,} is not a multiple of {ROWS}: GPUs multiply "
                      "such matrices more slowly", f"--model.decoder.vocab_size {padded}")  # fmt: skip


def of_tokenizer(tokenizer: Tokenizer | None, decoder: DecoderConfig | None) -> Iterator[Finding]:
    if tokenizer and tokenizer.lossy:
        yield Finding("advice", tokenizer.lossy, "a model learns and writes texts as they are decoded")
    rows, tokens = decoder.vocab_size if decoder else 0, tokenizer.vocab_size if tokenizer else 0
    if tokens and rows - tokens > max(ROWS, rows // 10):
        yield Finding("warning", f"{rows - tokens:,} of {rows:,} rows of the embedding belong to no token of the "
                      f"tokenizer, which has {tokens:,}",
                      "if this is the right tokenizer, leave model.decoder.vocab_size out")  # fmt: skip


def of_data(data: dict[str, Any], steps: dict[str, Any], config: Namespace) -> Iterator[Finding]:
    if not data["prepared"]:
        yield Finding("advice", f"{config.data.path} is not there yet: the first fit makes it from "
                      f"{', '.join(data['from'])}", "to plan with its tokens, run `lm data prepare` first")  # fmt: skip
        return
    for what, cure in data["warnings"]:
        yield Finding("warning", what, cure)
    if data["train"]["documents_end"] is False:
        yield Finding("warning", "model.document_mask does nothing: no document ends in the first block of the "
                      "training data", "leave it out, or prepare data with its end-of-text token")
    epochs = steps["epochs"]
    for source in config.data.sources or ():
        yield from _of_source(source, data["sources"][source.name]["windows"], steps)
    if epochs > MANY_EPOCHS and not config.data.sources:
        yield Finding("warning", f"every token is seen {epochs:,.2f} times: {_steps_an_epoch(data, steps)}, and the "
                      f"run has {steps['max_steps']:,}; beyond {MANY_EPOCHS} epochs repeated tokens teach little",
                      "give more data, or train for fewer steps")  # fmt: skip
    if "val" not in data:
        yield Finding("warning", "there is no validation data: no best checkpoint, no early stopping", "give data.val")
        return
    validated = min(config.data.val_tokens or data["val"]["tokens"], data["val"]["tokens"])
    if problem := describe_small_validation(validated):
        short = validated < data["val"]["tokens"]
        yield Finding("warning", problem, "raise data.val_tokens" if short else "give more in data.val, or prepare "
                      "the data again with a larger --val_fraction")  # fmt: skip
    # A validation has the forward pass alone, a third of a step's operations.
    share = validated / 3 / (config.trainer.val_interval * steps["tokens_per_step"])
    if share > LONG_VALIDATION:
        yield Finding("warning", f"validations take {share:.0%} as long as training: {format_count(validated)} tokens "
                      f"every {config.trainer.val_interval:,} steps of {format_count(steps['tokens_per_step'])}",
                      "lower data.val_tokens, or raise trainer.val_interval")  # fmt: skip


def _of_source(source: SourceConfig, windows: int, steps: dict[str, Any]) -> Iterator[Finding]:
    taken = steps["sources"][source.name]
    count, epochs, most = taken["samples"], taken["epochs"], source.max_epochs
    arithmetic = (f"{count:,} of the {steps['tokens'] // steps['seq_len']:,} samples of the run, {taken['share']:.1%}, "
                  f"are from its {windows:,}")  # fmt: skip
    if most is not None and epochs > most:
        yield Finding("error", f"data.sources {source.name} is repeated {epochs:,.3g} times, more than its max_epochs "
                      f"{most:g}: {arithmetic}", "give it less weight or more data, train for fewer steps, or raise "
                      "its max_epochs")  # fmt: skip
    elif most is None and epochs > MANY_EPOCHS:
        yield Finding("warning", f"data.sources {source.name} is repeated {epochs:,.3g} times: {arithmetic}; beyond "
                      f"{MANY_EPOCHS} epochs repeated tokens teach little",
                      "give it less weight or more data, or its max_epochs if this is meant")  # fmt: skip


def of_tasks(evaluation: EvaluationConfig) -> Iterator[Finding]:
    try:
        read_evaluation_tasks(evaluation)
    except RequestError as error:
        yield Finding("error", f"evaluation.tasks: {error}", "")


def of_device(memory: dict[str, Any], disk: DiskSpace, steps: dict[str, Any], device: Device,
              config: Namespace, precision: str) -> Iterator[Finding]:  # fmt: skip
    if precision != config.trainer.precision:
        yield Finding("advice", f"{device.name} is slow in {config.trainer.precision}, so {precision} is taken",
                      f"--trainer.precision {precision} says so")  # fmt: skip
    if config.trainer.matmul_precision == "high" and (device.capability or (0, 0)) < BF16_FROM:
        yield Finding("warning", f"trainer.matmul_precision high is TF32, which {device.name} does not have: it "
                      "changes nothing", "leave it out")  # fmt: skip
    if precision.startswith("bf16") and device.capability is not None and device.capability < BF16_FROM:
        yield Finding("warning", f"{device.name} has no bf16 in hardware", "--trainer.precision 16-mixed")
    if memory["device"] is None:
        yield Finding("warning", f"how much memory {device.name} has is not known", "name one with --device")
    else:
        yield from _of_memory(memory, steps, device, config)
    if not disk.suffices:
        yield Finding("error", str(disk), "free some, set trainer.default_root_dir to another disk, or `lm fit` with "
                      "--force")  # fmt: skip


def _of_memory(
    memory: dict[str, Any], steps: dict[str, Any], device: Device, config: Namespace
) -> Iterator[Finding]:  # fmt: skip
    share, best, asked = memory["total"] / memory["device"], memory["largest_micro_batch"], steps["micro_batch_size"]
    free = " that are free" if device.capability is None else ""
    need = f"about {format_bytes(memory['total'])} of {device.name}'s {format_bytes(memory['device'])}{free}"
    stays = "the run stays the same"
    if config.data.global_batch_tokens is None and best is not None:
        tokens = best * steps["seq_len"] * steps["world_size"]
        stays = f"a step then has {tokens:,} tokens, because data.global_batch_tokens is not set"
    if share > 1 and best is None:
        recomputed = memory["largest_recomputed"]
        take = "take a smaller model or context" if recomputed is None else (
            f"--model.activation_checkpointing block --data.micro_batch_size {recomputed}")  # fmt: skip
        yield Finding("error", f"a step takes {need}, and even one sample at a time does not fit",
                      f"{take}, shard it over more devices with trainer.strategy fsdp2, or `lm fit` with --force")
    elif share > 1:
        yield Finding("error", f"a step takes {need}",
                      f"--data.micro_batch_size {best}: the largest that fits, and {stays}; or "
                      "`lm fit` with --force")  # fmt: skip
    elif share > NEARLY_FULL:
        yield Finding("warning", f"a step takes {need}, {share:.0%}", "lower data.micro_batch_size if memory runs out")
    elif share < HALF_EMPTY and best is not None and best > asked and device.capability is not None:
        yield Finding("advice", f"a step takes {need}, {share:.0%}",
                      f"--data.micro_batch_size {best} fits too and may be faster; {stays}")  # fmt: skip


def of_schedule(steps: dict[str, Any], config: Namespace) -> Iterator[Finding]:
    """Findings on a decay that does not end with the run, and on a high rate without clipping."""
    schedule, total = config.model.schedule, steps["max_steps"]
    warmup, decay = steps["warmup_steps"], steps["decay_steps"]
    rate, name = config.model.optimizer.lr, schedule.name
    last, final, end = lr_fraction(total - 1, total, schedule), schedule.final_fraction, max(decay, warmup)
    if name == "wsd" and not decay and final < 1:
        yield Finding("warning", f"model.schedule wsd has no decay, so the run ends at its peak rate {rate:g}",
                      f"--model.schedule.decay_steps {max(1, total // 5)}, a fifth of the run, or name it constant")
    elif name in ("cosine", "linear") and decay > total and last > final + 0.01:
        yield Finding("warning", f"the decay ends at step {decay:,}, after the run's {total:,}: the last rate is "
                      f"{last:.0%} of the peak, {last * rate:.2g}, and not {final:.0%}",
                      "leave model.schedule.decay_steps out to end it with the run")  # fmt: skip
    elif name in ("cosine", "linear") and decay and total - end > EARLY_DECAY * total and final < 1:
        yield Finding("warning", f"the decay ends at step {end:,} of {total:,}: the last {1 - end / total:.0%} of the "
                      f"run have {final:.0%} of the peak rate, {final * rate:.2g}",
                      "leave model.schedule.decay_steps out to end it with the run")  # fmt: skip
    if not config.trainer.gradient_clip_val and rate > UNCLIPPED_RATE:
        yield Finding("warning", f"model.optimizer.lr {rate:g} without clipping: one bad batch can undo the run; runs "
                      f"with a peak of at most {UNCLIPPED_RATE:g} are clipped at 1.0 too",
                      "--trainer.gradient_clip_val 1.0")  # fmt: skip


def of_optimizer(optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Options that the class of `model.optimizer.class_path` does not get."""
    if names := optimizer.left_out():
        values = ", ".join(f"{name} {getattr(optimizer, name)}" for name in names)
        yield Finding("warning", f"model.optimizer: {values}: this is for the built-in optimizers, and "
                      f"{optimizer.class_path} gets none of it",
                      "put what it should get under model.optimizer.init_args")  # fmt: skip


def of_rules(decoder: DecoderConfig, steps: dict[str, Any], config: Namespace) -> Iterator[Finding]:
    """Findings on a batch or a learning rate far from the rules of `lm scale`, which has their sources."""
    tokens, batch, rate = steps["tokens"], steps["tokens_per_step"], config.model.optimizer.lr
    operations = tokens * block_flops_per_token(decoder, steps["seq_len"])
    if operations < RULES_FROM:
        return
    best, at_once = batch_tokens(tokens), batch // steps["accumulate"]
    if (times := max(batch / best, best / batch)) > FAR_BATCH:
        more = "more" if batch > best else "fewer"
        yield Finding("warning", f"a step has {batch:,} tokens, {times:.1f} times {more} than the {best:,.0f} "
                      f"that `lm scale` takes for {format_count(tokens)} tokens",
                      f"--data.global_batch_tokens {max(1, round(best / at_once)) * at_once}")  # fmt: skip
    if config.model.optimizer.class_path:
        return  # no rule is known for it
    optimizer = BUILTIN[config.model.optimizer.name]
    best = optimizer.learning_rate(decoder, operations, batch)
    why = optimizer.rate_follows.format(
        flops=operations, batch=batch, depth=decoder.num_hidden_layers, width=decoder.hidden_size
    )
    if (times := max(rate / best, best / rate)) > FAR_RATE:
        yield Finding("warning" if rate > best else "advice", f"model.optimizer.lr {rate:g} is {times:.1f} times "
                      f"{'more' if rate > best else 'less'} than the {best:.2g} that `lm scale` takes for {why}",
                      f"--model.optimizer.lr {best:.2g}")  # fmt: skip


def of_checkpoints(checkpoints: dict[str, Any], steps: dict[str, Any]) -> Iterator[Finding]:
    if "lost_seconds" not in checkpoints:
        return
    lost, interval = checkpoints["lost_seconds"], checkpoints["interval"]
    if lost > MUCH_LOST:
        yield Finding("warning", f"a crash loses up to {interval:,} steps of work: "
                      f"{format_time_and_cost(lost, checkpoints['lost_usd'])}",
                      f"--trainer.checkpoint_interval {max(1, int(interval * MUCH_LOST / 2 / lost))}: half an hour")
    if checkpoints["saving_share"] > LONG_SAVING and interval < steps["max_steps"]:
        enough = math.ceil(interval * checkpoints["saving_share"] / LONG_SAVING)
        yield Finding("warning", f"saving takes {checkpoints['saving_share']:.0%} of the time: "
                      f"{checkpoints['saving_seconds']:,.1f} s ({checkpoints['saving_basis']}) every {lost:,.1f} s",
                      f"--trainer.checkpoint_interval {enough}")  # fmt: skip


def of_budget(
    facts: dict[str, Any], time: dict[str, Any], steps: dict[str, Any], config: Namespace
) -> Iterator[Finding]:  # fmt: skip
    """Findings on what the run takes of its budget: errors where its speed was measured or given."""
    budget, hours, rate = config.guards.budget, facts["hours"], facts["rate_usd_per_hr"]
    if budget.cap_usd is not None and rate is None and facts["spent_usd"] is not None:
        yield Finding("warning", f"{budget.file} has no rate_usd_per_hr: the cost is not known beforehand, nor when "
                      "the file is not updated any more", "give guards.budget.rate_usd_per_hr too")  # fmt: skip
    if hours is None:
        return
    option = "max_tokens" if config.trainer.max_tokens else "max_steps"
    for name, cap, need, before, arithmetic in (
        ("cap_usd", budget.cap_usd, facts["usd"], facts["spent_usd"],
         f"{format_figure(hours)} h x {format_figure(rate or 0)} USD/h = {format_figure(facts['usd'] or 0)} USD"),
        ("max_hours", budget.max_hours, hours, facts["hours_elapsed"], f"{format_figure(hours)} h"),
    ):  # fmt: skip
        if cap is None or need is None or (before or 0.0) + need <= cap:
            continue
        spent = f" after {format_figure(before)} before it" if before else ""
        fits = int(steps["max_steps" if option == "max_steps" else "tokens"] * max(0.0, cap - (before or 0.0)) / need)
        error = need > cap and not time["assumed"] and not budget.dry_run
        yield Finding("error" if error else "warning", f"the run takes {arithmetic}{spent}, and "
                      f"guards.budget.{name} is {format_figure(cap)} ({time['basis']})",
                      f"--guards.budget.{name} {math.ceil((before or 0.0) + need)}"
                      f"{f', or --trainer.{option} {fits}' * bool(fits)}")  # fmt: skip
