"""`lm plan`: what a config means before it is run, on one page; nothing is built or written.

The numbers are computed here; `cli/plan_checks` has the findings on them. `lm fit` checks the same before it trains.
"""

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from rich.console import Console

from lm.cli import plan_checks as findings
from lm.cli.options import PlanOptions
from lm.cli.rehearse import rehearse, show_rehearsal
from lm.data.config import LEARNED, DataConfig, SourceConfig
from lm.data.datamodule import DataModule
from lm.data.mixture import counts_of, phases_of
from lm.data.tokenizer import Tokenizer
from lm.errors import LmError, RequestError, first_line
from lm.model.config import DecoderConfig
from lm.model.custom import attach_config, custom_flops_per_token, is_builtin
from lm.model.estimates import (
    Step,
    assumed_speed,
    checkpoint_bytes,
    describe_mfu,
    flops_per_token,
    largest_micro_batch,
    parameters,
    recomputed_flops_per_token,
    training_memory,
)
from lm.runs.mirror import Mirror
from lm.runs.run import Run, refuse_name
from lm.system.files import DAMAGE, disk_space, nonnegative, parse_json
from lm.system.hardware import Device, device_name, find_device
from lm.system.process import program
from lm.system.remote import NoAnswer, Unreachable, call_within, is_remote
from lm.system.units import format_bytes, format_count, format_figure, format_time_and_cost, parse_bytes, plural
from lm.training.callback import Callback
from lm.training.callbacks.budget import read_budget_file
from lm.training.callbacks.notifications import open_recipients, send_test
from lm.training.checks import Finding, Known, find, has_kernels, of_accelerator
from lm.training.config import (
    BudgetConfig,
    DistributedConfig,
    EarlyStoppingConfig,
    OptimizerConfig,
    TrainerConfig,
)
from lm.training.distributed import EXIT_WAIT
from lm.training.module import LanguageModule, training_class
from lm.training.optim import state_size
from lm.training.precision import multiplication_precision, precision_for_cpu
from lm.training.schedule import Steps, plan_steps, warmup_and_decay_steps
from lm.training.trainer import Trainer, device_count

log = logging.getLogger(__name__)

NESTED = {"distributed": DistributedConfig, "early_stopping": EarlyStoppingConfig}  # in the Trainer's options
SMALL_MODEL, SMALL_BATCH = 50e6, 8_192  # parameters, and tokens of a micro-batch, under which the host decides
RESERVE_BYTES = 2**30  # CUDA context and library workspaces
CPU_RESERVE_BYTES = 2**26  # what libraries take in a step, beyond what this process has already
RESERVE_SHARE = 0.05  # of the peak, for what the allocator cannot use
DISK_RATE = 500e6  # bytes a second, of a SATA SSD; volumes of clouds begin at 125e6 (AWS gp3)
NETWORK_SECONDS = 3.0  # that an object store is waited for


# ---- data ------------------------------------------------------------------------------------------------------------


def is_prepared(data: Namespace) -> bool:
    """Whether the first fit has no data to make."""
    return not data.path or not data.prepare or (Path(data.path) / "manifest.json").exists()


def find_tokenizer(data: Namespace) -> Tokenizer | None:
    """The tokenizer of a config's data; None where it is still to be made."""
    if is_prepared(data) or data.tokenizer:
        first = data.sources[0] if data.sources else data
        return Tokenizer.load(first.tokenizer or first.path)
    return None if data.prepare.tokenizer in LEARNED else Tokenizer.load(data.prepare.tokenizer)


def data_facts(
    data: Namespace, opened: DataModule | None, document_mask: bool = False
) -> tuple[dict[str, Any], Tokenizer | None]:
    """Tokens and shards by split, how well the tokenizer fits a sample of them, and the tokenizer.

    Args:
        data: the config's.
        opened: the data of a fit that begins, of which nothing is read, unless there is a document mask.
        document_mask: look whether documents end in the first block.

    Raises:
        RequestError: shards are missing, damaged or made with another tokenizer; names the file.
    """
    if opened is None and not is_prepared(data):
        return {"prepared": False, "from": list(data.prepare.input)}, find_tokenizer(data)
    fit, opened = opened is not None, opened or DataModule(**vars(data))
    if not fit:
        opened.prepare_data()  # which makes nothing: it looks whether the folder was made with these options
        opened.setup("fit")
    return {"prepared": True, "warnings": opened.warnings()} | {
        split: {
            "tokens": shards.document_tokens, "shards": len(shards.fingerprint()),
            "windows": int(shards.windows(opened.seq_len).sum()), "left_over": shards.left_over(opened.seq_len),
            "filled_up": shards.padding_fraction,
            "dtype": str(shards.column.dtype),
            # Of the first block, which in a mixture is of the first source alone.
            "bytes_per_token": None if fit or opened.mixed else float(
                shards.token_bytes(opened.tokenizer)[next(shards.pieces())].mean()),
            "documents_end": bool((shards.read(0) == opened.tokenizer.eos_id).any()) if document_mask else None,
        }
        for split, shards in opened.shards.items()
    } | {
        "sources": {
            source.name: {
                "tokens": shards.document_tokens, "windows": int(shards.windows(opened.seq_len).sum()),
                "bytes_per_token": bytes_per_token(source),
            }
            for source, shards in zip(opened.sources, opened.by_source["train"].values(), strict=True)
        } if opened.mixed else {}
    }, opened.tokenizer  # fmt: skip


def bytes_per_token(source: SourceConfig) -> float | None:
    """Bytes of text of each training token, by the manifest of a prepared folder; None where there is none."""
    try:
        made = parse_json((Path(source.path) / "manifest.json").read_bytes())["splits"]["train"]
        return made["bytes"] / made["tokens"]
    except (OSError, *DAMAGE):
        return None


def remote_sources(data: Namespace) -> list[str]:
    """The URLs among the sources of a fit."""
    each = [data, *(data.sources or [])]
    given = [[files] if isinstance(files, str) else files or [] for one in each for files in (one.train, one.val)]
    return [source for group in given for source in group if is_remote(source)]


def data_facts_in_time(
    data: Namespace, opened: DataModule | None, document_mask: bool
) -> tuple[dict[str, Any], Tokenizer | None]:
    """As `data_facts`, but a file system that is not local is waited for `NETWORK_SECONDS` and no longer.

    Raises:
        NoAnswer, Unreachable: it did not answer well in that time.
    """
    if opened is not None or not remote_sources(data):
        return data_facts(data, opened, document_mask)
    logging.getLogger("lm.system.remote").setLevel(logging.ERROR)  # the page says what failed
    brief = Namespace(**vars(data) | {"timeout": min(data.timeout, 2 * NETWORK_SECONDS)})  # reads have half of it
    return call_within(NETWORK_SECONDS, lambda: data_facts(brief, None, document_mask))


# ---- steps -----------------------------------------------------------------------------------------------------------


def step_facts(steps: Steps, config: Namespace, data: dict[str, Any]) -> dict[str, Any]:
    """The counts of the run: tokens, epochs, warm-up, validations, checkpoints."""
    warmup, decay = warmup_and_decay_steps(steps.max_steps, config.model.schedule)
    facts = {
        "seq_len": steps.seq_len, "micro_batch_size": steps.micro_batch_size, "accumulate": steps.accumulate,
        "world_size": steps.world_size, "tokens_per_step": steps.tokens_per_step, "max_steps": steps.max_steps,
        "tokens": steps.tokens_per_step * steps.max_steps,
        "warmup_steps": warmup, "warmup_share": warmup / steps.max_steps, "decay_steps": decay,
        "validations": math.ceil(steps.max_steps / config.trainer.val_interval),
        "checkpoints": math.ceil(steps.max_steps / config.trainer.checkpoint_interval),
    }  # fmt: skip
    if "train" in data:
        windows = data["train"]["windows"]
        facts["steps_per_epoch"] = windows / steps.global_batch
        facts["epochs"] = steps.max_steps * steps.global_batch / windows
    if data.get("sources"):
        samples = counts_of(phases_of(config.data.sources, config.data.phases or [], steps.seq_len),
                            steps.max_steps * steps.global_batch)  # fmt: skip
        facts["sources"] = {
            name: {"samples": count, "share": count / sum(samples), "epochs": count / source["windows"]}
            for (name, source), count in zip(data["sources"].items(), samples.tolist(), strict=True)
        }
    return facts


# ---- device ----------------------------------------------------------------------------------------------------------


def computation(steps: Steps, config: Namespace, device: Device, precision: str) -> Step:
    """How a micro-batch would be computed on a device."""
    model, options = config.model, DistributedConfig(**vars(config.trainer.distributed))
    return Step(
        steps.micro_batch_size, steps.seq_len, precision, has_kernels(device, model.kernels), model.compile,
        steps.accumulate, model.cuda_graphs,
        # With HSDP a model is divided over the devices of a node.
        steps.world_size // (config.trainer.num_nodes if config.trainer.strategy == "hsdp" else 1),
        config.trainer.strategy in ("fsdp2", "hsdp") and steps.world_size > 1, model.activation_checkpointing,
        options.gathered_blocks(model.decoder.num_hidden_layers),
    )  # fmt: skip


def memory_facts(
    decoder: DecoderConfig, step: Step, optimizer: OptimizerConfig, device: Device, global_batch: bool
) -> dict[str, Any]:
    """Bytes of a step by part, beside what the device has, and the largest micro-batch that would fit.

    `largest_recomputed` is the one with `model.activation_checkpointing block`. `global_batch`:
    `data.global_batch_tokens` is given; otherwise a step is one micro-batch, however large.
    """
    parts = training_memory(decoder, step, state_size(optimizer))
    reserve_bytes = CPU_RESERVE_BYTES if device.capability is None else RESERVE_BYTES
    reserve = reserve_bytes + int(RESERVE_SHARE * parts["peak"])
    facts = {**parts, "reserve": reserve, "total": parts["peak"] + reserve, "device": device.memory_bytes}
    if device.memory_bytes is not None:
        available = int((device.memory_bytes - reserve_bytes) / (1 + RESERVE_SHARE))
        samples = step.micro_batch_size * step.accumulate if global_batch else None
        for name, checkpointing in (("largest_micro_batch", step.checkpointing), ("largest_recomputed", "block")):
            tried = replace(step, checkpointing=checkpointing)
            facts[name] = largest_micro_batch(decoder, tried, available, samples, state_size(optimizer))
    return facts


def time_facts(
    steps: dict[str, Any], model: dict[str, Any], device: Device, precision: str, mfu: float | None,
    measured: dict[str, Any], usd_per_hour: float | None, recomputed: float,
) -> dict[str, Any]:  # fmt: skip
    """How long the steps take and what that costs; `seconds` is None where nothing says how fast the device is.

    Args:
        measured: what `lm bench step` found, if it was given.
        usd_per_hour: price of the machine; None: not known.
        recomputed: operations a token that activation checkpointing does again.
    """
    peak, flops = device.peak_flops(precision), model["flops_per_token"]
    if measured:
        rate, basis = measured["tokens_per_second"], measured["basis"]
    elif peak is None:
        return {"seconds": None, "basis": f"the peak of {device.name} in {precision} is not known: give "
                "--peak_tflops N or --bench FILE"}
    elif mfu:
        rate, basis = mfu * peak / flops, f"{mfu:.0%} MFU, given"
    else:
        rate, basis = assumed_speed(device, precision, flops + recomputed)
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
    """A file of `lm bench step --output`, with `tokens_per_second` of one device and what was measured, as `basis`.

    Raises:
        RequestError: it cannot be read, or is of another model.
    """
    try:
        found = parse_json(file.read_bytes())
        shape = found["parameters"], found["seq_len"]
        rate = float(found["tokens_per_second"]) / found.get("ranks", 1)  # of one device
        if not rate > 0:
            raise ValueError(f"{rate} tokens a second")
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise RequestError(f"--bench {file} is no result of `lm bench step --output`: {error}") from error
    if shape != (model_parameters, seq_len):
        raise RequestError(
            f"--bench {file} is of another model: {shape[0]:,} parameters and {shape[1]:,} tokens of context, this one "
            f"has {model_parameters:,} and {seq_len:,}"
        )
    basis = ", ".join([str(file), *(str(found[name]) for name in ("device", "precision") if name in found)])
    return {**found, "tokens_per_second": rate, "basis": basis}


# ---- checkpoints and budget ------------------------------------------------------------------------------------------


def checkpoint_facts(
    interval: int, steps: dict[str, Any], time: dict[str, Any], size: int, measured: dict[str, Any]
) -> dict[str, Any]:
    """What a crash loses at most, and the share of the time that saving takes.

    Args:
        interval: optimizer steps between checkpoints.
        size: bytes of a checkpoint.
        measured: what `lm bench step` found, if it was given.
    """
    interval = min(interval, steps["max_steps"])
    part = interval / steps["max_steps"]
    lost = part * (time["seconds"] or 0.0)
    if lost < 1:  # second: not known, or a model so small that nothing is lost
        return {"interval": interval}
    try:
        saving, basis = measured["checkpoint"]["stall_ms"] / 1000, "measured"
    except (KeyError, TypeError):
        saving, basis = size / DISK_RATE, f"a disk of {DISK_RATE / 1e6:.0f} MB/s, assumed"
    return {"interval": interval, "lost_seconds": lost, "lost_usd": time["usd"] and part * time["usd"],
            "saving_seconds": saving, "saving_share": saving / lost, "saving_basis": basis}  # fmt: skip


def budget_facts(
    budget: BudgetConfig, time: dict[str, Any], rate: float | None, file: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """What the run takes of its budget.

    Args:
        rate: US dollars an hour; None: not known.
        file: what `budget.file` says.
    """
    return {
        "cap_usd": budget.cap_usd, "max_hours": budget.max_hours, "rate_usd_per_hr": rate,
        "hours": time["seconds"] and time["seconds"] / 3600, "usd": time.get("usd"),
        "spent_usd": nonnegative(file.get("spent_usd")), "hours_elapsed": nonnegative(file.get("hours_elapsed")),
    }  # fmt: skip


# ---- the command -----------------------------------------------------------------------------------------------------


def plan(config: Namespace, name: str) -> None:
    """Check a config and say what it asks for: `lm plan --config X [--strict] [--device D] [--fit] [--json]`.

    Args:
        config: of a training, with `PlanOptions`.
        name: of the run.

    Raises:
        RequestError: the config has errors; they are on the page.
        RunError: a test message could not be sent.
    """
    if config.mfu is not None and not 0 < config.mfu <= 1:
        raise RequestError(f"--mfu {config.mfu} must lie in (0, 1]")
    if config.peak_tflops is not None and not 0 < config.peak_tflops < math.inf:
        raise RequestError(f"--peak_tflops {config.peak_tflops} must be above 0")
    if config.rate_usd_per_hr is not None and config.rate_usd_per_hr < 0:
        raise RequestError(f"--rate_usd_per_hr {config.rate_usd_per_hr} must not be below 0")
    if config.fit and config.strict:
        raise RequestError("--fit is about a device, and --strict looks at none: give one of them")
    refuse_name(name)
    recipients = open_recipients([] if config.strict else config.notify or [])
    if config.test_notify:
        return send_test(recipients, name)
    found, noted = examine(config)
    found = {"config": name, **found}
    if recipients:
        found["notify"] = [{"to": one.name, "level": one.level} for one in recipients]
    errors = [finding for finding in noted if finding.level == "error"]
    if config.rehearse and "steps" in found:  # errors of others, such as missing data, change nothing about the guards
        played = rehearse(config, found)
        print(json.dumps({"config": name, **played})) if config.json else show_rehearsal(played)
        return
    if config.fit:
        best = largest_that_fits(found, noted)
        found["fit"] = {"data.micro_batch_size": best}
    if config.json:
        print(json.dumps({**found, "findings": [finding._asdict() for finding in noted], "ready": not errors}))
    elif config.fit:
        print(f"--data.micro_batch_size {best}")
    else:
        show_plan(found, noted)
    if errors and not config.fit:
        raise RequestError(f"{name}: {plural(len(errors), 'error')}: {errors[0].what}")


def plan_memory(given: str | None) -> int | None:
    """Bytes of `--memory`.

    Raises:
        RequestError: it is no size, or too little for any GPU.
    """
    try:
        size = None if given is None else parse_bytes(given)
    except ValueError as error:
        raise RequestError(f"--memory: {error}") from error
    if size is not None and size <= RESERVE_BYTES:
        raise RequestError(f"--memory {given} is too little: CUDA alone takes {format_bytes(RESERVE_BYTES)}")
    return size


def largest_that_fits(found: dict[str, Any], noted: list[Finding]) -> int:
    """The largest micro-batch that fits.

    Raises:
        RequestError: none fits, or the config has an error.
    """
    if "memory" not in found:  # the last finding is the reason
        errors = [finding for finding in noted if finding.level == "error"]
        raise RequestError(f"--fit: {(errors or noted[-1:])[0].what}")
    if found["memory"]["device"] is None:
        raise RequestError(f"--fit: how much memory {found['device']['name']} has is not known: name one with --device")
    best = found["memory"]["largest_micro_batch"]
    if best is None:
        raise RequestError(
            f"--fit: not even a micro-batch of 1 fits {found['device']['name']}: take a smaller model or data.seq_len"
        )
    return best


# ---- facts and findings ----------------------------------------------------------------------------------------------


def examine(
    config: Namespace, opened: DataModule | None = None, resumed: Run | None = None
) -> tuple[dict[str, Any], list[Finding]]:
    """The facts of a config, as far as they can be known, and the findings on it.

    Args:
        config: of a training, with `PlanOptions`.
        opened: the data of a fit that begins.
        resumed: the run that it resumes.
    """
    found: dict[str, Any] = {}
    noted: list[Finding] = []
    wanted = config.device or "auto"
    cpu = wanted == "auto" and config.trainer.accelerator == "cpu"
    device, here = (Device("", None, None), 1) if config.strict else find_device(
        "cpu" if cpu and not config.memory else wanted, plan_memory(config.memory),
        config.peak_tflops or (config.trainer.peak_tflops if wanted == "auto" else None),
    )  # fmt: skip
    try:
        nested = {name: kind(**vars(config.trainer[name])) for name, kind in NESTED.items()}
        trainer, options = TrainerConfig(**vars(config.trainer) | nested), DataConfig(**vars(config.data))
        if trainer.mirror:
            Mirror(trainer.mirror)
        on_node = ranks(trainer.devices, here)
        world_size = on_node * trainer.num_nodes
        steps = plan_steps(
            seq_len=config.data.seq_len, micro_batch_size=config.data.micro_batch_size,
            global_batch_tokens=config.data.global_batch_tokens, world_size=world_size,
            max_steps=config.trainer.max_steps, max_tokens=config.trainer.max_tokens,
        )  # fmt: skip
        warmup_and_decay_steps(steps.max_steps, config.model.schedule)
    except RequestError as error:
        return found, [Finding("error", str(error), "")]
    data, tokenizer = {"prepared": False, "from": []}, None
    budget, budget_file, rate = config.guards.budget, {}, None
    if not config.strict:
        try:
            data, tokenizer = data_facts_in_time(config.data, opened, config.model.document_mask)
        except (NoAnswer, Unreachable) as error:
            why = first_line(error.__cause__ if isinstance(error, Unreachable) else error)
            where = ", ".join(remote_sources(config.data))
            noted.append(Finding("warning", f"{where}: how many tokens there are is not known, since the store does "
                                 f"not answer in {NETWORK_SECONDS:g} s: {why}",
                                 "check the network and the credentials, and plan again"))  # fmt: skip
            data, tokenizer = {"unknown": True}, find_tokenizer(config.data)  # which was read before
        except (LmError, OSError) as error:
            noted.append(Finding("error", str(error), ""))
            data = {"unknown": True}
        try:
            budget_file = read_budget_file(budget)
            rate = nonnegative(budget_file.get("rate_usd_per_hr")) or budget.rate_usd_per_hr or config.rate_usd_per_hr
            budget.refuse_rate(rate, "--rate_usd_per_hr")
        except RequestError as error:
            noted.append(Finding("error", str(error), ""))
    decoder = with_vocabulary(config, tokenizer)
    found["steps"] = step_facts(steps, config, data)
    known = Known() if config.strict else Known(
        world_size, device, here=wanted == "auto" and not config.memory, tokenizer=tokenizer,
        has_validation="val" in data if data.get("prepared") else None,
        every_target=None if opened is None else not any(shards.labels for shards in opened.shards.values()),
    )  # fmt: skip
    noted += find(trainer, config.model, options, known, samples=config.get("samples"), evaluation=config.evaluation,
                  custom=training_class().is_custom())  # fmt: skip
    if known.here:
        noted += of_accelerator(trainer.accelerator)
    noted += findings.of_steps(found["steps"], config)
    noted += findings.of_schedule(found["steps"], config)
    if resumed is None:
        noted += findings.of_warmup(found["steps"], config, data)
    if not config.strict and "unknown" not in data:
        found["data"] = data
        noted += findings.of_data(data, found["steps"], config)
        noted += findings.of_tasks(config.evaluation)
        if tokenizer and tokenizer.lossy:
            noted.append(Finding("advice", tokenizer.lossy, "a model learns and writes texts as they are decoded"))
        if tokenizer and decoder:
            noted += findings.of_vocabulary(tokenizer.vocab_size, decoder.vocab_size)
    if decoder is None:
        if "unknown" not in data:  # otherwise there is an error already
            noted.append(Finding("advice", "the model's size is not known before the tokenizer is made",
                                 "--model.decoder.vocab_size N"))  # fmt: skip
        return found, noted
    found["model"] = {
        "parameters": parameters(decoder), "flops_per_token": flops_per_token(decoder, config.data.seq_len),
        "flops_per_token_full_attention": flops_per_token(decoder, config.data.seq_len, full_attention=True),
        "tied": decoder.tie_word_embeddings, "vocab_size": decoder.vocab_size,
    }  # fmt: skip
    custom = custom_model(config, decoder)
    if custom is not None:
        found["model"] |= custom
        noted.append(Finding(
            "advice", f"memory and checkpoints are reckoned for the decoder of this project in this shape, with "
            f"{format_count(parameters(decoder)['total'])} parameters, and build_decoder returned another model",
            f"`{program()} bench step --config FILE` measures it",
        ))  # fmt: skip
    noted += findings.of_model(found["model"], found["steps"])
    noted += findings.of_optimizer(config.model.optimizer)
    noted += findings.of_rules(decoder, found["steps"], config)
    if config.strict:
        return found, noted
    if device.capability is None and device.memory_bytes is not None:
        device = device._replace(memory_bytes=device.memory_bytes // on_node)  # which the ranks of a CPU share
    precision = precision_for_cpu(config.trainer.precision) if device.capability is None else config.trainer.precision
    step = computation(steps, config, device, precision)
    found["device"] = {"name": device.name, "precision": precision, "kernels": step.kernels, "count": world_size}
    global_batch = config.data.global_batch_tokens is not None
    found["memory"] = memory_facts(decoder, step, config.model.optimizer, device, global_batch)
    count = found["model"]["parameters"]["total"]
    measured = read_bench(config.bench, count, config.data.seq_len) if config.bench else {}
    found["time"] = time_facts(
        found["steps"], found["model"], device,
        multiplication_precision(precision, config.trainer.matmul_precision), config.mfu, measured, rate,
        recomputed_flops_per_token(decoder, step.seq_len, config.model.activation_checkpointing),
    )  # fmt: skip
    one = checkpoint_bytes(decoder, step.master_item, state_size(config.model.optimizer))
    found["checkpoints"] = checkpoint_facts(
        config.trainer.checkpoint_interval, found["steps"], found["time"], one, measured
    )  # fmt: skip
    noted += findings.of_checkpoints(found["checkpoints"], found["steps"])
    if budget.wanted:
        found["budget"] = budget_facts(budget, found["time"], rate, budget_file)
        if resumed is None:  # of which a part is paid for
            noted += findings.of_budget(found["budget"], found["time"], found["steps"], config)
    every = config.trainer.keep_every
    kept = config.trainer.keep_checkpoints + (steps.max_steps // every if every else 0) + bool(config.trainer.mirror)
    present = len(resumed.steps()) if resumed else 0
    space = disk_space(Path(config.trainer.default_root_dir), one, kept, present)
    found["disk"] = {**space._asdict(), "mirror": config.trainer.mirror and Mirror(config.trainer.mirror).name}
    for finding in findings.of_device(found["memory"], space, found["steps"], device, config, precision):
        guessed = custom is not None and finding.level == "error"
        noted.append(finding._replace(level="warning") if guessed else finding)
    order = ("error", "warning", "advice")
    return found, sorted(noted, key=lambda finding: order.index(finding.level))


def custom_model(config: Namespace, decoder: DecoderConfig) -> dict[str, Any] | None:
    """The facts of a model of one's own that are counted by building it on the meta device; None: there is none.

    Raises:
        RequestError: `build_decoder` fails, or returns no module.
    """
    if not training_class().is_custom():
        return None
    module = training_class()(**vars(config.model))
    try:
        with torch.device("meta"):
            made = module.build_decoder(decoder)
    except Exception as error:
        what = f"{type(module).__name__}.build_decoder fails, as tried on the meta device"
        raise RequestError(f"{what}: {type(error).__name__}: {first_line(error)}") from error
    made, seq_len = attach_config(made, decoder), config.data.seq_len
    total = sum(weight.numel() for weight in made.parameters())
    return None if is_builtin(made) else {
        "parameters": parameters(decoder) | {"total": total},
        "flops_per_token": custom_flops_per_token(made, decoder, seq_len),
        "flops_per_token_full_attention": custom_flops_per_token(made, decoder, seq_len, full_attention=True),
    }  # fmt: skip


class PlanChecks(Callback):
    """Makes the checks of `lm plan` when a fit begins: logs the warnings, and refuses a run with an error.

    Args:
        sections: those of callbacks, by name.
    """

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self._sections = sections
        self._resumed: Run | None = None
        self._force = False
        self._noted: list[str] = []  # to be logged once the run has a log

    def resume(self, run: Run | None, force: bool) -> None:
        """What is known before a fit.

        Args:
            run: the one that it resumes. Errors that are about its beginning do not count.
            force: log the errors too, and train.
        """
        self._resumed, self._force = run, force

    def setup(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        """The data is open, and the model is not built yet."""
        if stage == "fit":
            self.refuse(trainer, pl_module, trainer.datamodule, opened=True)

    def refuse(self, trainer: Trainer, module: LanguageModule, data: DataModule, opened: bool) -> None:
        """Refuse what has an error; with several ranks, rank zero decides and reports, once they can exchange it.

        Args:
            opened: whether the data is; else it is still to be made, and the ranks have not found one another.

        Raises:
            RequestError: the last error, with its cure; those before it are logged.
        """
        ranks = {"num_nodes": trainer.num_nodes, "devices": trainer.world_size // trainer.num_nodes}
        config = Namespace(
            trainer=Namespace(**vars(trainer.options) | ranks),  # as torchrun or SLURM says
            model=Namespace(**vars(module.options) | dict(module.hparams)),
            data=Namespace(**vars(data.options) | {"seq_len": data.seq_len}), **self._sections,
            **vars(PlanOptions(device="cpu" if trainer.options.accelerator == "cpu" else "auto")),
        )  # fmt: skip
        noted: list[Finding] = []
        if trainer.is_global_zero or not opened:
            _, noted = examine(config, data if opened else None, self._resumed)
            noted = [finding for finding in noted if finding.level != "advice"]
        if opened:
            noted = trainer.strategy.broadcast(noted)
        errors = [str(finding) for finding in noted if finding.level == "error"]
        if errors and not self._force:
            if not trainer.is_global_zero:
                time.sleep(EXIT_WAIT)  # a launcher may end all ranks with the first one, which is to report
                raise SystemExit(RequestError.exit_code)
            for error in errors[:-1]:
                log.error("%s", error)
            raise RequestError(errors[-1])
        self._noted = [f"{finding.level}: {finding}" for finding in noted]

    def on_fit_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        for line in self._noted if trainer.is_global_zero else ():
            log.warning("%s", line)


def ranks(devices: int | str | list[int], here: int) -> int:
    """How many devices of a node `trainer.devices` names; `auto`: those of this machine.

    Raises:
        RequestError: it names none.
    """
    count = device_count(devices)
    if count is None:
        count = here if str(devices) in ("auto", "-1") else 0
    if count < 1:
        raise RequestError(f"trainer.devices {devices} names no device: give how many, or which, or auto")
    return count


def with_vocabulary(config: Namespace, tokenizer: Tokenizer | None) -> DecoderConfig | None:
    """The decoder's config with its vocabulary; None if the tokenizer that decides it is still to be made."""
    decoder, prepare = config.model.decoder, config.data.prepare
    if decoder.vocab_size:
        return decoder
    if tokenizer is not None:
        return replace(decoder, vocab_size=tokenizer.vocab_size)
    return replace(decoder, vocab_size=prepare.vocab_size) if prepare and prepare.tokenizer == "bpe" else None


# ---- the page --------------------------------------------------------------------------------------------------------


def show_plan(found: dict[str, Any], noted: list[Finding]) -> None:
    """Print the facts, the findings and whether the config is ready."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{found['config']}[/bold]")
    for name, lines_of in SECTIONS.items():
        for number, line in enumerate(lines_of(found) if name in found else []):
            console.print(f"{name if not number else '':8}{line}")
    colours = {"error": "red", "warning": "yellow", "advice": "cyan"}
    for finding in noted:
        console.print(f"[{colours[finding.level]}]{finding.level:8}[/]{finding.what}")
        if finding.cure:
            console.print(f"{'':8}{finding.cure}")
    counts = {level: sum(finding.level == level for finding in noted) for level in colours}
    state = "not ready" if counts["error"] else "ready"
    said = [plural(count, level).replace("advices", "advice") for level, count in counts.items() if count]
    console.print(f"[bold]{state}[/bold]{': ' * bool(said)}{', '.join(said)}")


def _model_lines(found: dict[str, Any]) -> list[str]:
    model, counts = found["model"], found["model"]["parameters"]
    names = [name for name in ("embedding", "attention", "mlp", "norms", "lm_head") if counts[name]]
    parts = ", ".join(f"{name} {format_count(counts[name])}" for name in names)
    return [
        f"{format_count(counts['total'])} parameters: {parts}{' (the output too)' * model['tied']}",
        f"{model['flops_per_token'] / 1e9:.3g} GFLOPs a token, both passes; vocabulary {model['vocab_size']:,}",
    ]


def _data_lines(found: dict[str, Any]) -> list[str]:
    data = found["data"]
    return [
        f"{split}: {format_count(data[split]['tokens'])} tokens in {plural(data[split]['shards'], 'shard')}, "
        f"{plural(data[split]['windows'], 'sample')}, {data[split]['left_over']:,} tokens in none"
        f"{_of_packing(data[split])}{_text_per_token(data[split])}"
        for split in ("train", "val") if split in data
    ] + [
        f"{name}: {source['share']:.1%} of the samples, {source['epochs']:.2f} epochs of "
        f"{format_count(data['sources'][name]['tokens'])} tokens{_text_per_token(data['sources'][name])}"
        for name, source in found["steps"].get("sources", {}).items()
    ] or ["not there yet"]  # fmt: skip


def _of_packing(facts: dict[str, Any]) -> str:
    return "" if facts["filled_up"] is None else f", {facts['filled_up']:.2%} of a sample only fills it up"


def _text_per_token(facts: dict[str, Any]) -> str:
    each = facts["bytes_per_token"]
    return "" if each is None else f", {each:.2f} bytes of text a token"


def _steps_lines(found: dict[str, Any]) -> list[str]:
    steps = found["steps"]
    epochs = f", {steps['epochs']:.2f} epochs" if "epochs" in steps and "sources" not in steps else ""
    return [
        f"{steps['micro_batch_size']:,} x {steps['seq_len']:,} tokens x {plural(steps['accumulate'], 'micro-batch')} x "
        f"{plural(steps['world_size'], 'rank')} = {steps['tokens_per_step']:,} tokens a step",
        f"{plural(steps['max_steps'], 'step')} = {format_count(steps['tokens'])} tokens{epochs}; warm-up "
        f"{steps['warmup_steps']:,} ({steps['warmup_share']:.1%}), {plural(steps['validations'], 'validation')}, "
        f"{plural(steps['checkpoints'], 'checkpoint')}",
    ]


def _memory_lines(found: dict[str, Any]) -> list[str]:
    memory, device = found["memory"], found["device"]
    free = " free" * (device["name"] == device_name("cpu"))
    parts = ("weights", "gradients", "optimizer", "casts", "activations", "working", "reserve")
    whole, best = memory["device"], memory.get("largest_micro_batch")
    of_device = f" of {format_bytes(whole)}{free} ({memory['total'] / whole:.0%})" if whole else ""
    return [
        f"{format_bytes(memory['total'])}{of_device} on {device['count']} x {device['name']}, {device['precision']}, "
        f"kernels {'on' if device['kernels'] else 'off'}",
        ", ".join(f"{name} {format_bytes(memory[name])}" for name in parts if memory[name]),
        *([f"the largest micro-batch that fits is {best:,}"] if best else []),
    ]


def _time_lines(found: dict[str, Any]) -> list[str]:
    time = found["time"]
    if time["seconds"] is None:
        return [f"unknown: {time['basis']}"]
    mfu = describe_mfu(time["mfu"], time["mfu_full_attention"])
    return [
        f"{format_time_and_cost(time['seconds'], time['usd'])} at {format_count(time['tokens_per_second'])} tokens/s "
        f"({time['basis']})",
        *([f"MFU {mfu}"] if time["mfu"] else []),
    ]


def _disk_lines(found: dict[str, Any]) -> list[str]:
    one, at_once, free = (format_bytes(found["disk"][name]) for name in ("checkpoint", "at_once", "free"))
    mirror = f"; each is uploaded to {found['disk']['mirror']}" if found["disk"]["mirror"] else ""
    lines, facts = [f"{one} a checkpoint, {at_once} at once; {free} free{mirror}"], found["checkpoints"]
    if "lost_seconds" in facts:
        lines.append(
            f"a crash loses at most {plural(facts['interval'], 'step')} of work: "
            f"{format_time_and_cost(facts['lost_seconds'], facts['lost_usd'])}; saving takes "
            f"{facts['saving_share']:.1%} of the time ({facts['saving_basis']})"
        )
    return lines


def _budget_lines(found: dict[str, Any]) -> list[str]:
    budget = found["budget"]
    if budget["hours"] is None:
        return ["unknown, since the time is"]
    hours, parts = f"{format_figure(budget['hours'])} h", []
    if budget["max_hours"]:
        parts.append(f"{hours} of {format_figure(budget['max_hours'])}")
    if budget["usd"] is not None:
        cap = f" of {format_figure(budget['cap_usd'])}" if budget["cap_usd"] else ""
        rate, usd = format_figure(budget["rate_usd_per_hr"]), format_figure(budget["usd"])
        parts.append(f"{hours} x {rate} USD/h = {usd} USD{cap}")
    if budget["spent_usd"]:
        parts.append(f"{format_figure(budget['spent_usd'])} USD are spent already")
    return ["; ".join(parts) or f"{hours}, and no rate is known"]


def _notify_lines(found: dict[str, Any]) -> list[str]:
    above = {"info": "everything", "warning": "warnings and errors", "error": "errors"}
    return [f"{one['to']}: {above[one['level']]}" for one in found["notify"]]


SECTIONS = {"model": _model_lines, "data": _data_lines, "steps": _steps_lines, "memory": _memory_lines,
            "time": _time_lines, "budget": _budget_lines, "disk": _disk_lines, "notify": _notify_lines}  # fmt: skip
