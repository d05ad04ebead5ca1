"""Devices by the names that people type: peak FLOP/s, memory and fast precisions. Unknown is None, never a guess."""

import re
from typing import NamedTuple

from lm.errors import RequestError
from lm.system.hardware import device_name, memory

ASSUMED_MFU = 0.4  # 47.9 % was measured for pretrain-350m on an H100; smaller matrices reach less

# Dense peaks in TFLOP/s, accumulating in fp32: (bf16, fp16, tf32, fp32, fp8). Vendors print the sparse figures, twice
# these. None: the device has no such unit. Names are torch's device names without vendor and brand (see `_model`),
# matched in full, so that a laptop's or a sliced GPU is unknown rather than confused with the full one.
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
    r"RTX 4080": (97.5, 97.5, 48.7, 48.7, 194.9),
    r"RTX 4090": (165.2, 165.2, 82.6, 82.6, 330.3),
    r"RTX 5090": (209.5, 209.5, 104.8, 104.8, 419),
    # NVIDIA Quadro RTX 6000 and 8000 data sheets, Turing white paper; here and below: tensor cores for fp16 alone
    r"Quadro RTX [68]000|TITAN RTX": (None, 130.5, None, 16.3, None),
    # NVIDIA V100 and T4 data sheets
    r"V100-SXM2-\w+": (None, 125, None, 15.7, None),
    r"V100-PCIE-\w+": (None, 112, None, 14, None),
    r"T4": (None, 65, None, 8.1, None),
    # AMD CDNA 3 white paper
    r"MI300X": (1307.4, 1307.4, 653.7, 163.4, 2614.9),
}

# Consumer and workstation cards by generation: (fp32 peak in TFLOP/s, memory in GiB). GeForce: 2 x CUDA cores x boost
# clock of NVIDIA's product pages; the others: single-precision figure of NVIDIA's data sheets. Left out: laptops',
# whose clocks their makers set; RTX 3050, the name of two cards; RTX PRO 5000 and smaller, whose sources disagree.
GEFORCE = {
    (7, 5): {
        "RTX 2060": (6.45, 6), "RTX 2060 SUPER": (7.18, 8), "RTX 2070": (7.46, 8), "RTX 2070 SUPER": (9.06, 8),
        "RTX 2080": (10.07, 8), "RTX 2080 SUPER": (11.15, 8), "RTX 2080 Ti": (13.45, 11),
    },
    (8, 6): {
        "RTX 3060": (12.74, 12), "RTX 3060 Ti": (16.2, 8), "RTX 3070": (20.31, 8), "RTX 3070 Ti": (21.75, 8),
        "RTX 3080": (29.77, 10), "RTX 3080 Ti": (34.1, 12), "RTX 3090 Ti": (40, 24),
    },
    (8, 9): {
        "RTX 4060": (15.11, 8), "RTX 4060 Ti": (22.06, 8), "RTX 4070": (29.15, 12), "RTX 4070 SUPER": (35.48, 12),
        "RTX 4070 Ti": (40.09, 12), "RTX 4070 Ti SUPER": (44.1, 16), "RTX 4080": (48.7, 16),
        "RTX 4080 SUPER": (52.22, 16),
    },
    (12, 0): {
        "RTX 5050": (13.17, 8), "RTX 5060": (19.18, 8), "RTX 5060 Ti": (23.7, 8), "RTX 5070": (30.87, 12),
        "RTX 5070 Ti": (43.94, 16), "RTX 5080": (56.28, 16),
    },
}  # fmt: skip
WORKSTATION = {
    (7, 5): {
        "Quadro RTX 4000": (7.1, 8), "Quadro RTX 5000": (11.2, 16), "Quadro RTX 6000": (16.3, 24),
        "Quadro RTX 8000": (16.3, 48), "TITAN RTX": (16.3, 24),
    },
    (8, 6): {
        "RTX A2000": (8, 6), "RTX A2000 12GB": (8, 12), "RTX A4000": (19.2, 16), "RTX A4500": (23.7, 20),
        "RTX A5000": (27.8, 24), "RTX A5500": (34.1, 24),
    },
    (8, 9): {
        "RTX 2000 Ada Generation": (12, 16), "RTX 4000 SFF Ada Generation": (19.2, 20),
        "RTX 4000 Ada Generation": (26.7, 20), "RTX 4500 Ada Generation": (39.6, 24),
        "RTX 5000 Ada Generation": (65.3, 32), "RTX 5880 Ada Generation": (69.3, 48),
        "RTX 6000 Ada Generation": (91.1, 48),
    },
    (12, 0): {
        "RTX PRO 6000 Blackwell Workstation Edition": (125.95, 96),
        "RTX PRO 6000 Blackwell Max-Q Workstation Edition": (109.7, 96),
    },
}  # fmt: skip
# Rates of GeForce over its fp32, accumulating in fp32: bf16, fp16, tf32, fp8; a workstation's tensor cores have twice
# that. NVIDIA Turing, Ampere GA102, Ada and RTX Blackwell white papers.
RATES = {(7, 5): (0, 4, 0, 0), (8, 6): (2, 2, 1, 0), (8, 9): (2, 2, 1, 4), (12, 0): (2, 2, 1, 4)}

FAMILIES = {"bf16": 0, "fp16": 1, "16": 1, "tf32": 2, "fp32": 3, "32": 3, "fp8": 4}


def peak_flops(device_name: str, precision: str) -> float | None:
    """The dense peak of a device, the denominator of MFU, in FLOP/s; None if not known.

    The precision is that of the matrix multiplications: "bf16", "fp16", "tf32" or "fp32", or a trainer's, such as
    "bf16-mixed" or "fp8-rowwise". "32-true" is fp32; a program that allows TF32 passes "tf32". For FP8 it is the FP8
    peak, although attention and the output matrix compute in bf16. So compare FP8 with bf16 by tokens a second, not by
    MFU.
    """
    column = FAMILIES.get(re.sub(r"-(mixed|true|tensorwise|rowwise)$", "", precision))
    model = _model(device_name)
    row = next((peaks for pattern, peaks in PEAKS.items() if re.fullmatch(pattern, model)), None)
    peak = None if row is None or column is None else row[column]
    return None if peak is None else peak * 1e12


def _model(device_name: str) -> str:
    """A device's name without the words in front of the model: "NVIDIA GeForce RTX 4090" -> "RTX 4090"."""
    return re.sub(r"^((NVIDIA|AMD|Tesla|GeForce|Graphics|Instinct)\s+)+", "", device_name.strip())


# ---- devices by name -------------------------------------------------------------------------------------------------

MIB = 2**20


class Device(NamedTuple):
    name: str  # torch's name
    memory_bytes: int | None  # total of a GPU, free memory of a CPU; None: not known
    capability: tuple[int, int] | None  # CUDA compute capability; None: no CUDA device
    peak_tflops: float | None = None  # in the precision of the run; None: as in `PEAKS`

    def peak_flops(self, precision: str) -> float | None:
        return self.peak_tflops * 1e12 if self.peak_tflops else peak_flops(self.name, precision)


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
# A driver keeps up to 0.5 % of a card's memory (RTX 5090: 32,607 of 32,768 MiB). Cards with 8 or 16 GB count as 8 GB.
for _brand, _times, _generations in (("NVIDIA GeForce ", 1, GEFORCE), ("NVIDIA ", 2, WORKSTATION)):
    for _capability, _cards in _generations.items():
        for _name, (_fp32, _gib) in _cards.items():
            _bf16, _fp16, _tf32, _fp8 = (_times * rate * _fp32 or None for rate in RATES[_capability])
            PEAKS.setdefault(_name, (_bf16, _fp16, _tf32, _fp32, _fp8))  # some have their own figures
            _short = re.sub(r"^RTX | Generation| Blackwell| Workstation Edition", "", _name).lower().replace(" ", "-")
            DEVICES[_short] = Device(_brand + _name, int(0.995 * _gib * 2**30), _capability)


# Parts of a name beside the model: brand, socket, kind of memory, and separators.
BESIDE_MODEL = re.compile(r"nvidia|geforce|tesla|rtx|sxm\d?|hbm\d\w?|[^a-z0-9]")


def _spelling(name: str) -> str:
    return BESIDE_MODEL.sub("", name.lower())


def assumed_speed(device: Device, precision: str, flops_per_token: float) -> tuple[float, str] | None:
    """Assumed tokens per second of a device, and the assumption in words; None if its peak is not known.

    FP8 counts as bf16: its gain must be measured, since not all products are in FP8, and converting takes time.
    `flops_per_token` includes what activation checkpointing repeats.
    """
    fp8 = precision.startswith("fp8")
    if fp8 and device.peak_tflops is not None:  # the peak that the user gave is that of FP8
        peak = device.peak_tflops * 1e12 / 2
    elif (peak := device.peak_flops("bf16" if fp8 else precision)) is None:
        return None
    return ASSUMED_MFU * peak / flops_per_token, f"{ASSUMED_MFU:.0%} MFU{' of bf16' if fp8 else ''}, assumed"


def find_device(name: str, memory_bytes: int | None = None, peak_tflops: float | None = None) -> tuple[Device, int]:
    """Find a device by name, to plan a run for another machine; returns it and the number of such devices.

    Names are for example "h200", "RTX 4090" or "NVIDIA A100-SXM4-80GB", counted as 1; "cpu"; "auto" for the device
    that this machine would train on. `memory_bytes` and `peak_tflops` replace the device's own; "auto" with a memory
    is any other GPU, of compute capability 8.0.
    """
    device, count = (Device("any GPU", None, (8, 0)), 1) if memory_bytes and name == "auto" else _named_device(name)
    return device._replace(memory_bytes=memory_bytes or device.memory_bytes, peak_tflops=peak_tflops), count


def _named_device(name: str) -> tuple[Device, int]:
    known = {f"{_spelling(key)}{round((device.memory_bytes or 0) / 2**30)}gb": key for key, device in DEVICES.items()}
    known |= {_spelling(spelled): key for key, device in DEVICES.items() for spelled in (key, device.name)}
    if (key := known.get(_spelling(name))) is not None:
        return DEVICES[key], 1
    if name.lower() not in ("auto", "cpu"):
        raise RequestError(
            f"--device {name} is not known: give --memory 16GiB --peak_tflops 120 with its figures in its place; "
            f"known are {', '.join(DEVICES)}, cpu, and auto for this one"
        )
    import torch

    if name.lower() == "auto" and torch.cuda.is_available():
        total = torch.cuda.get_device_properties("cuda").total_memory
        return Device(device_name("cuda"), total, torch.cuda.get_device_capability()), torch.cuda.device_count()
    ram = memory()
    return Device(device_name("cpu"), ram["total_bytes"] - ram["used_bytes"], None), 1
