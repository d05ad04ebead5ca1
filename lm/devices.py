"""GPUs by the names that people type, with their memory, so that a training can be planned for one that is elsewhere.

Peaks are in `hardware`, by torch's names. Importing this imports no torch.
"""

from typing import NamedTuple

from lm.errors import RequestError

MIB = 2**20


class Device(NamedTuple):
    """A kind of device."""

    name: str  # torch's
    memory_bytes: int | None  # all of it; None: not known
    capability: tuple[int, int] | None  # CUDA compute capability; None: no CUDA device


# Memory is what `nvidia-smi` calls memory.total, in MiB: less than the number on the box where it is printed in GB.
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
    """A device by name, or with `auto` the one that this machine would train on.

    Args:
        name: such as "h200"; "cpu"; "auto".

    Returns:
        The device, and how many of it there are here (1 for one that is elsewhere).

    Raises:
        RequestError: no such name.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()], 1
    if name not in ("auto", "cpu"):
        raise RequestError(f"--device {name} is not known; there are {', '.join(DEVICES)}, cpu, and auto for this one")
    import torch

    from lm.hardware import device_name, memory_bytes

    if name == "auto" and torch.cuda.is_available():
        found = Device(device_name("cuda"), memory_bytes("cuda"), torch.cuda.get_device_capability())
        return found, torch.cuda.device_count()
    return Device(device_name("cpu"), memory_bytes("cpu"), None), 1
