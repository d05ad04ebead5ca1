"""What is read of the machine is true, and what cannot be read is None and never an error."""

import logging
import mmap
import os
import shutil
import sys
import time
from types import SimpleNamespace

import pynvml
import pytest
import torch
from trainings import fit, make_workplace

from lm.runs.run import Run
from lm.system.hardware import allowed_cores, memory
from lm.system.telemetry import Telemetry
from lm.training.callbacks.heartbeat import Heartbeat, machine_metrics
from lm.training.run_state import RunState

GIB = 2**30


class Driver:
    """Stands in for the module pynvml on a machine with GPUs: its exceptions and constants are the real ones.

    Args:
        gpus: answers by the name of the question; an exception is raised, a question that is not there is one that
            the GPU does not support.
    """

    def __init__(self, *gpus: dict) -> None:
        self.gpus = gpus
        self.NVMLError = pynvml.NVMLError
        self.NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE
        self.NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for handle, facts in enumerate(self.gpus):
            if facts.get("UUID") == uuid:
                return handle
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def __getattr__(self, question):
        assert hasattr(pynvml, question), question

        def answer(handle, *_):
            value = self.gpus[handle].get(question.removeprefix("nvmlDeviceGet"))
            if value is None or isinstance(value, pynvml.NVMLError):
                raise value or pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return value

        return answer


def uuid(index: int) -> str:
    return f"GPU-{index}a2b3c4d-0000-1111-2222-333344445555"


def gpu(index: int = 0, **changes) -> dict:
    """A GPU whose sensors all answer."""
    return {
        "UUID": uuid(index), "Index": index, "Name": "NVIDIA H200", "MigMode": [0, 0],
        "UtilizationRates": SimpleNamespace(gpu=97, memory=60),
        "MemoryInfo": SimpleNamespace(used=71 * GIB, total=140 * GIB), "Temperature": 61 + index,
        "PowerUsage": 640_500, "EnforcedPowerLimit": 700_000, **changes,
    }  # fmt: skip


def read(*gpus: dict, wanted: list[str] | None = None) -> list[dict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", Driver(*gpus))
        return Telemetry(wanted or [uuid(index) for index in range(len(gpus))]).read()["gpus"]


# ---- GPUs ------------------------------------------------------------------------------------------------------------
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
FIGURES = {
    "index": 0, "name": "NVIDIA H200", "load_percent": 97, "memory_used_bytes": 71 * GIB,
    "memory_total_bytes": 140 * GIB, "temperature_celsius": 61, "power_watts": 640.5, "power_limit_watts": 700.0,
}  # fmt: skip


ANSWERS = {
    "all answer": ({}, {}),
    "no sensor for some": (
        dict.fromkeys(["Temperature", "PowerUsage", "UtilizationRates", "MigMode"]),
        dict.fromkeys(["temperature_celsius", "power_watts", "load_percent"]),
    ),
    "sliced": ({"MigMode": [1, 1]}, dict.fromkeys(["load_percent", "memory_used_bytes", "memory_total_bytes"])),
    "lost": ({"UtilizationRates": LOST}, {"load_percent": None}),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "found"), ANSWERS.values(), ids=ANSWERS)
def test_a_figure_is_in_its_unit_and_none_where_the_gpu_does_not_answer(changes, found):
    assert read(gpu(**changes)) == [{**FIGURES, **found}]


def test_only_the_gpus_that_are_trained_on_are_read():
    readings = read(gpu(0), gpu(1), gpu(2), wanted=[uuid(2), "GPU-unknown", uuid(0)])
    assert [one["index"] for one in readings] == [2, 0]


@pytest.mark.parametrize("code", ["DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "NO_PERMISSION"])
def test_without_a_driver_no_gpu_is_read(code, monkeypatch):
    driver = Driver(gpu())

    def fails():
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))

    driver.nvmlInit = fails
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert Telemetry([uuid(0)]).read()["gpus"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_real_package_on_a_machine_without_a_gpu():
    assert Telemetry([uuid(0)]).read()["gpus"] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_real_gpu_is_the_one_that_torch_has():
    properties = torch.cuda.get_device_properties(0)
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda:0")
    gpu_facts = Telemetry([f"GPU-{properties.uuid}"]).read()["gpus"][0]
    assert gpu_facts["name"] == properties.name
    assert gpu_facts["memory_used_bytes"] is None or gpu_facts["memory_used_bytes"] >= held.numel()


# ---- the machine and this process ------------------------------------------------------------------------------------
def test_work_shows_as_load_of_the_process_and_the_machine():
    telemetry, began = Telemetry(), time.monotonic()
    assert telemetry.read()["cpu"]["load_percent"] is None  # it is a mean since the reading before
    end = time.process_time() + 0.3
    while time.process_time() < end:
        sum(range(1000))
    share = 100 * 0.3 / (time.monotonic() - began)  # of one core, of which others may have had some
    facts = telemetry.read()
    assert facts["cpu"]["cores"] == os.cpu_count()
    assert share / os.cpu_count() / 2 < facts["cpu"]["load_percent"] <= 100


def test_memory_that_is_held_shows():
    telemetry = Telemetry()
    before = telemetry.read()["process"]["memory_bytes"]
    held = mmap.mmap(-1, 2**28)  # memory that this process has not had before and freed
    held[:: mmap.PAGESIZE] = b"x" * (len(held) // mmap.PAGESIZE)
    assert telemetry.read()["process"]["memory_bytes"] - before > 0.9 * len(held)
    machine = memory()
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine["used_bytes"] < machine["total_bytes"] <= physical


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_container_is_its_limit_and_its_cache_is_not_in_use(version, monkeypatch):
    machine = SimpleNamespace(total=10**6, available=400_000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: machine)
    if version == 2:
        files = {"/sys/fs/cgroup/memory.current": "300000\n", "/sys/fs/cgroup/memory.max": "500000\n",
                 "/sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 100000\n"}  # fmt: skip
    else:
        folder = "/sys/fs/cgroup/memory/memory"
        files = {f"{folder}.usage_in_bytes": "300000\n", f"{folder}.limit_in_bytes": "500000\n",
                 f"{folder}.stat": "inactive_file 7\ntotal_inactive_file 100000\n"}  # fmt: skip
    monkeypatch.setattr("lm.system.hardware._read", lambda path: files.get(path, ""))
    assert memory() == {"used_bytes": 200_000, "total_bytes": 500_000}
    files = {name: text.replace("500000", "max") for name, text in files.items()}
    assert memory() == {"used_bytes": 600_000, "total_bytes": 1_000_000}


def test_cores_of_a_container_are_those_of_its_quota(monkeypatch):
    own = len(os.sched_getaffinity(0))
    for quota, expected in (("100000 100000\n", 1), ("50000 100000", 1), ("max 100000\n", own), ("", own)):
        monkeypatch.setattr("lm.system.hardware._read", lambda path, quota=quota: quota)
        assert allowed_cores() == expected
    monkeypatch.setattr("lm.system.hardware._read", lambda path: "900000000 100000")
    assert allowed_cores() == own


# ---- the heartbeat ---------------------------------------------------------------------------------------------------
@pytest.fixture
def beating(tmp_path):
    """A heartbeat, twenty times a second, of a fit on a CPU."""
    run = Run(tmp_path / "run")
    run.path.mkdir()
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(run_state=RunState(run=run), is_global_zero=True, strategy=strategy, device_ids=[0])
    heartbeat = Heartbeat(interval=0.05)
    heartbeat.on_fit_start(trainer, None)
    yield heartbeat, trainer
    heartbeat.teardown(trainer, None, "fit")


def next_beat(run: Run) -> dict:
    """The first beat that begins after now."""
    now, deadline = time.time(), time.monotonic() + 10
    while (beat := run.read("heartbeat.json")).get("time", 0) <= now:
        assert time.monotonic() < deadline, beat
        time.sleep(0.01)
    return beat


def test_it_says_who_lives_where_and_how_the_machine_does(beating):
    heartbeat, trainer = beating
    run = trainer.run_state.run
    next_beat(run)
    beat = next_beat(run)
    assert beat["pid"] == os.getpid() and beat["host"] == os.uname().nodename
    assert beat["machine"]["process"]["memory_bytes"] > 10 * 2**20
    metrics = heartbeat.logged_metrics(trainer, SimpleNamespace(device=torch.device("cpu")))
    assert metrics["mem/process_gib"] > 0.01 and "perf/gpu_load" not in metrics


def test_a_folder_that_vanishes_does_not_stop_it(beating):
    heartbeat, trainer = beating
    run = trainer.run_state.run
    next_beat(run)
    shutil.rmtree(run.path)
    time.sleep(0.3)
    assert heartbeat._thread.is_alive()
    run.path.mkdir()
    next_beat(run)


def test_a_reading_that_fails_does_not_stop_it(beating, monkeypatch, caplog):
    heartbeat, trainer = beating
    run = trainer.run_state.run

    def fails(self):
        raise ValueError("nonsense from a driver")

    monkeypatch.setattr(Telemetry, "read", fails)
    with caplog.at_level(logging.WARNING):
        next_beat(run)
        next_beat(run)
        assert next_beat(run)["machine"] == {}
    assert len([record for record in caplog.records if "nonsense" in record.getMessage()]) == 1


@pytest.mark.parametrize("how", ["teardown", "on_exception"])
def test_it_ends_with_the_fit(beating, how):
    heartbeat, _ = beating
    thread = heartbeat._thread
    getattr(heartbeat, how)(None, None, "fit" if how == "teardown" else RuntimeError())
    assert not thread.is_alive()


def test_other_ranks_have_none():
    heartbeat = Heartbeat()
    trainer = SimpleNamespace(is_global_zero=False, run_state=RunState())
    heartbeat.on_fit_start(trainer, None)
    assert heartbeat._thread is None
    assert heartbeat.logged_metrics(trainer, SimpleNamespace(device=torch.device("cpu"))) == {}


def test_several_gpus_are_one_line_of_tensorboard():
    gpus = read(gpu(0, UtilizationRates=SimpleNamespace(gpu=57)), gpu(1), gpu(2))
    del gpus[2]["power_limit_watts"]
    gpus[2]["load_percent"] = None
    metrics = machine_metrics({"gpus": gpus})
    assert metrics["perf/gpu_load"] == 77 and metrics["perf/gpu_temperature"] == 63
    assert metrics["perf/gpu_power"] == 3 * 640.5 and metrics["mem/gpu_gib"] == 71
    assert machine_metrics({"process": {"memory_bytes": 3 * 2**30}}) == {"mem/process_gib": 3.0}
    assert machine_metrics({}) == {}


def test_a_fit_leaves_its_heartbeat_and_its_memory_among_the_metrics(tmp_path):
    _, run = fit(make_workplace(tmp_path), **{"trainer.max_steps": 4})
    assert run.read("heartbeat.json")["machine"]["process"]["memory_bytes"] > 50 * 2**20
    assert any(line.get("mem/process_gib", 0) > 0.05 for line in run.metrics())
    assert not [path for path in run.path.iterdir() if path.name.startswith(".heartbeat")]
