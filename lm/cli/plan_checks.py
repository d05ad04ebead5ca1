"""The findings of `lm plan` on the numbers of `cli/plan_facts`: errors and warnings, with the arithmetic and the fix.

`training/checks` finds options that do not go together, which needs no numbers.
"""

import math
from collections.abc import Iterator
from typing import Any

from lm.cli.request import Sections
from lm.data.config import SourceConfig
from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.system.devices import Device
from lm.system.units import format_bytes, format_count, format_figure, plural
from lm.training.checks import Finding, error
from lm.training.config import EvaluationConfig, OptimizerConfig
from lm.training.schedule import lr_fraction

MANY_EPOCHS = 100  # more than any text is worth
NEARLY_FULL = 0.92  # of the device's memory
LONG_VALIDATION = 0.1  # fraction of the time
BF16_FROM = (8, 0)  # compute capability
FAR = 30  # times that the rate of a group is more, or less, than the optimizer's
DECAY_OFF = 0.05  # fraction of the run between its end and that of its decay
FORCE = "`lm fit` with --force"

Facts = dict[str, Any]  # by name, as `lm plan --json` prints them


def warning(what: str, fix: str = "") -> Finding:
    return Finding("warning", what, fix)


def check_data(data: Facts, steps: Facts, config: Sections) -> Iterator[Finding]:
    if not data["prepared"]:
        rows, prepare = config.model.decoder.vocab_size, config.data.prepare
        if rows and prepare and prepare.tokenizer == "bpe" and rows < prepare.vocab_size:
            smaller = f"model.decoder.vocab_size {rows:,} is smaller than data.prepare.vocab_size"
            yield error(f"{smaller} {prepare.vocab_size:,}", "leave it out to take the tokenizer's")
        return
    for problem, fix in data["warnings"]:
        yield warning(problem, fix)
    if data["train"]["documents_per_token"] == 0:
        yield warning(
            "model.document_mask does nothing: no document ends in the first block of the training data",
            "leave it out, or prepare data with its end-of-text token",
        )
    if config.model.document_mask and data["train"]["answers_end_documents"]:
        what = "model.document_mask separates the turns of a conversation, whose answers end with the end-of-text token"
        yield error(what, "leave it out")
    limit, epochs = config.trainer.max_epochs, steps.get("epochs", 0.0)
    run = f"the run of {plural(steps['max_steps'], 'step')} reads the data"
    if limit is not None and epochs > limit:
        last, warmup = int(steps["max_steps"] * limit / epochs), steps["warmup_steps"]
        within = f", within the warm-up of {warmup:,}" if last < warmup else ""
        fix = f"--trainer.max_steps {max(1, last)}, or give more data, or raise trainer.max_epochs"
        yield error(f"{run} {epochs:.3g} times, and trainer.max_epochs {limit:g} ends after step {last:,}{within}", fix)
    elif limit is not None and 0 < epochs < 0.9 * limit:
        what = f"trainer.max_epochs {limit:g} is only a limit: the run ends after {epochs:.2g} epochs"
        yield warning(what, f"--trainer.max_steps {int(steps['max_steps'] * limit / epochs)} is as long")
    elif epochs > MANY_EPOCHS:
        yield warning(f"{run} {epochs:,.0f} times", "train for fewer steps, or give more data")
    for phase in config.data.phases or ():
        if phase.tokens >= steps["tokens"]:
            what = f"data.phases: one begins after {phase.tokens:,} tokens, and the run ends after {steps['tokens']:,}"
            yield warning(what, "let it begin earlier, or train for longer")
    for source in config.data.sources or ():
        yield from check_source(source, data["sources"][source.name]["windows"], steps, limit)
    if "val" not in data:
        what = "there is no validation data: no best checkpoint, no early stopping"
        if config.evaluation.tasks and config.evaluation.interval is None:
            what += ", and no evaluation without evaluation.interval"
        yield warning(what, "give data.val")
        return
    validated = min(config.data.val_tokens or data["val"]["tokens"], data["val"]["tokens"])
    # A validation has the forward pass alone, a third of a step's FLOPs.
    fraction = validated / 3 / (config.trainer.val_interval * steps["tokens_per_step"])
    if fraction > LONG_VALIDATION:
        yield warning(
            f"validations take {fraction:.0%} as long as training: {format_count(validated)} tokens every "
            f"{config.trainer.val_interval:,} steps of {format_count(steps['tokens_per_step'])}",
            "raise trainer.val_interval, or lower data.val_tokens",
        )


def check_source(source: SourceConfig, windows: int, steps: Facts, limit: float | None) -> Iterator[Finding]:
    facts, limit = steps["sources"][source.name], limit if source.max_epochs is None else source.max_epochs
    if limit is not None and facts["epochs"] > limit:
        samples = steps["tokens"] // steps["seq_len"]
        yield error(
            f"data.sources {source.name} is repeated {facts['epochs']:,.3g} times, more than its max_epochs "
            f"{limit:g}: {facts['samples']:,} of the {samples:,} samples of the run, {facts['share']:.1%}, "
            f"are from its {windows:,}",
            "give it less weight or more data, train for fewer steps, or raise its max_epochs",
        )


def check_tasks(evaluation: EvaluationConfig) -> Iterator[Finding]:
    if not evaluation.tasks:
        return
    from lm.training.callbacks.evaluation import read_evaluation_tasks

    try:
        read_evaluation_tasks(evaluation)
    except RequestError as problem:
        yield error(f"evaluation.tasks: {problem}")


def check_warmup(steps: Facts, config: Sections) -> Iterator[Finding]:
    warmup, total = steps["warmup_steps"], steps["max_steps"]
    if warmup >= total:
        shorter = total // 10 if total >= 20 else 0
        by_ratio = config.model.schedule.warmup_ratio is not None
        option = "--model.schedule.warmup_ratio 0.1" if by_ratio else f"--model.schedule.warmup_steps {shorter}"
        what = f"the warm-up of {plural(warmup, 'step')} is not over when the run of {total:,} ends"
        yield error(what, f"{option}, or {FORCE}")


def check_steps(steps: Facts, config: Sections) -> Iterator[Finding]:
    """Findings on a decay that does not end with the run."""
    schedule, total, decay = config.model.schedule, steps["max_steps"], steps["decay_steps"]
    if schedule.final_fraction >= 1:
        return
    end = f"and the run ends at step {total:,} with {lr_fraction(total - 1, total, schedule):.0%} of the peak rate"
    if schedule.name == "wsd" and not decay:
        fix = "give model.schedule.decay_ratio, such as 0.2, or let `lm branch` decay it later"
        yield warning(f"model.schedule wsd has no decay, {end}", fix)
    elif schedule.name in ("cosine", "linear") and decay:
        if abs(total - max(decay, steps["warmup_steps"])) > DECAY_OFF * total:
            option = "decay_ratio" if schedule.decay_ratio is not None else "decay_steps"
            fix = f"--model.schedule.{option} null ends it with the run"
            yield warning(f"the decay ends at step {decay:,}, {end}", fix)


def check_optimizer(optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Findings on rates of groups that are far from the optimizer's."""
    for name, group in vars(optimizer.groups).items():
        if group.lr is not None and not 1 / FAR <= group.lr / optimizer.lr <= FAR:
            place = f"model.optimizer.groups.{name}"
            yield warning(
                f"{place}.lr {group.lr:g} is {group.lr / optimizer.lr:.3g} times model.optimizer.lr "
                f"{optimizer.lr:g}, which it does not follow",
                f"--{place}.lr null --{place}.lr_ratio 8 makes it 8 times as large",
            )


def check_windows(decoder: DecoderConfig) -> Iterator[Finding]:
    window, context = decoder.sliding_window, decoder.max_position_embeddings
    if window is not None and window >= context:
        what = f"model.decoder.sliding_window {window:,} is all of the context of {context:,}: S layers are as L layers"
        yield warning(what, f"--model.decoder.sliding_window {context // 4} is a quarter of it")
    pattern, layers = decoder.window_pattern or "L", decoder.num_hidden_layers
    if "L" in pattern[layers:] and "L" not in pattern[:layers]:
        what = f"none of the {plural(layers, 'layer')} of model.decoder.window_pattern {pattern} has full attention"
        yield warning(what, f"--model.decoder.window_pattern {'S' * (layers - 1)}L")


def check_device(
    memory: Facts, disk: Facts, steps: Facts, device: Device, config: Sections, precision: str
) -> Iterator[Finding]:
    if precision.startswith("bf16") and device.capability is not None and device.capability < BF16_FROM:
        yield warning(f"{device.name} has no bf16 in hardware", "--trainer.precision 16-mixed")
    if memory["device"] is None:
        yield warning(f"how much memory {device.name} has is not known", "name one with --device")
    else:
        yield from check_memory(memory, steps, device, config)
    if disk["at_once"] > disk["free"]:
        checkpoint, at_once, free = map(format_bytes, disk.values())
        what = f"checkpoints of {checkpoint} need {at_once} at once, and {free} are free"
        yield error(what, f"free some, set trainer.default_root_dir to another disk, or {FORCE}")


def check_memory(memory: Facts, steps: Facts, device: Device, config: Sections) -> Iterator[Finding]:
    fraction, largest = memory["total"] / memory["device"], memory["largest_micro_batch"]
    free = " that are free" if device.capability is None else ""
    need = f"about {format_bytes(memory['total'])} of {device.name}'s {format_bytes(memory['device'])}{free}"
    if fraction > 1 and largest is None:
        options = "take a smaller model or context"
        if memory["largest_recomputed"] is not None:
            micro_batch = memory["largest_recomputed"]
            options = f"--model.activation_checkpointing block --data.micro_batch_size {micro_batch}"
        what = f"a step takes {need}, and even one sample at a time does not fit"
        yield error(what, f"{options}, shard it over more devices with trainer.strategy fsdp2, or {FORCE}")
    elif fraction > 1:
        effect = "the run stays the same"
        if config.data.global_batch_tokens is None:
            tokens = largest * steps["seq_len"] * steps["world_size"]
            effect = f"a step then has {tokens:,} tokens, because data.global_batch_tokens is not set"
        fix = f"--data.micro_batch_size {largest}: the largest that fits, and {effect}; or {FORCE}"
        yield error(f"a step takes {need}", fix)
    elif fraction > NEARLY_FULL:
        yield warning(f"a step takes {need}, {fraction:.0%}", "lower data.micro_batch_size if memory runs out")


def check_budget(facts: Facts, time: Facts, steps: Facts, config: Sections) -> Iterator[Finding]:
    """Findings on a run that, with what was spent before it, exceeds a cap of its budget: an error if it does so by
    itself, otherwise a warning, since the guard saves a checkpoint in time.
    """
    budget, hours, rate, usd = config.guards.budget, facts["hours"], facts["rate_usd_per_hr"], facts["usd"]
    if hours is None:
        return
    takes_hours = f"{format_figure(hours)} h"
    takes_usd = f"{takes_hours} x {format_figure(rate or 0)} USD/h = {format_figure(usd or 0)} USD"
    caps = {"cap_usd": (usd, facts["spent_usd"], takes_usd), "max_hours": (hours, facts["hours_elapsed"], takes_hours)}
    for name, (need, spent, arithmetic) in caps.items():
        cap, spent = getattr(budget, name), spent or 0.0
        if cap is None or need is None or spent + need <= cap:
            continue
        before = f" after {format_figure(spent)} before it" if spent else ""
        what = f"the run takes {arithmetic}{before}, and guards.budget.{name} is {format_figure(cap)} ({time['basis']})"
        fix = f"--guards.budget.{name} {math.ceil(spent + need)}"
        if fitting := int(0.99 * steps["max_steps"] * max(0.0, cap - spent) / need):
            in_tokens = f"--trainer.max_tokens {fitting * steps['tokens_per_step']}"
            fix += f", or {in_tokens if config.trainer.max_tokens else f'--trainer.max_steps {fitting}'}"
        refused = need > cap and not budget.dry_run
        yield error(what, f"{fix}, or {FORCE}") if refused else warning(what, fix)
