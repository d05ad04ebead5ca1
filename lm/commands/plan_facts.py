"""What a config asks for, as numbers: the parts of `lm plan`'s page. Nothing is built, allocated or written.

`plan_findings` judges them, `plan` shows them.
"""

import json
import math
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lm.data.shards import Shards
from lm.data.tokenizer import Tokenizer
from lm.devices import Device
from lm.errors import RequestError
from lm.hardware import peak_flops
from lm.model.accounting import flops_per_token, parameters
from lm.model.config import DecoderConfig
from lm.model.memory import Step, checkpoint_bytes, largest_micro_batch, training_memory
from lm.optim import OptimizerConfig
from lm.room import room
from lm.schedule import lengths
from lm.steps import Steps

KERNELS_FROM = (8, 0)  # compute capability, as in `kernels/operations`
ASSUMED_MFU = 0.4  # what published trainings of this size reach on one GPU: nanochat 41 to 50 %, OLMo-core 52 to 57 %
SMALL_MODEL, SMALL_BATCH = 50e6, 8_192  # parameters, and tokens of a micro-batch, under which the host decides
RESERVE_BYTES = 2**30  # CUDA context and library workspaces; on a CPU Python and its libraries
RESERVE_SHARE = 0.05  # of the peak, for what the allocator cannot use


def model_facts(config: DecoderConfig, seq_len: int) -> dict[str, Any]:
    """Parameters by part, and operations a token."""
    return {
        "parameters": parameters(config),
        "flops_per_token": flops_per_token(config, seq_len),
        "tied": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
    }


# ---- data ------------------------------------------------------------------------------------------------------------


def find_tokenizer(data: Namespace) -> Tokenizer | None:
    """The tokenizer of a config's data; None where it is still to be made.

    Raises:
        RequestError: it is not there, and nothing says what to make it from.
    """
    if data.tokenizer is None and not (Path(data.path) / "tokenizer.json").exists() and data.prepare:
        return Tokenizer.load(data.prepare.tokenizer) if data.prepare.tokenizer not in ("bpe", "char") else None
    if data.tokenizer is None and not Path(data.path).is_dir():
        raise RequestError(f"data.path {data.path} is not there: make it with `lm data prepare --output {data.path}`")
    return Tokenizer.load(data.tokenizer or data.path)


def data_facts(data: Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Tokens and shards by split, and how well the tokenizer fits a sample of them.

    Raises:
        RequestError: shards are missing, damaged or made with another tokenizer; names the file.
    """
    sources = {"train": data.train, "val": data.val}
    if data.path and not (Path(data.path) / "manifest.json").exists():
        if data.prepare is None:
            raise RequestError(f"data.path {data.path} holds no manifest.json: make it with `lm data prepare`")
        return {"prepared": False, "from": list(data.prepare.input)}
    found: dict[str, Any] = {"prepared": True}
    for split, source in sources.items():
        if source is None and data.path and (Path(data.path) / split).is_dir():
            source = str(Path(data.path) / split)
        if source is None:
            continue
        shards = Shards.open(source, data.column, vocab_size=tokenizer.vocab_size, tokenizer_sha256=tokenizer.sha256)
        windows = shards.require_windows(data.seq_len)
        found[split] = {
            "tokens": shards.tokens, "shards": len(shards.fingerprint()), "windows": windows,
            "dtype": str(shards.column.dtype), "bytes_per_token": _fit_of_sample(shards, tokenizer),
        }  # fmt: skip
    return found


def _fit_of_sample(shards: Shards, tokenizer: Tokenizer) -> float:
    """UTF-8 bytes a token over the first block: how well the tokenizer fits these texts."""
    ids = shards.read(0)
    return float(tokenizer.token_bytes()[ids].sum() / len(ids))


# ---- steps -----------------------------------------------------------------------------------------------------------


def step_facts(steps: Steps, config: Namespace, data: dict[str, Any]) -> dict[str, Any]:
    """The algebra of the run: tokens, epochs, warm-up, validations, checkpoints."""
    warmup, decay = lengths(steps.max_steps, config.model.schedule)
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
    return facts


# ---- device ----------------------------------------------------------------------------------------------------------


def computation(steps: Steps, config: Namespace, device: Device, precision: str) -> Step:
    """How a micro-batch would be computed on a device."""
    model = config.model
    kernels = model.kernels not in ("off", False) and bool(device.capability and device.capability >= KERNELS_FROM)
    return Step(
        steps.micro_batch_size, steps.seq_len, precision, kernels, model.compile, steps.accumulate, model.cuda_graphs,
        steps.world_size, config.trainer.strategy == "fsdp2" and steps.world_size > 1,
    )  # fmt: skip


def memory_facts(decoder: DecoderConfig, step: Step, optimizer: OptimizerConfig, device: Device) -> dict[str, Any]:
    """Bytes of a step by part, beside what the device has, and the largest micro-batch that would fit."""
    muon = optimizer.name == "muon"
    parts = training_memory(decoder, step, muon)
    reserve = RESERVE_BYTES + int(RESERVE_SHARE * parts["peak"])
    facts = {**parts, "reserve": reserve, "total": parts["peak"] + reserve, "device": device.memory_bytes}
    if device.memory_bytes is not None:
        room = int((device.memory_bytes - RESERVE_BYTES) / (1 + RESERVE_SHARE))
        samples = step.micro_batch_size * step.accumulate
        facts["largest_micro_batch"] = largest_micro_batch(decoder, step, room, samples, muon)
    return facts


def time_facts(
    steps: dict[str, Any], flops: float, device: Device, precision: str, mfu: float | None, bench: Path | None,
    model_parameters: int, usd_per_hour: float | None,
) -> dict[str, Any]:  # fmt: skip
    """How long the steps take and what that costs; `seconds` is None where nothing says how fast the device is.

    Raises:
        RequestError: the bench file is of another model.
    """
    peak = peak_flops(device.name, precision)
    if bench is not None:
        rate, basis = measured_rate(bench, model_parameters, steps["seq_len"])
    elif peak is not None and mfu:
        rate, basis = mfu * peak / flops, f"{mfu:.0%} MFU, given"
    elif peak is not None:
        # What FP8 wins over bf16 is known when it is measured: not all products are in it, and converting costs.
        fp8 = precision.startswith("fp8")
        rate = ASSUMED_MFU * (peak_flops(device.name, "bf16") if fp8 else peak) / flops
        basis = f"{ASSUMED_MFU:.0%} MFU{' of bf16' * fp8}, assumed"
        if model_parameters < SMALL_MODEL or steps["micro_batch_size"] * steps["seq_len"] < SMALL_BATCH:
            basis += ", and more than so little work a kernel can reach"
    else:
        return {"seconds": None, "basis": f"the peak of {device.name} in {precision} is not known: give --bench FILE"}
    rate *= steps["world_size"]
    seconds = steps["tokens"] / rate
    return {
        "seconds": seconds, "tokens_per_second": rate, "basis": basis,
        "mfu": rate * flops / (peak * steps["world_size"]) if peak else None,
        "usd": None if usd_per_hour is None else seconds / 3600 * usd_per_hour,
    }  # fmt: skip


def measured_rate(file: Path, model_parameters: int, seq_len: int) -> tuple[float, str]:
    """Tokens a second of one device in a file of `lm bench step --output`, of several modes the fastest; and what was
    measured there, in words.

    Raises:
        RequestError: it cannot be read, or is of another model.
    """
    try:
        found = json.loads(file.read_text())
        runs = [run for run in found.get("modes", {"": found}).values() if "unavailable" not in run]
        fastest = max(runs, key=lambda run: run["lightning"]["tokens_per_second"])
        shape = fastest["parameters"], fastest["seq_len"]
        rate = float(fastest["lightning"]["tokens_per_second"])
        if not rate > 0:
            raise ValueError(f"{rate} tokens a second")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise RequestError(f"--bench {file} is no result of `lm bench step --output`: {error}") from error
    if shape != (model_parameters, seq_len):
        raise RequestError(
            f"--bench {file} is of another model: {shape[0]:,} parameters and {shape[1]:,} tokens of context, this one "
            f"has {model_parameters:,} and {seq_len:,}"
        )
    return rate, ", ".join([str(file), *(str(fastest[name]) for name in ("device", "precision") if name in fastest)])


def disk_facts(decoder: DecoderConfig, step: Step, config: Namespace) -> dict[str, Any]:
    """Bytes of a checkpoint, of all that are there at once (kept, best and the one in flight), and what is free."""
    muon = config.model.optimizer.name == "muon"
    one = checkpoint_bytes(decoder, step.master_item, muon)
    return room(Path(config.trainer.default_root_dir), one, config.trainer.keep_checkpoints)._asdict()
