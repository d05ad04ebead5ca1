"""The load of the machine: CPU, memory, process and GPUs, which the run's heartbeat has."""

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import psutil

from lm.system.hardware import memory, process_bytes, start_nvml


class Telemetry:
    """Reads the load and memory of CPU, process and GPUs. Loads are means since the previous reading; None: not known.

    All readings must be made by one thread.
    """

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self._uuids = gpus
        self._nvml: Any = None  # the module `pynvml`, set by the first reading
        self._has_read = False

    def read(self) -> dict[str, Any]:
        load, since_before = psutil.cpu_percent(), self._has_read
        self._has_read = True
        return {
            "cpu": {"load_percent": load if since_before else None, "cores": os.cpu_count()},
            "memory": memory(),
            "process": {"memory_bytes": process_bytes()},
            "gpus": [self._gpu(handle) for handle in self._handles],
        }

    @cached_property
    def _handles(self) -> list[Any]:
        """NVML handles of the GPUs; the first reading starts NVML. Empty without its package or driver."""
        self._nvml = start_nvml() if self._uuids else None
        if self._nvml is None:
            return []
        handles = [self._ask("nvmlDeviceGetHandleByUUID", uuid) for uuid in self._uuids]
        return [handle for handle in handles if handle is not None]

    def _gpu(self, handle: Any) -> dict[str, Any]:
        ask, nvml = self._ask, self._nvml
        sliced = ask("nvmlDeviceGetMigMode", handle, then=lambda modes: modes[0] == nvml.NVML_DEVICE_MIG_ENABLE)
        used = None if sliced else ask("nvmlDeviceGetMemoryInfo", handle)  # of a sliced GPU, it would count all users
        load = None if sliced else ask("nvmlDeviceGetUtilizationRates", handle, then=lambda rates: rates.gpu)
        return {
            "index": ask("nvmlDeviceGetIndex", handle),
            "name": ask("nvmlDeviceGetName", handle),
            "load_percent": load,
            "memory_used_bytes": used.used if used else None,
            "memory_total_bytes": used.total if used else None,
            "temperature_celsius": ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "power_watts": ask("nvmlDeviceGetPowerUsage", handle, then=lambda milliwatts: milliwatts / 1e3),
            "power_limit_watts": ask("nvmlDeviceGetEnforcedPowerLimit", handle, then=lambda limit: limit / 1e3),
        }

    def _ask(self, function: str, *arguments: Any, then: Callable[[Any], Any] = lambda value: value) -> Any:
        """Call NVML; None if this GPU or driver does not support the call, or the device is lost."""
        try:
            return then(getattr(self._nvml, function)(*arguments))
        except self._nvml.NVMLError:
            return None
