"""The numbers of `lm plan`: what a config means in tokens, steps, bytes, hours and dollars.

`cli/plan_checks` has the findings on them, and `cli/plan` the command.
"""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from lm.data.config import LEARNED, SourceConfig
from lm.data.datamodule import DataModule
from lm.data.mixture import counts_of, phases_of
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError, first_line
from lm.model.config import DecoderConfig
from lm.model.custom import attach_config, custom_flops_per_token, is_builtin
from lm.model.estimates import (
    Step,
    assumed_speed,
    flops_per_token,
    largest_micro_batch,
    parameters,
    training_memory,
)
from lm.system.files import DAMAGE, nonnegative, parse_json
from lm.system.hardware import Device
from lm.system.remote import call_within, is_remote
from lm.system.units import parse_bytes
from lm.training.checks import has_kernels
from lm.training.config import BudgetConfig, OptimizerConfig
from lm.training.module import training_class
from lm.training.optim import state_size
from lm.training.schedule import Steps, warmup_and_decay_steps
from lm.training.trainer import device_count

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


def with_vocabulary(config: Namespace, tokenizer: Tokenizer | None) -> DecoderConfig | None:
    """The decoder's config with its vocabulary; None if the tokenizer that decides it is still to be made."""
    decoder, prepare = config.model.decoder, config.data.prepare
    if decoder.vocab_size:
        return decoder
    if tokenizer is not None:
        return replace(decoder, vocab_size=tokenizer.vocab_size)
    return replace(decoder, vocab_size=prepare.vocab_size) if prepare and prepare.tokenizer == "bpe" else None


def data_facts(
    data: Namespace, opened: DataModule | None, document_mask: bool = False
) -> tuple[dict[str, Any], Tokenizer | None]:
    """Tokens and shards by split, how well the tokenizer fits a sample of them, and the tokenizer.

    Of `opened`, the data of a fit that begins, nothing is read but, for a document mask, whether documents end in the
    first block.
    """
    if opened is None and not is_prepared(data):
        return {"prepared": False, "from": list(data.prepare.input)}, find_tokenizer(data)
    reads = opened is None
    if reads:
        opened = DataModule(**vars(data))
        opened.prepare_data()  # which makes nothing: it looks whether the folder was made with these options
        opened.setup("fit")
    found: dict[str, Any] = {"prepared": True, "warnings": opened.warnings(), "sources": {}}
    for split, shards in opened.shards.items():
        found[split] = {
            "tokens": shards.document_tokens, "shards": len(shards.fingerprint()),
            "windows": int(shards.windows(opened.seq_len).sum()), "left_over": shards.left_over(opened.seq_len),
            "filled_up": shards.padding_fraction, "dtype": str(shards.column.dtype), "bytes_per_token": None,
            "documents_end": bool((shards.read(0) == opened.tokenizer.eos_id).any()) if document_mask else None,
        }  # fmt: skip
        if reads and not opened.mixed:  # the first block of a mixture is of its first source alone
            first = next(shards.pieces())
            found[split]["bytes_per_token"] = float(shards.token_bytes(opened.tokenizer)[first].mean())
    if opened.mixed:
        for source, shards in zip(opened.sources, opened.by_source["train"].values(), strict=True):
            found["sources"][source.name] = {
                "tokens": shards.document_tokens, "windows": int(shards.windows(opened.seq_len).sum()),
                "bytes_per_token": bytes_per_token(source),
            }  # fmt: skip
    return found, opened.tokenizer


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
    """As `data_facts`, but raises NoAnswer or Unreachable where an object store takes more than `NETWORK_SECONDS`."""
    if opened is not None or not remote_sources(data):
        return data_facts(data, opened, document_mask)
    logging.getLogger("lm.system.remote").setLevel(logging.ERROR)  # the page says what failed
    brief = Namespace(**vars(data) | {"timeout": min(data.timeout, 2 * NETWORK_SECONDS)})  # reads have half of it
    return call_within(NETWORK_SECONDS, lambda: data_facts(brief, None, document_mask))


# ---- steps -----------------------------------------------------------------------------------------------------------


def ranks(devices: int | str | list[int], here: int) -> int:
    """How many devices of a node `trainer.devices` names; `auto`: those of this machine."""
    count = device_count(devices)
    if count is None:
        count = here if str(devices) in ("auto", "-1") else 0
    if count < 1:
        raise RequestError(f"trainer.devices {devices} names no device: give how many, or which, or auto")
    return count


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


# ---- model -----------------------------------------------------------------------------------------------------------


def model_facts(decoder: DecoderConfig, seq_len: int) -> dict[str, Any]:
    """Parameters by part, and floating-point operations of a token, of the decoder of this project."""
    return {
        "parameters": parameters(decoder), "flops_per_token": flops_per_token(decoder, seq_len),
        "flops_per_token_full_attention": flops_per_token(decoder, seq_len, full_attention=True),
        "tied": decoder.tie_word_embeddings, "vocab_size": decoder.vocab_size,
    }  # fmt: skip


def custom_model(config: Namespace, decoder: DecoderConfig) -> dict[str, Any] | None:
    """The facts of a custom model, which are counted by building it on the meta device; None: there is none."""
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


# ---- device ----------------------------------------------------------------------------------------------------------


def computation(steps: Steps, config: Namespace, device: Device, precision: str) -> Step:
    """How a micro-batch would be computed on a device."""
    model = config.model
    return Step(
        steps.micro_batch_size, steps.seq_len, precision, has_kernels(device, model.kernels), model.compile,
        steps.accumulate, model.cuda_graphs,
        # With HSDP a model is divided over the devices of a node.
        steps.world_size // (config.trainer.num_nodes if config.trainer.strategy == "hsdp" else 1),
        config.trainer.strategy in ("fsdp2", "hsdp") and steps.world_size > 1, model.activation_checkpointing,
        config.trainer.distributed.gathered_blocks(model.decoder.num_hidden_layers),
    )  # fmt: skip


def memory_of_option(given: str | None) -> int | None:
    try:
        return None if given is None else parse_bytes(given)
    except ValueError as error:
        raise RequestError(f"--memory: {error}") from error


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

    `measured` is what `lm bench step` found; activation checkpointing does `recomputed` operations a token again.
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
    """A file of `lm bench step --output`, with `tokens_per_second` of one device and what was measured, as `basis`."""
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


# ---- checkpoints and budget ------------------------------------------------------------------------------------------


def checkpoint_facts(
    interval: int, steps: dict[str, Any], time: dict[str, Any], size: int, measured: dict[str, Any]
) -> dict[str, Any]:
    """What a crash loses at most, and the share of the time that saving a checkpoint of `size` bytes takes."""
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
    """What the run takes of its budget, at a rate in US dollars an hour; `file` is what `budget.file` says."""
    return {
        "cap_usd": budget.cap_usd, "max_hours": budget.max_hours, "rate_usd_per_hr": rate,
        "hours": time["seconds"] and time["seconds"] / 3600, "usd": time.get("usd"),
        "spent_usd": nonnegative(file.get("spent_usd")), "hours_elapsed": nonnegative(file.get("hours_elapsed")),
    }  # fmt: skip
