"""The machine: names, memory and precisions of its devices. Unknown is None, never a guess.

This module does not import torch; functions that need it import it themselves.
"""

import ctypes
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch

# Memory files of a container, cgroup v2 and v1: used, limit, parts, and the part that the system can reclaim.
CGROUPS = (
    ("memory.current", "memory.max", "memory.stat", "inactive_file"),
    ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def device_name(device: "torch.device | str" = "cpu") -> str:
    """The model of a device: torch's name for a GPU, the operating system's for a CPU."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def process_bytes() -> int:
    return psutil.Process().memory_info().rss


def driver_version() -> str | None:
    nvml = start_nvml()
    try:
        return nvml and nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError:
        return None


def start_nvml() -> Any:
    """The initialised module `pynvml`; None without the driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def cpu_half_precision() -> str | None:
    """The half precision that this CPU multiplies faster than fp32: "bf16", or None if the system reports none.

    In hardware it is AMX-BF16 or AVX512-BF16 on x86, and BF16 with SVE on Arm. Otherwise torch emulates it,
    several times slower than fp32.
    """
    line = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    on_arm = {"sve", "bf16"} <= flags or "svebf16" in flags
    return "bf16" if flags & {"amx_bf16", "avx512_bf16"} or on_arm else None


def keep_freed_memory() -> None:
    """Make glibc's allocator keep freed memory, for training on a CPU.

    By default it returns large blocks to the system and gets them back page by page: every micro-batch's
    logits cost tens of thousands of page faults. Without glibc this does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    no_mmap, trim_threshold = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    libc.mallopt(no_mmap, 0)
    libc.mallopt(trim_threshold, -1)


def allowed_cores() -> int:
    """The cores that this process may use, by its affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return min(cores, max(1, int(quota) // int(period))) if quota.isdigit() else cores


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def memory() -> dict[str, int]:
    """Used and total memory of the machine, or of its container if the limit is lower; without the page cache."""
    machine = psutil.virtual_memory()
    for in_use, limit, stat, cache in CGROUPS:
        limit, in_use = (_read(f"/sys/fs/cgroup/{name}").strip() for name in (limit, in_use))
        if limit.isdigit() and in_use.isdigit() and int(limit) < machine.total:
            parts = dict(line.split() for line in _read(f"/sys/fs/cgroup/{stat}").splitlines())
            return {"used_bytes": max(0, int(in_use) - int(parts.get(cache, 0))), "total_bytes": int(limit)}
    return {"used_bytes": machine.total - machine.available, "total_bytes": machine.total}
