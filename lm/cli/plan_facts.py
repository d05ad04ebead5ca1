"""The numbers of `lm plan` and the findings on them, subject by subject: data, steps, model, device, cost.

The numbers express a config in tokens, steps, bytes, hours and dollars. Functions named `check_...` yield findings:
errors and warnings, with the arithmetic and the cure. `training/checks` finds incompatible options, and
`cli/plan` has the command.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm.cli.command_options import PlanOptions
from lm.cli.request import Sections
from lm.data.config import LEARNED, DataConfig, SourceConfig, is_prepared
from lm.data.datamodule import DataModule
from lm.data.shard_statistics import document_tokens, padding_fraction
from lm.data.tokenizer import Tokenizer
from lm.errors import LmError, RequestError, first_line, require_at_least
from lm.model.config import DecoderConfig
from lm.model.estimates import checkpoint_bytes, flops_per_token, parameters, recomputed_flops_per_token
from lm.model.memory import Step, largest_micro_batch, training_memory
from lm.runs.disk_space import DiskSpace, disk_space
from lm.runs.run import Run
from lm.system.devices import Device, assumed_speed, find_device
from lm.system.files import is_remote
from lm.system.parsing import nonnegative, parse_json
from lm.system.process import program
from lm.system.units import format_bytes, format_count, format_figure, parse_bytes, plural
from lm.training.checks import Finding, Known, check_accelerator, find, has_kernels
from lm.training.config import BudgetConfig, EvaluationConfig, OptimizerConfig
from lm.training.module import training_class
from lm.training.optim import state_size
from lm.training.precision import multiplication_precision, precision_for_cpu
from lm.training.schedule import Steps, lr_fraction, plan_steps, warmup_and_decay_steps
from lm.training.trainer import device_count

SMALL_MODEL, SMALL_BATCH = 50e6, 8_192  # parameters and tokens of a micro-batch below which the host limits the speed
RESERVE_BYTES = 2**30  # CUDA context and library workspaces
RESERVE_SHARE = 0.05  # of the peak, for what the allocator cannot use
CPU_RESERVE_BYTES = 2**26  # memory of libraries in a step, beyond what this process already has
CPU_RESERVE_SHARE = 0.6  # of the peak: glibc keeps freed memory, in holes that the next tensor may not fit into
DISK_RATE = 500e6  # bytes a second, of a SATA SSD; cloud volumes start at 125e6 (AWS gp3)
NETWORK_SECONDS = 3.0  # to wait for an object store
NEARLY_FULL = 0.92  # of the device's memory
LONG_VALIDATION = 0.1  # share of the time
BF16_FROM = (8, 0)  # compute capability
DECAY_OFF = 0.05  # share of the run between its end and that of its decay


# ---- data ------------------------------------------------------------------------------------------------------------


def find_tokenizer(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of a config's data; None if it does not exist yet."""
    if is_prepared(data) or data.tokenizer:
        first = data.sources[0] if data.sources else data
        return Tokenizer.load(first.tokenizer or first.path)
    return None if data.prepare.tokenizer in LEARNED else Tokenizer.load(data.prepare.tokenizer)


def with_vocabulary(config: Sections, tokenizer: Tokenizer | None) -> DecoderConfig | None:
    """The decoder's config with `vocab_size` set; None if this depends on a tokenizer that does not exist yet."""
    decoder, prepare = config.model.decoder, config.data.prepare
    if decoder.vocab_size:
        return decoder
    if tokenizer is not None:
        return replace(decoder, vocab_size=tokenizer.vocab_size)
    return replace(decoder, vocab_size=prepare.vocab_size) if prepare and prepare.tokenizer == "bpe" else None


def data_facts(
    data: DataConfig, opened: DataModule | None, document_mask: bool
) -> tuple[dict[str, Any], Tokenizer | None]:
    """Tokens and shards of each split (with a document mask also documents per token), and the tokenizer."""
    if opened is None and not is_prepared(data):
        return {"prepared": False, "from": list(data.prepare.input)}, find_tokenizer(data)
    if opened is None:
        opened = DataModule(**vars(data))
        opened.prepare_data()  # makes nothing; checks that the folder was made with these options
        opened.setup("fit")
    found: dict[str, Any] = {"prepared": True, "warnings": opened.warnings(), "sources": {}}
    for split, shards in opened.shards.items():
        found[split] = {
            "tokens": document_tokens(shards), "shards": len(shards.fingerprint()),
            "windows": int(shards.index.windows(opened.seq_len).sum()),
            "left_over": shards.index.left_over(opened.seq_len),
            "filled_up": padding_fraction(shards), "dtype": str(shards.column.dtype),
            "documents_per_token": opened.documents_per_token(split) if document_mask else None,
        }  # fmt: skip
    if opened.mixed:
        for source, shards in zip(opened.sources, opened.by_source["train"].values(), strict=True):
            found["sources"][source.name] = {
                "tokens": document_tokens(shards), "windows": int(shards.index.windows(opened.seq_len).sum()),
            }  # fmt: skip
    return found, opened.tokenizer


def remote_sources(data: DataConfig) -> list[str]:
    """The URLs among the data files of a config."""
    each = [data, *(data.sources or [])]
    given = [[files] if isinstance(files, str) else files or [] for one in each for files in (one.train, one.val)]
    return [source for group in given for source in group if is_remote(source)]


def open_data(
    config: Sections, opened: DataModule | None, noted: list[Finding]
) -> tuple[dict[str, Any], Tokenizer | None]:
    """Call `data_facts`; errors, or no answer of an object store in `NETWORK_SECONDS`, become findings in `noted`."""
    data, document_mask = config.data, config.model.document_mask
    try:
        if opened is None and (remote := remote_sources(data)):
            return _open_remote(data, document_mask, remote, noted)
        return data_facts(data, opened, document_mask)
    except (LmError, OSError) as error:
        noted.append(Finding("error", str(error), ""))
        return {"unknown": True}, None


def _open_remote(
    data: DataConfig, document_mask: bool, remote: list[str], noted: list[Finding]
) -> tuple[dict[str, Any], Tokenizer | None]:
    from lm.system.remote import NoAnswer, Unreachable, call_within

    logging.getLogger("lm.system.remote").setLevel(logging.ERROR)  # the page says what failed
    brief = replace(data, timeout=min(data.timeout, 2 * NETWORK_SECONDS))  # reads may take half
    try:
        return call_within(NETWORK_SECONDS, lambda: data_facts(brief, None, document_mask))
    except (NoAnswer, Unreachable) as error:
        why = first_line(error.__cause__ if isinstance(error, Unreachable) else error)
        noted.append(Finding("warning", f"{', '.join(remote)}: how many tokens there are is not known, "
                             f"since the store does not answer in {NETWORK_SECONDS:g} s: {why}",
                             "check the network and the credentials, and plan again"))  # fmt: skip
        return {"unknown": True}, find_tokenizer(data)  # which was read before


def check_data(data: dict[str, Any], steps: dict[str, Any], config: Sections) -> Iterator[Finding]:
    if not data["prepared"]:
        rows, learned = config.model.decoder.vocab_size, config.data.prepare
        if rows and learned.tokenizer == "bpe" and rows < learned.vocab_size:
            yield Finding("error", f"model.decoder.vocab_size {rows:,} is smaller than data.prepare.vocab_size "
                          f"{learned.vocab_size:,}", "leave it out to take the tokenizer's")  # fmt: skip
        return
    for what, cure in data["warnings"]:
        yield Finding("warning", what, cure)
    if data["train"]["documents_per_token"] == 0:
        yield Finding("warning", "model.document_mask does nothing: no document ends in the first block of the "
                      "training data", "leave it out, or prepare data with its end-of-text token")  # fmt: skip
    for source in config.data.sources or ():
        yield from _check_source(source, data["sources"][source.name]["windows"], steps)
    if "val" not in data:
        yield Finding("warning", "there is no validation data: no best checkpoint, no early stopping", "give data.val")
        return
    validated = min(config.data.val_tokens or data["val"]["tokens"], data["val"]["tokens"])
    # A validation has the forward pass alone, a third of a step's operations.
    share = validated / 3 / (config.trainer.val_interval * steps["tokens_per_step"])
    if share > LONG_VALIDATION:
        yield Finding("warning", f"validations take {share:.0%} as long as training: {format_count(validated)} tokens "
                      f"every {config.trainer.val_interval:,} steps of {format_count(steps['tokens_per_step'])}",
                      "raise trainer.val_interval, or lower data.val_tokens")  # fmt: skip


def _check_source(source: SourceConfig, windows: int, steps: dict[str, Any]) -> Iterator[Finding]:
    taken = steps["sources"][source.name]
    count, epochs, most = taken["samples"], taken["epochs"], source.max_epochs
    if most is not None and epochs > most:
        yield Finding("error", f"data.sources {source.name} is repeated {epochs:,.3g} times, more than its max_epochs "
                      f"{most:g}: {count:,} of the {steps['tokens'] // steps['seq_len']:,} samples of the run, "
                      f"{taken['share']:.1%}, are from its {windows:,}", "give it less weight or more data, train for "
                      "fewer steps, or raise its max_epochs")  # fmt: skip


def check_tasks(evaluation: EvaluationConfig) -> Iterator[Finding]:
    if not evaluation.tasks:
        return
    from lm.training.callbacks.evaluation import read_evaluation_tasks

    try:
        read_evaluation_tasks(evaluation)
    except RequestError as error:
        yield Finding("error", f"evaluation.tasks: {error}", "")


# ---- steps -----------------------------------------------------------------------------------------------------------


def ranks(devices: int | str | list[int], here: int) -> int:
    """Number of devices per node in `trainer.devices`; `auto` means `here`, those of this machine."""
    count = device_count(devices)
    if count is None:
        count = here if str(devices) in ("auto", "-1") else 0
    if count < 1:
        raise RequestError(f"trainer.devices {devices} names no device: give how many, or which, or auto")
    return count


def step_facts(steps: Steps, config: Sections, data: dict[str, Any]) -> dict[str, Any]:
    """The counts of the run: tokens, epochs, warm-up, validations, checkpoints."""
    warmup, decay = warmup_and_decay_steps(steps.max_steps, config.model.schedule)
    facts = {
        "seq_len": steps.seq_len, "micro_batch_size": steps.micro_batch_size, "accumulate": steps.accumulate,
        "world_size": steps.world_size, "tokens_per_step": steps.tokens_per_step, "max_steps": steps.max_steps,
        "tokens": steps.tokens(steps.max_steps),
        "warmup_steps": warmup, "warmup_share": warmup / steps.max_steps, "decay_steps": decay,
        "validations": math.ceil(steps.max_steps / config.trainer.val_interval),
        "checkpoints": math.ceil(steps.max_steps / config.trainer.checkpoint_interval),
    }  # fmt: skip
    if "train" in data:
        windows = data["train"]["windows"]
        facts["epochs"] = steps.samples(steps.max_steps) / windows
    if data.get("sources"):
        from lm.data.mixture import merge_phases, source_counts

        samples = source_counts(merge_phases(config.data.sources, config.data.phases or [], steps.seq_len),
                            steps.samples(steps.max_steps))  # fmt: skip
        facts["sources"] = {
            name: {"samples": count, "share": count / sum(samples), "epochs": count / source["windows"]}
            for (name, source), count in zip(data["sources"].items(), samples.tolist(), strict=True)
        }
    return facts


def check_warmup(steps: dict[str, Any], config: Sections) -> Iterator[Finding]:
    warmup, total = steps["warmup_steps"], steps["max_steps"]
    if warmup >= total:
        ratio = config.model.schedule.warmup_ratio is not None
        shorter = "ratio 0.1" if ratio else f"steps {total // 10 * (total >= 20)}"
        yield Finding("error", f"the warm-up of {plural(warmup, 'step')} is not over when the run of {total:,} ends",
                      f"--model.schedule.warmup_{shorter}, or `lm fit` with --force")  # fmt: skip


def check_steps(steps: dict[str, Any], config: Sections) -> Iterator[Finding]:
    """Findings on `inject_step`, and on a decay that does not end with the run."""
    schedule, total = config.model.schedule, steps["max_steps"]
    if (drill := config.guards.inject_step) is not None and drill > total:
        yield Finding("error", f"guards.inject_step {drill:,}: the run ends with step {total:,}", "inject it before")
    decay, last, off = steps["decay_steps"], lr_fraction(total - 1, total, schedule), DECAY_OFF * total
    none = schedule.name == "wsd" and not decay
    moved = schedule.name in ("cosine", "linear") and decay and abs(total - max(decay, steps["warmup_steps"])) > off
    if schedule.final_fraction < 1 and (none or moved):
        ends = f"the decay ends at step {decay:,}" if decay else "model.schedule wsd has no decay"
        yield Finding("warning", f"{ends}, and the run ends at step {total:,} with {last:.0%} of the peak rate",
                      "give model.schedule.decay_ratio, such as 0.2, or name it constant" if none else
                      "leave model.schedule.decay_steps out to end it with the run")  # fmt: skip


def check_optimizer(optimizer: OptimizerConfig) -> Iterator[Finding]:
    """Findings on options that are not passed to the class of `model.optimizer.class_path`."""
    if names := optimizer.left_out():
        values = ", ".join(f"{name} {getattr(optimizer, name)}" for name in names)
        yield Finding("warning", f"model.optimizer: {values}: this is for the built-in optimizers, and "
                      f"{optimizer.class_path} gets none of it",
                      "put what it should get under model.optimizer.init_args")  # fmt: skip


# ---- model -----------------------------------------------------------------------------------------------------------


def model_facts(decoder: DecoderConfig, seq_len: int) -> dict[str, Any]:
    """Parameters by part, and FLOPs per token, of the built-in decoder."""
    return {
        "parameters": parameters(decoder), "flops_per_token": flops_per_token(decoder, seq_len),
        "flops_per_token_full_attention": flops_per_token(decoder, seq_len, full_attention=True),
        "tied": decoder.tie_word_embeddings, "vocab_size": decoder.vocab_size,
    }  # fmt: skip


# ---- memory and time -------------------------------------------------------------------------------------------------


def computation(steps: Steps, config: Sections, device: Device, precision: str, data: dict[str, Any]) -> Step:
    """Describe the computation of a micro-batch on a device, for the estimates of memory."""
    model, train = config.model, data.get("train", {})
    return Step(
        steps.micro_batch_size, steps.seq_len, precision, has_kernels(device, model.kernels), model.compile,
        steps.accumulate,
        # With HSDP a model is divided over the devices of a node.
        steps.world_size // (config.trainer.num_nodes if config.trainer.strategy == "hsdp" else 1),
        config.trainer.strategy in ("fsdp2", "hsdp") and steps.world_size > 1, model.activation_checkpointing,
        config.trainer.distributed.gathered_blocks(model.decoder.num_hidden_layers),
        train.get("documents_per_token") or 0.0,
    )  # fmt: skip


def memory_of_option(given: str | None) -> int | None:
    try:
        return None if given is None else parse_bytes(given)
    except ValueError as error:
        raise RequestError(f"--memory: {error}") from error


def memory_facts(
    decoder: DecoderConfig, step: Step, optimizer: OptimizerConfig, device: Device, global_batch: bool
) -> dict[str, Any]:
    """Bytes of a step by part, the device's memory, and the largest micro-batch that fits it.

    `largest_recomputed` is the largest with `model.activation_checkpointing block`. `global_batch`:
    `data.global_batch_tokens` is given; otherwise a step is one micro-batch, however large.
    """
    parts = training_memory(decoder, step, state_size(optimizer))
    on_cpu = device.capability is None
    reserve_bytes, share = (CPU_RESERVE_BYTES, CPU_RESERVE_SHARE) if on_cpu else (RESERVE_BYTES, RESERVE_SHARE)
    reserve = reserve_bytes + int(share * parts["peak"])
    facts = {**parts, "reserve": reserve, "total": parts["peak"] + reserve, "device": device.memory_bytes}
    if step.kernels and step.checkpointing == "none" and not step.precision.startswith("fp8"):
        stored = training_memory(decoder, replace(step, checkpointing="store_all"), state_size(optimizer))["peak"]
        facts["store_all"] = stored + reserve_bytes + int(share * stored)
    if device.memory_bytes is not None:
        available = int((device.memory_bytes - reserve_bytes) / (1 + share))
        samples = step.micro_batch_size * step.accumulate if global_batch else None
        for name, checkpointing in (("largest_micro_batch", step.checkpointing), ("largest_recomputed", "block")):
            tried = replace(step, checkpointing=checkpointing)
            facts[name] = largest_micro_batch(decoder, tried, available, samples, state_size(optimizer))
    return facts


def time_facts(
    steps: dict[str, Any], model: dict[str, Any], device: Device, precision: str, mfu: float | None,
    measured: dict[str, Any], usd_per_hour: float | None, recomputed: float,
) -> dict[str, Any]:  # fmt: skip
    """Time and cost of the steps; `seconds` is None if the speed of the device is not known.

    `measured` is the result of `lm bench step`; activation checkpointing repeats `recomputed` FLOPs per token.
    """
    peak, flops = device.peak_flops(precision), model["flops_per_token"]
    if measured:
        rate, basis = measured["tokens_per_second"], measured["basis"]
    elif peak is None or (assumed := assumed_speed(device, precision, flops + recomputed)) is None:
        return {"seconds": None, "basis": f"the peak of {device.name} in {precision} is not known: give --peak_tflops "
                "N, or measure the same config with `lm bench step --steps 3 --output step.json` and give --bench "
                "step.json"}  # fmt: skip
    elif mfu:
        rate, basis = mfu * peak / flops, f"{mfu:.0%} MFU, given"
    else:
        rate, basis = assumed
        if recomputed:
            basis += f"; {recomputed / flops:.0%} more work for activation checkpointing"
        if model["parameters"]["total"] < SMALL_MODEL or steps["micro_batch_size"] * steps["seq_len"] < SMALL_BATCH:
            basis += "; a model or micro-batch as small as this reaches less"
    rate *= steps["world_size"]
    seconds = steps["tokens"] / rate
    used = rate * flops / (peak * steps["world_size"]) if peak else None
    return {
        "seconds": seconds, "tokens_per_second": rate, "basis": basis, "assumed": not (measured or mfu),
        "mfu": used,
        "mfu_full_attention": used and used * model["flops_per_token_full_attention"] / flops,
        "usd": None if usd_per_hour is None else seconds / 3600 * usd_per_hour,
    }  # fmt: skip


def read_bench(file: Path, model_parameters: int, seq_len: int) -> dict[str, Any]:
    """Read a file of `lm bench step --output`; `tokens_per_second` is per device, and `basis` says what it is from."""
    try:
        found = parse_json(file.read_bytes())
        shape = found["parameters"], found["seq_len"]
        rate = float(found["tokens_per_second"]) / found.get("ranks", 1)  # of one device
        if not rate > 0:
            raise ValueError(f"{rate} tokens a second")
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise RequestError(f"--bench {file} is not a result of `lm bench step --output`: {error}") from error
    if shape != (model_parameters, seq_len):
        raise RequestError(
            f"--bench {file} is of another model: {shape[0]:,} parameters and {shape[1]:,} tokens of context, this one "
            f"has {model_parameters:,} and {seq_len:,}"
        )
    basis = ", ".join([str(file), *(str(found[name]) for name in ("device", "precision") if name in found)])
    return {**found, "tokens_per_second": rate, "basis": basis}


def check_device(memory: dict[str, Any], disk: DiskSpace, steps: dict[str, Any], device: Device,
              config: Sections, precision: str) -> Iterator[Finding]:  # fmt: skip
    if precision.startswith("bf16") and device.capability is not None and device.capability < BF16_FROM:
        yield Finding("warning", f"{device.name} has no bf16 in hardware", "--trainer.precision 16-mixed")
    if memory["device"] is None:
        yield Finding("warning", f"how much memory {device.name} has is not known", "name one with --device")
    else:
        yield from _check_memory(memory, steps, device, config)
    if not disk.suffices:
        yield Finding("error", str(disk), "free some, set trainer.default_root_dir to another disk, or `lm fit` with "
                      "--force")  # fmt: skip


def _check_memory(
    memory: dict[str, Any], steps: dict[str, Any], device: Device, config: Sections
) -> Iterator[Finding]:  # fmt: skip
    share, best = memory["total"] / memory["device"], memory["largest_micro_batch"]
    free = " that are free" if device.capability is None else ""
    need = f"about {format_bytes(memory['total'])} of {device.name}'s {format_bytes(memory['device'])}{free}"
    if share > 1 and best is None:
        recomputed = memory["largest_recomputed"]
        take = "take a smaller model or context" if recomputed is None else (
            f"--model.activation_checkpointing block --data.micro_batch_size {recomputed}")  # fmt: skip
        yield Finding(
            "error",
            f"a step takes {need}, and even one sample at a time does not fit",
            f"{take}, shard it over more devices with trainer.strategy fsdp2, or `lm fit` with --force",
        )
    elif share > 1:
        stays = "the run stays the same"
        if config.data.global_batch_tokens is None:
            tokens = best * steps["seq_len"] * steps["world_size"]
            stays = f"a step then has {tokens:,} tokens, because data.global_batch_tokens is not set"
        yield Finding("error", f"a step takes {need}",
                      f"--data.micro_batch_size {best}: the largest that fits, and {stays}; or "
                      "`lm fit` with --force")  # fmt: skip
    elif share > NEARLY_FULL:
        yield Finding("warning", f"a step takes {need}, {share:.0%}", "lower data.micro_batch_size if memory runs out")


# ---- checkpoints and budget ------------------------------------------------------------------------------------------


def checkpoint_facts(
    interval: int, steps: dict[str, Any], time: dict[str, Any], size: int, measured: dict[str, Any]
) -> dict[str, Any]:
    """The most work that a crash can lose, and the share of the time spent saving checkpoints of `size` bytes."""
    interval = min(interval, steps["max_steps"])
    part = interval / steps["max_steps"]
    lost = part * (time["seconds"] or 0.0)
    if lost < 1:  # second: the time is not known, or too short to matter
        return {"interval": interval}
    try:
        saving, basis = measured["checkpoint"]["stall_ms"] / 1000, "measured"
    except (KeyError, TypeError):
        saving, basis = size / DISK_RATE, f"a disk of {DISK_RATE / 1e6:.0f} MB/s, assumed"
    return {"interval": interval, "lost_seconds": lost, "lost_usd": time["usd"] and part * time["usd"],
            "saving_share": saving / lost, "saving_basis": basis}  # fmt: skip


def budget_facts(
    budget: BudgetConfig, time: dict[str, Any], rate: float | None, file: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """The run's use of its budget, at `rate` US dollars an hour; `file` is the content of `budget.file`."""
    return {
        "cap_usd": budget.cap_usd, "max_hours": budget.max_hours, "rate_usd_per_hr": rate,
        "hours": time["seconds"] and time["seconds"] / 3600, "usd": time.get("usd"),
        "spent_usd": nonnegative(file.get("spent_usd")), "hours_elapsed": nonnegative(file.get("hours_elapsed")),
    }  # fmt: skip


def check_budget(
    facts: dict[str, Any], time: dict[str, Any], steps: dict[str, Any], config: Sections
) -> Iterator[Finding]:  # fmt: skip
    """Findings on a run that exceeds its budget: errors if its speed was measured or given, else warnings."""
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


# ---- facts and findings ----------------------------------------------------------------------------------------------


def examine(
    config: Sections, wanted: PlanOptions, opened: DataModule | None = None, resumed: Run | None = None
) -> tuple[dict[str, Any], list[Finding]]:
    """Return the facts of a config, as far as they can be known, and the findings on it.

    When a fit calls this, `opened` is its data, and `resumed` a run whose warm-up and budget are not checked again.
    """
    if wanted.mfu is not None and not 0 < wanted.mfu <= 1:
        raise RequestError(f"--mfu {wanted.mfu} must lie in (0, 1]")
    if wanted.peak_tflops is not None and not 0 < wanted.peak_tflops < math.inf:
        raise RequestError(f"--peak_tflops {wanted.peak_tflops} must be above 0")
    require_at_least(0, "--", rate_usd_per_hr=wanted.rate_usd_per_hr)
    name = wanted.device or "auto"
    cpu = name == "auto" and config.trainer.accelerator == "cpu"
    device, here = (Device("", None, None), 1) if wanted.strict else find_device(
        "cpu" if cpu and not wanted.memory else name, memory_of_option(wanted.memory),
        wanted.peak_tflops or (config.trainer.peak_tflops if name == "auto" else None),
    )  # fmt: skip
    try:
        on_node = ranks(config.trainer.devices, here)
        world_size = on_node * config.trainer.num_nodes
        steps = plan_steps(
            seq_len=config.data.seq_len, micro_batch_size=config.data.micro_batch_size,
            global_batch_tokens=config.data.global_batch_tokens, world_size=world_size,
            max_steps=config.trainer.max_steps, max_tokens=config.trainer.max_tokens,
        )  # fmt: skip
        warmup_and_decay_steps(steps.max_steps, config.model.schedule)
    except RequestError as error:
        return {}, [Finding("error", str(error), "")]
    found: dict[str, Any] = {}
    noted: list[Finding] = []
    data, tokenizer, budget_file, rate = {"prepared": False, "from": []}, None, {}, None
    if not wanted.strict:
        data, tokenizer = open_data(config, opened, noted)
        budget_file, rate = _read_rate(config, wanted, noted)
    decoder = with_vocabulary(config, tokenizer)
    found["steps"] = step_facts(steps, config, data)
    custom = training_class().is_custom()
    known = Known() if wanted.strict else Known(
        world_size, device, here=name == "auto" and not wanted.memory, tokenizer=tokenizer,
        has_validation="val" in data if data.get("prepared") else None,
    )  # fmt: skip
    noted += find(config.trainer, config.model, config.data, known, samples=config.samples,
                  evaluation=config.evaluation, custom=custom)  # fmt: skip
    if known.here:
        noted += check_accelerator(config.trainer.accelerator)
    noted += check_steps(found["steps"], config)
    if resumed is None:
        noted += check_warmup(found["steps"], config)
    if not wanted.strict and "unknown" not in data:
        found["data"] = data
        noted += check_data(data, found["steps"], config)
        noted += check_tasks(config.evaluation)
    noted += check_optimizer(config.model.optimizer)
    if custom:
        found["model"] = {"unknown": "size, memory and speed are those of what build_decoder returns: "
                          f"`{program()} bench step --config FILE` measures them"}  # fmt: skip
        return found, noted
    if decoder is None:
        if "unknown" not in data:  # otherwise there is an error already
            found["model"] = {"unknown": "the size is not known before the tokenizer is made: "
                              "give --model.decoder.vocab_size N"}  # fmt: skip
        return found, noted
    found["model"] = model_facts(decoder, config.data.seq_len)
    if wanted.strict:
        return found, noted
    if device.capability is None and device.memory_bytes is not None:
        device = device._replace(memory_bytes=device.memory_bytes // on_node)  # the ranks on a CPU share its memory
    precision = precision_for_cpu(config.trainer.precision) if device.capability is None else config.trainer.precision
    step, optimizer = computation(steps, config, device, precision, data), config.model.optimizer
    found["device"] = {"name": device.name, "precision": precision, "kernels": step.kernels, "count": world_size}
    global_batch = config.data.global_batch_tokens is not None
    found["memory"] = memory_facts(decoder, step, optimizer, device, global_batch)
    count = found["model"]["parameters"]["total"]
    measured = read_bench(wanted.bench, count, config.data.seq_len) if wanted.bench else {}
    found["time"] = time_facts(
        found["steps"], found["model"], device,
        multiplication_precision(precision, config.trainer.matmul_precision), wanted.mfu, measured, rate,
        recomputed_flops_per_token(decoder, step.seq_len, config.model.activation_checkpointing),
    )  # fmt: skip
    one = checkpoint_bytes(decoder, step.master_item, state_size(optimizer))
    found["checkpoints"] = checkpoint_facts(
        config.trainer.checkpoint_interval, found["steps"], found["time"], one, measured
    )
    if config.guards.budget.wanted:
        found["budget"] = budget_facts(config.guards.budget, found["time"], rate, budget_file)
        if resumed is None:
            noted += check_budget(found["budget"], found["time"], found["steps"], config)
    every = config.trainer.keep_every
    kept = config.trainer.keep_checkpoints + (steps.max_steps // every if every else 0)
    present = len(resumed.steps()) if resumed else 0
    space = disk_space(Path(config.trainer.default_root_dir), one, kept, present)
    found["disk"] = space._asdict()
    noted += check_device(found["memory"], space, found["steps"], device, config, precision)
    return found, noted


def _read_rate(config: Sections, wanted: PlanOptions, noted: list[Finding]) -> tuple[dict[str, Any], float | None]:
    """The content of `guards.budget.file`, and the price of an hour in US dollars; findings are added to `noted`."""
    budget, file, rate = config.guards.budget, {}, wanted.rate_usd_per_hr
    if not budget.wanted:
        return file, rate
    from lm.training.budget import read_budget_file

    try:
        file = read_budget_file(budget)
        rate = nonnegative(file.get("rate_usd_per_hr")) or budget.rate_usd_per_hr or wanted.rate_usd_per_hr
    except RequestError as error:
        noted.append(Finding("error", str(error), ""))
    return file, rate
