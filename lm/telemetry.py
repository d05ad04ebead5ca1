"""How the machine is doing: CPU, memory, this process and its GPUs. Unknown is None, never a guess and never an error.

Nothing here imports torch. GPUs are asked through NVML by nvidia-ml-py, and only those that this process may use.
"""

import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

# What holds a GPU's clocks below what they could be: bits of nvml.h (nvmlClocksEventReason...) and words for them. The
# first is set beside that of its cause. Being idle and clocks that somebody set are no limits.
CLOCK_LIMITS = {
    0x08: "hardware slowdown",  # HwSlowdown
    0x40: "thermal",  # HwThermalSlowdown
    0x20: "thermal",  # SwThermalSlowdown
    0x04: "power cap",  # SwPowerCap
    0x80: "power brake",  # HwPowerBrakeSlowdown
}
# Files of a container's memory, cgroup v2 and v1: in use, limit, parts, and the part that is given back on demand.
CGROUPS = (
    ("memory.current", "memory.max", "memory.stat", "inactive_file"),
    ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
TICKS_BUSY = (0, 1, 2, 5, 6, 7)  # of /proc/stat: user, nice, system, irq, softirq, steal; 3 is idle, 4 waits for a disk


class Telemetry:
    """Reads this machine; loads are means since the reading before.

    Args:
        gpus: UUIDs of the GPUs to look at, or their indices as NVML counts; what CUDA_VISIBLE_DEVICES names if not
            given, all of them where it is not set.
        nvml: the module `pynvml` or one like it; imported at the first reading if not given.
    """

    def __init__(self, gpus: Sequence[str] | None = None, nvml: Any = None) -> None:
        self._wanted = gpus
        self._nvml = nvml
        self._handles: list[tuple[int | None, Any]] | None = None  # of GPUs; None: NVML does not answer
        self._opened = False
        self._before = (time.monotonic(), time.process_time())
        self._ticks = _ticks()

    def read(self) -> dict[str, Any]:
        """One reading.

        Returns:
            `cpu`: `load_percent` of all cores (None at once after the first call, since it is a difference),
            `load_average` over a minute, `cores`; `memory`: `used_bytes` and `total_bytes` of the machine, or of the
            container where it has a limit; `process`: `memory_bytes` resident, `cpu_percent` of one core; `gpus`: None
            where NVML does not answer, else for each `index`, `name`, `load_percent`, `memory_used_bytes`,
            `memory_total_bytes`, `temperature_celsius`, `power_watts`, `power_limit_watts`, `clocks_limited_by` (words,
            empty where nothing limits them).
        """
        return {"cpu": self._cpu(), "memory": memory(), "process": self._process(), "gpus": self._gpus()}

    # ---- the machine and this process -------------------------------------------------------------------------------

    def _cpu(self) -> dict[str, Any]:
        before, self._ticks = self._ticks, _ticks()
        busy, total = (now - then for now, then in zip(self._ticks, before, strict=True))
        try:
            average = os.getloadavg()[0]
        except (AttributeError, OSError):  # not on Windows
            average = None
        load = 100 * busy / total if total > 0 else None
        return {"load_percent": load, "load_average": average, "cores": os.cpu_count()}

    def _process(self) -> dict[str, Any]:
        (then, used_then), self._before = self._before, (time.monotonic(), time.process_time())
        now, used = self._before
        resident = _read("/proc/self/statm").split()[1:2]  # pages
        return {
            "memory_bytes": int(resident[0]) * os.sysconf("SC_PAGE_SIZE") if resident else None,
            "cpu_percent": 100 * (used - used_then) / (now - then) if now > then else None,
        }

    # ---- GPUs -------------------------------------------------------------------------------------------------------

    def _gpus(self) -> list[dict[str, Any]] | None:
        if not self._opened:
            self._opened = True
            self._handles = self._open()
        return None if self._handles is None else [self._gpu(index, handle) for index, handle in self._handles]

    def _open(self) -> list[tuple[int | None, Any]] | None:
        """Start NVML and find the GPUs; None where the package, the driver or the GPUs are not there."""
        try:
            self._nvml = self._nvml or import_module("pynvml")
        except ImportError:
            return None
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError:
            return None
        every = [self._ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]  # None: it is lost
        wanted = self._wanted if self._wanted is not None else visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if wanted is None:
            return list(enumerate(every))
        found: list[tuple[int | None, Any]] = []
        for name in wanted:
            device = self._find(name, every)
            if device is None:  # CUDA too takes the ones before a name that is wrong
                break
            found.append(device)
        return found

    def _find(self, name: str, every: list[Any]) -> tuple[int | None, Any] | None:
        """One GPU by its index, by its UUID or the beginning of it, or a slice of a GPU by its UUID."""
        if name.isdigit():
            return (int(name), every[int(name)]) if int(name) < len(every) else None
        for index, handle in enumerate(every):
            if (self._ask("nvmlDeviceGetUUID", handle) or "").startswith(name):
                return index, handle
        handle = self._ask("nvmlDeviceGetHandleByUUID", name) if name.startswith("MIG-") else None
        return None if handle is None else (None, handle)

    def _gpu(self, index: int | None, handle: Any) -> dict[str, Any]:
        ask, nvml = self._ask, self._nvml
        sliced = ask("nvmlDeviceGetMigMode", handle, then=lambda modes: modes[0] == nvml.NVML_DEVICE_MIG_ENABLE)
        used = None if sliced else ask("nvmlDeviceGetMemoryInfo", handle)  # a sliced GPU's is that of all its users
        return {
            "index": index,
            "name": ask("nvmlDeviceGetName", handle),
            "load_percent": None if sliced else ask("nvmlDeviceGetUtilizationRates", handle, then=lambda of: of.gpu),
            "memory_used_bytes": used.used if used else None,
            "memory_total_bytes": used.total if used else None,
            "temperature_celsius": ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "power_watts": ask("nvmlDeviceGetPowerUsage", handle, then=lambda milliwatts: milliwatts / 1e3),
            "power_limit_watts": ask("nvmlDeviceGetEnforcedPowerLimit", handle, then=lambda limit: limit / 1e3),
            "clocks_limited_by": clock_limits(self._reasons(handle)),
        }

    def _reasons(self, handle: Any) -> int | None:
        """Bits of what limits the clocks; drivers before R535 know the question by its old name alone."""
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) if reasons is None else reasons

    def _ask(self, function: str, *arguments: Any, then: Callable[[Any], Any] = lambda value: value) -> Any:
        """What NVML answers; None where this GPU or driver has no answer, or lost it."""
        try:
            return then(getattr(self._nvml, function)(*arguments))
        except self._nvml.NVMLError:
            return None


def clock_limits(reasons: int | None) -> list[str] | None:
    """NVML's bits of what limits a GPU's clocks, in words."""
    if reasons is None:
        return None
    words = dict.fromkeys(word for bit, word in CLOCK_LIMITS.items() if reasons & bit)
    if len(words) > 1:
        words.pop("hardware slowdown", None)
    return list(words)


def visible(variable: str | None) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by index or UUID; None where it is not set and all are visible."""
    if variable is None:
        return None
    return [name.strip() for name in variable.split(",") if name.strip()]


def memory() -> dict[str, int | None]:
    """Memory in use and in all: the machine's, or the container's where its limit is less. Page cache is not in use."""
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    if "MemTotal" not in kib:
        known = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
        return {"used_bytes": None, "total_bytes": total}
    total, used = kib["MemTotal"] * 1024, (kib["MemTotal"] - kib.get("MemAvailable", kib["MemFree"])) * 1024
    for in_use, limit, stat, cache in CGROUPS:
        limit, in_use = (_read(f"/sys/fs/cgroup/{name}").strip() for name in (limit, in_use))
        if limit.isdigit() and in_use.isdigit() and int(limit) < total:
            parts = dict(line.split() for line in _read(f"/sys/fs/cgroup/{stat}").splitlines())
            total, used = int(limit), max(0, int(in_use) - int(parts.get(cache, 0)))
    return {"used_bytes": used, "total_bytes": total}


def _ticks() -> tuple[int, int]:
    """Busy and all clock ticks of all cores since the machine was started; zeros where it does not tell."""
    first = _read("/proc/stat").partition("\n")[0].split()[1:9]  # guests' time stands behind and is in user's
    ticks = [int(count) for count in first]
    return sum(ticks[index] for index in TICKS_BUSY) if len(ticks) == 8 else 0, sum(ticks)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
