"""What is said of the machine is true or None: a peak is of that very device and precision, never of a similar one."""

import pytest

from lm.errors import RequestError
from lm.system import hardware
from lm.system.devices import DEVICES, PEAKS, find_device, peak_flops
from lm.system.hardware import cpu_half_precision, device_name, memory
from lm.system.process import ssh_options


@pytest.mark.parametrize("name, precision, teraflops", [
    ("NVIDIA H200", "bf16-mixed", 989), ("NVIDIA H200", "fp8-rowwise", 1979),
    ("NVIDIA H100 80GB HBM3", "fp8-tensorwise", 1978.9), ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
    ("NVIDIA H100 PCIe", "bf16", 756), ("NVIDIA H100 NVL", "bf16", 835.5), ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312),
    ("NVIDIA A100 80GB PCIe", "32-true", 19.5), ("A100-SXM4-40GB", "tf32", 156), ("NVIDIA A10G", "bf16", 70),
    ("NVIDIA L40S", "bf16", 362.05), ("NVIDIA B200", "bf16", 2250), ("NVIDIA GB300", "fp8", 5000),
    ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2), ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ("NVIDIA GeForce RTX 5090", "fp32", 104.8), ("NVIDIA GeForce RTX 2080 Ti", "16-mixed", 53.8),
    ("NVIDIA GeForce RTX 3080", "tf32", 29.8), ("NVIDIA GeForce RTX 4060", "fp8", 60.4),
    ("NVIDIA GeForce RTX 5080", "bf16", 112.6), ("Quadro RTX 6000", "fp16", 130.5),
    ("NVIDIA RTX 4000 Ada Generation", "bf16", 106.9),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8),
    ("Tesla T4", "fp16", 65), ("Tesla V100-SXM2-16GB", "16-mixed", 125), ("AMD Instinct MI300X", "bf16", 1307.4),
])  # fmt: skip
def test_peaks_are_the_data_sheets_dense_figures(name, precision, teraflops):
    assert peak_flops(name, precision) == pytest.approx(teraflops * 1e12, rel=2e-3)


@pytest.mark.parametrize("name, precision", [
    ("NVIDIA H300", "bf16"), ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"), ("NVIDIA GeForce RTX 2080 Ti", "bf16"),
    ("NVIDIA RTX A4000", "fp8"), ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bf16"), ("", "bf16"), ("cpu", "32-true"),
    ("AMD EPYC 9654 96-Core Processor", "32-true"), ("NVIDIA A100-SXM4-80GB", "fp8-rowwise"),
    ("Tesla T4", "bf16"),  # emulated there
    ("Tesla V100-SXM2-16GB", "tf32"), ("NVIDIA H200", "transformer-engine"),
])  # fmt: skip
def test_the_unknown_is_none(name, precision):
    assert peak_flops(name, precision) is None


def test_wider_precisions_are_never_faster():
    for bf16, fp16, tf32, fp32, fp8 in PEAKS.values():
        assert bf16 in (None, fp16) and fp16 >= (tf32 or fp32) >= fp32
        assert fp8 is None or fp8 == pytest.approx(2 * bf16, rel=0.02)


def test_this_cpu_has_a_name_memory_and_no_peak():
    assert device_name() and peak_flops(device_name(), "32-true") is None
    assert 2**28 < memory()["total_bytes"] < 2**50
    assert device_name("meta") == "meta"


@pytest.mark.parametrize("cpuinfo, expected", [
    ("flags\t\t: fpu avx512f avx512_bf16 avx512_fp16\n", "bf16"),
    ("flags\t\t: fpu amx_bf16 amx_tile\n", "bf16"), ("Features\t: fp asimd sve bf16\n", "bf16"),
    ("Features\t: fp asimd sve svebf16\n", "bf16"), ("flags\t\t: fpu avx2 avx512f\n", None),
    ("Features\t: fp asimd bf16\n", None), ("", None),
])  # fmt: skip
def test_half_precision_is_only_what_the_cpu_has_in_hardware(cpuinfo, expected, monkeypatch):
    monkeypatch.setattr(hardware, "_read", lambda path: cpuinfo)
    assert cpu_half_precision() == expected


@pytest.mark.parametrize(("key", "names"), [
    ("4090", ["rtx4090", "RTX 4090", "rtx-4090", "RTX_4090", "geforce rtx 4090", "NVIDIA GeForce RTX 4090"]),
    ("a100", ["A100-80GB", "a100 80gb", "A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"]), ("t4", ["Tesla T4"]),
    ("a100-40gb", ["a100_40gb", "NVIDIA A100-SXM4-40GB"]), ("h100", ["H100", "H100-SXM5", "h100 80GB HBM3"]),
    ("h100-pcie", ["NVIDIA H100 PCIe"]), ("v100", ["v100-32gb"]), ("a6000", ["RTX A6000"]),
])  # fmt: skip
def test_a_device_is_known_by_any_spelling_of_its_name(key, names):
    assert [find_device(name)[0] for name in names] == [DEVICES[key]] * len(names)


def test_every_device_is_known_by_its_own_name_and_has_a_memory_and_a_peak():
    for key, device in DEVICES.items():
        assert find_device(key)[0] == find_device(device.name)[0] == device
        assert device.memory_bytes > 5 * 2**30 and peak_flops(device.name, "16-mixed") is not None, device


@pytest.mark.parametrize("name", ["cuda", "GPU", "cuda:0"])
def test_a_kind_of_device_is_none(name):
    with pytest.raises(RequestError, match=f"--device {name} is not known: .*, h200, .* auto for this one"):
        find_device(name)


@pytest.mark.parametrize(("session", "options"), [
    (None, None), ("203.0.113.9 50000 198.51.100.4 22", "me@198.51.100.4"),
    ("203.0.113.9 50000 198.51.100.4 2222", "-p 2222 me@198.51.100.4"),
])  # fmt: skip
def test_ssh_leads_back_the_way_that_the_session_came(monkeypatch, session, options):
    monkeypatch.setenv("USER", "me")
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.setenv("SSH_CONNECTION", session) if session else monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert ssh_options() == options
