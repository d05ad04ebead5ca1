"""Attention kernels are chosen by measuring them; on a CPU there are two to measure."""

import json
import sys
import types

import pytest
import torch
from torch.nn.attention import _registry, current_flash_attention_impl

from lm.errors import RequestError, RunError
from lm.model import attention_choice
from lm.model.attention_choice import Choice, Shape, choose_attention, fastest, measure, measured

CPU = torch.device("cpu")
CAUSAL = Shape(2, 128, 4, 2, 32, (None,) * 3, False)
WINDOWS = Shape(2, 128, 4, 2, 32, (None, 16, 16, None), False)


def test_both_kernels_of_a_cpu_are_timed_and_what_does_not_run_says_why():
    drawn = torch.get_rng_state()
    times, failures = measure(CPU, torch.bfloat16, CAUSAL, ["flash", "math", "cudnn"])
    assert torch.equal(torch.get_rng_state(), drawn)  # a training's random numbers are its own
    assert set(times) == {"flash", "math"} and all(value > 0 for value in times.values())
    assert set(failures) == {"cudnn"} and "kernel" in failures["cudnn"].lower()


def test_times_are_measured_once_for_a_device_and_a_shape(tmp_path, monkeypatch):
    monkeypatch.setenv("LM_KERNEL_CACHE", str(tmp_path))
    times = measured(CPU, torch.bfloat16, CAUSAL)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == times
    file.write_text('{"math": 1.0}')
    assert measured(CPU, torch.bfloat16, CAUSAL) == {"math": 1.0}  # a resumed run takes the same kernel
    assert set(measured(CPU, torch.bfloat16, CAUSAL._replace(length=64))) == {"flash", "math"}
    file.write_text("{")
    assert set(measured(CPU, torch.bfloat16, CAUSAL)) == {"flash", "math"}


def test_a_wheel_of_flash_attention_that_was_installed_since_is_measured(tmp_path, monkeypatch):
    """torch lists the names of both versions in any case."""
    monkeypatch.setenv("LM_KERNEL_CACHE", str(tmp_path / "cache"))
    counted = []
    monkeypatch.setattr(attention_choice, "measure", lambda *arguments: (counted.append(1) or {"math": 1.0}, {}))
    monkeypatch.syspath_prepend(tmp_path)
    for version in (None, "3.0.0", "3.0.1"):
        if version:
            facts = tmp_path / f"flash_attn_3-{version}.dist-info" / "METADATA"
            facts.parent.mkdir()
            facts.write_text(f"Metadata-Version: 2.1\nName: flash_attn_3\nVersion: {version}\n")
        for _ in range(2):
            measured(CPU, torch.bfloat16, CAUSAL)
    assert len(counted) == 3


def test_a_gpu_s_runs_are_queued_between_events_and_waited_for_once(monkeypatch):
    """The first round contains the host's way to the GPU, and the others are timed by the GPU's own clock."""
    queue, moments = [], iter([0.0, 90.0, 94.0, 98.5, 103.0, 108.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            queue.append(stream)
            self.moment = next(moments)

        def synchronize(self):
            queue.append("wait")

        def elapsed_time(self, end):
            return end.moment - self.moment

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "mark")
    found = attention_choice.least_milliseconds(lambda: queue.append("run"), torch.device("cuda"))
    assert found == 0.4 and queue == ["mark", *(["run"] * 10 + ["mark"]) * 5, "wait"]


@pytest.mark.parametrize("times, shape, choice", [
    ({"cudnn": 1.0, "flash": 2.0, "efficient": 3.0}, CAUSAL, Choice("cudnn", "flash")),
    ({"cudnn": 2.0, "flash": 1.0}, CAUSAL, Choice("flash", "flash")),
    ({"cudnn": 1.0, "flash": 2.0, "flash 16": 0.5}, WINDOWS, Choice("cudnn", "flash")),
    # The version that is faster over sequences is taken even where its causal kernel is not the fastest.
    ({"cudnn": 1.0, "flash": 2.0, "flash 16": 3.0, "flash3": 1.1, "flash3 16": 1.0}, WINDOWS,
     Choice("cudnn", "flash3")),
    ({"flash": 2.0, "flash 16": 1.0, "flash3": 1.0, "flash3 16": 1.5}, WINDOWS, Choice("flash3", "flash3")),
    ({"flash None": 2.0, "flash4 None": 1.0}, CAUSAL._replace(documents=True), Choice("flash4", "flash4")),
])  # fmt: skip
def test_the_least_time_of_all_layers_decides(times, shape, choice):
    assert fastest(times, shape) == choice


def test_a_cpu_has_nothing_to_choose_and_a_named_kernel_is_refused():
    assert choose_attention("auto", CPU, torch.bfloat16, CAUSAL) is None
    with pytest.raises(RequestError, match="model.attention cudnn needs a CUDA device"):
        choose_attention("cudnn", CPU, torch.bfloat16, CAUSAL)


@pytest.fixture
def third_version(monkeypatch):
    """A wheel of flash attention that torch can be told to take."""
    taken = []
    handle = types.SimpleNamespace(remove=lambda: taken.append("removed"))
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: taken.append("taken") or handle)
    yield taken
    if current_flash_attention_impl():
        attention_choice.restore_flash_attention_impl()


def test_measuring_leaves_the_version_of_flash_attention_as_it_was(third_version):
    times, _ = measure(CPU, torch.bfloat16, CAUSAL, ["math", "flash3"])
    assert set(times) == {"flash3", "math"} and third_version == ["taken", "removed"]
    assert current_flash_attention_impl() is None
    attention_choice._use_flash("FA3")
    measure(CPU, torch.bfloat16, CAUSAL, ["flash", "flash3"])
    assert current_flash_attention_impl() == "FA3"


def test_a_wheel_that_is_not_installed_is_a_failure_and_not_an_error():
    if "flash_attn_interface" in sys.modules:
        pytest.skip("it is installed")
    times, failures = measure(CPU, torch.bfloat16, CAUSAL, ["flash3", "math"])
    assert set(times) == {"math"} and "flash" in failures["flash3"]


def test_a_version_that_is_not_there_is_told_in_one_line_and_leaves_another_project_s_as_it_was(monkeypatch):
    """Its name may be unknown to torch, its wheel missing on this rank; another project may have set a third one."""
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "theirs", lambda: types.SimpleNamespace(remove=lambda: None))
    monkeypatch.delitem(_registry._FLASH_ATTENTION_IMPLS, "FA4")
    attention_choice.activate_flash_attention_impl("theirs")
    try:
        _, failures = measure(CPU, torch.bfloat16, CAUSAL, ["flash4"])
        assert failures["flash4"].startswith("flash attention FA4: Unknown flash attention impl")
        assert current_flash_attention_impl() == "theirs"
    finally:
        attention_choice.restore_flash_attention_impl()
    with pytest.raises(RunError, match="flash attention FA4: Unknown .* install its wheel"):
        attention_choice._use_flash("FA4")
