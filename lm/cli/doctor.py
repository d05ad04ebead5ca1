"""`lm doctor`: whether this machine can train, line by line, each with a fix for what is wrong.

The page may stand in an issue: it has no names of people. Whether the data is there, `lm plan` says.
"""

import importlib.metadata
import json as jsonlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from filelock import FileLock
from rich.console import Console
from rich.markup import escape

from lm.errors import LmError, first_line
from lm.kernels import runtime, swiglu
from lm.model.attention_choice import kernel_names, why_it_fails
from lm.model.build import kernels_missing
from lm.model.config import DecoderConfig
from lm.runs import registry
from lm.runs.run import ROOT
from lm.system.devices import peak_flops
from lm.system.hardware import cpu_half_precision, device_name, driver_version, memory
from lm.system.process import lm_version
from lm.system.units import format_bytes, plural

LITTLE_DISK = 5 * 2**30  # bytes; a checkpoint of the 350M preset takes 4.2 GB
LONGEST_REASON = 80  # characters of why an attention kernel does not run
MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


class Check(NamedTuple):
    """One line of the page."""

    name: str
    level: Literal["ok", "warning", "error"]
    what: str
    cure: str = ""  # the fix, by its name in the JSON


def doctor(json: bool = False) -> None:
    """Check whether this machine has what training needs.

    Args:
        json: Print one JSON object instead of a page.
    """
    checks = [check._replace(what=_anonymous(check.what), cure=_anonymous(check.cure)) for check in _checks()]
    errors = [check for check in checks if check.level == "error"]
    if json:
        print(jsonlib.dumps({"checks": [check._asdict() for check in checks], "ready": not errors}))
    else:
        console, width = Console(highlight=False, soft_wrap=True), max(len(check.name) for check in checks)
        for check in checks:
            console.print(f"{check.name:<{width}}  {MARKS[check.level]:<7}  {escape(check.what)}")
            if check.cure:
                console.print(f"{'':<{width}}           {escape(check.cure)}")
    if errors:
        raise LmError(f"{plural(len(errors), 'error')}: {errors[0].name}: {errors[0].what}")


def _checks() -> Iterator[Check]:
    groups = {"Python": _python, "torch": _torch, "GPU": _gpus, "kernels": _kernels, "attention": _attention}
    groups |= {"disk": _disk, "registry": _registry}
    for name, group in groups.items():
        try:
            yield from group()
        except Exception as failure:  # the other checks are still of use
            what = f"{type(failure).__name__}: {first_line(failure)}"
            yield Check(name, "error", what, "please report it with this page")


def _anonymous(text: str) -> str:
    """Without the user's name in paths of the home folder."""
    home = os.path.expanduser("~")
    return text if home == "/" else re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)


def _python() -> Iterator[Check]:
    yield Check("lm", "ok", f"{lm_version()} on {platform.platform()}")
    yield Check("Python", "ok", f"{platform.python_version()} at {sys.executable}")
    packages = ("lightning", "tokenizers", "pyarrow")
    yield Check("packages", "ok", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages))


def _torch() -> Iterator[Check]:
    cuda = torch.version.cuda
    built_for = f"CUDA {cuda}" if cuda else "ROCm" if torch.version.hip else "CPUs"
    yield Check("torch", "ok", f"{torch.__version__}, for {built_for}")
    if not (driver := driver_version()):
        return
    wheel = "cu130" if int(driver.partition(".")[0]) >= 580 else "cu126"  # what PyTorch is built for
    index = f"--index-url https://download.pytorch.org/whl/{wheel}"
    reinstall = f"pip install --force-reinstall torch=={torch.__version__.partition('+')[0]} {index}"
    if not cuda:
        what = f"there is an NVIDIA driver, {driver}, and this torch is for CPUs only"
        yield Check("driver", "error", what, reinstall)
    elif not torch.cuda.is_available():
        what = f"torch for CUDA {cuda} finds no GPU with NVIDIA driver {driver}"
        fix = f"install a newer driver, or {reinstall}; in a container, start it with --gpus all"
        yield Check("driver", "error", what, fix)
    else:
        yield Check("driver", "ok", f"NVIDIA {driver}")


def _gpus() -> Iterator[Check]:
    cores, size = os.cpu_count(), memory()["total_bytes"]
    half = f", {cpu_half_precision()} in hardware" if cpu_half_precision() else ""
    yield Check("CPU", "ok", f"{device_name('cpu')}, {plural(cores or 1, 'core')}{half}; {format_bytes(size)}")
    if not torch.cuda.is_available():
        if torch.backends.mps.is_available():
            yield Check("GPU", "ok", "Apple's, by MPS")
        else:
            fix = "a CPU trains models of a few million parameters; for more, rent a GPU"
            yield Check("GPU", "warning", "none: training is on the CPU", fix)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        name, (major, minor) = device_name(device), torch.cuda.get_device_capability(device)
        free, total = torch.cuda.mem_get_info(device)
        peak = peak_flops(name, "bf16")
        known = f"peak {peak / 1e12:,.0f} TFLOP/s in bf16" if peak else "peak not known, so MFU is not shown"
        what = f"{name}, capability {major}.{minor}, {format_bytes(free)} of {format_bytes(total)} free, {known}"
        if free < 0.5 * total:
            yield Check(f"GPU {index}", "warning", what, "another process uses it: `nvidia-smi` shows which")
        else:
            yield Check(f"GPU {index}", "ok", what)


def _kernels() -> Iterator[Check]:
    """Compile a kernel with NVRTC, and where there is a GPU run it beside plain PyTorch."""
    if not torch.cuda.is_available():
        if not runtime.available():
            yield Check("kernels", "ok", "none are needed without a GPU")
            return
        code, _ = runtime.compile_source("swiglu", "sm_90", **swiglu.constants(torch.bfloat16, 64, 8))
        yield Check("kernels", "ok", f"NVRTC compiles them ({len(code):,} bytes for sm_90); no GPU to run them")
        return
    device = torch.device("cuda")
    if missing := kernels_missing(device):
        fix = "pip install cuda-bindings nvidia-cuda-nvrtc" if "NVRTC" in missing else "install a newer driver"
        yield Check("kernels", "warning", f"{missing}; plain PyTorch is used, which is slower", fix)
        return
    gate_up = torch.randn(8, 128, device=device, dtype=torch.bfloat16)
    ours = torch.ops.lm.swiglu(gate_up)
    difference = (ours.cpu() - torch.ops.lm.swiglu(gate_up.cpu())).abs().max().item()
    if difference < 0.05:
        yield Check("kernels", "ok", f"compiled by NVRTC, loaded, and right on {device_name(device)}")
    else:
        fix = "--model.kernels off, and please report it with this page"
        yield Check("kernels", "error", f"a kernel is wrong by {difference:.3g} on {device_name(device)}", fix)


def _attention() -> Iterator[Check]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    config = DecoderConfig(hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    tried = {name: why_it_fails(name, device, dtype, config) for name in kernel_names(device)}
    run = sorted(name for name, why in tried.items() if why is None)
    not_run = "".join(f"; {name} does not: {why[:LONGEST_REASON]}" for name, why in tried.items() if why)
    if run:
        yield Check("attention", "ok", f"{', '.join(run)} run forward and backward{not_run}")
    else:
        yield Check("attention", "error", f"no kernel runs{not_run}", "install a torch that is built for this GPU")


def _disk() -> Iterator[Check]:
    existing = ROOT if ROOT.exists() else Path()
    free = shutil.disk_usage(existing).free
    place = existing / f".lm-doctor-{os.getpid()}"
    try:
        with FileLock(place, timeout=1):
            place.write_text("written")
        place.unlink(missing_ok=True)
    except OSError as failure:
        what = f"{existing} cannot be written to: {failure.strerror or failure}"
        yield Check("disk", "error", what, "set trainer.default_root_dir to another folder")
        return
    what = f"{existing.resolve()}: {format_bytes(free)} free, writable, locks work"
    if free < LITTLE_DISK:
        yield Check("disk", "warning", what, "`lm plan` says what the checkpoints of a run need")
    else:
        yield Check("disk", "ok", what)


def _registry() -> Iterator[Check]:
    try:
        registry.forget([])  # opens it for writing and removes nothing
        yield Check("registry", "ok", f"{registry.place()}, {plural(len(registry.known_runs()), 'run')}")
    except LmError as failure:
        yield Check("registry", "warning", str(failure), "`lm runs rebuild` makes a new one; LM_REGISTRY names another")
