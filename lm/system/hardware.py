"""The machine: peak FLOP/s, memory and precisions of its devices, and their load. Unknown is None, never a guess.

Importing this imports no torch; functions that need it import it themselves.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm.errors import RequestError

if TYPE_CHECKING:
    import torch

# ---- devices: peaks, memory, fast precisions -------------------------------------------------------------------------

# Dense peaks in TFLOP/s, accumulating in fp32: (bf16, fp16, tf32, fp32, fp8). Vendors print the sparse figures, twice
# these. None: the device has no such unit. Names are torch's device names without vendor and brand (see `_model`),
# matched whole, so that a laptop's or a sliced GPU is unknown rather than taken for the full one.
PEAKS: dict[str, tuple[float | None, float, float | None, float, float | None]] = {
    # NVIDIA Blackwell data sheets (HGX B200 and B300: an eighth of the board; GB200 and GB300: half of the superchip)
    r"B[23]00": (2250, 2250, 1125, 75, 4500),
    r"GB[23]00": (2500, 2500, 1250, 80, 5000),
    # NVIDIA H100 data sheet and Hopper white paper; H200 data sheet; GH200 data sheet
    r"H100 80GB HBM3|H800|GH200 (480GB|144G HBM3e)": (989.4, 989.4, 494.7, 66.9, 1978.9),
    r"H[18]00 PCIe": (756, 756, 378, 51.2, 1513),
    r"H100 NVL|H200 NVL": (835.5, 835.5, 417.5, 60, 1670.5),
    r"H200": (989, 989, 494.5, 67, 1979),
    # NVIDIA A100 data sheet; the 800 differs only in its links
    r"A[18]00[- ](SXM4|PCIE|80GB)[- ](40GB|80GB|PCIe)": (312, 312, 156, 19.5, None),
    # NVIDIA A10, A10G, A30, A40 data sheets
    r"A10": (125, 125, 62.5, 31.2, None),
    r"A10G": (70, 70, 35, 35, None),
    r"A30": (165, 165, 82, 10.3, None),
    r"A40": (149.7, 149.7, 74.8, 37.4, None),
    # NVIDIA L4, L40, L40S data sheets
    r"L4": (121, 121, 60, 30.3, 242.5),
    r"L40": (181.05, 181.05, 90.5, 90.5, 362),
    r"L40S": (362.05, 362.05, 183, 91.6, 733),
    # NVIDIA Ampere GA102 and Ada white papers, workstation cards
    r"RTX A6000": (154.8, 154.8, 77.4, 38.7, None),
    r"RTX 6000 Ada Generation": (364.2, 364.2, 182.1, 91.1, 728.5),
    # NVIDIA Ampere GA102, Ada and RTX Blackwell white papers; GeForce halves its rate when accumulating in fp32
    r"RTX 3090": (71, 71, 35.6, 35.6, None),
    r"RTX 3090 Ti": (80, 80, 40, 40, None),
    r"RTX 4080": (97.5, 97.5, 48.7, 48.7, 194.9),
    r"RTX 4090": (165.2, 165.2, 82.6, 82.6, 330.3),
    r"RTX 5090": (209.5, 209.5, 104.8, 104.8, 419),
    # NVIDIA V100 and T4 data sheets: tensor cores for fp16 alone
    r"V100-SXM2-\w+": (None, 125, None, 15.7, None),
    r"V100-PCIE-\w+": (None, 112, None, 14, None),
    r"T4": (None, 65, None, 8.1, None),
    # AMD CDNA 3 white paper
    r"MI300X": (1307.4, 1307.4, 653.7, 163.4, 2614.9),
}
FAMILIES = {"bf16": 0, "fp16": 1, "16": 1, "tf32": 2, "fp32": 3, "32": 3, "fp8": 4}


def peak_flops(device_name: str, precision: str) -> float | None:
    """The dense peak of a device, the denominator of MFU.

    Args:
        device_name: as torch names the GPU, such as "NVIDIA H100 80GB HBM3".
        precision: of the matrix multiplications: "bf16", "fp16", "tf32" or "fp32", or a trainer's ("bf16-mixed",
            "bf16-true", "16-mixed", "32-true", "fp8-tensorwise", "fp8-rowwise"). "32-true" is fp32; a program that
            allows TF32 passes "tf32". For FP8 it is the FP8 peak, although attention and the output matrix compute in
            bf16. So compare FP8 with bf16 by tokens a second, not by MFU.

    Returns:
        Floating-point operations a second; None for a CPU, and for a device or a precision that is not in the table.
    """
    column = FAMILIES.get(re.sub(r"-(mixed|true|tensorwise|rowwise)$", "", precision))
    model = _model(device_name)
    row = next((peaks for pattern, peaks in PEAKS.items() if re.fullmatch(pattern, model)), None)
    if row is None or column is None or row[column] is None:
        return None
    return row[column] * 1e12


def _model(device_name: str) -> str:
    """A device's name without the words in front of the model: "NVIDIA GeForce RTX 4090" -> "RTX 4090"."""
    return re.sub(r"^((NVIDIA|AMD|Tesla|GeForce|Graphics|Instinct)\s+)+", "", device_name.strip())


def device_name(device: torch.device | str = "cpu") -> str:
    """The model of a device: torch's name of a GPU, the operating system's of a CPU."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def memory_bytes(device: torch.device | str = "cpu") -> int | None:
    """Bytes of a device: all of a GPU's; for a CPU the machine's, or a container's limit where that is less."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return memory()["total_bytes"] if device.type == "cpu" else None


def cpu_half_precision(cpuinfo: str | None = None) -> str | None:
    """The half precision that this CPU multiplies faster than fp32: "bf16", or None where the system names none.

    These have it in hardware: AMX-BF16 or AVX512-BF16 on x86, BF16 with SVE on Arm. On others torch emulates it,
    several times slower than fp32. `cpuinfo` is the text of `/proc/cpuinfo`, read from this machine if not given.
    """
    lines = re.findall(r"^(?:flags|Features)\s*:\s*(.+)$", _read("/proc/cpuinfo") if cpuinfo is None else cpuinfo,
                       re.MULTILINE)
    flags = set(lines[0].split()) if lines else set()
    on_arm = {"sve", "bf16"} <= flags or "svebf16" in flags
    return "bf16" if flags & {"amx_bf16", "avx512_bf16"} or on_arm else None


def has_fp8(device: torch.device) -> bool:
    """Whether a device multiplies in FP8 as torch's scaled product does: NVIDIA's from compute capability 8.9 on."""
    import torch

    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)


def keep_freed_memory() -> None:
    """Let glibc's allocator keep what is freed, for training on a CPU.

    By default it returns large blocks to the system at once and gets them back page by page: every micro-batch's
    logits cost tens of thousands of page faults. Without glibc this does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    no_mmap, trim_threshold = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    libc.mallopt(no_mmap, 0)
    libc.mallopt(trim_threshold, -1)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


# ---- devices by the names that people type ---------------------------------------------------------------------------

MIB = 2**20


class Device(NamedTuple):
    """A kind of device."""

    name: str  # torch's
    memory_bytes: int | None  # all of it; None: not known
    capability: tuple[int, int] | None  # CUDA compute capability; None: no CUDA device


# Memory is what `nvidia-smi` calls memory.total, in MiB: less than the GB of the product's name.
DEVICES = {
    "b200": Device("NVIDIA B200", 183_359 * MIB, (10, 0)),
    "h200": Device("NVIDIA H200", 143_771 * MIB, (9, 0)),
    "h100": Device("NVIDIA H100 80GB HBM3", 81_559 * MIB, (9, 0)),
    "h100-pcie": Device("NVIDIA H100 PCIe", 81_559 * MIB, (9, 0)),
    "a100": Device("NVIDIA A100-SXM4-80GB", 81_920 * MIB, (8, 0)),
    "a100-40gb": Device("NVIDIA A100-SXM4-40GB", 40_960 * MIB, (8, 0)),
    "l40s": Device("NVIDIA L40S", 46_068 * MIB, (8, 9)),
    "l4": Device("NVIDIA L4", 23_034 * MIB, (8, 9)),
    "a10g": Device("NVIDIA A10G", 23_028 * MIB, (8, 6)),
    "a6000": Device("NVIDIA RTX A6000", 49_140 * MIB, (8, 6)),
    "5090": Device("NVIDIA GeForce RTX 5090", 32_607 * MIB, (12, 0)),
    "4090": Device("NVIDIA GeForce RTX 4090", 24_564 * MIB, (8, 9)),
    "3090": Device("NVIDIA GeForce RTX 3090", 24_576 * MIB, (8, 6)),
    "v100": Device("Tesla V100-SXM2-32GB", 32_768 * MIB, (7, 0)),
    "t4": Device("Tesla T4", 15_360 * MIB, (7, 5)),
}


def find_device(name: str) -> tuple[Device, int]:
    """A device by its name, so that a training can be planned for another machine, and how many of them there are.

    Args:
        name: such as "h200", of which there is 1; "cpu"; "auto" for the device that this machine would train on.

    Raises:
        RequestError: the name is not known.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()], 1
    if name not in ("auto", "cpu"):
        raise RequestError(f"--device {name} is not known; there are {', '.join(DEVICES)}, cpu, and auto for this one")
    import torch

    if name == "auto" and torch.cuda.is_available():
        found = Device(device_name("cuda"), memory_bytes("cuda"), torch.cuda.get_device_capability())
        return found, torch.cuda.device_count()
    return Device(device_name("cpu"), memory_bytes("cpu"), None), 1


# ---- telemetry: load, memory, temperature and power -----------------------------------------------------------------

# Reasons for reduced clocks of a GPU: bits of nvml.h (nvmlClocksEventReason...) and their names. The first is set
# together with the bit of its cause. An idle GPU and clocks that a person has set are no limits.
CLOCK_LIMITS = {
    0x08: "hardware slowdown",  # HwSlowdown
    0x40: "thermal",  # HwThermalSlowdown
    0x20: "thermal",  # SwThermalSlowdown
    0x04: "power cap",  # SwPowerCap
    0x80: "power brake",  # HwPowerBrakeSlowdown
}
# Files of a container's memory, cgroup v2 and v1: used, limit, parts, and the part that the system can reclaim.
CGROUPS = (
    ("memory.current", "memory.max", "memory.stat", "inactive_file"),
    ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
TICKS_BUSY = (0, 1, 2, 5, 6, 7)  # of /proc/stat: user, nice, system, irq, softirq, steal; 3 is idle, 4 waits for a disk


class Telemetry:
    """Reads CPU, memory, this process and its GPUs. Loads are means since the reading before; None is not known.

    Args:
        gpus: UUIDs of the GPUs to read.
        nvml: the module `pynvml` or a replacement; imported at the first reading if not given.
    """

    def __init__(self, gpus: Sequence[str] = (), nvml: Any = None) -> None:
        self._wanted = gpus
        self._nvml = nvml
        self._handles: list[Any] | None = None  # of the GPUs that NVML knows, from the first reading on
        self._ticks = _ticks()

    def read(self) -> dict[str, Any]:
        """One reading.

        Returns:
            `cpu`: `load_percent` of all cores, `cores`; `memory`: `used_bytes` and `total_bytes` of the machine, or of
            the container where it has a limit; `process`: `memory_bytes` resident; `gpus`: for each `index`, `name`,
            `load_percent`, `memory_used_bytes`, `memory_total_bytes`, `temperature_celsius`, `power_watts`,
            `power_limit_watts`, `clocks_limited_by` (reasons, empty where nothing limits them).
        """
        if self._handles is None:
            self._handles = self._open()
        gpus = [self._gpu(handle) for handle in self._handles]
        return {"cpu": self._cpu(), "memory": memory(), "process": self._process(), "gpus": gpus}

    def _cpu(self) -> dict[str, Any]:
        before, self._ticks = self._ticks, _ticks()
        busy, total = (now - then for now, then in zip(self._ticks, before, strict=True))
        return {"load_percent": 100 * busy / total if total > 0 else None, "cores": os.cpu_count()}

    def _process(self) -> dict[str, Any]:
        resident = _read("/proc/self/statm").split()[1:2]  # pages
        return {"memory_bytes": int(resident[0]) * os.sysconf("SC_PAGE_SIZE") if resident else None}

    def _open(self) -> list[Any]:
        """Start NVML and find the GPUs; none where the package or the driver is not there."""
        if not self._wanted:
            return []
        try:
            self._nvml = self._nvml or import_module("pynvml")
        except ImportError:
            return []
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError:
            return []
        found = [self._ask("nvmlDeviceGetHandleByUUID", uuid) for uuid in self._wanted]
        return [handle for handle in found if handle is not None]

    def _gpu(self, handle: Any) -> dict[str, Any]:
        ask, nvml = self._ask, self._nvml
        sliced = ask("nvmlDeviceGetMigMode", handle, then=lambda modes: modes[0] == nvml.NVML_DEVICE_MIG_ENABLE)
        used = None if sliced else ask("nvmlDeviceGetMemoryInfo", handle)  # of a sliced GPU it is that of all its users
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # drivers before R535 have them under another name
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return {
            "index": ask("nvmlDeviceGetIndex", handle),
            "name": ask("nvmlDeviceGetName", handle),
            "load_percent": None if sliced else ask("nvmlDeviceGetUtilizationRates", handle, then=lambda of: of.gpu),
            "memory_used_bytes": used.used if used else None,
            "memory_total_bytes": used.total if used else None,
            "temperature_celsius": ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "power_watts": ask("nvmlDeviceGetPowerUsage", handle, then=lambda milliwatts: milliwatts / 1e3),
            "power_limit_watts": ask("nvmlDeviceGetEnforcedPowerLimit", handle, then=lambda limit: limit / 1e3),
            "clocks_limited_by": clock_limits(reasons),
        }

    def _ask(self, function: str, *arguments: Any, then: Callable[[Any], Any] = lambda value: value) -> Any:
        """The answer of NVML; None where this GPU or driver has none, or lost the device."""
        try:
            return then(getattr(self._nvml, function)(*arguments))
        except self._nvml.NVMLError:
            return None


def clock_limits(reasons: int | None) -> list[str] | None:
    """The names of the reasons for reduced clocks in NVML's bits."""
    if reasons is None:
        return None
    words = dict.fromkeys(word for bit, word in CLOCK_LIMITS.items() if reasons & bit)
    if len(words) > 1:
        words.pop("hardware slowdown", None)
    return list(words)


def memory() -> dict[str, int | None]:
    """Used and total memory of the machine, or of the container where its limit is less. Page cache is not used."""
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
    """Busy and total clock ticks of all cores since the machine was started; zeros where the system does not say."""
    first = _read("/proc/stat").partition("\n")[0].split()[1:9]  # user's includes guests'
    ticks = [int(count) for count in first]
    return sum(ticks[index] for index in TICKS_BUSY) if len(ticks) == 8 else 0, sum(ticks)
