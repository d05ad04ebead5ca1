"""The numbers of `lm plan`, subject by subject: a config in tokens, steps, bytes, hours and dollars.

`examine` returns them with the findings of `cli/plan_checks` and `training/checks`. `cli/plan` has the command.
"""

import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

from lm.cli import plan_checks
from lm.cli.command_options import PlanOptions
from lm.cli.options import command_options
from lm.cli.plan_checks import Facts
from lm.cli.request import Sections
from lm.cli.settings import read_options
from lm.data.config import LEARNED, DataConfig, is_prepared
from lm.data.datamodule import DataModule
from lm.data.document_ends import answers_end_documents
from lm.data.shard_statistics import document_tokens, padding_fraction
from lm.data.shards import Shards
from lm.data.tokenizer import Tokenizer
from lm.errors import LmError, RequestError
from lm.model.config import DecoderConfig
from lm.model.estimates import checkpoint_bytes, flops_per_token, parameters, recomputed_flops_per_token
from lm.model.memory import Step, largest_micro_batch, training_memory
from lm.runs.expected_loss import expected_loss
from lm.runs.run import Run
from lm.system import process
from lm.system.devices import Device, assumed_speed, find_device
from lm.system.parsing import nonnegative, read_object
from lm.system.units import parse_bytes
from lm.training.checks import Finding, error, find_problems, has_kernels
from lm.training.config import BudgetConfig, OptimizerConfig
from lm.training.module import training_class
from lm.training.optim import state_size
from lm.training.precision import multiplication_precision, precision_for_cpu
from lm.training.schedule import Steps, warmup_and_decay_steps
from lm.training.world import device_count

SMALL_MODEL, SMALL_BATCH = 50e6, 8_192  # parameters and tokens of a micro-batch below which the host limits the speed
# Memory beside the tensors: bytes, and a fraction of the peak.
RESERVE = 2**30, 0.05  # CUDA context and library workspaces; what the allocator cannot use
CPU_RESERVE = 2**26, 0.6  # libraries, beyond what this process has; freed memory that glibc keeps, in holes too small
DISK_RATE = 500e6  # bytes a second, of a SATA SSD; cloud volumes start at 125e6 (AWS gp3)
STORE_SECONDS = 20.0  # to wait for data from an object store, at most


def find_tokenizer(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of a config's data; None if it does not exist yet."""
    if is_prepared(data) or data.tokenizer:
        first = data.sources[0] if data.sources else data
        return Tokenizer.load(first.tokenizer or first.path)
    assert data.prepare is not None  # otherwise it is prepared
    return None if data.prepare.tokenizer in LEARNED else Tokenizer.load(data.prepare.tokenizer)


def with_vocabulary(config: Sections, tokenizer: Tokenizer | None) -> DecoderConfig | None:
    """The decoder's config with `vocab_size` set; None if this depends on a tokenizer that does not exist yet."""
    decoder, prepare = config.model.decoder, config.data.prepare
    if decoder.vocab_size:
        return decoder
    if tokenizer is not None:
        return replace(decoder, vocab_size=tokenizer.vocab_size)
    return replace(decoder, vocab_size=prepare.vocab_size) if prepare and prepare.tokenizer == "bpe" else None


def data_facts(data: DataConfig, opened: DataModule | None, document_mask: bool) -> tuple[Facts, Tokenizer | None]:
    """Tokens and shards of each split (with a document mask also documents per token), and the tokenizer."""
    if opened is None and data.prepare and not is_prepared(data):
        return {"prepared": False, "from": list(data.prepare.input)}, find_tokenizer(data)
    if opened is None:
        opened = DataModule(**vars(replace(data, timeout=min(data.timeout, STORE_SECONDS))))
        opened.prepare_data()  # makes nothing; checks that the folder was made with these options
        opened.setup("fit")

    def counts(shards: Shards) -> dict[str, int]:
        return {"tokens": document_tokens(shards), "windows": int(shards.index.windows(opened.seq_len).sum())}

    facts: Facts = {"prepared": True, "warnings": opened.warnings(), "sources": {}}
    for split, shards in opened.shards.items():
        facts[split] = counts(shards) | {
            "shards": len(shards.fingerprint()),
            "left_over": shards.index.left_over(opened.seq_len),
            "filled_up": padding_fraction(shards),
            "dtype": str(shards.column.dtype),
            "documents_per_token": opened.documents_per_token(split) if document_mask else None,
            "answers_end_documents": answers_end_documents(shards, opened.tokenizer),
        }
    if opened.mixed:
        sources = zip(opened.sources, opened.by_source["train"].values(), strict=True)
        facts["sources"] = {source.name: counts(shards) for source, shards in sources}
    return facts, opened.tokenizer


def step_facts(steps: Steps, config: Sections, data: Facts) -> Facts:
    """The counts of the run: tokens, epochs, warm-up, validations, checkpoints."""
    warmup, decay = warmup_and_decay_steps(steps.max_steps, config.model.schedule)
    counts = ("seq_len", "micro_batch_size", "accumulate", "world_size", "tokens_per_step", "max_steps")
    facts: Facts = {
        **{name: getattr(steps, name) for name in counts},
        "tokens": steps.tokens(steps.max_steps),
        "warmup_steps": warmup,
        "warmup_share": warmup / steps.max_steps,
        "decay_steps": decay,
        "validations": math.ceil(steps.max_steps / config.trainer.val_interval),
        "checkpoints": math.ceil(steps.max_steps / config.trainer.checkpoint_interval),
    }
    total = steps.samples(steps.max_steps)
    if "train" in data:
        facts["epochs"] = total / data["train"]["windows"]
    if data.get("sources"):
        from lm.data.mixture import merge_phases, source_counts

        samples = source_counts(merge_phases(config.data.sources, config.data.phases or [], steps.seq_len), total)
        facts["sources"] = {
            name: {"samples": count, "share": count / sum(samples), "epochs": count / source["windows"]}
            for (name, source), count in zip(data["sources"].items(), samples.tolist(), strict=True)
        }
    return facts


def model_facts(decoder: DecoderConfig, seq_len: int) -> Facts:
    """Parameters by part, and FLOPs per token, of the built-in decoder."""
    return {
        "parameters": parameters(decoder),
        "flops_per_token": flops_per_token(decoder, seq_len),
        "flops_per_token_full_attention": flops_per_token(decoder, seq_len, full_attention=True),
        "tied": decoder.tie_word_embeddings,
        "vocab_size": decoder.vocab_size,
    }


def computation(steps: Steps, config: Sections, device: Device, precision: str, data: Facts) -> Step:
    """Describe the computation of a micro-batch on a device, for the estimates of memory."""
    model, trainer = config.model, config.trainer
    return Step(
        steps.micro_batch_size,
        steps.seq_len,
        precision,
        has_kernels(device, model.kernels),
        model.compile,
        steps.accumulate,
        steps.world_size,
        trainer.strategy == "fsdp2" and steps.world_size > 1,
        model.activation_checkpointing,
        data.get("train", {}).get("documents_per_token") or 0.0,
    )


def memory_facts(
    decoder: DecoderConfig, step: Step, optimizer: OptimizerConfig, device: Device, global_batch: bool
) -> Facts:
    """Bytes of a step by part, the device's memory, and the largest micro-batch that fits it.

    `largest_recomputed` is the largest with `model.activation_checkpointing block`. `global_batch`:
    `data.global_batch_tokens` is given; otherwise a step is one micro-batch, however large.
    """
    parts = training_memory(decoder, step, state_size(optimizer))
    reserve_bytes, fraction = CPU_RESERVE if device.capability is None else RESERVE
    reserve = reserve_bytes + int(fraction * parts["peak"])
    facts = {**parts, "reserve": reserve, "total": parts["peak"] + reserve, "device": device.memory_bytes}
    if device.memory_bytes is not None:
        available = int((device.memory_bytes - reserve_bytes) / (1 + fraction))
        samples = step.micro_batch_size * step.accumulate if global_batch else None
        for name, checkpointing in (("largest_micro_batch", step.checkpointing), ("largest_recomputed", "block")):
            tried = replace(step, checkpointing=checkpointing)
            facts[name] = largest_micro_batch(decoder, tried, available, samples, state_size(optimizer))
    return facts


def time_facts(
    steps: Facts,
    model: Facts,
    device: Device,
    precision: str,
    mfu: float | None,
    bench: Facts,
    usd_per_hour: float | None,
    recomputed: float,
) -> Facts:
    """Time and cost of the steps; `seconds` is None if the speed of the device is not known.

    `bench` is the result of `lm bench step`; activation checkpointing repeats `recomputed` FLOPs per token.
    """
    peak, flops = device.peak_flops(precision), model["flops_per_token"]
    if bench:
        rate, basis = bench["tokens_per_second"], bench["basis"]
    elif peak is None or (assumed := assumed_speed(device, precision, flops + recomputed)) is None:
        basis = (
            f"the peak of {device.name} in {precision} is not known: give --peak_tflops N, or measure it with "
            f"`{bench_command()} --steps 3 --output step.json` and give --bench step.json"
        )
        return {"seconds": None, "basis": basis}
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
    reached = rate * flops / (peak * steps["world_size"]) if peak else None
    return {
        "seconds": seconds,
        "tokens_per_second": rate,
        "basis": basis,
        "assumed": not (bench or mfu),
        "mfu": reached,
        "mfu_full_attention": reached and reached * model["flops_per_token_full_attention"] / flops,
        "usd": None if usd_per_hour is None else seconds / 3600 * usd_per_hour,
    }


def bench_command() -> str:
    """The command that times a step of the config that `lm plan` was given, with the same options."""
    command, *arguments = [*process.arguments(), ""]
    typed = read_options("plan", arguments[:-1]) if command == "plan" else [("config", "FILE")]
    own = [option.name for option in command_options("plan")]
    words = [word for name, value in typed if name not in own for word in (f"--{name}", str(value))]
    return f"{process.program()} bench step {shlex.join(words)}"


def read_bench(file: Path, model_parameters: int, seq_len: int) -> Facts:
    """Read a file of `lm bench step --output`; `tokens_per_second` is per device, and `basis` says what it is from."""
    bench = read_object(file)
    shape = bench["parameters"], bench["seq_len"]
    if shape != (model_parameters, seq_len):
        raise RequestError(
            f"--bench {file} is of another model: {shape[0]:,} parameters and {shape[1]:,} tokens of context, this one "
            f"has {model_parameters:,} and {seq_len:,}"
        )
    basis = ", ".join([str(file), *(str(bench[name]) for name in ("device", "precision") if name in bench)])
    return {**bench, "tokens_per_second": bench["tokens_per_second"] / bench.get("ranks", 1), "basis": basis}


def checkpoint_facts(interval: int, steps: Facts, time: Facts, size: int, bench: Facts) -> Facts:
    """The most work that a crash can lose, and the fraction of the time spent saving checkpoints of `size` bytes."""
    interval = min(interval, steps["max_steps"])
    fraction = interval / steps["max_steps"]
    lost = fraction * (time["seconds"] or 0.0)
    if lost < 1:  # second: the time is not known, or too short to matter
        return {"interval": interval}
    saving, basis = size / DISK_RATE, f"a disk of {DISK_RATE / 1e6:.0f} MB/s, assumed"
    if bench.get("checkpoint"):
        saving, basis = bench["checkpoint"]["stall_ms"] / 1000, "measured"
    facts = {"interval": interval, "lost_seconds": lost, "lost_usd": time["usd"] and fraction * time["usd"]}
    return {**facts, "saving_share": saving / lost, "saving_basis": basis}


def budget_facts(budget: BudgetConfig, time: Facts, rate: float | None, file: Facts) -> Facts:
    """The run's use of its budget, at `rate` US dollars an hour; `file` is the content of `budget.file`."""
    return {
        "cap_usd": budget.cap_usd,
        "max_hours": budget.max_hours,
        "rate_usd_per_hr": rate,
        "hours": time["seconds"] and time["seconds"] / 3600,
        "usd": time.get("usd"),
        **{name: nonnegative(file.get(name)) for name in ("spent_usd", "hours_elapsed")},
    }


# ---- facts and findings ----------------------------------------------------------------------------------------------


def examine(
    config: Sections, options: PlanOptions, opened: DataModule | None = None, resumed: Run | None = None
) -> tuple[Facts, list[Finding]]:
    """Return the facts of a config, as far as they can be known, and the findings on it.

    When a fit calls this, `opened` is its data, and `resumed` a run whose warm-up and budget are not checked again.
    """
    device, present = device_of_options(config, options)
    try:
        on_node = device_count(config.trainer.devices) or present
        world_size = on_node * config.trainer.num_nodes
        steps = config.steps(world_size)
        warmup_and_decay_steps(steps.max_steps, config.model.schedule)
    except RequestError as problem:
        return {}, [error(str(problem))]
    facts: Facts = {}
    findings: list[Finding] = []
    data, tokenizer = {"prepared": False, "from": []}, None
    if not options.strict:
        try:
            data, tokenizer = data_facts(config.data, opened, config.model.document_mask)
        except (LmError, OSError) as problem:
            data = {"unknown": True}
            findings.append(error(str(problem)))
    budget_file, rate = read_rate(config, options, findings)
    facts["steps"] = step_facts(steps, config, data)
    custom = training_class().is_custom()
    findings += find_problems(config.trainer, config.model, None if options.strict else device, tokenizer)
    findings += plan_checks.check_steps(facts["steps"], config)
    if resumed is None:
        findings += plan_checks.check_warmup(facts["steps"], config)
    if not options.strict and "unknown" not in data:
        facts["data"] = data
        findings += plan_checks.check_data(data, facts["steps"], config)
        findings += plan_checks.check_tasks(config.evaluation)
    findings += plan_checks.check_optimizer(config.model.optimizer)
    findings += plan_checks.check_windows(config.model.decoder)
    decoder = with_vocabulary(config, tokenizer)
    if custom:
        measure = f"`{bench_command()}` measures them"
        facts["model"] = {"unknown": f"size, memory and speed are those of what build_decoder returns: {measure}"}
    elif decoder is not None:
        facts["model"] = model_facts(decoder, config.data.seq_len)
    elif "unknown" not in data:  # otherwise there is an error already
        size = "the size is not known before the tokenizer is made: give --model.decoder.vocab_size N"
        facts["model"] = {"unknown": size}
    if custom or decoder is None or options.strict:
        return facts, findings
    if device.capability is None and device.memory_bytes is not None:
        device = device._replace(memory_bytes=device.memory_bytes // on_node)  # the ranks on a CPU share its memory
    precision = precision_for_cpu(config.trainer.precision) if device.capability is None else config.trainer.precision
    step, optimizer = computation(steps, config, device, precision, data), config.model.optimizer
    facts["device"] = {"name": device.name, "precision": precision, "kernels": step.kernels, "count": world_size}
    global_batch = config.data.global_batch_tokens is not None
    facts["memory"] = memory_facts(decoder, step, optimizer, device, global_batch)
    counts = parameters(decoder)
    bench = read_bench(options.bench, counts["total"], config.data.seq_len) if options.bench else {}
    multiplied_in = multiplication_precision(precision, config.trainer.matmul_precision)
    recomputed = recomputed_flops_per_token(decoder, step.seq_len, config.model.activation_checkpointing)
    facts["time"] = time_facts(
        facts["steps"], facts["model"], device, multiplied_in, options.mfu, bench, rate, recomputed
    )
    tokens = facts["steps"]["tokens"]
    multiplied, flops = counts["total"] - counts["embedding"], tokens * facts["model"]["flops_per_token"]
    expected = expected_loss(multiplied, tokens, flops, config.data.path, config.trainer.default_root_dir)
    facts["loss"] = expected._asdict()
    size = checkpoint_bytes(decoder, step.master_item, state_size(optimizer))
    interval = config.trainer.checkpoint_interval
    facts["checkpoints"] = checkpoint_facts(interval, facts["steps"], facts["time"], size, bench)
    if config.guards.budget.wanted:
        facts["budget"] = budget_facts(config.guards.budget, facts["time"], rate, budget_file)
        if resumed is None:
            findings += plan_checks.check_budget(facts["budget"], facts["time"], facts["steps"], config)
    every = config.trainer.keep_every
    checkpoints = config.trainer.keep_checkpoints + (steps.max_steps // every if every else 0)
    present = len(resumed.steps()) if resumed else 0
    facts["disk"] = disk_facts(Path(config.trainer.default_root_dir), size, checkpoints, present)
    findings += plan_checks.check_device(facts["memory"], facts["disk"], facts["steps"], device, config, precision)
    return facts, findings


def disk_facts(folder: Path, checkpoint: int, keep: int, present: int) -> Facts:
    """Bytes: of one checkpoint, of all that exist at the same time, and of free space in a (possibly new) folder.

    The newest `keep` are kept, beside the best and the one being written. The space of the `present` checkpoints is
    reused.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free + checkpoint * present
    return {"checkpoint": checkpoint, "at_once": checkpoint * (keep + 2), "free": free}


def memory_of_option(memory: str | None) -> int | None:
    try:
        return None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise RequestError(f"--memory: {error}") from error


def device_of_options(config: Sections, options: PlanOptions) -> tuple[Device, int]:
    """The device to plan for, and how many of them this machine has; with `strict` it is not looked at."""
    if options.strict:
        return Device("", None, None), 1
    name, peak_tflops = options.device or "auto", options.peak_tflops
    if name == "auto":
        peak_tflops = peak_tflops or config.trainer.peak_tflops
        name = "cpu" if config.trainer.accelerator == "cpu" and not options.memory else name
    return find_device(name, memory_of_option(options.memory), peak_tflops)


def read_rate(config: Sections, options: PlanOptions, findings: list[Finding]) -> tuple[Facts, float | None]:
    """The content of `guards.budget.file`, and the price of an hour in US dollars; errors are added to `findings`."""
    budget, rate = config.guards.budget, options.rate_usd_per_hr
    if options.strict or not budget.wanted:
        return {}, rate
    from lm.training.budget import read_budget_file

    try:
        file = read_budget_file(budget)
        return file, nonnegative(file.get("rate_usd_per_hr")) or budget.rate_usd_per_hr or rate
    except RequestError as problem:
        findings.append(error(str(problem)))
        return {}, rate
