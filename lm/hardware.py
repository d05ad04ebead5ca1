"""What the machine is and can do: peaks, memory, fast precisions. Unknown is None, never a guess.

Importing this imports no torch; functions that need it import it themselves.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Dense peaks in TFLOP/s, accumulating in fp32: (bf16, fp16, tf32, fp32, fp8). Vendors print the sparse figures, twice
# these. None: the device has no such unit. Names are torch's device names without vendor and brand (see `_model`),
# matched whole, so that a laptop's or a sliced GPU is unknown rather than taken for its big sister.
PEAKS: dict[str, tuple[float | None, float, float | None, float, float | None]] = {
    # NVIDIA Blackwell data sheets (HGX B200: an eighth of the board; GB200: half of the superchip)
    r"B200": (2250, 2250, 1125, 75, 4500),
    r"GB200": (2500, 2500, 1250, 80, 5000),
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
    """The dense peak of a device, what MFU is divided by.

    Args:
        device_name: as torch names the GPU, such as "NVIDIA H100 80GB HBM3".
        precision: of the matrix multiplications: "bf16", "fp16", "tf32" or "fp32", or a trainer's ("bf16-mixed",
            "bf16-true", "16-mixed", "32-true", "fp8-tensorwise", "fp8-rowwise"). "32-true" is fp32; a program that
            allows TF32 asks for "tf32". FP8 is divided by the device's FP8 peak, though attention and the output
            matrix compute in bf16: a smaller peak would flatter it. So its MFU is no measure against one of bf16;
            tokens a second are.

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
    """The memory of a device: all of a GPU's; for a CPU the machine's, or a container's limit where that is less.

    Returns:
        Bytes; None where it cannot be told.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = (_read(f"/sys/fs/cgroup/{name}").strip() for name in ("memory.max", "memory/memory.limit_in_bytes"))
    return min([installed, *(int(limit) for limit in limits if limit.isdigit())])


def cpu_half_precision(cpuinfo: str | None = None) -> str | None:
    """The half precision that this CPU multiplies faster than fp32.

    Only hardware counts: AMX-BF16 or AVX512-BF16 on x86, BF16 with SVE on Arm. Elsewhere torch emulates it, several
    times slower than fp32.

    Args:
        cpuinfo: the text of `/proc/cpuinfo`; read from this machine if not given.

    Returns:
        "bf16", or None where there is none or it cannot be told.
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
    logits cost tens of thousands of page faults. Elsewhere than on glibc this does nothing.
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
